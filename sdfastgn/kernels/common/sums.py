"""Triton functions for the norms: differences from a mean, and sums over the columns of a matrix.

A norm needs the mean and the sum of squared deviations. The kernels sum differences from a *pivot*, which
is one of the values. Such sums are rounded relative to the deviations, while sums of the values themselves
are rounded relative to the mean.

If the pivot is an outlier, the differences are rounded relative to its distance from the mean. 16-bit
results do not show that. For fp32 results (``EXACT``) the first sum only gives a better pivot, the rounded
mean (``mean_as_pivot``), and the differences are computed again from it.

Backward passes end with sums over the columns of fp32 partial sums (``sum_columns``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.common.tiles import PTX

# --- differences ------------------------------------------------------------------------------------


@triton.jit
def mean_as_pivot(pivot, total, share):
    """pivot + total * share: the mean, given the sum ``total`` of differences from ``pivot``.

    ``share`` is 1 / count. The result is exactly ``pivot`` if all differences are 0.
    """
    return tl.fma(total, share, pivot)


@triton.jit
def difference(x, shift, pivot):
    """x + shift - pivot. Its rounding error scales with the result, not with x, shift or pivot.

    Knuth's two-sum finds the rounding error of x + shift. The last line adds that error back.
    """
    total = x + shift
    shift_in_total = total - x
    rounded_off = (x - (total - shift_in_total)) + (shift - shift_in_total)
    return (total - pivot) + rounded_off


@triton.jit
def square_root(x):
    """The square root of x, in fp32.

    On NVIDIA GPUs it is one PTX instruction. ``tl.sqrt`` would link a library, which makes compilation
    slower.
    """
    if PTX:
        root = tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def inverse_deviation(variance, eps):
    """1 / sqrt(variance + eps)"""
    return 1 / square_root(variance + eps)


# --- columns ----------------------------------------------------------------------------------------

# Warps of a program that calls ``sum_columns``.
SUM_WARPS = 8
# Number of elements of a tile. A program loads a tile at once.
_SUM_TILE = 8192
# Maximum number of rows of a tile. With more rows, loads wait for each other.
_SUM_ROWS = 256
# Maximum number of columns of a tile.
_SUM_COLUMNS = 1024


def column_sum_block(partials: int, D: int) -> tuple[int, int]:
    """(rows, columns) of the tile in which a program adds up (partials, D) partial sums."""
    block = min(next_power_of_2(partials), _SUM_ROWS)
    return block, min(next_power_of_2(D), _SUM_COLUMNS, _SUM_TILE // block)


@triton.jit
def sum_columns(partials, out_ptr, count, D, c, BLOCK_P: tl.constexpr):
    """Stores in ``out_ptr`` + c the sums of the columns ``c`` of ``partials``, in a fixed order.

    ``partials``: (count, D) fp32. ``out_ptr``: (D,) of any dtype; if it is None, nothing happens.
    """
    if out_ptr is not None:
        p = tl.arange(0, BLOCK_P)[:, None]
        total = tl.zeros((BLOCK_P, c.shape[0]), tl.float32)
        for start in range(0, count, BLOCK_P):
            mask = (start + p < count) & (c < D)[None, :]
            total += tl.load(partials + (start + p).to(tl.int64) * D + c[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + c, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=c < D)
