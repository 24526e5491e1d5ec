"""Triton functions for the norms: differences from a mean, and sums over the columns of a matrix.

A norm needs the mean of x and the sum of squared deviations from it. If a kernel summed x itself, the
rounding error would grow with the mean. So the kernels sum x - pivot, where the *pivot* is one of the values
of x. Then the rounding error grows only with the deviations.

If the pivot is an outlier, the rounding error grows with its distance from the mean. This does not matter for
16-bit results. For fp32 results (kernels with the constant ``EXACT``) the first sum only serves to compute a
better pivot, the rounded mean (``mean_as_pivot``). Then the sums are computed again with this pivot.

Backward kernels store partial sums of a gradient as the rows of an fp32 matrix. ``sum_columns`` adds up each
column of such a matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.common.tiles import PTX

# --- differences ------------------------------------------------------------------------------------


@triton.jit
def mean_as_pivot(pivot, total, share):
    """Returns the mean of the values x, as pivot + total * share. It serves as the next, better pivot.

    ``pivot``: the value that was subtracted from each x. ``total``: the sum of all x - pivot. ``share``: 1 /
    number of values. If all values equal the pivot, the result is exactly the pivot.
    """
    return tl.fma(total, share, pivot)


@triton.jit
def difference(x, shift, pivot):
    """Returns x + shift - pivot. Its rounding error is small relative to the result, even if x is large.

    Knuth's two-sum computes the rounding error of x + shift. The last line adds this error to the result.
    """
    total = x + shift
    shift_in_total = total - x
    rounded_off = (x - (total - shift_in_total)) + (shift - shift_in_total)
    return (total - pivot) + rounded_off


@triton.jit
def square_root(x):
    """Returns the square root of x, in fp32.

    On NVIDIA GPUs this is one PTX instruction. ``tl.sqrt`` would link a library, which makes compilation
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
    """Returns 1 / sqrt(variance + eps)."""
    return 1 / square_root(variance + eps)


# --- columns ----------------------------------------------------------------------------------------

# The number of warps of a program that calls ``sum_columns``.
SUM_WARPS = 8
# Maximum number of elements of the tiles in which ``sum_columns`` reads a matrix. A program loads a whole
# tile at once.
_SUM_TILE = 8192
# Maximum number of rows of the tiles in which ``sum_columns`` reads a matrix. With more rows, a program's
# loads no longer run all at the same time.
_SUM_ROWS = 256
# Maximum number of columns of the tiles in which ``sum_columns`` reads a matrix.
_SUM_COLUMNS = 1024


def column_sum_block(partials: int, D: int) -> tuple[int, int]:
    """Returns (rows, columns) of the tiles in which ``sum_columns`` reads a (partials, D) matrix."""
    block = min(next_power_of_2(partials), _SUM_ROWS)
    return block, min(next_power_of_2(D), _SUM_COLUMNS, _SUM_TILE // block)


@triton.jit
def sum_columns(partials, out_ptr, count, D, c, BLOCK_P: tl.constexpr):
    """Adds up each of the columns ``c`` of the matrix ``partials``, and stores the sums at ``out_ptr`` + c.

    ``partials``: (count, D) fp32. ``out_ptr``: (D,) of any dtype; if it is None, nothing happens. The rows
    are added in a fixed order.
    """
    if out_ptr is not None:
        p = tl.arange(0, BLOCK_P)[:, None]
        total = tl.zeros((BLOCK_P, c.shape[0]), tl.float32)
        for start in range(0, count, BLOCK_P):
            mask = (start + p < count) & (c < D)[None, :]
            total += tl.load(partials + (start + p).to(tl.int64) * D + c[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + c, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=c < D)
