"""Triton kernels of the backward of BatchNorm + residual + activation; formulas: ``batch_norm/backward.py``.

Layout and pointers as in ``batch_norm/kernels.py``, and beside those:

- ``dy``, ``dx``, ``dz``: gradients of y, x and of the activation's argument, which is the residual's
  gradient too, in the layout of x; the latter two may be None;
- ``sums``: (2, samples, P, width) fp32, sums of dz and of dz * xhat by column and chunk;
- ``dbias``, ``dweight``: (C,) fp32, the same by channel; None where the batch decided nothing.

The ways of the forward, by the same function of sizes: *small*, or ``batch_sums_kernel``,
``batch_merge_sums_kernel`` and ``batch_apply_grad_kernel``. Where the residual wants a gradient the
first of the three stores dz. The last one reads that instead of dy and the residual, unless its
dtype is narrower than that of x.

Numerics: fp32, one rounding at the store; sums in a fixed order without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.batch_norm.kernels import all_positions, given_moments
from sdfastgn.kernels.common.activation_kernels import activation_grad
from sdfastgn.kernels.common.sums import sum_columns
from sdfastgn.kernels.common.tiles import LANE_AXIS, STEP_AXIS, load_ahead, map_tile, multiple_of
from sdfastgn.kernels.group_norm.channels import channel_affine, channel_sum
from sdfastgn.kernels.statistics.kernels import positions_of_channels, rows_of_channels


@triton.jit
def _load(pointers, mask):
    x = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _grad_tile(
    x_ptr, dy_ptr, residual_ptr, dz_ptr,
    at, mask, mean, rstd, scale, offset,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(dz, xhat) of a tile, 0 where masked; dz is stored where that is wanted."""
    dy = _load(dy_ptr + at, mask)
    xhat = (_load(x_ptr + at, mask) - mean) * rstd
    if mask is not None:
        xhat = tl.where(mask, xhat, 0.0)
    z = xhat * scale + offset
    if residual_ptr is not None:
        z += _load(residual_ptr + at, mask)
    dz = activation_grad(dy, z, ACTIVATION, PAIRS)
    if dz_ptr is not None:
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    return dz, xhat


