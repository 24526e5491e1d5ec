"""Tiles in the registers of a program, in an order of axes that makes reductions cheap.

A tile of a reduction has four axes: lanes, warps, steps and block.

- lanes: the threads of a warp. A sum over this axis takes shuffles;
- warps, always the second axis: the warps of a program;
- steps: further elements in the registers of the same thread. A sum over this axis takes plain additions;
- block, always the last axis: elements that are contiguous in memory, several of them in one thread.

Triton itself decides which axis it distributes over the lanes of a warp. Up to 3.6, Triton begins with the
first axis, Triton 3.7 and later with the third. So lanes are the first axis and steps the third, or the other
way round (``LANE_AXIS``, ``STEP_AXIS``). In the wrong order results are the same, but sums go through shared
memory and registers spill. ``tests/kernels/test_compile_only.py`` fails if the order is wrong.

Elementwise kernels have tiles of two axes (``map_tile``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sdfastgn.kernels.common.gpu import TRITON_VERSION

_LANES_FIRST = TRITON_VERSION < (3, 7)
LANE_AXIS = tl.constexpr(0 if _LANES_FIRST else 2)
STEP_AXIS = tl.constexpr(2 if _LANES_FIRST else 0)
# True if kernels can use inline PTX assembly. False in Triton's interpreter and on AMD's GPUs.
PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def multiple_of(value, FACTOR: tl.constexpr):
    """Returns ``value``, a multiple of ``FACTOR``, and lets the compiler know that it is one.

    The compiler can then vectorize loads at such offsets. ``tl.multiple_of`` has no effect on a kernel's
    argument (Triton 3.6 and 3.9).
    """
    return value // FACTOR * FACTOR


@triton.jit
def along_lanes(SIZE: tl.constexpr):
    """Returns 0, 1, ... ``SIZE`` - 1 along the lanes axis of a (lanes, warps, steps, block) tile."""
    i = tl.arange(0, SIZE)
    return i[:, None, None, None] if LANE_AXIS == 0 else i[None, None, :, None]


@triton.jit
def along_warps(SIZE: tl.constexpr):
    """Returns 0, 1, ... ``SIZE`` - 1 along the warps axis of a (lanes, warps, steps, block) tile."""
    return tl.arange(0, SIZE)[None, :, None, None]


@triton.jit
def along_steps(SIZE: tl.constexpr):
    """Returns 0, 1, ... ``SIZE`` - 1 along the steps axis of a (lanes, warps, steps, block) tile."""
    i = tl.arange(0, SIZE)
    return i[:, None, None, None] if STEP_AXIS == 0 else i[None, None, :, None]


@triton.jit
def along_block(SIZE: tl.constexpr):
    """Returns 0, 1, ... ``SIZE`` - 1 along the block axis of a (lanes, warps, steps, block) tile."""
    return tl.arange(0, SIZE)[None, None, None, :]


@triton.jit
def _flat(d):
    """Sum a (lanes, warps, steps, block) tile over its steps, and flatten the result to a vector."""
    d = tl.sum(d, STEP_AXIS, keep_dims=True)
    return tl.reshape(d, (d.shape[0] * d.shape[1] * d.shape[2] * d.shape[3],))


@triton.jit
def tile_sum(d):
    """The sum of all elements of a (lanes, warps, steps, block) tile."""
    return tl.sum(_flat(d), 0)


@triton.jit
def sums_in_warps(d):
    """Sums a (lanes, warps, steps, block) tile along all axes but warps, without shared memory.

    Returns (1, warps, 1, 1).
    """
    d = tl.sum(d, STEP_AXIS, keep_dims=True)
    return tl.sum(tl.sum(d, 3, keep_dims=True), LANE_AXIS, keep_dims=True)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def tile_sums(d, squares):
    """Returns (sum of ``d``, sum of ``squares``) for two tiles of equal shape.

    Warps exchange both sums through shared memory in one step instead of two.
    """
    d, squares = _flat(d), _flat(squares)
    # Triton's interpreter would call ``_add_pairs`` for each element, which is slow. So it calls ``tl.sum``
    # twice instead.
    return tl.reduce((d, squares), 0, _add_pairs) if PTX else (tl.sum(d, 0), tl.sum(squares, 0))


@triton.jit
def load_ahead(pointers, mask, AHEAD: tl.constexpr):
    """Loads values. ``AHEAD``: True if the kernel loads them before it waits for the previous kernel.

    Then the load bypasses the L1 cache, which may have old values of this memory
    (docs/adr/0007-programmatic-dependent-launch.md).
    """
    return tl.load(pointers, mask=mask, cache_modifier=".cg" if AHEAD else "")


@triton.jit
def map_tile(pid, HW, C, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr):
    """Computes the indices and offsets of tile number ``pid``, for an elementwise kernel on (N, C, HW).

    Returns:
        n: index of the sample, int64.
        c: (BLOCK_C,), indices of the channels.
        positions: (BLOCK_HW, 1), indices of the positions.
        last, first: (BLOCK_HW, BLOCK_C) int64 offsets of the elements. ``last`` is for a channels-last
            tensor, ``first`` for a channels-first one.
    """
    columns = tl.cdiv(C, BLOCK_C)
    tiles = tl.cdiv(HW, BLOCK_HW)
    first_row = pid // columns % tiles * BLOCK_HW
    n = (pid // columns // tiles).to(tl.int64)
    c = pid % columns * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_HW)[:, None]
    last = (n * HW + first_row) * C + (row * C + c[None, :])
    first = n * C * HW + first_row + (row + c[None, :].to(tl.int64) * HW)
    return n, c, first_row + row, last, first
