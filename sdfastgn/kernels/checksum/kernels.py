"""The Triton kernel of ``checksums`` and ``Checksums``, which ``checksum/op.py`` launches.

One launch serves many tensors, so it reads addresses and sizes from tables:

- ``blocks``: int32 (programs, 2), for each program the index of its tensor, and the number of its block among
  the blocks of this tensor that the launch reads;
- ``tensors``: int64 (tensors, 3), for each tensor: its address, its size in words of 8 bytes, and its period:
  a launch reads one block of each ``period`` blocks;
- ``window``: one int64, which says which block of each ``period`` blocks is read.
"""

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


@triton.jit
def checksum_kernel(blocks_ptr, tensors_ptr, window_ptr, sums_ptr, BLOCK: tl.constexpr):
    """Adds ``_mixed(word + _mixed(index))`` of each word of a block to the sum of the block's tensor.

    ``_mixed`` scatters the bits of a 64-bit integer. A program reads one block of BLOCK words of 8 bytes.
    ``sums``: int64 (tensors,), 0 before the launch. Sums are modulo 2^64. The order of the atomic additions
    does not matter, because the numbers are integers.
    """
    program = tl.program_id(0)
    tensor = tl.load(blocks_ptr + 2 * program)
    row = tensors_ptr + 3 * tensor
    # ``multiple_of`` is needed because Triton does not know how an address from a table is aligned.
    x = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    period = tl.load(row + 2)
    block = tl.load(blocks_ptr + 2 * program + 1) * period + tl.load(window_ptr) % period
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(row + 1)
    word = tl.load(x + at, mask=mask, other=0).to(tl.uint64)
    mixed = _mixed(word + _mixed(at.to(tl.uint64))).to(tl.int64)
    tl.atomic_add(sums_ptr + tensor, tl.sum(tl.where(mask, mixed, 0), 0), sem="relaxed")
