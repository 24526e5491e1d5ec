"""The four axes of a register tile: which Triton gives to lanes, to warps, and to a thread's registers.

A tile's last axis is contiguous in memory. Of the other three, Triton fills a warp's lanes from one
end, then the warps, and keeps what is left in registers: from the first axis in Triton 3.6, from
the third since 3.7. Reductions over the register axis are plain additions, over the lanes' axis
shuffles; the wrong way round they go through shared memory and spill. The warps' axis is the second
in both.

Where an axis stands changes no result. ``tests/kernels/test_compile_only.py`` fails where it costs
registers. Elementwise kernels have plain tiles of two axes (``map_tile``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sdfastgn.kernels.common.gpu import TRITON_VERSION

_LANES_FIRST = TRITON_VERSION < (3, 7)
LANE_AXIS = tl.constexpr(0 if _LANES_FIRST else 2)
STEP_AXIS = tl.constexpr(2 if _LANES_FIRST else 0)
# Whether kernels may have inline assembly, which the interpreter and AMD's compiler do not know.
PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def multiple_of(value, FACTOR: tl.constexpr):
    """``value``, a multiple of ``FACTOR``, in a form that tells the compiler so: loads are vectors then.

    Of a kernel's argument ``tl.multiple_of`` says it to no effect (Triton 3.6 and 3.9).
    """
    return value // FACTOR * FACTOR


@triton.jit
def along_lanes(SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    return i[:, None, None, None] if LANE_AXIS == 0 else i[None, None, :, None]


@triton.jit
def along_warps(SIZE: tl.constexpr):
    return tl.arange(0, SIZE)[None, :, None, None]


@triton.jit
def along_steps(SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    return i[:, None, None, None] if STEP_AXIS == 0 else i[None, None, :, None]


@triton.jit
def along_block(SIZE: tl.constexpr):
    return tl.arange(0, SIZE)[None, None, None, :]


@triton.jit
def _flat(d):
    d = tl.sum(d, STEP_AXIS, keep_dims=True)
    return tl.reshape(d, (d.shape[0] * d.shape[1] * d.shape[2] * d.shape[3],))


@triton.jit
def tile_sum(d):
    """Over a whole (lanes, warps, steps, block) tile."""
    return tl.sum(_flat(d), 0)


@triton.jit
def sums_in_warps(d):
    """Sums of a tile by warp, without shared memory."""
    d = tl.sum(d, STEP_AXIS, keep_dims=True)
    return tl.sum(tl.sum(d, 3, keep_dims=True), LANE_AXIS, keep_dims=True)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def tile_sums(d, squares):
    """Over two whole tiles, which pass through shared memory together: one exchange instead of two."""
    d, squares = _flat(d), _flat(squares)
    # In the interpreter ``tl.reduce`` calls a function of ours for each element.
    return tl.reduce((d, squares), 0, _add_pairs) if PTX else (tl.sum(d, 0), tl.sum(squares, 0))


@triton.jit
def load_ahead(pointers, mask, AHEAD: tl.constexpr):
    """A load that may come before the kernel's own wait if ``AHEAD``. It then goes past L1, where older
    values may lie (ADR 7).
    """
    return tl.load(pointers, mask=mask, cache_modifier=".cg" if AHEAD else "")


@triton.jit
def map_tile(pid, HW, C, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr):
    """(sample, channels, positions, channels-last and channels-first offsets) of an elementwise tile."""
    columns = tl.cdiv(C, BLOCK_C)
    tiles = tl.cdiv(HW, BLOCK_HW)
    first_row = pid // columns % tiles * BLOCK_HW
    n = (pid // columns // tiles).to(tl.int64)
    c = pid % columns * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_HW)[:, None]
    last = (n * HW + first_row) * C + (row * C + c[None, :])
    first = n * C * HW + first_row + (row + c[None, :].to(tl.int64) * HW)
    return n, c, first_row + row, last, first
