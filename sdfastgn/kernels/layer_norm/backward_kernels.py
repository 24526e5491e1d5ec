"""The Triton kernels of LayerNorm's backward. Formulas and op are in ``layer_norm/backward.py``.

The gradients of weight, bias and add_bias are sums over all rows, called *column sums*. The backward runs in
one of two ways, depending on the sizes:

- *rows*: ``_rows_grad_kernel`` loads whole rows of dy and x into registers and writes dx. Each program
  processes one or several tiles of rows, and keeps their column sums in registers;
- *chunks*, for rows that do not fit into registers: ``_chunk_sums_kernel`` computes the two sums that dx
  needs, for each chunk of each row. Then ``_chunk_grad_kernel`` reads x and dy again. A program of this
  kernel writes dx for a block of columns in a group of rows, and keeps the column sums of these rows.

In both ways each program stores its column sums as partial sums, and ``_column_sum_kernel`` adds up the
partial sums.

Tensors, in addition to the ones in ``layer_norm/kernels.py`` (x is the tensor that was normalized):

- ``dy``, ``dx``: (rows, D), contiguous, the gradients of y and x; dx may be None;
- ``dtotal``: (rows, D), contiguous, the gradient of ``add_layer_norm``'s second result, or None;
- ``sums``: fp32 (2, rows, chunks), sums of dy * weight and of dy * weight * xhat over each chunk, where xhat
  is the normalized x. ``_chunk_grad_kernel`` gets the sums over all chunks of a row, (2, rows);
- ``partials``: fp32 (3, programs, D), partial sums for weight, bias and add_bias. ``plane`` is programs * D,
  the number of elements for one of the three;
- ``dweight``, ``dbias``, ``dadded``: (D,), the gradients of weight, bias and add_bias, or None.

Sums have a fixed order and no atomics, so every run gives the same bits. With programmatic dependent launch
(``PDL``) every kernel waits for the end of the previous kernel before it accesses memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.sums import sum_columns
from sdfastgn.kernels.common.tiles import LANE_AXIS
from sdfastgn.kernels.layer_norm.kernels import row_mean, row_sum, tile_column, tile_row


@triton.jit
def store_column_sum(partials, at, total, mask, WIDE: tl.constexpr):
    """Sums ``total``, a (lanes, warps, steps, block) tile, over the rows of the tile, and stores the sums.

    Args:
        partials, at: pointer, and the offset from it for each column of the tile.
        mask: True for the columns that exist.
        WIDE: True if the warps divide each row among them. False if each warp has whole rows.
    """
    total = tl.sum(total, LANE_AXIS, keep_dims=True)
    if not WIDE:
        total = tl.sum(total, 1, keep_dims=True)
    tl.store(partials + at, total, mask=mask)


@triton.jit(do_not_specialize=["rows", "plane"])
def _rows_grad_kernel(
    dy_ptr, dtotal_ptr, x_ptr, centre_ptr, rstd_ptr, weight_ptr, dx_ptr, partials_ptr,
    rows, plane,
    D: tl.constexpr, X_STRIDE: tl.constexpr,
    ROW_SUMS: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, ADDED_GRAD: tl.constexpr,
    PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes dx, and partial sums over rows for the gradients of weight, bias and add_bias.

    A program processes every ``num_programs``-th tile of whole rows.

    Constants:
        ROW_SUMS: True if dx is computed. Either dx is wanted, or the gradient of add_bias, which is the sum
            of dx over rows.
        WEIGHT_GRAD, BIAS_GRAD, ADDED_GRAD: True if the gradient of weight, bias or add_bias is wanted.
        WIDE: True if the warps divide each row among them. False if each warp has whole rows.
    """
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    in_row = c < D
    dweight = tl.zeros((r + c).shape, tl.float32)
    dbias = dweight
    dadded = dweight
    if PDL:
        gdc_wait()
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        is_row = r < tl.minimum(rows - first, ROWS).to(tl.int32)
        mask = is_row & in_row
        at = first * D + (r * D + c)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x_row = first * X_STRIDE + r * X_STRIDE
        x = tl.load(x_ptr + x_row + c, mask=mask, other=0.0).to(tl.float32)
        pivot = tl.load(x_ptr + x_row, mask=is_row, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + first + r, mask=is_row, other=0.0)
        pivot, rest = row_mean(pivot, tl.load(centre_ptr + first + r, mask=is_row, other=0.0))
        xhat = (x - pivot - rest) * rstd
        if WEIGHT_GRAD:
            dweight += dy * xhat
        if BIAS_GRAD:
            dbias += dy
        if ROW_SUMS:
            g = dy * weight
            dx = rstd * (g - row_sum(g, WIDE) / D - xhat * (row_sum(g * xhat, WIDE) / D))
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if dx_ptr is not None:
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if ADDED_GRAD:
                dadded += dx
    out = tl.program_id(0).to(tl.int64) * D + c
    if WEIGHT_GRAD:
        store_column_sum(partials_ptr, out, dweight, in_row, WIDE)
    if BIAS_GRAD:
        store_column_sum(partials_ptr + plane, out, dbias, in_row, WIDE)
    if ADDED_GRAD:
        store_column_sum(partials_ptr + 2 * plane, out, dadded, in_row, WIDE)


