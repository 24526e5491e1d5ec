"""Triton kernels of the backward of GroupNorm + activation. Formulas: ``group_norm/backward.py``.

xhat is the normalized x. z = xhat * scale + offset is the activation's argument (``channel_affine``), and dz
is its gradient. All gradients follow from three sums over positions, for each sample and channel: of dz, of
dz * xhat and, for the shift, of xhat. With g = dz * scale, dx also needs the means of g and of g * xhat over
each group.

There are three ways to launch the kernels. Sizes, layouts, the activation and the wanted gradients decide
which of them is used:

- *small*: a program holds one group of x and dy in registers. One launch writes dx and the sums;
- *walk*, one launch: a program reads its group of x and dy twice (``group_norm/walk_kernels.py``);
- *split*, three launches: ``sums_kernel`` computes the sums of each chunk of positions.
  ``merge_sums_kernel`` adds them up, and stores for each channel what dx needs. ``apply_grad_kernel``
  reads x and dy again and writes dx.

The gradients of all operands but x are computed last, from the sums
(``group_norm/parameter_kernels.py``). In the split way the first programs of ``apply_grad_kernel`` compute
them. In the other two ways, and if dx is not wanted, a further launch computes them, or two if there are
many samples.

Pointers, in addition to the ones in ``group_norm/kernels.py``:

- ``dy``: the gradient of y, channels-last or channels-first. Its layout may differ from that of x;
- ``dx``: the gradient of x, in the layout of x, or None if it is not wanted;
- ``dweight``, ``dbias``, ``dshift``, ``dada_scale``, ``dada_shift``: the gradients in the shapes of their
  operands, or None;
- ``scratch``: fp32 memory. In the split way it has three parts: ``sums``, ``totals`` and the table. In the
  other two ways it has only ``totals``. ``sums`` has planes of (N, P, C) with the sums of P chunks.
  ``totals``, at ``totals_offset``, has planes of (N, C): the sums of dz and of dz * xhat, and the gradient of
  the shift. The table, at ``table_offset``, has planes of (N, C): scale, offset, slope, level and centre.
  ``merge_sums_kernel`` explains these five names.

BatchNorm launches ``small_grad_kernel`` and ``sums_kernel`` too (``batch_norm/backward_plans.py``). A channel
of the whole batch is then a group. ``mean`` and ``rstd`` have the mean and the variance of each channel, (C,)
of any dtype. Only BatchNorm has these pointers:

- ``residual``: the tensor that the forward added before the activation, in the layout of x;
- ``dz``: the gradient of the activation's argument, in the layout of x, or None if it is not wanted.

With programmatic dependent launch (``PDL``) a kernel starts while the kernel before it still runs, and calls
``gdc_wait`` before it reads what that kernel writes. ``sums_kernel`` lets the next kernel start when x and dy
are complete.

Numerics: the kernels compute in fp32, and round once when they store. Sums have a fixed order and no atomics,
so every run gives the same bits.
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

# Names of the kernels' stride arguments. Triton's ``do_not_specialize`` gets them, so that one compiled
# kernel serves all strides.
STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]


@triton.jit
def _centre(n, c, group, in_range, mean_ptr, rstd_ptr, shift_ptr, shift_stride, EPS: tl.constexpr = None):
    """Returns (centre, rstd) of channels ``c`` in ``group``. The normalized x is (x - centre) * rstd.

    centre is the mean of x + shift, minus shift. If ``EPS`` is not None, as for BatchNorm, ``rstd_ptr``
    points to variances.
    """
    centre = tl.load(mean_ptr + group, mask=in_range, other=0.0)
    rstd = tl.load(rstd_ptr + group, mask=in_range, other=0.0)
    if EPS is not None:
        centre, rstd = centre.to(tl.float32), inverse_deviation(rstd.to(tl.float32), EPS)
    if shift_ptr is not None:
        centre -= tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
    return centre, rstd


@triton.jit
def _channel_sum(t, CHANNELS_LAST: tl.constexpr):
    """Returns the sum of each channel in a (lanes, warps, steps, block) tile. Summed axes keep size 1."""
    return channel_sum(t) if CHANNELS_LAST else tl.sum(t, 3, keep_dims=True)


@triton.jit
def _group_sum(t, EACH_CHANNEL: tl.constexpr):
    """Sums ``t``, which has one value for each channel, over the channels of the group.

    Returns ``t`` itself if ``EACH_CHANNEL``: each channel is a group.
    """
    if not EACH_CHANNEL:
        t = tl.sum(tl.reshape(t, (t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3],)), 0)
    return t


@triton.jit
def store_totals(
    totals, plane, in_range, sum_dz, sum_dz_xhat, sum_xhat, positions, rstd, scale, mean_g, mean_g_xhat,
    SHIFT_GRAD: tl.constexpr,
):  # fmt: skip
    """Stores at ``totals`` the sums of dz and of dz * xhat and, if ``SHIFT_GRAD``, the shift's gradient.

    dz is the gradient of the activation's argument, xhat the normalized x.

    Args:
        sum_dz, sum_dz_xhat, sum_xhat: sums of dz, of dz * xhat and of xhat over the positions, one value for
            each channel.
        positions: HW.
        mean_g, mean_g_xhat: the group's means of g = dz * scale and of g * xhat.
    """
    tl.store(totals, sum_dz, mask=in_range)
    tl.store(totals + plane, sum_dz_xhat, mask=in_range)
    if SHIFT_GRAD:
        shift_grad = rstd * (scale * sum_dz - positions * mean_g - sum_xhat * mean_g_xhat)
        tl.store(totals + 2 * plane, shift_grad, mask=in_range)


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
    """A program computes dx of one group of a sample, and the sums for the gradients of the other operands.

    If ``EACH_CHANNEL``, it does so for ``CHANNELS`` groups of one channel each.

    ``totals``: planes of ``plane`` values: the sums of dz (the gradient of the activation's argument) and of
    dz * xhat (xhat: the normalized x), and the gradient of the shift. It is None if only dx is wanted. For
    BatchNorm it is None too, and the two sums go to ``dbias`` and ``dweight``, (C,) fp32.

    Constants:
        CG: channels of a group.
        SHIFT_GRAD: True if the gradient of the shift is wanted.
        CHANNELS_LAST: True if x is channels-last.
        DY_LAST: True if dy is channels-last.
        EACH_CHANNEL: True if each channel is a group and x is channels-last.
        IMAGE: None, except for a channels-first BatchNorm. There it is the number of positions of an image,
            and x and dy are (HW / IMAGE, C, IMAGE), although CHANNELS_LAST, DY_LAST and EACH_CHANNEL must
            be True.
        EPS: added to BatchNorm's variance. None for other norms.
        IN_EVAL: True if BatchNorm normalized x with its running averages, which do not depend on x.
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
    sum_dz = _channel_sum(dz, CHANNELS_LAST)
    sum_dz_xhat = _channel_sum(dz * xhat, CHANNELS_LAST)
    positions = HW.to(tl.float32)
    count = positions * (1 if EACH_CHANNEL else CHANNELS)
    mean_g = _group_sum(scale * sum_dz, EACH_CHANNEL) / count
    mean_g_xhat = _group_sum(scale * sum_dz_xhat, EACH_CHANNEL) / count
    if dx_ptr is not None:
        dx = dz * scale
        if not IN_EVAL:
            dx = dx - mean_g - xhat * mean_g_xhat
        dx = rstd * dx
        out = dx_ptr + base + (last if CHANNELS_LAST else first)
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if totals_ptr is not None:
        sum_xhat = _channel_sum(xhat, CHANNELS_LAST) if SHIFT_GRAD else sum_dz_xhat
        store_totals(
            totals_ptr + n * C + c, plane, in_range, sum_dz, sum_dz_xhat, sum_xhat, positions, rstd, scale,
            mean_g, mean_g_xhat, SHIFT_GRAD,
        )  # fmt: skip
    if dweight_ptr is not None:
        tl.store(dbias_ptr + c, sum_dz, mask=in_range)
        tl.store(dweight_ptr + c, sum_dz_xhat, mask=in_range)


@triton.jit
def grad_tile(
    x_ptr, dy_ptr,
    x_offsets, dy_offsets, mask, centre, rstd, scale, offset,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, EVICTION: tl.constexpr,
    residual_ptr=None, dz_ptr=None,
):  # fmt: skip
    """Returns dz, the gradient of the activation's argument, and xhat, the normalized x, of a tile.

    Both are 0 where masked. If ``mask`` is None, nothing is masked. If ``dz_ptr`` is not None, dz is also
    stored there. ``residual``, which the forward added before the activation, and dz have the layout of x.
    """
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
    """Each warp computes the sums of dz, of dz * xhat and, if ``SHIFT_GRAD``, of xhat in one chunk.

    dz is the gradient of the activation's argument, xhat the normalized x. If x is channels-last, a program
    has a block of channels, and its warps have neighboring chunks of positions. If x is channels-first, a
    program has one chunk, and each of its warps has a different channel.

    Numbers:
        rows, chunks: positions of a chunk, and chunks of a sample.
        plane: elements between the starts of planes. Each kind of sum has one plane.

    Constants:
        EVEN: True if no element is masked.
        LOOP: True if a chunk has more than one tile.
        HW_FACTOR: a divisor of HW and rows. It tells the compiler how loads are aligned.
        CHANNELS: number of BatchNorm's channels. Column ``c`` of x is then channel ``c % CHANNELS``, and all
            samples share mean and variance. None for other norms.
        EPS: added to BatchNorm's variance. None for other norms.
        ADDED: True if a program adds up its warps' sums, and stores one sum instead of one for each warp.
            This is possible only for channels-last x. It saves time if channels are few, because there are
            then many chunks to merge.
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
    sum_dz = tl.sum(dz, STEP_AXIS, keep_dims=True)
    sum_dz_xhat = tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
    sum_xhat = tl.sum(xhat, STEP_AXIS, keep_dims=True)
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
            sum_dz += tl.sum(dz, STEP_AXIS, keep_dims=True)
            sum_dz_xhat += tl.sum(dz * xhat, STEP_AXIS, keep_dims=True)
            sum_xhat += tl.sum(xhat, STEP_AXIS, keep_dims=True)
    if ADDED:
        sum_dz = tl.sum(tl.sum(sum_dz, REDUCED, keep_dims=True), 1, keep_dims=True)
        sum_dz_xhat = tl.sum(tl.sum(sum_dz_xhat, REDUCED, keep_dims=True), 1, keep_dims=True)
        chunks = tl.cdiv(chunks, WARPS)
        chunk = tl.program_id(0) // tl.cdiv(C, BLOCK) % chunks + tl.zeros((1, 1, 1, 1), tl.int32)
    out = sums_ptr + (n * chunks + chunk) * C + c
    mask = (chunk < chunks) & in_range
    tl.store(out, tl.sum(sum_dz, REDUCED, keep_dims=True), mask=mask)
    tl.store(out + plane, tl.sum(sum_dz_xhat, REDUCED, keep_dims=True), mask=mask)
    if SHIFT_GRAD:
        tl.store(out + 2 * plane, tl.sum(sum_xhat, REDUCED, keep_dims=True), mask=mask)


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
    """A program adds up the chunks' sums of one group, and stores the total sums of each channel.

    If ``EACH_CHANNEL``, it does so for ``CHANNELS`` groups of one channel each. For each channel it also
    stores five values in the table: scale, offset, slope, level and centre. With these ``apply_grad_kernel``
    computes

        z = (x - centre) * scale + offset, the activation's argument, from which dz, its gradient, follows
        dx = dz * scale - (x - centre) * slope - level

    Numbers:
        plane: elements between the starts of planes of sums. Each kind of sum has one plane.
        table_plane: elements between the starts of planes of the totals and of the table.

    Constants:
        LOOP: True if there are more than ``BLOCK_P`` chunks.
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
    dz_tile = tl.load(at, mask=mask, other=0.0)
    dz_xhat_tile = tl.load(at + plane, mask=mask, other=0.0)
    xhat_tile = tl.load(at + 2 * plane, mask=mask, other=0.0) if SHIFT_GRAD else dz_tile
    if LOOP:
        for start in range(BLOCK_P, chunks, BLOCK_P):
            mask = (start + p < chunks) & in_range[None, :]
            from_here = at + tl.cast(start, tl.int64) * C
            dz_tile += tl.load(from_here, mask=mask, other=0.0)
            dz_xhat_tile += tl.load(from_here + plane, mask=mask, other=0.0)
            if SHIFT_GRAD:
                xhat_tile += tl.load(from_here + 2 * plane, mask=mask, other=0.0)
    sum_dz, sum_dz_xhat = tl.sum(dz_tile, 0), tl.sum(dz_xhat_tile, 0)
    positions = HW.to(tl.float32)
    count = positions * (1 if EACH_CHANNEL else CHANNELS)
    mean_g = scale * sum_dz
    mean_g_xhat = scale * sum_dz_xhat
    if not EACH_CHANNEL:
        mean_g = tl.sum(mean_g, 0) + tl.zeros_like(scale)
        mean_g_xhat = tl.sum(mean_g_xhat, 0) + tl.zeros_like(scale)
    mean_g /= count
    mean_g_xhat /= count
    totals = scratch_ptr + totals_offset + n * C + c
    tl.store(totals, sum_dz, mask=in_range)
    tl.store(totals + table_plane, sum_dz_xhat, mask=in_range)
    if SHIFT_GRAD:
        shift_grad = rstd * (scale * sum_dz - positions * mean_g - tl.sum(xhat_tile, 0) * mean_g_xhat)
        tl.store(totals + 2 * table_plane, shift_grad, mask=in_range)
    scale *= rstd
    slope = rstd * rstd * mean_g_xhat
    level = rstd * mean_g
    table = scratch_ptr + table_offset + n * C + c
    tl.store(table, scale, mask=in_range)
    tl.store(table + table_plane, offset, mask=in_range)
    tl.store(table + 2 * table_plane, slope, mask=in_range)
    tl.store(table + 3 * table_plane, level, mask=in_range)
    tl.store(table + 4 * table_plane, centre, mask=in_range)


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
    """A program computes dx for ``BLOCK_C`` channels at ``BLOCK_HW`` positions of one sample.

    The first ``PARAMETER_PROGRAMS`` programs instead compute the gradients of the operands other than x, for
    ``BLOCK_PARAMETERS`` channels each (``parameter_grads``).

    Numbers:
        plane: elements between the starts of two planes in ``scratch``.

    Constants:
        EVEN: True if no element is masked.
        AHEAD: True if x and dy are read before ``gdc_wait``.
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
        # The first programs with tiles of dx take the last rows, which ``sums_kernel`` has left in L2.
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
