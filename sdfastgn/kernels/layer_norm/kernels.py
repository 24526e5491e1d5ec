"""The Triton kernels of LayerNorm, and of residual add + LayerNorm. Formula: ``layer_norm/op.py``.

The forward runs in one of two ways. ``forward_config`` chooses one of them from the sizes:

- *rows*: ``_rows_kernel`` loads whole rows into registers, and one launch reads x and writes y. A warp has
  one row or several short ones, or several warps divide a long row among them;
- *chunks*, for rows that do not fit into registers. ``_chunk_kernel`` computes the mean and the sum of
  squared deviations (M2) of each chunk of each row. ``_merge_chunks_kernel`` combines these to the mean and
  M2 of each row. ``_normalise_kernel`` reads x again and writes y.

With a residual, the sum x + residual + add_bias is rounded to the dtype of x and then normalized. The first
kernel stores the sum for the caller. With a ``total_bias`` the caller gets the sum plus total_bias instead:
``_rows_kernel`` stores only the sum plus total_bias, and ``_chunk_kernel`` stores both, because
``_normalise_kernel`` needs the sum.

Tensors have the same meaning in all kernels. All except x, y and partials may be None:

- ``x``, ``residual``: (rows, D), fp16, bf16 or fp32, with contiguous rows and a fixed stride between them;
- ``y``: (rows, D), contiguous, in the dtype of x or in fp32. With a quantizer y is in E4M3;
- ``weight``, ``bias``, ``add_bias``, ``total_bias``: (D,);
- ``added``, ``position``: (groups, D), vectors that are added to groups of rows before and after the norm.
  Only ``_rows_kernel`` has them (``layer_norm/grouped.py``);
- ``quantizer``: (8,) fp32, with the scale of y in E4M3 (``common/e4m3.py``). With a quantizer, the kernel
  that writes y is launched a second time (``RETRY``). This retry writes y again with a larger scale, if
  values were beyond the range of E4M3. The retry has few programs, and each of them computes several tiles;
- ``total``: (rows, D), contiguous, in the dtype of x. ``_rows_kernel`` stores the sum plus total_bias in it,
  ``_chunk_kernel`` the sum;
- ``kept``: (rows, D), contiguous, in the dtype of x. It is the sum plus total_bias;
- ``centre``: (rows,), from which ``row_mean`` gets the mean of each row. If y has 16 bits, it is the mean
  minus the row's first element, in fp32. If y is fp32, it is the mean, in fp64;
- ``rstd``: (rows,) fp32, 1 / deviation of each row;
- ``partials``: fp32, two or three values for each chunk. If y has 16 bits, (2, rows, chunks): the chunk's
  mean minus the row's first element; M2. If y is fp32, (3, rows, chunks): the rounded mean of the chunk's
  first block; M2; the chunk's mean minus that rounded mean.

With programmatic dependent launch (``PDL``, from sm_90 on) a kernel starts while the kernel before it still
runs, and calls ``gdc_wait`` before it reads what that kernel writes. Before ``gdc_wait`` a kernel reads only
x, and only if no kernel of this call writes x (``docs/adr/0007-programmatic-dependent-launch.md``).

Numerics: all arithmetic is fp32, and each result is rounded once. Sums have a fixed order and no atomics,
except for the count of values beyond the range of E4M3. The first element of a row is subtracted from all
values of the row before they are summed. Squares are squares of differences from a mean: ``_rows_kernel``
takes the mean of the row, ``_chunk_kernel`` the mean of a chunk's first block. Squares of the values
themselves would lose digits. Chan's formula merges the means and M2 of chunks.

A mean is stored as its difference from the row's first element, because the rounding error of the mean itself
would grow with its size. If the first element is an outlier, the difference has a large rounding error too.
This does not matter for 16-bit results. For fp32 results (``EXACT``) means are fp64, and ``row_mean`` splits
them into two fp32 numbers. Offsets that can be 2^31 or more are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.e4m3_kernels import (
    begin_retry,
    end_retry,
    in_e4m3_range,
    start_of_e4m3,
    wait_before_retry,
)
from sdfastgn.kernels.common.sums import inverse_deviation, mean_as_pivot
from sdfastgn.kernels.common.tiles import (
    STEP_AXIS,
    along_block,
    along_lanes,
    along_steps,
    along_warps,
    load_ahead,
)


@triton.jit
def tile_row(WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Returns the row of each element of a tile, counted from the tile's first row.

    The result broadcasts to the tile's shape, (lanes, warps, steps, block). ``WIDE``: True if the warps
    divide each row among them. False if each warp has ``LANES`` whole rows.
    """
    row = along_lanes(LANES)
    if not WIDE:
        row += along_warps(WARPS) * LANES
    return row


