"""Sums inside Triton kernels: differences from a mean, as every norm takes them, and sums of columns.

Sums are of differences from a pivot, one of the values: rounded at the size of the deviations, where
sums of the values are rounded at the size of the data. If the pivot is an outlier, the differences
are rounded at its size. Results in 16 bits do not show that. For results in fp32 (``EXACT``) the sum
of the differences only makes a better pivot, ``mean_as_pivot``, from which they are taken again.

Backward passes end with sums over the columns of fp32 partial sums, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.common.tiles import PTX

# --- differences ------------------------------------------------------------------------------------


@triton.jit
def mean_as_pivot(pivot, total, share):
    """The mean, rounded, from the sum of differences from a pivot. Exactly the pivot where all are 0."""
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
    """The root of x in fp32, by an instruction: ``tl.sqrt`` links a library, and compiles longer."""
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

# Warps of a program that adds up partial sums.
SUM_WARPS = 8
# Partial sums that one program adds up at a time.
_SUM_TILE = 8192
# Rows of them at most: more are loads that wait for each other.
_SUM_ROWS = 256
# Columns of them at most.
_SUM_COLUMNS = 1024


def column_sum_block(partials: int, D: int) -> tuple[int, int]:
    """(partials, columns) of the tile in which partial sums are added up."""
    block = min(next_power_of_2(partials), _SUM_ROWS)
    return block, min(next_power_of_2(D), _SUM_COLUMNS, _SUM_TILE // block)


@triton.jit
def sum_columns(partials, out_ptr, count, D, c, BLOCK_P: tl.constexpr):
    """Adds up the columns ``c`` of (count, D) in a fixed order, unless ``out_ptr`` is None."""
    if out_ptr is not None:
        p = tl.arange(0, BLOCK_P)[:, None]
        total = tl.zeros((BLOCK_P, c.shape[0]), tl.float32)
        for start in range(0, count, BLOCK_P):
            mask = (start + p < count) & (c < D)[None, :]
            total += tl.load(partials + (start + p).to(tl.int64) * D + c[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + c, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=c < D)
