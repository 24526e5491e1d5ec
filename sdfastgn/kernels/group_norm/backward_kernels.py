"""Triton kernels of the backward of GroupNorm + activation; formulas: ``group_norm/backward.py``.

Layout: x as in ``group_norm/kernels.py``; the incoming gradient dy is read where it lies, in the
layout of x or in the other one; dx has the layout of x.

Pointers, beside those of ``group_norm/kernels.py``:

- ``dy``, ``dx``: gradients of y and x; ``dx`` is None where it is not wanted;
- ``dweight``, ``dbias``, ``dshift``, ``dada_scale``, ``dada_shift``: gradients, in the shapes of
  their tensors, or None;
- ``residual``, ``dz``: as in ``batch_norm/kernels.py``, for BatchNorm only; ``EPS`` is then added
  to the variance, which it has in place of rstd;
- ``scratch``: fp32. ``sums``: planes (N, P, C) of sums of chunks. From ``totals_offset`` on
  ``totals``: planes (N, C) of sums of samples. From ``table_offset`` on the table for dx, planes
  (N, C) of scale, offset, slope, level and centre.

The ways of the forward, by the same function of sizes:

- *small*: one program holds a group of x and of dy in registers: dx, and two or three sums per
  sample and channel;
- *walk* (``group_norm/walk_kernels.py``): the same with a group that one program reads twice;
- *split*: ``sums_kernel`` leaves these sums per channel and chunk, ``merge_sums_kernel`` brings
  them together and writes what dx is made of per channel, ``apply_grad_kernel`` makes dx. Its first
  programs turn the sums into the gradients of the parameters, which after the other two is a launch
  of its own.

Programmatic dependent launch as in the forward: the sums kernel lets its successors start when x
and dy are complete.

Numerics: fp32, one rounding at the store; sums in a fixed order without atomics, so that gradients
are the same at each run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.activation_kernels import activation_grad
from sdfastgn.kernels.common.sums import inverse_deviation
from sdfastgn.kernels.common.tiles import (
    LANE_AXIS,
    STEP_AXIS,
    along_block,
    along_lanes,
    along_steps,
    along_warps,
    load_ahead,
    map_tile,
    multiple_of,
)
from sdfastgn.kernels.group_norm.channels import channel_affine, channel_sum
from sdfastgn.kernels.group_norm.parameter_kernels import parameter_grads
from sdfastgn.kernels.statistics.kernels import positions_of_channels, rows_of_channels

STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]


@triton.jit
def _centre(n, c, group, in_range, mean_ptr, rstd_ptr, shift_ptr, shift_stride, EPS: tl.constexpr = None):
    """(what x is less its mean after the shift, 1 / deviation) of channels ``c``."""
    centre = tl.load(mean_ptr + group, mask=in_range, other=0.0)
    rstd = tl.load(rstd_ptr + group, mask=in_range, other=0.0)
    if EPS is not None:
        centre, rstd = centre.to(tl.float32), inverse_deviation(rstd.to(tl.float32), EPS)
    if shift_ptr is not None:
        centre -= tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
    return centre, rstd


@triton.jit
def _channel_sum(t, CHANNELS_LAST: tl.constexpr):
    """Over the positions of a (lanes, warps, steps, block) tile."""
    return channel_sum(t) if CHANNELS_LAST else tl.sum(t, 3, keep_dims=True)


@triton.jit
def _group_sum(t, EACH_CHANNEL: tl.constexpr):
    """Over the channels, given a value for each; or not, if each is a group."""
    if not EACH_CHANNEL:
        t = tl.sum(tl.reshape(t, (t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3],)), 0)
    return t


@triton.jit
def store_totals(
    totals, plane, in_range, along_z, along_x, sum_x, positions, rstd, scale, along_mean, along_var,
    SHIFT_GRAD: tl.constexpr,
):  # fmt: skip
    """Sums of a sample: of dz, of dz * xhat, and the shift's gradient (``sum_x``: the sum of xhat)."""
    tl.store(totals, along_z, mask=in_range)
    tl.store(totals + plane, along_x, mask=in_range)
    if SHIFT_GRAD:
        shift_grad = rstd * (scale * along_z - positions * along_mean - sum_x * along_var)
        tl.store(totals + 2 * plane, shift_grad, mask=in_range)