@triton.jit
def tile_column(WIDE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the column of each element of a tile.

    The result broadcasts to the tile's shape, (lanes, warps, steps, block).
    """
    part = along_steps(STEPS)
    if WIDE:
        part = part * WARPS + along_warps(WARPS)
    return part * BLOCK + along_block(BLOCK)


@triton.jit
def row_sum(x, WIDE: tl.constexpr):
    """Returns the sum of each row of a (lanes, warps, steps, block) tile. Summed axes keep size 1."""
    total = tl.sum(tl.sum(x, STEP_AXIS, keep_dims=True), 3, keep_dims=True)
    if WIDE:
        total = tl.sum(total, 1, keep_dims=True)
    return total


@triton.jit
def row_mean(first, centre):
    """Returns two fp32 numbers for each row, whose sum is the row's mean.

    Callers subtract first one number from x, then the other. The mean itself, as one fp32 number, would be
    less exact. ``first``: the row's first element. ``centre``: what the forward has saved for the row, in
    fp32 the mean minus the first element, in fp64 the mean.
    """
    if centre.dtype == tl.float64:
        first = centre.to(tl.float32)
        centre = (centre - first.to(tl.float64)).to(tl.float32)
    return first, centre


@triton.jit
def _read(x_ptr, residual_ptr, add_bias_ptr, added_ptr, x_at, residual_at, added_at, c, mask):
    """Loads the sum x + residual + add_bias + added, without the summands whose pointers are None.

    Returns the sum twice, both as fp32: rounded to the dtype of x, and not rounded. add_bias is only read if
    there is a residual.
    """
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    total = x.to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        if add_bias_ptr is not None:
            # ``tl.load`` of Triton 3.4 broadcasts the mask to the shape of the pointers, but not the pointers
            # to the shape of the mask. So both are broadcast here.
            columns, mask = tl.broadcast(add_bias_ptr + c, mask)
            total += tl.load(columns, mask=mask, other=0.0).to(tl.float32)
    if added_ptr is not None:
        total += tl.load(added_ptr + added_at, mask=mask, other=0.0).to(tl.float32)
    if (residual_ptr is not None) or (added_ptr is not None):
        x = total.to(x.dtype)
    return x.to(tl.float32), total


@triton.jit
def _affine(weight_ptr, bias_ptr, c, in_row):
    """Loads weight and bias of the columns ``c`` in fp32. Without a weight it returns 1, without a bias 0.

    Kernels call it before they sum over x, so that the loads of weight and bias run at the same time as the
    loads of x.
    """
    scale = 1.0
    offset = 0.0
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def _rows_tile(
    x_ptr, residual_ptr, add_bias_ptr, added_ptr, total_bias_ptr, weight_ptr, bias_ptr, position_ptr,
    quantizer_ptr, total_ptr, y_ptr, centre_ptr, rstd_ptr,
    rows, period, groups, biased, eps, tile,
    D: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, PDL: tl.constexpr,
    RETRY: tl.constexpr, ONE_ROW: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes a tile of whole rows of y, for ``_rows_kernel``, which explains the arguments."""
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    first = tl.cast(tile, tl.int64) * ROWS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    is_row = r < tl.minimum(rows - first, ROWS).to(tl.int32)
    in_row = c < D
    mask = is_row & in_row
    x_row = first * X_STRIDE + r * X_STRIDE
    residual_row = first * RESIDUAL_STRIDE + r * RESIDUAL_STRIDE
    group_row = r * 0
    if (added_ptr is not None) or (position_ptr is not None):
        group_row = (first.to(tl.int32) + r) // period % groups * D
    if PDL:
        wait_before_retry(quantizer_ptr)
    x, kept = _read(
        x_ptr, residual_ptr, add_bias_ptr, added_ptr, x_row + c, residual_row + c, group_row + c, c, mask
    )
    # The first element of each row, which is subtracted from the row's values before they are summed.
    pivot, _ = _read(
        x_ptr, residual_ptr, add_bias_ptr, added_ptr, x_row, residual_row, group_row, r * 0, is_row
    )
    # Weight and bias are loaded in one of two ways. With the offsets ``c``, each column is loaded once, and
    # the values are broadcast to all rows. With ``c + r * 0``, which has the shape of the tile, each thread
    # loads the values of its own elements. If each thread has elements of only one row (``ONE_ROW``), the
    # broadcast would go through shared memory, so the second way is used.
    if total_bias_ptr is not None:
        # The load of total_bias must come before the loads of weight and bias in ``_affine``. In the reverse
        # order ptxas takes 168 registers a thread instead of 128, and only three programs run on a
        # multiprocessor instead of four.
        bias = total_bias_ptr + (c + r * 0 if ONE_ROW else c)
        kept += tl.load(bias, mask=c < D * biased, other=0.0).to(tl.float32)
    scale, offset = _affine(weight_ptr, bias_ptr, c + r * 0 if ONE_ROW else c, in_row)
    out = first * D + (r * D + c)
    if total_ptr is not None:
        tl.store(total_ptr + out, kept.to(total_ptr.dtype.element_ty), mask=mask)
    d = tl.where(in_row, x - pivot, 0.0)
    total = row_sum(d, WIDE)
    if EXACT:
        pivot = mean_as_pivot(pivot, total, 1 / D)
        d = tl.where(in_row, x - pivot, 0.0)
        total = row_sum(d, WIDE)
    # The mean of d is subtracted from d by an explicit fma. Otherwise ptxas would use an fma only in
    # inference, where the mean is not stored for the backward, and training would give other bits.
    d = tl.where(in_row, tl.fma(total, -1 / D, d), 0.0)
    rstd = inverse_deviation(row_sum(d * d, WIDE) / D, eps)
    y = d * rstd * scale + offset
    if position_ptr is not None:
        y += tl.load(position_ptr + (group_row + c), mask=mask, other=0.0).to(tl.float32)
    if quantizer_ptr is not None:
        y = in_e4m3_range(y, mask, quantizer_ptr, RETRY)
        out += start_of_e4m3()
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    if centre_ptr is not None:
        tl.store(
            centre_ptr + first + r,
            pivot.to(tl.float64) + (total * (1 / D)).to(tl.float64) if EXACT else total * (1 / D),
            mask=is_row,
        )
        tl.store(rstd_ptr + first + r, rstd, mask=is_row)


@triton.jit(do_not_specialize=["rows", "period", "groups", "biased", "eps"])
def _rows_kernel(
    x_ptr, residual_ptr, add_bias_ptr, added_ptr, total_bias_ptr, weight_ptr, bias_ptr, position_ptr,
    quantizer_ptr, total_ptr, y_ptr, centre_ptr, rstd_ptr,
    rows, period, groups, biased, eps,
    D: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, PDL: tl.constexpr,
    RETRY: tl.constexpr, ONE_ROW: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y, the LayerNorm of x or of the sum with the residual. A program has a tile of whole rows.

    Numbers:
        period, groups: row i uses row ``i // period % groups`` of ``added`` and of ``position``.
        biased: 1 to add ``total_bias``, 0 if ``total_bias`` is a placeholder that is not read. If
            ``total_bias`` is None, ``biased`` has no effect.

    Constants:
        X_STRIDE, RESIDUAL_STRIDE: elements between the starts of neighboring rows of x and of residual.
        RETRY: True in the second launch of a call whose y is in E4M3. The second launch computes y again with
            a larger scale if values were beyond the range of E4M3.
        ONE_ROW: True if each thread has elements of only one row.
        WIDE: True if the warps divide each row among them. False if each warp has whole rows.
    """
    if RETRY:
        if PDL:
            gdc_wait()
        if begin_retry(quantizer_ptr):
            tiles = tl.cdiv(rows, LANES if WIDE else LANES * WARPS)
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                _rows_tile(
                    x_ptr, residual_ptr, add_bias_ptr, added_ptr, total_bias_ptr, weight_ptr, bias_ptr,
                    position_ptr, quantizer_ptr, total_ptr, y_ptr, centre_ptr, rstd_ptr,
                    rows, period, groups, biased, eps, tile,
                    D, X_STRIDE, RESIDUAL_STRIDE, False, True, ONE_ROW, WIDE, LANES, WARPS, STEPS, BLOCK,
                )  # fmt: skip
            end_retry(quantizer_ptr)
    else:
        _rows_tile(
            x_ptr, residual_ptr, add_bias_ptr, added_ptr, total_bias_ptr, weight_ptr, bias_ptr, position_ptr,
            quantizer_ptr, total_ptr, y_ptr, centre_ptr, rstd_ptr,
            rows, period, groups, biased, eps, tl.program_id(0),
            D, X_STRIDE, RESIDUAL_STRIDE, PDL, False, ONE_ROW, WIDE, LANES, WARPS, STEPS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "blocks", "d_parts", "x_parts", "residual_parts", "plane"])
def _chunk_kernel(
    x_ptr, residual_ptr, add_bias_ptr, total_bias_ptr, total_ptr, kept_ptr, partials_ptr,
    chunks, blocks, d_parts, x_parts, residual_parts, plane,
    EXACT: tl.constexpr, PDL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes mean and sum of squared deviations (M2) of each chunk, and stores them in ``partials``.

    With a residual the kernel also stores the sum. A program processes one chunk of one row.

    Numbers:
        chunks: number of chunks of a row.
        blocks: number of blocks of a chunk.
        d_parts, x_parts, residual_parts: D, and the strides of x and residual, divided by ``VECTOR``. The
            kernel multiplies them by ``VECTOR``, so the compiler knows that the products are multiples of
            ``VECTOR``.
        plane: number of chunks in all rows. ``partials`` has first the means of all chunks, then all M2 and,
            with ``EXACT``, then small corrections of the means.

    Constants:
        EXACT: True if y is fp32.
        VECTOR: number of elements that a thread loads at once.
        BLOCK: number of elements of a block.
    """
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = (tl.program_id(0) % chunks).to(tl.int64) * blocks * BLOCK
    parts = tl.minimum(blocks * (BLOCK // VECTOR), d_parts - start // VECTOR).to(tl.int32)
    count = parts * VECTOR
    x_row = row * x_parts * VECTOR + start
    residual_row = row * residual_parts * VECTOR + start
    total_row = row * d_parts * VECTOR + start
    i = tl.arange(0, BLOCK)
    if PDL:
        # This kernel waits for x before it lets the next kernels start. So x is complete when they start, and
        # they may read x before their own ``gdc_wait``.
        gdc_wait()
        gdc_launch_dependents()
    # ``first`` is the first element of the row, or of the chunk if y is fp32 (``EXACT``). It is subtracted
    # from all values before they are summed, because sums of small numbers have small rounding errors. If
    # ``EXACT``, ``first`` becomes the mean of the first block once this mean is known.
    to_pivot = 0 if EXACT else start
    first, _ = _read(
        x_ptr, residual_ptr, add_bias_ptr, None, x_row - to_pivot, residual_row - to_pivot, None,
        start - to_pivot, row >= 0,
    )  # fmt: skip
    pivot = 0.0
    sums = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, count, BLOCK):
        mask = at + i < count
        c = start + at + i
        x, kept = _read(
            x_ptr, residual_ptr, add_bias_ptr, None, x_row + at + i, residual_row + at + i, None, c, mask
        )
        if total_ptr is not None:
            tl.store(total_ptr + total_row + at + i, x.to(total_ptr.dtype.element_ty), mask=mask)
        if total_bias_ptr is not None:
            kept += tl.load(total_bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
            tl.store(kept_ptr + total_row + at + i, kept.to(kept_ptr.dtype.element_ty), mask=mask)
        d = tl.where(mask, x - first, 0.0)
        if at == 0:
            pivot = tl.sum(d, 0) / tl.minimum(count, BLOCK).to(tl.float32)
            if EXACT:
                first += pivot
        d = tl.where(mask, x - first if EXACT else d - pivot, 0.0)
        sums += d
        squares += d * d
    n = count.to(tl.float32)
    delta = tl.sum(sums, 0) / n
    out = partials_ptr + tl.program_id(0)
    if EXACT:
        tl.store(out, first)
        tl.store(out + 2 * plane, delta)
    else:
        tl.store(out, pivot + delta)
    tl.store(out + plane, tl.maximum(tl.sum(squares, 0) - delta * delta * n, 0.0))


@triton.jit(do_not_specialize=["chunks", "length", "D", "plane", "eps"])
def _merge_chunks_kernel(
    partials_ptr, centre_ptr, rstd_ptr,
    chunks, length, D, plane, eps,
    EXACT: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes ``centre`` (the mean) and ``rstd`` (1 / deviation) of each row.

    A program merges mean and sum of squared deviations of all chunks of one row by Chan's formula.
    ``length``: elements of a chunk. ``plane``: number of chunks in all rows. ``BLOCK``: number of chunks of a
    row, rounded up to a power of 2.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    base = partials_ptr + row * chunks
    mask = p < chunks
    weight = tl.where(mask, tl.minimum(D - p.to(tl.int64) * length, length), 0).to(tl.float32)
    elements = D.to(tl.float32)
    d = tl.load(base + p, mask=mask, other=0.0)
    if EXACT:
        pivot = tl.load(base)
        d = tl.where(mask, d - pivot, 0.0) + tl.load(base + 2 * plane + p, mask=mask, other=0.0)
    delta = tl.sum(d * weight, 0) / elements
    d -= delta
    m2 = tl.sum(tl.load(base + plane + p, mask=mask, other=0.0) + d * d * weight, 0)
    if EXACT:
        delta = pivot.to(tl.float64) + delta.to(tl.float64)
    tl.store(centre_ptr + row, delta)
    tl.store(rstd_ptr + row, inverse_deviation(m2 / elements, eps))


@triton.jit
def _normalise_tile(
    x_ptr, weight_ptr, bias_ptr, quantizer_ptr, centre_ptr, rstd_ptr, y_ptr,
    rows, d_parts, x_parts, tile,
    AHEAD: tl.constexpr, PDL: tl.constexpr, RETRY: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one block of one row of y, for ``_normalise_kernel``, which explains the arguments."""
    # Programs with neighboring numbers have the same columns of different rows, and run at the same time. So
    # weight and bias of these columns are read from memory only once.
    row = (tile % rows).to(tl.int64)
    c = (tile // rows).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    D = d_parts.to(tl.int64) * VECTOR
    mask = c < D
    x_row = x_ptr + row * x_parts * VECTOR
    if PDL and not AHEAD:
        gdc_wait()
    x = load_ahead(x_row + c, mask, AHEAD)
    first = load_ahead(x_row, None, AHEAD)
    if PDL and AHEAD:
        gdc_wait()
    if PDL and quantizer_ptr is not None:  # the second launch, for y in E4M3, may start
        gdc_launch_dependents()
    scale, offset = _affine(weight_ptr, bias_ptr, c, mask)
    first, rest = row_mean(first.to(tl.float32), tl.load(centre_ptr + row))
    y = (x.to(tl.float32) - first - rest) * tl.load(rstd_ptr + row)
    y = y * scale + offset
    if quantizer_ptr is not None:
        y = in_e4m3_range(y, mask, quantizer_ptr, RETRY)
    tl.store(y_ptr + row * D + c, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "d_parts", "x_parts"])
def _normalise_kernel(
    x_ptr, weight_ptr, bias_ptr, quantizer_ptr, centre_ptr, rstd_ptr, y_ptr,
    rows, d_parts, x_parts,
    AHEAD: tl.constexpr, PDL: tl.constexpr, RETRY: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y = (x - mean) * rstd * weight + bias. A program computes one block of one row.

    ``x``: the tensor that is normalized; with a residual, the sum that ``_chunk_kernel`` has stored.
    ``d_parts``, ``x_parts``: D, and the stride of x, divided by ``VECTOR``. ``AHEAD``: True if x is read
    before ``gdc_wait``. This is possible only without a residual: then no kernel of this call writes x, and
    ``_chunk_kernel`` has waited for x. ``RETRY``: True in the second launch of a call whose y is in E4M3. The
    second launch computes y again with a larger scale if values were beyond the range of E4M3.
    """
    if RETRY:
        if PDL:
            gdc_wait()
        if begin_retry(quantizer_ptr):
            tiles = rows * tl.cdiv(d_parts * VECTOR, BLOCK)
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                _normalise_tile(
                    x_ptr, weight_ptr, bias_ptr, quantizer_ptr, centre_ptr, rstd_ptr, y_ptr,
                    rows, d_parts, x_parts, tile, False, False, True, VECTOR, BLOCK,
                )  # fmt: skip
            end_retry(quantizer_ptr)
    else:
        _normalise_tile(
            x_ptr, weight_ptr, bias_ptr, quantizer_ptr, centre_ptr, rstd_ptr, y_ptr,
            rows, d_parts, x_parts, tl.program_id(0), AHEAD, PDL, False, VECTOR, BLOCK,
        )  # fmt: skip