@triton.jit(do_not_specialize=["HW", "positions", "eps"])
def batch_small_grad_kernel(
    x_ptr, dy_ptr, residual_ptr, dx_ptr, dz_ptr, dweight_ptr, dbias_ptr, mean_ptr, var_ptr, weight_ptr,
    bias_ptr,
    HW, positions, eps,
    C: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr, TRAINING: tl.constexpr,
    PAIRS: tl.constexpr, HW_FACTOR: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` channels at all positions a program."""
    c, in_range, mask, at = all_positions(
        HW, positions, C, CHANNELS_LAST, HW_FACTOR, LANES, WARPS, STEPS, BLOCK
    )
    if PDL:
        gdc_wait()
    mean, rstd = given_moments(c, in_range, mean_ptr, var_ptr, eps)
    scale, offset = channel_affine(0, c, in_range, weight_ptr, bias_ptr, None, None, 0, 0)
    dz, xhat = _grad_tile(
        x_ptr, dy_ptr, residual_ptr, dz_ptr, at, mask, mean, rstd, scale, offset, ACTIVATION, PAIRS
    )
    along_z, along_x = channel_sum(dz), channel_sum(dz * xhat)
    tl.store(dbias_ptr + c, along_z, mask=in_range)
    tl.store(dweight_ptr + c, along_x, mask=in_range)
    if dx_ptr is not None:
        dx = dz
        if TRAINING:
            share = 1 / positions.to(tl.float32)
            dx = dz - along_z * share - xhat * (along_x * share)
        tl.store(dx_ptr + at, (dx * (scale * rstd)).to(dx_ptr.dtype.element_ty), mask=mask)


# One program: channels-last a block of columns in one chunk for each warp, channels-first one column
# for each warp in one chunk.
@triton.jit(do_not_specialize=["HW", "rows", "chunks", "plane", "eps"])
def batch_sums_kernel(
    x_ptr, dy_ptr, residual_ptr, dz_ptr, sums_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr,
    HW, rows, chunks, plane, eps,
    C: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr, ADDED: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, LOOP: tl.constexpr, HW_FACTOR: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of dz and of dz * xhat by column and chunk.

    ``ADDED``: by column and program instead. Few channels have so many chunks that to merge them
    takes longer than for the warps of a program, channels-last, to add up theirs.
    """
    TILE: tl.constexpr = (LANES if CHANNELS_LAST else BLOCK) * STEPS
    REDUCED: tl.constexpr = LANE_AXIS if CHANNELS_LAST else 3
    if CHANNELS_LAST:
        n, chunk, column, position, row = rows_of_channels(
            HW, rows, chunks, WIDTH, LANES, WARPS, STEPS, BLOCK
        )
        at = row * WIDTH + (position * WIDTH + column)
    else:
        HW, rows = multiple_of(HW, HW_FACTOR), multiple_of(rows, HW_FACTOR)
        n, chunk, column, position, start = positions_of_channels(
            HW, rows, chunks, WIDTH, WARPS, STEPS, BLOCK
        )
        at = start + position
    count = tl.maximum(tl.minimum(rows, HW - chunk.to(tl.int64) * rows), 0).to(tl.int32)
    in_range = column < WIDTH
    c = column if WIDTH == C else column % C
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mean, rstd = given_moments(c, in_range, mean_ptr, var_ptr, eps)
    scale, offset = channel_affine(0, c, in_range, weight_ptr, bias_ptr, None, None, 0, 0)
    mask = None
    if not EVEN:
        mask = (position < count) & in_range
    dz, xhat = _grad_tile(
        x_ptr, dy_ptr, residual_ptr, dz_ptr, at, mask, mean, rstd, scale, offset, ACTIVATION, PAIRS
    )
    along_z = tl.sum(dz, STEP_AXIS, keep_dims=True)
    along_x = tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
    if LOOP:
        for start in range(TILE, rows, TILE):
            if not EVEN:
                mask = (start + position < count) & in_range
            step = tl.cast(start, tl.int64)
            dz, xhat = _grad_tile(
                x_ptr, dy_ptr, residual_ptr, dz_ptr, at + step * (WIDTH if CHANNELS_LAST else 1), mask,
                mean, rstd, scale, offset, ACTIVATION, PAIRS,
            )  # fmt: skip
            along_z += tl.sum(dz, STEP_AXIS, keep_dims=True)
            along_x += tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
    along_z, along_x = tl.sum(along_z, REDUCED, keep_dims=True), tl.sum(along_x, REDUCED, keep_dims=True)
    if ADDED:
        along_z, along_x = tl.sum(along_z, 1, keep_dims=True), tl.sum(along_x, 1, keep_dims=True)
        chunks = tl.cdiv(chunks, WARPS)
        chunk = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK) % chunks) + tl.zeros((1, 1, 1, 1), tl.int32)
    out = sums_ptr + (n * chunks + chunk) * WIDTH + column
    mask = (chunk < chunks) & in_range
    tl.store(out, along_z, mask=mask)
    tl.store(out + plane, along_x, mask=mask)


@triton.jit(do_not_specialize=["partials", "plane"])
def batch_merge_sums_kernel(
    sums_ptr, dweight_ptr, dbias_ptr,
    partials, plane,
    C: tl.constexpr, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of each chunk -> sums of each channel; one of the two a program."""
    c = tl.program_id(0) // 2 * BLOCK_C + tl.arange(0, BLOCK_C)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) % 2 == 0:
        sum_columns(sums_ptr, dbias_ptr, partials, C, c, BLOCK_P)
    else:
        sum_columns(sums_ptr + plane, dweight_ptr, partials, C, c, BLOCK_P)


# One program: ``BLOCK_C`` columns at ``BLOCK_HW`` positions.
@triton.jit(do_not_specialize=["HW", "positions", "eps"])
def batch_apply_grad_kernel(
    x_ptr, dy_ptr, residual_ptr, dx_ptr, dweight_ptr, dbias_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr,
    HW, positions, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    HW_FACTOR: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = scale * (dz - dbias / positions - xhat * dweight / positions), or scale * dz without sums.

    ``AHEAD``: x, dy and residual are read before the wait, as a kernel of this op has waited for them.
    """
    # Last rows first: they are what the sums kernel left in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if not CHANNELS_LAST:
        HW = multiple_of(HW, HW_FACTOR)
    _, column, position, last, first = map_tile(pid, HW, WIDTH, BLOCK_HW, BLOCK_C)
    at = last if CHANNELS_LAST else first
    in_range = column < WIDTH
    c = column if WIDTH == C else column % C
    mask = None
    if not EVEN:
        mask = (position < HW) & in_range[None, :]
    if PDL and not AHEAD:
        gdc_wait()
    x = load_ahead(x_ptr + at, mask, AHEAD).to(tl.float32)
    dy = load_ahead(dy_ptr + at, mask, AHEAD).to(tl.float32)
    if residual_ptr is not None:
        residual = load_ahead(residual_ptr + at, mask, AHEAD).to(tl.float32)
    if AHEAD:
        gdc_wait()
    scale, offset = channel_affine(0, c, in_range, weight_ptr, bias_ptr, None, None, 0, 0)
    mean, rstd = given_moments(c, in_range, mean_ptr, var_ptr, eps)
    scale *= rstd
    d = x - mean[None, :]
    z = d * scale[None, :] + offset[None, :]
    if residual_ptr is not None:
        z += residual
    dx = activation_grad(dy, z, ACTIVATION, PAIRS) * scale[None, :]
    if dweight_ptr is not None:
        share = scale / positions.to(tl.float32)
        level = tl.load(dbias_ptr + c, mask=in_range, other=0.0) * share
        slope = tl.load(dweight_ptr + c, mask=in_range, other=0.0) * share * rstd
        dx -= d * slope[None, :] + level[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
