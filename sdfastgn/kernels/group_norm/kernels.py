"""Triton kernels of GroupNorm + activation. Formula and op: ``group_norm/op.py``.

There are two ways to launch these kernels:

- *small*, for small groups: a program holds a whole group in registers. One launch reads x and writes y
  (``small_kernel``). If each channel is a group and x is channels-last, a program holds several channels
  (``channels_kernel``);
- *split*, three launches: the kernel of ``statistics/kernels.py`` computes the mean and the sum of squared
  deviations (M2) of each channel and chunk of positions. ``merge_kernel`` combines them to the statistics
  of each group, and stores a scale and an offset for each channel. ``apply_kernel`` reads x again and
  writes y. If the caller gives the statistics, the first launch is left out.

If the caller gives the statistics, split is always used. Otherwise ``launch_config`` chooses one of the two
from the sizes, the layout and the dtype of x.

Pointers have the same meaning in all kernels. x, y and statistics are never None. ``table`` is None only in
BatchNorm's launches. Every other pointer may be None:

- ``x``, ``y``: (N, HW, C) or (N, C, HW) without gaps, fp16, bf16 or fp32. y has the layout of x, or is
  (N, HW, C) tokens; the dtype of y is the dtype of x, or fp32;
- ``mean``, ``rstd``: (N, G) fp32, mean and 1 / deviation of each group. Stored for the backward;
- ``weight``, ``bias``: (C,);
- ``shift``, ``ada_scale``, ``ada_shift``: (N, C) or (C,). The kernels' arguments ``shift_stride``,
  ``ada_scale_stride`` and ``ada_shift_stride`` are the numbers of elements between two rows, or 0 for (C,);
- ``statistics``: (2, N, P, C) fp32, mean and M2 of each channel in each of a sample's P chunks;
- ``table``: fp32 scratch memory. At ``table_offset`` are planes of ``table_plane`` values. Each plane has a
  value for each sample and channel. The planes are the scale, the offset and, for fp32 x, the mean to
  subtract from x. For 16-bit x the mean is part of the offset (constant ``FOLD``).

BatchNorm launches ``channels_kernel`` and ``merge_kernel`` too (``batch_norm/plans.py``). The batch is then
one sample, each channel is a group, and ``rstd`` gets the variance. Only BatchNorm has these pointers:

- ``residual``: in the layout of x, added before the activation;
- ``running_mean``, ``running_var``: (C,), BatchNorm's running averages, updated in place.

Programmatic dependent launch (``PDL``, from sm_90 on): a kernel starts while the kernel before it still
runs, and calls ``gdc_wait`` before it reads what that kernel writes. With ``AHEAD``,
``apply_kernel`` reads x before its wait, and its loads bypass the L1 cache. Reading early is safe: the
kernels that run earlier in the call let the next kernel start only when x is complete and in L2
(docs/adr/0007-programmatic-dependent-launch.md).

Numerics: the kernels compute in fp32, and round once when they store. Variances are computed from squared
deviations, never from squares of the values themselves. Chan's formula merges the sums of squared deviations
in a fixed order without atomics, so every run gives the same bits. Offsets that can pass 2^31 are int64.
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

# Names of the kernels' stride arguments, for Triton's ``do_not_specialize``. Sizes that are named there do
# not become part of the compiled kernel, so a new resolution compiles few kernels. Constants tell the
# compiler what it must know about a size. For example, kernels in which C is no constant have the constant
# ``C_FACTOR``, a power of 2 that divides C.
_STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]
# ``small_kernel`` subtracts a pivot, the group's first value, before it sums values and their squares. If
# (pivot - mean)^2 is more than this number times the variance, it computes the variance again from squared
# deviations, because the sum of squares is then not exact enough.
_FAR = tl.constexpr(64.0)


@triton.jit
def _save(mean_ptr, rstd_ptr, mean, rstd, groups, mask):
    """Stores mean and 1 / deviation (BatchNorm: mean and variance) of ``groups``, if pointers are given."""
    if mean_ptr is not None:
        tl.store(mean_ptr + groups, mean, mask=mask)
        tl.store(rstd_ptr + groups, rstd, mask=mask)


@triton.jit
def _output(
    x, scale, offset, activates, ACTIVATION: tl.constexpr, OPTIONAL: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Returns x * scale + offset with the activation applied.

    If ``OPTIONAL`` is True, the activation is left out if ``activates`` is 0. If ``OPTIONAL`` is False,
    ``activates`` is not read.
    """
    y = x * scale + offset
    if OPTIONAL:
        if activates != 0:
            y = activate(y, ACTIVATION, PAIRS)
    else:
        y = activate(y, ACTIVATION, PAIRS)
    return y