@triton.jit(do_not_specialize=["chunks", "blocks", "d_parts", "x_parts", "plane"])
def _chunk_sums_kernel(
    dy_ptr, x_ptr, centre_ptr, rstd_ptr, weight_ptr, sums_ptr,
    chunks, blocks, d_parts, x_parts, plane,
    PDL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the sums of dy * weight and of dy * weight * xhat, where xhat is the normalized x.

    A program sums over one chunk of one row. ``chunks``: number of chunks of a row. ``blocks``: number of
    blocks of ``BLOCK`` elements of a chunk. ``d_parts``, ``x_parts``: D, and the stride of x, divided by
    ``VECTOR``. ``plane``: number of chunks in all rows, which is the number of sums of each of the two kinds.
    """
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = (tl.program_id(0) % chunks).to(tl.int64) * blocks * BLOCK
    parts = tl.minimum(blocks * (BLOCK // VECTOR), d_parts - start // VECTOR).to(tl.int32)
    count = parts * VECTOR
    x_row = row * x_parts * VECTOR + start
    dy_row = row * d_parts * VECTOR + start
    i = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    first = tl.load(x_ptr + x_row - start).to(tl.float32)
    first, rest = row_mean(first, tl.load(centre_ptr + row))
    rstd = tl.load(rstd_ptr + row)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    sum_g_xhat = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, count, BLOCK):
        mask = at + i < count
        g = tl.load(dy_ptr + dy_row + at + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + x_row + at + i, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + start + at + i, mask=mask, other=0.0).to(tl.float32)
        sum_g += g
        sum_g_xhat += g * ((x - first - rest) * rstd)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sum_g, 0))
    tl.store(sums_ptr + plane + tl.program_id(0), tl.sum(sum_g_xhat, 0))


@triton.jit(do_not_specialize=["rows", "group_rows", "d_parts", "x_parts", "plane"])
def _chunk_grad_kernel(
    dy_ptr, dtotal_ptr, x_ptr, centre_ptr, rstd_ptr, weight_ptr, sums_ptr, dx_ptr, partials_ptr,
    rows, group_rows, d_parts, x_parts, plane,
    ROW_SUMS: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, ADDED_GRAD: tl.constexpr,
    PDL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes dx, and partial sums over rows for the gradients of weight, bias and add_bias.

    A program has a block of columns of ``group_rows`` rows. ``d_parts``: D / ``VECTOR``. ``x_parts``: the
    stride of x / ``VECTOR``. ``plane``: number of partial sums for each of weight, bias and add_bias.
    ``ROW_SUMS``: True if dx is computed. ``WEIGHT_GRAD``, ``BIAS_GRAD``, ``ADDED_GRAD``: True if the gradient
    of weight, bias or add_bias is wanted.
    """
    D = d_parts.to(tl.int64) * VECTOR
    columns = tl.cdiv(D, BLOCK)
    c = (tl.program_id(0) % columns).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = (tl.program_id(0) // columns).to(tl.int64)
    mask = c < D
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = dweight
    dadded = dweight
    if PDL:
        gdc_wait()
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    for row in range(group * group_rows, tl.minimum((group + 1) * group_rows, rows)):
        rstd = tl.load(rstd_ptr + row)
        dy = tl.load(dy_ptr + row * D + c, mask=mask, other=0.0).to(tl.float32)
        x_row = x_ptr + row * x_parts * VECTOR
        x = tl.load(x_row + c, mask=mask, other=0.0).to(tl.float32)
        first, rest = row_mean(tl.load(x_row).to(tl.float32), tl.load(centre_ptr + row))
        xhat = (x - first - rest) * rstd
        if WEIGHT_GRAD:
            dweight += dy * xhat
        if BIAS_GRAD:
            dbias += dy
        if ROW_SUMS:
            mean_g = tl.load(sums_ptr + row) / D.to(tl.float32)
            mean_g_xhat = tl.load(sums_ptr + rows + row) / D.to(tl.float32)
            dx = rstd * (dy * weight - mean_g - xhat * mean_g_xhat)
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + row * D + c, mask=mask, other=0.0).to(tl.float32)
            if dx_ptr is not None:
                tl.store(dx_ptr + row * D + c, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if ADDED_GRAD:
                dadded += dx
    out = group * D + c
    if WEIGHT_GRAD:
        tl.store(partials_ptr + out, dweight, mask=mask)
    if BIAS_GRAD:
        tl.store(partials_ptr + plane + out, dbias, mask=mask)
    if ADDED_GRAD:
        tl.store(partials_ptr + 2 * plane + out, dadded, mask=mask)


@triton.jit(do_not_specialize=["count", "D", "plane"])
def _column_sum_kernel(
    partials_ptr, dweight_ptr, dbias_ptr, dadded_ptr,
    count, D, plane,
    PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of weight, bias and add_bias from partial sums.

    A program computes a block of columns of one of the three gradients. It adds up ``count`` partial sums for
    each column. ``plane``: number of partial sums for each of the three gradients.
    """
    which = tl.program_id(0) % 3
    c = (tl.program_id(0) // 3).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PDL:
        gdc_wait()
    if which == 0:
        sum_columns(partials_ptr, dweight_ptr, count, D, c, BLOCK_P)
    elif which == 1:
        sum_columns(partials_ptr + plane, dbias_ptr, count, D, c, BLOCK_P)
    else:
        sum_columns(partials_ptr + 2 * plane, dadded_ptr, count, D, c, BLOCK_P)
