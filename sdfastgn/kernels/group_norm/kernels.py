"""Triton kernels of GroupNorm + activation. Op: ``group_norm/op.py``, launches: ``group_norm/plans.py``.

Layout: the kernels read (N, HW, C) or (N, C, HW) without gaps; the output has the input's strides,
or is (N, HW, C) tokens.

Pointers, which mean the same in every kernel; each but x, y, statistics and table may be None:

- ``x``, ``y``: input and output;
- ``mean``, ``rstd``: (N, G) fp32, what the backward takes, stored if it is wanted;
- ``weight``, ``bias``: (C,);
- ``shift``, ``ada_scale``, ``ada_shift``: (N, C), rows ``*_stride`` elements apart, or (C,) with a
  stride of 0;
- ``statistics``: (2, N, P, C) fp32, mean and M2 of each channel and chunk;
- ``residual``, ``running_mean``, ``running_var``: as in ``batch_norm/kernels.py``, for BatchNorm only;
- ``table``: fp32 scratch memory. From ``table_offset`` on it has planes of ``table_plane`` values,
  one for each sample and channel: scale, offset and, without ``FOLD``, mean.

Two ways, chosen by ``launch_config`` from sizes alone:

- *small*: one program holds a whole group in registers: one read, one write, one launch. Groups of
  one channel lie several to a program, in ``channels_kernel`` if channels-last;
- *split*: the kernel of ``statistics/kernels.py`` leaves a mean and a sum of squared deviations
  (M2) per channel and chunk of rows, ``merge_kernel`` brings them together per group and writes
  what each channel is scaled and moved by, ``apply_kernel`` does that. The reduction over HW is
  spread over the whole GPU. Where a producer gave the statistics, the first of the three falls
  away.

From sm_90 on (``PDL``) a kernel starts while the one before still runs, and waits before it reads
what that one writes (programmatic dependent launch). ``apply_kernel`` reads its tile of x before
the wait, and past L1. That is right because none of the two kernels before it lets a successor start
until x is complete, and in L2 (ADR 7).

Numerics: fp32 throughout, one rounding at the store. Sums are of deviations, never of raw squares,
and are merged by Chan's formula in a fixed order without atomics, so that results are the same at
each run. Offsets that can pass 2^31 are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.common.sums import difference, inverse_deviation, mean_as_pivot
from sdfastgn.kernels.common.tiles import (
    along_block,
    along_lanes,
    along_steps,
    along_warps,
    load_ahead,
    map_tile,
    multiple_of,
    sums_in_warps,
    tile_sum,
    tile_sums,
)
from sdfastgn.kernels.group_norm.channels import channel_affine, channel_sum, update_average

# Sizes are not specialised on: a new resolution compiles little. What matters of them is passed
# as a constant. Channels are such a size where their number decides no tile: what the compiler
# has to know is which power of 2 divides it (``C_FACTOR``).
_STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]
# Square of the pivot's distance from the mean, over the variance, from which on the variance is
# summed by itself.
_FAR = tl.constexpr(64.0)


@triton.jit
def _save(mean_ptr, rstd_ptr, mean, rstd, groups, mask):
    """Stores what the backward takes."""
    if mean_ptr is not None:
        tl.store(mean_ptr + groups, mean, mask=mask)
        tl.store(rstd_ptr + groups, rstd, mask=mask)


@triton.jit
def _small_tile(
    x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, n, group_c, first_c, HW,
    C: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(x, shift, x + shift less the pivot, pivot, scale, offset, mask, offsets in y) of channels from
    ``first_c`` on.
    """
    outer = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
    inner = along_block(BLOCK)
    row = outer if CHANNELS_LAST else inner
    j = inner if CHANNELS_LAST else outer
    c = first_c + j
    in_range = (j < CHANNELS) & (c < C)
    mask = (row < HW) & in_range
    base = n * HW * C
    last = row * C + c
    first = c * HW + row
    x = tl.load(x_ptr + base + (last if CHANNELS_LAST else first), mask=mask, other=0.0).to(tl.float32)
    # Sums are of differences from the first element: rounded at the size of the deviations, not
    # of the data.
    pivot = tl.load(x_ptr + base + group_c * (1 if CHANNELS_LAST else HW)).to(tl.float32)
    d = x - pivot
    shift = 0.0
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        first_shift = tl.load(shift_ptr + n * shift_stride + group_c).to(tl.float32)
        d += shift - first_shift
        pivot += first_shift
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    d = tl.where(mask, d, 0.0)
    return x, shift, d, pivot, scale, offset, mask, base + (last if OUT_LAST else first)