@triton.jit
def _small_tile(
    x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, shifted, n, group_c, first_c, HW,
    C: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the tile of ``CHANNELS`` channels from ``first_c`` on, in the group that starts at ``group_c``.

    Returns:
        x, shift: the loaded values. shift is 0 if ``shift_ptr`` is None or ``shifted`` is 0.
        d: x + shift - pivot, 0 where masked.
        pivot: the group's first value of x + shift. It is subtracted from all values before they are summed.
        scale, offset: of each channel. The activation's argument is xhat * scale + offset, where xhat is the
            normalized x (``channel_affine``).
        mask: True for the elements of the tile that exist in x.
        out: offsets of the elements in y.
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
    pivot = tl.load(x_ptr + base + group_c * (1 if CHANNELS_LAST else HW)).to(tl.float32)
    d = x - pivot
    shift = 0.0
    if shift_ptr is not None:
        shift_ptr += n * shift_stride
        shift = tl.load(shift_ptr + c, mask=in_range & (c < C * shifted), other=0.0).to(tl.float32)
        first_shift = tl.load(shift_ptr + group_c, mask=shifted != 0, other=0.0).to(tl.float32)
        d += shift - first_shift
        pivot += first_shift
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    d = tl.where(mask, d, 0.0)
    return x, shift, d, pivot, scale, offset, mask, base + (last if OUT_LAST else first)


@triton.jit(do_not_specialize=[*_STRIDES, "shifted", "activates", "HW", "eps"])
def small_kernel(
    x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, shifted, activates, HW, eps,
    C: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    OPTIONAL: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, TAIL_LANES: tl.constexpr, TAIL_STEPS: tl.constexpr,
):  # fmt: skip
    """A program normalizes one group, which has ``CHANNELS`` channels, of one sample.

    If ``TAIL`` is not 0, the group's last ``TAIL`` channels are in a second tile. With one tile, whose sizes
    must be powers of 2, up to half of the elements would be padding.

    ``shifted``: 1 if ``shift_ptr`` points to a shift, 0 if it is a placeholder that is not read.
    ``activates``, ``OPTIONAL``: if ``OPTIONAL`` is True, the activation is left out if ``activates`` is 0.
    """
    # If y is fp32, the variance is summed in a second pass over the registers, when the mean is known.
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0)
    n = (part // PARTS).to(tl.int64)
    group_c = part % PARTS * CHANNELS
    if PDL:
        gdc_wait()
    x, shift, d, pivot, scale, offset, mask, out = _small_tile(
        x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, shift_stride,
        ada_scale_stride, ada_shift_stride, shifted, n, group_c, group_c, HW, C, CHANNELS - TAIL,
        CHANNELS_LAST, OUT_LAST, LANES, WARPS, STEPS, BLOCK,
    )  # fmt: skip
    if TAIL:
        tail_x, tail_shift, tail_d, _, tail_scale, tail_offset, tail_mask, tail_out = _small_tile(
            x_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, shift_stride,
            ada_scale_stride, ada_shift_stride, shifted, n, group_c, group_c + (CHANNELS - TAIL), HW, C,
            TAIL, CHANNELS_LAST, OUT_LAST, TAIL_LANES, WARPS, TAIL_STEPS, TAIL,
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
    # Without the explicit fma, ptxas may give y other bits in calls that also store the mean.
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
        # If the group's first value is far from the mean, this variance is inexact or NaN. Compute it again.
        again = (mean * mean > _FAR * variance) | (square == float("inf"))
        if EXACT:
            again = True
        if again:
            variance = tile_sum(d * d) * share
            if TAIL:
                variance += tile_sum(tail_d * tail_d) * share
    rstd = inverse_deviation(variance, eps)
    _save(mean_ptr, rstd_ptr, tl.fma(total, share, pivot), rstd, part, None)
    y = _output(d, scale * rstd, offset, activates, ACTIVATION, OPTIONAL, PAIRS)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL:
        tail_y = _output(tail_d, tail_scale * rstd, tail_offset, activates, ACTIVATION, OPTIONAL, PAIRS)
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
    """A program normalizes ``CHANNELS`` channels of a sample, each by itself.

    x and y are channels-last if ``IMAGE`` is None.

    Constants:
        IMAGE: None, except for a channels-first BatchNorm. There it is the number of positions of an image,
            and x and y are (HW / IMAGE, C, IMAGE).
        MOMENTUM: weight of this batch in BatchNorm's running averages. None for other norms.
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
    # Offset of each channel's first element. Its value, the pivot, is subtracted from the channel's values
    # before they are summed, which reduces rounding errors.
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
    # Subtracts the mean from d. Without the explicit fma, ptxas may give y other bits in calls that also
    # store the mean.
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
    """Loads the statistics of channels ``c`` in ``BLOCK_P`` chunks, from chunk ``start`` on.

    Returns mean + shift, M2 and count, three tiles of shape (BLOCK_P, channels). M2 is the sum of squared
    deviations. count is a chunk's number of positions, and 0 where the chunk or the channel does not exist.
    """
    p = start + tl.arange(0, BLOCK_P)[:, None]
    count = tl.minimum(rows, HW - p.to(tl.int64) * rows).to(tl.int32)
    mask = (p < chunks) & (count > 0) & in_range[None, :]
    at = p.to(tl.int64) * C + c[None, :]
    mean = tl.load(base + at, mask=mask, other=0.0) + shift[None, :]
    m2 = tl.load(base + plane + at, mask=mask, other=0.0)
    return mean, m2, tl.where(mask, count, 0).to(tl.float32)


@triton.jit
def _merged(partials, EACH_CHANNEL: tl.constexpr):
    """Sums (chunks, channels) values over the chunks and, unless ``EACH_CHANNEL``, over the channels too."""
    # Channels are summed before chunks, so that warps exchange scalars through shared memory, and not rows.
    return tl.sum(partials, axis=0) if EACH_CHANNEL else tl.sum(tl.sum(partials, axis=1), axis=0)


@triton.jit
def _differences(
    base, plane, chunks, rows, HW, c, in_range, to_pivot, C,
    EACH_CHANNEL: tl.constexpr, LOOP: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Sums d * count over all chunks of a group, where d is a chunk's mean + shift - pivot.

    The pivot, such as the first chunk's mean, is subtracted so that the sum keeps its last bits.
    ``to_pivot`` is shift - pivot. Returns four values: d, M2 (the sum of squared deviations) and count (the
    number of positions) of each of the first ``BLOCK_P`` chunks, which the caller needs again, and the sum.
    """
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
    """A program merges the statistics of one group by Chan's formula.

    It stores in ``table`` the scale and the offset with which ``apply_kernel`` normalizes each channel.
    If ``EACH_CHANNEL``, it does so for ``CHANNELS`` groups of one channel each. If ``table`` is None, as for
    BatchNorm, it only stores mean and variance.

    Numbers:
        shifted: 1 if ``shift_ptr`` points to a shift, 0 if it is a placeholder that is not read.
        CHANNELS, parts: channels of a program, and programs of a sample.
        complete: 1 if the statistics kernel runs before this kernel, else 0. With 1, x is complete when this
            kernel starts, so the next kernel may start at once. With 0, it may start only
            after this kernel's ``gdc_wait``.
        rows, chunks: positions of a chunk, and chunks of a sample.
        plane: elements of each half of ``statistics``.

    Constants:
        EXACT: True if y is fp32. The means of the chunks are then merged twice. The first result, which is
            close to the group's mean, is subtracted from the chunks' means before the second merge.
        FOLD: True if x has 16 bits. The table then has offset - mean * scale instead of offset and mean,
            which saves the apply kernel a load and registers. The rounding error of offset - mean * scale is
            proportional to mean / deviation, as in PyTorch. If all values of a group were equal, the error of
            y could be 0.5. So such a group gets the scale 0, and its offset is stored without the mean.
        LOOP: True if there may be more than ``BLOCK_P`` chunks.
        C_FACTOR: a divisor of C and CHANNELS. It tells the compiler how loads are aligned.
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
    # Means are summed as differences from the first chunk's mean, so that the sum keeps their last bits.
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
    # Without the explicit fma, ptxas may give the results other bits in calls that also store the mean.
    d = tl.fma(total, -share, d)
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
        # ``centre`` is what ``apply_kernel`` subtracts from x: the mean of x + shift, minus shift.
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
    """A program computes y for ``BLOCK_C`` channels at ``BLOCK_HW`` positions of one sample.

    Numbers:
        activates: with ``OPTIONAL``, 1 to apply the activation, 0 to leave it out.

    Constants:
        OPTIONAL: True if ``activates`` decides whether the activation is applied. Without ``OPTIONAL`` it is
            always applied.
        FOLD: True if the table has offset - mean * scale, instead of the offset and the mean.
        EVEN: True if no element is masked.
        AHEAD: True if x is read before ``gdc_wait``.
        C_FACTOR, HW_FACTOR: divisors of C and HW. They tell the compiler how loads are aligned.
    """
    # The first programs take the last rows, which the statistics kernel has left in L2.
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
    y = _output(x, scale[None, :], offset[None, :], activates, ACTIVATION, OPTIONAL, PAIRS)
    tl.store(y_ptr + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)