# One program: a group of one sample, or ``CHANNELS`` groups of one channel each.
@triton.jit(do_not_specialize=[*STRIDES, "HW", "plane"])
def small_grad_kernel(
    x_ptr, dy_ptr, dx_ptr, totals_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr,
    ada_shift_ptr, residual_ptr, dz_ptr, dweight_ptr, dbias_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, HW, plane,
    C: tl.constexpr, CG: tl.constexpr,
    ACTIVATION: tl.constexpr, SHIFT_GRAD: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    DY_LAST: tl.constexpr, EACH_CHANNEL: tl.constexpr,
    PDL: tl.constexpr, PAIRS: tl.constexpr,
    IMAGE: tl.constexpr, EPS: tl.constexpr, IN_EVAL: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x, dy -> dx; and by sample and channel sums of dz, dz * xhat, and the gradient of the shift.

    BatchNorm's sums of its one sample go to ``dbias`` and ``dweight`` instead.
    ``IMAGE``: as in ``channels_kernel``. ``IN_EVAL``: mean and variance do not depend on x.
    """
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    n = (tl.program_id(0) // PARTS).to(tl.int64)
    if IMAGE is not None:
        HW = multiple_of(HW, IMAGE)
    outer = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
    inner = along_block(BLOCK)
    row = outer if CHANNELS_LAST else inner
    j = inner if CHANNELS_LAST else outer
    c = tl.program_id(0) % PARTS * CHANNELS + j
    in_range = (j < CHANNELS) & (c < C)
    mask = (row < HW) & in_range
    base = n * HW * C
    last = row * C + c if IMAGE is None else (row // IMAGE * C + c) * IMAGE + row % IMAGE
    first = c * HW + row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + base + (last if CHANNELS_LAST else first), mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + base + (last if DY_LAST else first), mask=mask, other=0.0).to(tl.float32)
    centre, rstd = _centre(
        n, c, n * (C // CG) + c // CG, in_range, mean_ptr, rstd_ptr, shift_ptr, shift_stride, EPS
    )
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    xhat = tl.where(mask, (x - centre) * rstd, 0.0)
    z = xhat * scale + offset
    if residual_ptr is not None:
        z += tl.load(residual_ptr + base + last, mask=mask, other=0.0).to(tl.float32)
    dz = activation_grad(dy, z, ACTIVATION, PAIRS)
    if dz_ptr is not None:
        tl.store(dz_ptr + base + last, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    along_z = _channel_sum(dz, CHANNELS_LAST)
    along_x = _channel_sum(dz * xhat, CHANNELS_LAST)
    positions = HW.to(tl.float32)
    count = positions * (1 if EACH_CHANNEL else CHANNELS)
    along_mean = _group_sum(scale * along_z, EACH_CHANNEL) / count
    along_var = _group_sum(scale * along_x, EACH_CHANNEL) / count
    if dx_ptr is not None:
        dx = dz * scale
        if not IN_EVAL:
            dx = dx - along_mean - xhat * along_var
        dx = rstd * dx
        out = dx_ptr + base + (last if CHANNELS_LAST else first)
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if totals_ptr is not None:
        sum_x = _channel_sum(xhat, CHANNELS_LAST) if SHIFT_GRAD else along_x
        store_totals(
            totals_ptr + n * C + c, plane, in_range, along_z, along_x, sum_x, positions, rstd, scale,
            along_mean, along_var, SHIFT_GRAD,
        )  # fmt: skip
    if dweight_ptr is not None:
        tl.store(dbias_ptr + c, along_z, mask=in_range)
        tl.store(dweight_ptr + c, along_x, mask=in_range)


@triton.jit
def grad_tile(
    x_ptr, dy_ptr,
    x_offsets, dy_offsets, mask, centre, rstd, scale, offset,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, EVICTION: tl.constexpr,
    residual_ptr=None, dz_ptr=None,
):  # fmt: skip
    """(dz, xhat) of a tile, 0 where masked. dz is stored where that is wanted."""
    if mask is None:
        x = tl.load(x_ptr + x_offsets, eviction_policy=EVICTION)
        dy = tl.load(dy_ptr + dy_offsets, eviction_policy=EVICTION)
    else:
        x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0, eviction_policy=EVICTION)
        dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0, eviction_policy=EVICTION)
    xhat = (x.to(tl.float32) - centre) * rstd
    if mask is not None:
        xhat = tl.where(mask, xhat, 0.0)
    dy, z = dy.to(tl.float32), xhat * scale + offset
    if residual_ptr is not None:
        if mask is None:
            z += tl.load(residual_ptr + x_offsets).to(tl.float32)
        else:
            z += tl.load(residual_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    dz = activation_grad(dy, z, ACTIVATION, PAIRS)
    if dz_ptr is not None:
        tl.store(dz_ptr + x_offsets, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    return dz, xhat


# One program: channels-last a block of channels in one chunk for each warp, channels-first one channel
# for each warp in one chunk.
@triton.jit(do_not_specialize=[*STRIDES, "HW", "rows", "chunks", "plane"])
def sums_kernel(
    x_ptr, dy_ptr, sums_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr,
    ada_shift_ptr, residual_ptr, dz_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride,
    HW, rows, chunks, plane,
    C: tl.constexpr, CG: tl.constexpr,
    ACTIVATION: tl.constexpr, SHIFT_GRAD: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    PDL: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, LOOP: tl.constexpr,
    HW_FACTOR: tl.constexpr,
    CHANNELS: tl.constexpr, EPS: tl.constexpr, ADDED: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each channel and chunk, the sums of dz, of dz * xhat and (``SHIFT_GRAD``) of xhat.

    ``CHANNELS``: of BatchNorm, whose mean and variance are those of all samples; column ``c`` of x is then
    channel ``c % CHANNELS``. None for other norms.
    ``ADDED``: channels-last, the sums are those of a program's chunks together. Few channels have so many
    chunks that to merge them takes longer.
    """
    TILE: tl.constexpr = (LANES if CHANNELS_LAST else BLOCK) * STEPS
    REDUCED: tl.constexpr = LANE_AXIS if CHANNELS_LAST else 3
    if CHANNELS_LAST:
        n, chunk, c, position, row = rows_of_channels(HW, rows, chunks, C, LANES, WARPS, STEPS, BLOCK)
        x_offsets = row * C + (position * C + c)
    else:
        HW, rows = multiple_of(HW, HW_FACTOR), multiple_of(rows, HW_FACTOR)
        n, chunk, c, position, start = positions_of_channels(HW, rows, chunks, C, WARPS, STEPS, BLOCK)
        x_offsets = start + position
    first = chunk.to(tl.int64) * rows
    dy_offsets = x_offsets
    if DY_LAST and not CHANNELS_LAST:
        dy_offsets = (n * HW + first + position) * C + c
    if CHANNELS_LAST and not DY_LAST:
        dy_offsets = (n * C + c) * HW + first + position
    count = tl.maximum(tl.minimum(rows, HW - chunk.to(tl.int64) * rows), 0).to(tl.int32)
    in_range = c < C
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channel = c if CHANNELS is None else c % CHANNELS
    group = n * (C // CG) + c // CG if CHANNELS is None else channel
    centre, rstd = _centre(n, c, group, in_range, mean_ptr, rstd_ptr, shift_ptr, shift_stride, EPS)
    scale, offset = channel_affine(
        n, channel, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    mask = None
    if not EVEN:
        mask = (position < count) & in_range
    dz, xhat = grad_tile(
        x_ptr, dy_ptr, x_offsets, dy_offsets, mask, centre, rstd, scale, offset, ACTIVATION, PAIRS, "",
        residual_ptr, dz_ptr,
    )  # fmt: skip
    along_z = tl.sum(dz, STEP_AXIS, keep_dims=True)
    along_x = tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
    sum_x = tl.sum(xhat, STEP_AXIS, keep_dims=True)
    if LOOP:
        for start in range(TILE, rows, TILE):
            if not EVEN:
                mask = (start + position < count) & in_range
            step = tl.cast(start, tl.int64)
            dz, xhat = grad_tile(
                x_ptr, dy_ptr, x_offsets + step * (C if CHANNELS_LAST else 1),
                dy_offsets + step * (C if DY_LAST else 1), mask, centre, rstd, scale, offset, ACTIVATION,
                PAIRS, "", residual_ptr, dz_ptr,
            )  # fmt: skip
            along_z += tl.sum(dz, STEP_AXIS, keep_dims=True)
            along_x += tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
            sum_x += tl.sum(xhat, STEP_AXIS, keep_dims=True)
    if ADDED:
        along_z = tl.sum(tl.sum(along_z, REDUCED, keep_dims=True), 1, keep_dims=True)
        along_x = tl.sum(tl.sum(along_x, REDUCED, keep_dims=True), 1, keep_dims=True)
        chunks = tl.cdiv(chunks, WARPS)
        chunk = tl.program_id(0) // tl.cdiv(C, BLOCK) % chunks + tl.zeros((1, 1, 1, 1), tl.int32)
    out = sums_ptr + (n * chunks + chunk) * C + c
    mask = (chunk < chunks) & in_range
    tl.store(out, tl.sum(along_z, REDUCED, keep_dims=True), mask=mask)
    tl.store(out + plane, tl.sum(along_x, REDUCED, keep_dims=True), mask=mask)
    if SHIFT_GRAD:
        tl.store(out + 2 * plane, tl.sum(sum_x, REDUCED, keep_dims=True), mask=mask)


# One program: a group of one sample, or ``CHANNELS`` groups of one channel each.
@triton.jit(
    do_not_specialize=[*STRIDES, "HW", "chunks", "plane", "totals_offset", "table_offset", "table_plane"]
)
def merge_sums_kernel(
    scratch_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride,
    HW, chunks, plane, totals_offset, table_offset, table_plane,
    C: tl.constexpr, CG: tl.constexpr, EACH_CHANNEL: tl.constexpr, SHIFT_GRAD: tl.constexpr,
    LOOP: tl.constexpr, PDL: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of each chunk -> sums of each sample, and the table for dx.

    dx = dz * scale - (x - centre) * slope - level, where the activation's argument is (x -
    centre) * scale + offset.
    """
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    n = (tl.program_id(0) // PARTS).to(tl.int64)
    j = tl.arange(0, BLOCK_C)
    c = tl.program_id(0) % PARTS * CHANNELS + j
    in_range = (j < CHANNELS) & (c < C)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    centre, rstd = _centre(
        n, c, n * (C // CG) + c // CG, in_range, mean_ptr, rstd_ptr, shift_ptr, shift_stride
    )
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    p = tl.arange(0, BLOCK_P)[:, None]
    at = scratch_ptr + n * chunks * C + (p * C + c[None, :])
    mask = (p < chunks) & in_range[None, :]
    z_tile = tl.load(at, mask=mask, other=0.0)
    x_tile = tl.load(at + plane, mask=mask, other=0.0)
    sum_tile = tl.load(at + 2 * plane, mask=mask, other=0.0) if SHIFT_GRAD else z_tile
    if LOOP:
        for start in range(BLOCK_P, chunks, BLOCK_P):
            mask = (start + p < chunks) & in_range[None, :]
            from_here = at + tl.cast(start, tl.int64) * C
            z_tile += tl.load(from_here, mask=mask, other=0.0)
            x_tile += tl.load(from_here + plane, mask=mask, other=0.0)
            if SHIFT_GRAD:
                sum_tile += tl.load(from_here + 2 * plane, mask=mask, other=0.0)
    along_z, along_x = tl.sum(z_tile, 0), tl.sum(x_tile, 0)
    positions = HW.to(tl.float32)
    count = positions * (1 if EACH_CHANNEL else CHANNELS)
    along_mean = scale * along_z
    along_var = scale * along_x
    if not EACH_CHANNEL:
        along_mean = tl.sum(along_mean, 0) + tl.zeros_like(scale)
        along_var = tl.sum(along_var, 0) + tl.zeros_like(scale)
    along_mean /= count
    along_var /= count
    totals = scratch_ptr + totals_offset + n * C + c
    tl.store(totals, along_z, mask=in_range)
    tl.store(totals + table_plane, along_x, mask=in_range)
    if SHIFT_GRAD:
        shift_grad = rstd * (scale * along_z - positions * along_mean - tl.sum(sum_tile, 0) * along_var)
        tl.store(totals + 2 * table_plane, shift_grad, mask=in_range)
    scale *= rstd
    slope = rstd * rstd * along_var
    level = rstd * along_mean
    table = scratch_ptr + table_offset + n * C + c
    tl.store(table, scale, mask=in_range)
    tl.store(table + table_plane, offset, mask=in_range)
    tl.store(table + 2 * table_plane, slope, mask=in_range)
    tl.store(table + 3 * table_plane, level, mask=in_range)
    tl.store(table + 4 * table_plane, centre, mask=in_range)


# One program: ``BLOCK_C`` channels at ``BLOCK_HW`` positions of one sample; the first ones
# ``BLOCK_PARAMETERS`` channels of the parameters.
@triton.jit(do_not_specialize=["ada_scale_stride", "N", "totals_offset", "plane", "HW", "table_offset"])
def apply_grad_kernel(
    x_ptr, dy_ptr, dx_ptr, scratch_ptr, weight_ptr, bias_ptr, ada_scale_ptr, dweight_ptr, dbias_ptr,
    dshift_ptr, dada_scale_ptr, dada_shift_ptr,
    ada_scale_stride,
    N, totals_offset, plane, HW, table_offset,
    C: tl.constexpr,
    SHIFT_ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, OFFSET_ROWS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, DY_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
    HW_FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_PARAMETERS: tl.constexpr, PARAMETER_PROGRAMS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x, dy and the table of ``merge_sums_kernel`` -> dx; the first programs: gradients of parameters.

    ``AHEAD``: x and dy are read before the wait.
    """
    if tl.program_id(0) < PARAMETER_PROGRAMS:
        if PDL:
            gdc_wait()
        parameter_grads(
            tl.program_id(0), 0, N, scratch_ptr + totals_offset, weight_ptr, bias_ptr, ada_scale_ptr,
            dweight_ptr, dbias_ptr, dshift_ptr, dada_scale_ptr, dada_shift_ptr, ada_scale_stride, N,
            plane, C, SHIFT_ROWS, SCALE_ROWS, OFFSET_ROWS, BLOCK_N, BLOCK_PARAMETERS,
        )  # fmt: skip
    else:
        # Last rows first: they are what the sums kernel left in L2.
        pid = tl.num_programs(0) - 1 - tl.program_id(0)
        if not (CHANNELS_LAST and DY_LAST):
            HW = multiple_of(HW, HW_FACTOR)
        n, c, position, last, first = map_tile(pid, HW, C, BLOCK_HW, BLOCK_C)
        in_range = None
        mask = None
        if not EVEN:
            in_range = c < C
            mask = (position < HW) & in_range[None, :]
        if PDL and not AHEAD:
            gdc_wait()
        x = load_ahead(x_ptr + (last if CHANNELS_LAST else first), mask, AHEAD)
        dy = load_ahead(dy_ptr + (last if DY_LAST else first), mask, AHEAD)
        if AHEAD:
            gdc_wait()
        x = x.to(tl.float32)
        table = scratch_ptr + table_offset + n * C + c
        scale = tl.load(table, mask=in_range)[None, :]
        offset = tl.load(table + plane, mask=in_range)[None, :]
        slope = tl.load(table + 2 * plane, mask=in_range)[None, :]
        level = tl.load(table + 3 * plane, mask=in_range)[None, :]
        x -= tl.load(table + 4 * plane, mask=in_range)[None, :]
        dz = activation_grad(dy.to(tl.float32), x * scale + offset, ACTIVATION, PAIRS)
        dx = dz * scale - x * slope - level
        tl.store(dx_ptr + (last if CHANNELS_LAST else first), dx.to(dx_ptr.dtype.element_ty), mask=mask)
