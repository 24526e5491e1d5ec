"""Triton kernels of LayerNorm and of residual add + LayerNorm. Op: ``layer_norm/op.py``.

Two ways, chosen by ``forward_config`` from sizes alone:

- *rows*: one program holds whole rows in registers: one read, one write, one launch. A warp takes a
  row, or several short ones by itself, or the warps of a program share a long one;
- *chunks*: for rows that do not fit. ``_chunk_kernel`` leaves a mean and a sum of squared
  deviations (M2) per chunk, ``_merge_chunks_kernel`` brings them together per row,
  ``_normalise_kernel`` applies them. Ten rows then fill a GPU as well.

Pointers, which mean the same in every kernel; each but x, y and the scratch memory may be None:

- ``x``, ``residual``: (rows, D), rows a known stride apart; ``y``: (rows, D), contiguous;
- ``weight``, ``bias``: (D,); ``add_bias``: (D,), added to the sum; ``total_bias``: (D,), added to
  what is kept of it;
- ``total``: (rows, D), the sum that is normalized, and in the rows kernel with total_bias on top;
  ``kept``: the same with total_bias, in the chunk kernel;
- ``centre``: (rows,), the mean less the row's first element, in fp32; the mean itself, in fp64, where
  ``y`` is fp32 (``EXACT``);
- ``rstd``: (rows,) fp32;
- ``partials``: fp32 (2, rows, chunks), mean less the row's first element, and M2. If ``EXACT``,
  (3, rows, chunks): the mean rounded, M2, and what the rounding left.

With a residual, the kernel that reads x first also writes the sum, and takes the statistics of what
it wrote, as rounded. With a ``total_bias`` what is kept is another tensor than what is normalised:
rows have both in registers, chunks write both.

Launched dependent on each other from sm_90 on (``PDL``), by the rules of ADR 7: nothing is read or
written before ``gdc_wait`` but x, and x only where no kernel of this call writes it.

Numerics: fp32 throughout, one rounding at each store. Sums are of deviations from the row's first
element or a tile's mean, never of raw squares, merged by Chan's formula in a fixed order without
atomics. Means stay what they are found as, differences from the row's first element (``centre``),
which fp32 holds to the last bit where it would round the mean at the size of the data. It would also
round a difference from a first element that is an outlier, so results in fp32 have means in fp64, and
``row_mean`` splits those into two fp32 parts. Offsets that can pass 2^31 are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    """Row in the tile of each thread."""
    row = along_lanes(LANES)
    if not WIDE:
        row += along_warps(WARPS) * LANES
    return row


@triton.jit
def tile_column(WIDE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Column of each element of the tile."""
    part = along_steps(STEPS)
    if WIDE:
        part = part * WARPS + along_warps(WARPS)
    return part * BLOCK + along_block(BLOCK)


@triton.jit
def row_sum(x, WIDE: tl.constexpr):
    """Sum of each row: in registers, in shuffles, and where warps share a row in shared memory."""
    total = tl.sum(tl.sum(x, STEP_AXIS, keep_dims=True), 3, keep_dims=True)
    if WIDE:
        total = tl.sum(total, 1, keep_dims=True)
    return total


@triton.jit
def row_mean(first, centre):
    """The mean of rows as two fp32 numbers, to subtract one after the other.

    ``first``: the row's first element. ``centre``: as stored, fp64 if it is the mean itself.
    """
    if centre.dtype == tl.float64:
        first = centre.to(tl.float32)
        centre = (centre - first.to(tl.float64)).to(tl.float32)
    return first, centre


