"""Triton kernels of BatchNorm + residual + activation. Op: ``batch_norm/op.py``, launches: ``plans.py``.

Layout: x without gaps is (samples, rows, width) channels-last, or (samples, width, rows)
channels-first, as ``as_rows`` in ``batch_norm/config.py`` has it; column ``j`` is channel ``j % C``.

Pointers, which mean the same in every kernel; all but x, y, mean, var and statistics may be None:

- ``x``, ``residual``, ``y``: input, what is added before the activation, output, all in one layout;
- ``mean``, ``var``: (C,), of the batch in fp32, or the running ones in their dtype; ``var`` is biased;
- ``weight``, ``bias``: (C,);
- ``running_mean``, ``running_var``: (C,), updated in place;
- ``statistics``: (2, samples, P, width) fp32, mean and M2 of each column and chunk.

Two ways, chosen by ``small_config``:

- *small*: a program holds all positions of a few channels in registers: one launch;
- *split*: the kernel of ``statistics/kernels.py`` leaves a mean and a sum of squared deviations (M2)
  per column and chunk, ``batch_merge_kernel`` brings them together per channel, and
  ``batch_apply_kernel`` normalizes. With given mean and var the last one runs alone.

Programmatic dependent launch as in ``group_norm/kernels.py``: ``batch_apply_kernel`` behind the
other two reads x and the residual before its wait, because none of them lets a successor start until
those are complete.

Numerics: fp32 throughout, one rounding at the store. Sums are of deviations, never of raw squares,
and are merged by Chan's formula in a fixed order without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.common.sums import inverse_deviation, mean_as_pivot
from sdfastgn.kernels.common.tiles import (
    along_block,
    along_lanes,
    along_steps,
    along_warps,
    load_ahead,
    map_tile,
    multiple_of,
)
from sdfastgn.kernels.group_norm.channels import channel_affine, channel_sum


@triton.jit
def all_positions(
    HW, positions,
    C: tl.constexpr, CHANNELS_LAST: tl.constexpr, HW_FACTOR: tl.constexpr, LANES: tl.constexpr,
    WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(channels, which of them exist, mask, offsets) of this program's tile of x."""
    HW, positions = multiple_of(HW, HW_FACTOR), multiple_of(positions, HW_FACTOR)
    row = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
    c = tl.program_id(0) * BLOCK + along_block(BLOCK)
    in_range = c < C
    at = row * C + c if CHANNELS_LAST else row // HW * HW * C + c * HW + row % HW
    return c, in_range, (row < positions) & in_range, at


