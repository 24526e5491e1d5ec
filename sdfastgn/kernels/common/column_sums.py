"""Sums over the columns of fp32 partial sums, in a fixed order: the end of many backward passes."""

from __future__ import annotations

from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.common.tiles import triton

if triton is not None:
    import triton.language as tl

__all__ = ["SUM_WARPS", "column_sum_block", "sum_columns"]

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


if triton is not None:

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