@triton.jit
def _read(x_ptr, residual_ptr, add_bias_ptr, x_at, residual_at, c, mask):
    """x, or x + residual + add_bias, in fp32: rounded to the dtype of x, and before that."""
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    total = x.to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        if add_bias_ptr is not None:
            columns, mask = tl.broadcast(add_bias_ptr + c, mask)  # Triton 3.4 widens the mask alone
            total += tl.load(columns, mask=mask, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
    return x.to(tl.float32), total


@triton.jit
def _affine(weight_ptr, bias_ptr, c, in_row):
    """(scale, offset) of the columns ``c``. Called before the sums, so that the loads are under
    way while they run.
    """
    scale = 1.0
    offset = 0.0
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    return scale, offset


# One program: a tile of whole rows.
@triton.jit(do_not_specialize=["rows", "eps"])
def _rows_kernel(
    x_ptr, residual_ptr, add_bias_ptr, total_bias_ptr, weight_ptr, bias_ptr, total_ptr, y_ptr, centre_ptr,
    rstd_ptr,
    rows, eps,
    D: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, PDL: tl.constexpr,
    ONE_ROW: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    is_row = r < tl.minimum(rows - first, ROWS).to(tl.int32)
    in_row = c < D
    mask = is_row & in_row
    x_row = first * X_STRIDE + r * X_STRIDE
    residual_row = first * RESIDUAL_STRIDE + r * RESIDUAL_STRIDE
    if PDL:
        gdc_wait()
    x, kept = _read(x_ptr, residual_ptr, add_bias_ptr, x_row + c, residual_row + c, c, mask)
    # Sums are of differences from the row's first element: rounded at the size of the
    # deviations, not of the data.
    pivot, _ = _read(x_ptr, residual_ptr, add_bias_ptr, x_row, residual_row, r * 0, is_row)
    # Where a thread has one row, it reads its own columns: a broadcast would send the whole
    # tile through shared memory.
    if total_bias_ptr is not None:
        # Before the affine: after it, ptxas holds 168 registers a thread instead of 128, and
        # three programs fit instead of four.
        kept += tl.load(total_bias_ptr + (c + r * 0 if ONE_ROW else c), mask=in_row, other=0.0).to(tl.float32)
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
    # Explicit: ptxas would contract product and difference here, but not where the centre is
    # stored too, and other bits come out.
    d = tl.where(in_row, tl.fma(total, -1 / D, d), 0.0)
    rstd = inverse_deviation(row_sum(d * d, WIDE) / D, eps)
    y = d * rstd * scale + offset
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    if centre_ptr is not None:
        tl.store(
            centre_ptr + first + r,
            pivot.to(tl.float64) + (total * (1 / D)).to(tl.float64) if EXACT else total * (1 / D),
            mask=is_row,
        )
        tl.store(rstd_ptr + first + r, rstd, mask=is_row)


# One program: a chunk of one row.
@triton.jit(do_not_specialize=["chunks", "blocks", "d_parts", "x_parts", "residual_parts", "plane"])
def _chunk_kernel(
    x_ptr, residual_ptr, add_bias_ptr, total_bias_ptr, total_ptr, kept_ptr, partials_ptr,
    chunks, blocks, d_parts, x_parts, residual_parts, plane,
    EXACT: tl.constexpr, PDL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and M2 of each chunk of each row, as in ``partials``; and the sum that x is part of.

    ``kept_ptr``: the sum and total_bias, where there is one.
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
        # Whatever follows may start once every program is past the wait: x is then complete,
        # and may be read ahead.
        gdc_wait()
        gdc_launch_dependents()
    # All means of a row are taken from its first element: rounded at the size of the
    # deviations, not of the data. If ``EXACT``, those of each chunk are.
    to_pivot = 0 if EXACT else start
    first, _ = _read(
        x_ptr, residual_ptr, add_bias_ptr, x_row - to_pivot, residual_row - to_pivot, start - to_pivot,
        row >= 0,
    )  # fmt: skip
    pivot = 0.0
    sums = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, count, BLOCK):
        mask = at + i < count
        c = start + at + i
        x, kept = _read(x_ptr, residual_ptr, add_bias_ptr, x_row + at + i, residual_row + at + i, c, mask)
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


# One program: a row.
@triton.jit(do_not_specialize=["chunks", "length", "D", "plane", "eps"])
def _merge_chunks_kernel(
    partials_ptr, centre_ptr, rstd_ptr,
    chunks, length, D, plane, eps,
    EXACT: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Chan's formula over the chunks of a row."""
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


@triton.jit(do_not_specialize=["rows", "d_parts", "x_parts"])
def _normalise_kernel(
    x_ptr, weight_ptr, bias_ptr, centre_ptr, rstd_ptr, y_ptr,
    rows, d_parts, x_parts,
    AHEAD: tl.constexpr, PDL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row. ``AHEAD``: x is read before the wait, as a kernel of this op has waited
    for it.
    """
    # Neighbours have the same columns of neighbouring rows: weight and bias are read from memory once.
    row = (tl.program_id(0) % rows).to(tl.int64)
    c = (tl.program_id(0) // rows).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    D = d_parts.to(tl.int64) * VECTOR
    mask = c < D
    x_row = x_ptr + row * x_parts * VECTOR
    if PDL and not AHEAD:
        gdc_wait()
    x = load_ahead(x_row + c, mask, AHEAD)
    first = load_ahead(x_row, None, AHEAD)
    if AHEAD:
        gdc_wait()
    scale, offset = _affine(weight_ptr, bias_ptr, c, mask)
    first, rest = row_mean(first.to(tl.float32), tl.load(centre_ptr + row))
    y = (x.to(tl.float32) - first - rest) * tl.load(rstd_ptr + row)
    y = y * scale + offset
    tl.store(y_ptr + row * D + c, y.to(y_ptr.dtype.element_ty), mask=mask)