@triton.jit
def given_moments(c, in_range, mean_ptr, var_ptr, eps):
    """(mean, 1 / deviation) of channels ``c``."""
    mean = tl.load(mean_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    var = tl.load(var_ptr + c, mask=in_range, other=1.0).to(tl.float32)
    return mean, inverse_deviation(var, eps)


@triton.jit
def _average(running_ptr, c, in_range, value, momentum):
    if running_ptr is not None:
        old = tl.load(running_ptr + c, mask=in_range, other=0.0).to(tl.float32)
        new = (1 - momentum) * old + momentum * value
        tl.store(running_ptr + c, new.to(running_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def _store_moments(
    mean_ptr, var_ptr, running_mean_ptr, running_var_ptr,
    c, in_range, mean, m2, positions, momentum,
):  # fmt: skip
    """Stores what the backward takes, updates the running averages, and returns the variance."""
    var = m2 / positions.to(tl.float32)
    tl.store(mean_ptr + c, mean, mask=in_range)
    tl.store(var_ptr + c, var, mask=in_range)
    _average(running_mean_ptr, c, in_range, mean, momentum)
    _average(running_var_ptr, c, in_range, m2 / (positions - 1).to(tl.float32), momentum)
    return var


@triton.jit(do_not_specialize=["HW", "positions", "eps", "momentum"])
def batch_small_kernel(
    x_ptr, residual_ptr, y_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, running_mean_ptr,
    running_var_ptr,
    HW, positions, eps, momentum,
    C: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, HW_FACTOR: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` channels at all positions a program."""
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    c, in_range, mask, at = all_positions(
        HW, positions, C, CHANNELS_LAST, HW_FACTOR, LANES, WARPS, STEPS, BLOCK
    )
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # Sums are of differences from the first element: rounded at the size of the deviations.
    pivot = tl.load(x_ptr + c * (1 if CHANNELS_LAST else HW), mask=in_range, other=0.0).to(tl.float32)
    scale, offset = channel_affine(0, c, in_range, weight_ptr, bias_ptr, None, None, 0, 0)
    share = 1 / positions.to(tl.float32)
    d = tl.where(mask, x - pivot, 0.0)
    total = channel_sum(d)
    if EXACT:
        pivot = mean_as_pivot(pivot, total, share)
        d = tl.where(mask, x - pivot, 0.0)
        total = channel_sum(d)
    # Explicit fmas: whether ptxas contracts these depends on what else is stored, and the bits differ.
    d = tl.where(mask, tl.fma(total, -share, d), 0.0)
    var = _store_moments(
        mean_ptr, var_ptr, running_mean_ptr, running_var_ptr, c, in_range, tl.fma(total, share, pivot),
        channel_sum(d * d), positions, momentum,
    )  # fmt: skip
    z = tl.fma(d, scale * inverse_deviation(var, eps), offset)
    if residual_ptr is not None:
        z += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, activate(z, ACTIVATION, PAIRS).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _partials(
    statistics_ptr, plane, start, partials, chunks, rows, HW, c, in_range,
    C: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """(mean, M2, count) of the channels ``c`` in a block of partial results; count is 0 outside."""
    p = start + tl.arange(0, BLOCK_P)[:, None]
    chunk = p // TOGETHER % chunks
    count = tl.minimum(rows, HW - chunk.to(tl.int64) * rows).to(tl.int32)
    mask = (p < partials) & (count > 0) & in_range[None, :]
    at = p.to(tl.int64) * C + c[None, :]
    mean = tl.load(statistics_ptr + at, mask=mask, other=0.0)
    m2 = tl.load(statistics_ptr + plane + at, mask=mask, other=0.0)
    return mean, m2, tl.where(mask, count, 0).to(tl.float32)


# One program: ``BLOCK_C`` channels.
@triton.jit(do_not_specialize=["HW", "rows", "chunks", "partials", "plane", "positions", "momentum"])
def batch_merge_kernel(
    statistics_ptr, mean_ptr, var_ptr, running_mean_ptr, running_var_ptr,
    HW, rows, chunks, partials, plane, positions, momentum,
    C: tl.constexpr, TOGETHER: tl.constexpr, EXACT: tl.constexpr,
    LOOP: tl.constexpr, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Chan's formula over ``partials`` of each channel, those of ``chunks`` chunks in each sample.

    ``TOGETHER``: partial results of one chunk that a channel has, in neighboring columns.
    ``EXACT``: the result is fp32.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_range = c < C
    share = 1 / positions.to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Means are merged as deviations from the first: their sum is then exact to the data's last bit.
    pivot = tl.load(statistics_ptr + c, mask=in_range, other=0.0)[None, :]
    if EXACT:
        total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        for start in range(0, partials, BLOCK_P):
            m, _, w = _partials(
                statistics_ptr, plane, start, partials, chunks, rows, HW, c, in_range, C, TOGETHER,
                BLOCK_P,
            )  # fmt: skip
            total += (m - pivot) * w
        pivot = mean_as_pivot(pivot, tl.sum(total, 0, keep_dims=True), share)
    mean, m2, weight = _partials(
        statistics_ptr, plane, 0, partials, chunks, rows, HW, c, in_range, C, TOGETHER, BLOCK_P
    )
    mean -= pivot
    if LOOP:
        # Element by element, so that one pass over memory is enough.
        for start in range(BLOCK_P, partials, BLOCK_P):
            m, part_m2, w = _partials(
                statistics_ptr, plane, start, partials, chunks, rows, HW, c, in_range, C, TOGETHER,
                BLOCK_P,
            )  # fmt: skip
            d = m - pivot - mean
            share_of_w = w / tl.maximum(weight + w, 1.0)
            mean += d * share_of_w
            m2 += part_m2 + d * d * weight * share_of_w
            weight += w
    shift = (tl.sum(mean * weight, 0) * share)[None, :]
    d = mean - shift
    m2 = tl.sum(m2 + d * d * weight, 0, keep_dims=True)
    _store_moments(
        mean_ptr, var_ptr, running_mean_ptr, running_var_ptr, c[None, :], in_range[None, :],
        pivot + shift, m2, positions, momentum,
    )  # fmt: skip


# One program: ``BLOCK_C`` columns at ``BLOCK_HW`` positions.
@triton.jit(do_not_specialize=["HW", "eps"])
def batch_apply_kernel(
    x_ptr, residual_ptr, y_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr,
    HW, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    HW_FACTOR: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``AHEAD``: x and residual are read before the wait, as a kernel of this op has waited for them."""
    # Last rows first: they are what the statistics pass left in L2.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if not CHANNELS_LAST:
        HW = multiple_of(HW, HW_FACTOR)
    _, column, position, last, first = map_tile(pid, HW, WIDTH, BLOCK_HW, BLOCK_C)
    at = last if CHANNELS_LAST else first
    in_range = column < WIDTH
    mask = None
    if not EVEN:
        mask = (position < HW) & in_range[None, :]
    if PDL and not AHEAD:
        gdc_wait()
    x = load_ahead(x_ptr + at, mask, AHEAD).to(tl.float32)
    if residual_ptr is not None:
        residual = load_ahead(residual_ptr + at, mask, AHEAD).to(tl.float32)
    if AHEAD:
        gdc_wait()
    c = column if WIDTH == C else column % C
    scale, offset = channel_affine(0, c, in_range, weight_ptr, bias_ptr, None, None, 0, 0)
    mean, rstd = given_moments(c, in_range, mean_ptr, var_ptr, eps)
    z = tl.fma(x - mean[None, :], (scale * rstd)[None, :], offset[None, :])
    if residual_ptr is not None:
        z += residual
    tl.store(y_ptr + at, activate(z, ACTIVATION, PAIRS).to(y_ptr.dtype.element_ty), mask=mask)
