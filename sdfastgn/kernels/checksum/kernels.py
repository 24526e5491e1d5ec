"""The Triton kernel of ``checksums``. Op and launch: ``checksum/op.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """A bijection of uint64. If one bit of x changes, about half of the bits of the result change.

    Source: the last step of the random number generator splitmix64.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["words"])
def checksum_kernel(x_ptr, sum_ptr, words, BLOCK: tl.constexpr):
    """Adds the sum of ``_mixed(word + _mixed(index))`` over the words of x to ``sum``, modulo 2^64.

    A program adds the sum of one block. ``x``: (words,) int64. ``sum``: one int64, 0 before the launch.
    The order of the atomic additions does not matter, because the numbers are integers.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < words
    word = tl.load(x_ptr + at, mask=mask, other=0).to(tl.uint64)
    mixed = _mixed(word + _mixed(at.to(tl.uint64))).to(tl.int64)
    tl.atomic_add(sum_ptr, tl.sum(tl.where(mask, mixed, 0), 0), sem="relaxed")