@triton.jit(do_not_specialize=[*_STRIDES, "HW", "eps"])
def small_kernel(
    x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, HW, eps,
    C: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, TAIL_LANES: tl.constexpr, TAIL_STEPS: tl.constexpr,
):  # fmt: skip
    """A group of ``CHANNELS`` a program.

    ``TAIL``: the last so many channels of a group are a tile of their own, where one tile would
    be a power of 2 too large.
    """
    # Two sums one after the other where both at once would cost the last bits of the result.
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0)
    n = (part // PARTS).to(tl.int64)
    group_c = part % PARTS * CHANNELS
    if PDL:
        gdc_wait()
    x, shift, d, pivot, scale, offset, mask, out = _small_tile(
        x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, shift_stride,
        ada_scale_stride, ada_shift_stride, n, group_c, group_c, HW, C, CHANNELS - TAIL, CHANNELS_LAST,
        OUT_LAST, LANES, WARPS, STEPS, BLOCK,
    )  # fmt: skip
    if TAIL:
        tail_x, tail_shift, tail_d, _, tail_scale, tail_offset, tail_mask, tail_out = _small_tile(
            x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, shift_stride,
            ada_scale_stride, ada_shift_stride, n, group_c, group_c + (CHANNELS - TAIL), HW, C, TAIL,
            CHANNELS_LAST, OUT_LAST, TAIL_LANES, WARPS, TAIL_STEPS, TAIL,
        )  # fmt: skip
    share = 1 / (HW * CHANNELS).to(tl.float32)
    if EXACT:
        total = tile_sum(d)
        if TAIL:
            total += tile_sum(tail_d)
        pivot = mean_as_pivot(pivot, total, share)
        d = tl.where(mask, difference(x, shift, pivot), 0.0)
        if TAIL:
            tail_d = tl.where(tail_mask, difference(tail_x, tail_shift, pivot), 0.0)
    # An explicit fma: ptxas contracts this only where the mean is not stored, and the bits differ.
    if EXACT and not TAIL:
        total = tile_sum(d)
        d = tl.where(mask, tl.fma(total, -share, d), 0.0)
        variance = tile_sum(d * d) * share
    else:
        if TAIL:
            sums = sums_in_warps(d) + sums_in_warps(tail_d)
            squares = sums_in_warps(d * d) + sums_in_warps(tail_d * tail_d)
        else:
            sums, squares = d, d * d
        total, square = tile_sums(sums, squares)
        d = tl.where(mask, tl.fma(total, -share, d), 0.0)
        if TAIL:
            tail_d = tl.where(tail_mask, tl.fma(total, -share, tail_d), 0.0)
        mean = total * share
        variance = tl.fma(mean, -mean, square * share)
        # The pivot is an outlier: the difference has too few bits left, or the squares are inf.
        again = (mean * mean > _FAR * variance) | (square == float("inf"))
        if EXACT:
            again = True
        if again:
            variance = tile_sum(d * d) * share
            if TAIL:
                variance += tile_sum(tail_d * tail_d) * share
    rstd = inverse_deviation(variance, eps)
    _save(mean_ptr, rstd_ptr, tl.fma(total, share, pivot), rstd, part, None)
    y = activate(d * (scale * rstd) + offset, ACTIVATION, PAIRS)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL:
        tail_y = activate(tail_d * (tail_scale * rstd) + tail_offset, ACTIVATION, PAIRS)
        tl.store(y_ptr + tail_out, tail_y.to(y_ptr.dtype.element_ty), mask=tail_mask)


@triton.jit(do_not_specialize=[*_STRIDES, "HW", "eps"])
def channels_kernel(
    x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    residual_ptr, running_mean_ptr, running_var_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, HW, eps,
    C: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
    IMAGE: tl.constexpr, MOMENTUM: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``CHANNELS`` of a sample a program, channels-last; each is normalised by itself.

    For BatchNorm one sample has the positions of all. ``MOMENTUM``: of its running averages, None for other
    norms; the variance is then saved, not rstd. ``IMAGE``: x is channels-first, in images of so many
    positions; or None.
    """
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0)
    n = (part // PARTS).to(tl.int64)
    first_c = part % PARTS * CHANNELS
    if IMAGE is not None:
        HW = multiple_of(HW, IMAGE)
    row = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
    j = along_block(BLOCK)
    c = first_c + j
    in_range = (j < CHANNELS) & (c < C)
    mask = (row < HW) & in_range
    base = n * HW * C
    at = row * C + c if IMAGE is None else (row // IMAGE * C + c) * IMAGE + row % IMAGE
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    # Sums are of differences from the first element: rounded at the size of the deviations, not
    # of the data.
    first = c if IMAGE is None else c * IMAGE
    pivot = tl.load(x_ptr + base + first, mask=in_range, other=0.0).to(tl.float32)
    d = x - pivot
    shift = 0.0
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        d += shift
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    share = 1 / HW.to(tl.float32)
    d = tl.where(mask, d, 0.0)
    total = channel_sum(d)
    if EXACT:
        pivot = mean_as_pivot(pivot, total, share)
        d = tl.where(mask, difference(x, shift, pivot), 0.0)
        total = channel_sum(d)
    # An explicit fma: ptxas contracts this only where the mean is not stored, and the bits differ.
    d = tl.where(mask, tl.fma(total, -share, d), 0.0)
    variance = channel_sum(d * d) * share
    rstd = inverse_deviation(variance, eps)
    mean = tl.fma(total, share, pivot)
    _save(mean_ptr, rstd_ptr, mean, rstd if MOMENTUM is None else variance, n * C + c, in_range)
    if MOMENTUM is not None:
        update_average(running_mean_ptr, c, in_range, mean, MOMENTUM)
        unbiased = variance * (HW.to(tl.float32) / (HW - 1).to(tl.float32))
        update_average(running_var_ptr, c, in_range, unbiased, MOMENTUM)
    z = d * (scale * rstd) + offset
    if residual_ptr is not None:
        z += tl.load(residual_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    y = activate(z, ACTIVATION, PAIRS)
    tl.store(y_ptr + base + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _partials(base, plane, start, chunks, rows, HW, c, in_range, shift, C, BLOCK_P: tl.constexpr):
    """(mean + shift, M2, count) of the channels ``c`` in a block of chunks; count is 0 outside."""
    p = start + tl.arange(0, BLOCK_P)[:, None]
    count = tl.minimum(rows, HW - p.to(tl.int64) * rows).to(tl.int32)
    mask = (p < chunks) & (count > 0) & in_range[None, :]
    at = p.to(tl.int64) * C + c[None, :]
    mean = tl.load(base + at, mask=mask, other=0.0) + shift[None, :]
    m2 = tl.load(base + plane + at, mask=mask, other=0.0)
    return mean, m2, tl.where(mask, count, 0).to(tl.float32)


@triton.jit
def _merged(partials, EACH_CHANNEL: tl.constexpr):
    # Channels first where they are summed: a scalar a warp then passes through shared memory,
    # not a row of channels.
    return tl.sum(partials, axis=0) if EACH_CHANNEL else tl.sum(tl.sum(partials, axis=1), axis=0)


@triton.jit
def _differences(
    base, plane, chunks, rows, HW, c, in_range, to_pivot, C,
    EACH_CHANNEL: tl.constexpr, LOOP: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """(mean + ``to_pivot``, M2, count) of the first block of chunks, and the sum over the group."""
    d, m2, weight = _partials(base, plane, 0, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
    total = d * weight
    if LOOP:
        for start in range(BLOCK_P, chunks, BLOCK_P):
            m, _, w = _partials(base, plane, start, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
            total += m * w
    return d, m2, weight, _merged(total, EACH_CHANNEL)


@triton.jit(
    do_not_specialize=[
        *_STRIDES, "shifted", "C", "CHANNELS", "parts", "complete", "HW", "rows", "chunks", "plane",
        "table_offset", "table_plane", "eps",
    ]
)  # fmt: skip
def merge_kernel(
    statistics_ptr, table_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr,
    ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, shifted,
    C, CHANNELS, parts, complete,
    HW, rows, chunks, plane, table_offset, table_plane, eps,
    EACH_CHANNEL: tl.constexpr, EXACT: tl.constexpr,
    FOLD: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr, C_FACTOR: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Chan's formula over a group: statistics -> (scale, offset, mean) of each of its channels.

    ``CHANNELS`` of a sample a program: a group, or groups of one channel (``EACH_CHANNEL``).
    ``parts``: programs of a sample. ``shifted``: 1 if there is a shift in ``shift``, else 0.
    ``complete``: 1 if x is when this kernel starts, else 0. ``EXACT``: the result is fp32.

    ``FOLD``, for 16-bit x: the mean goes into the offset, which saves the apply pass registers
    and a load. The offset is then rounded at the size of mean / deviation, as PyTorch's own is.
    A group of equal values would get an offset that is wrong by 0.5, so its scale is 0 and its
    offset stays as it is.

    Without a table, for BatchNorm, the variance is saved in place of rstd.
    """
    C, CHANNELS = multiple_of(C, C_FACTOR), multiple_of(CHANNELS, C_FACTOR)
    part = tl.program_id(0)
    n = (part // parts).to(tl.int64)
    j = tl.arange(0, BLOCK_C)
    first_c = part % parts * CHANNELS
    c = first_c + j
    in_range = (j < CHANNELS) & (c < C)
    base = statistics_ptr + n * chunks * C
    share = 1 / (HW.to(tl.float32) * (1 if EACH_CHANNEL else CHANNELS))
    if PDL:
        if complete != 0:
            gdc_launch_dependents()
        gdc_wait()
        if complete == 0:
            gdc_launch_dependents()
    # Means are merged as deviations from the first: their sum is then exact to the data's last bit.
    pivot = tl.load(base + c, mask=in_range, other=0.0) if EACH_CHANNEL else tl.load(base + first_c)
    shift = tl.zeros((BLOCK_C,), tl.float32)
    if shift_ptr is not None:
        is_shifted = in_range & (c < C * shifted)
        shift += tl.load(shift_ptr + n * shift_stride + c, mask=is_shifted, other=0.0).to(tl.float32)
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    to_pivot = shift - pivot
    d, part_m2, weight, total = _differences(
        base, plane, chunks, rows, HW, c, in_range, to_pivot, C, EACH_CHANNEL, LOOP, BLOCK_P
    )
    if EXACT:
        pivot = mean_as_pivot(pivot, total, share)
        to_pivot = shift - pivot
        d, part_m2, weight, total = _differences(
            base, plane, chunks, rows, HW, c, in_range, to_pivot, C, EACH_CHANNEL, LOOP, BLOCK_P
        )
    d = tl.fma(total, -share, d)  # explicit for the same reason as in the small kernel
    m2 = part_m2 + d * d * weight
    if LOOP:
        for start in range(BLOCK_P, chunks, BLOCK_P):
            d, part_m2, w = _partials(base, plane, start, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
            d = tl.fma(total, -share, d)
            m2 += part_m2 + d * d * w
    mean = total * share
    m2 = _merged(m2, EACH_CHANNEL)
    rstd = inverse_deviation(m2 * share, eps)
    groups, mask = (n * C + c, in_range) if EACH_CHANNEL else (part, None)
    _save(mean_ptr, rstd_ptr, mean + pivot, m2 * share if table_ptr is None else rstd, groups, mask)
    if table_ptr is not None:
        scale *= rstd
        # The mean is that of x + shift, and x comes without: mean - shift is subtracted from it.
        centre = mean - to_pivot
        out = table_ptr + table_offset + n * C + c
        if FOLD:
            scale = tl.where((m2 == 0) & (eps > 0), 0.0, scale)
            tl.store(out + table_plane, offset - centre * scale, mask=in_range)
        else:
            tl.store(out + table_plane, offset, mask=in_range)
            tl.store(out + 2 * table_plane, centre, mask=in_range)
        tl.store(out, scale, mask=in_range)


@triton.jit(do_not_specialize=["C", "activates", "HW", "table_offset", "table_plane"])
def apply_kernel(
    x_ptr, y_ptr, table_ptr,
    C, activates, HW, table_offset, table_plane,
    CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    OPTIONAL: tl.constexpr, PAIRS: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, C_FACTOR: tl.constexpr, HW_FACTOR: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``BLOCK_C`` channels at ``BLOCK_HW`` positions of a sample a program. ``OPTIONAL``: the activation is
    left out where ``activates`` is 0, and not 1. ``AHEAD``: x is read before the wait.
    """
    # Last rows first: they are what the statistics pass left in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    C = multiple_of(C, C_FACTOR)
    if not (CHANNELS_LAST and OUT_LAST):
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
    if AHEAD:
        gdc_wait()
    x = x.to(tl.float32)
    table = table_ptr + table_offset + n * C + c
    scale = tl.load(table, mask=in_range)
    offset = tl.load(table + table_plane, mask=in_range)
    if not FOLD:
        x -= tl.load(table + 2 * table_plane, mask=in_range)[None, :]
    y = x * scale[None, :] + offset[None, :]
    if OPTIONAL:
        if activates != 0:
            y = activate(y, ACTIVATION, PAIRS)
    else:
        y = activate(y, ACTIVATION, PAIRS)
    tl.store(y_ptr + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)
