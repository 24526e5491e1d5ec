"""Triton kernels of BatchNorm + residual + activation that GroupNorm has no use for.

Op: ``batch_norm/op.py``, launches: ``plans.py`` and ``backward_plans.py``; formulas of the gradients:
``backward.py``.

Layout: x without gaps is (samples, rows, width) channels-last, or (samples, width, rows)
channels-first, as ``as_rows`` in ``batch_norm/config.py`` has it; column ``j`` is channel ``j % C``.

Pointers, which mean the same in every kernel; all but x, y, mean and var may be None:

- ``x``, ``residual``, ``y``: input, what is added before the activation, output, all in one layout;
- ``mean``, ``var``: (C,), of the batch in fp32, or the running ones in their dtype; ``var`` is biased;
- ``weight``, ``bias``: (C,);
- ``running_mean``, ``running_var``: (C,), updated in place;
- ``dy``, ``dx``, ``dz``: gradients of y, x and of the activation's argument, which is the residual's
  gradient too, in the layout of x;
- ``sums``: (2, P, C) fp32, partial sums of dz and of dz * xhat;
- ``dbias``, ``dweight``: (C,) fp32, the sums of these; None where the batch decided nothing.

Two ways, chosen by ``small_config``. The batch counts as one sample of GroupNorm with a group for each
channel:

- *small*: ``channels_kernel`` or ``small_grad_kernel`` of GroupNorm holds all positions of a few channels
  in registers: one launch;
- *split*: the kernel of ``statistics/kernels.py`` and GroupNorm's ``merge_kernel`` leave mean and variance,
  and ``batch_apply_kernel`` normalizes. In the backward GroupNorm's ``sums_kernel`` and
  ``batch_merge_sums_kernel`` leave two sums for each channel, and ``batch_apply_grad_kernel`` makes dx.
  With given mean and var the apply kernels can run alone, and so they take mean and var, not GroupNorm's
  table of scales.

Where the residual wants a gradient ``sums_kernel`` stores dz. ``batch_apply_grad_kernel`` reads that instead
of dy and the residual, unless its dtype is narrower than that of x.

Programmatic dependent launch as in ``group_norm/kernels.py``: the apply kernels read x, dy and the residual
before their wait (``AHEAD``) where a kernel of the same call has waited for them.

Numerics: fp32 throughout, one rounding at the store; sums in a fixed order without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate, activation_grad
from sdfastgn.kernels.common.sums import inverse_deviation, sum_columns
from sdfastgn.kernels.common.tiles import load_ahead, map_tile, multiple_of
from sdfastgn.kernels.group_norm.channels import channel_affine, update_average


@triton.jit
def _moments(c, in_range, mean_ptr, var_ptr):
    """(mean, variance) of channels ``c``."""
    mean = tl.load(mean_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    return mean, tl.load(var_ptr + c, mask=in_range, other=1.0).to(tl.float32)


# One program: ``BLOCK_C`` columns at ``BLOCK_HW`` positions. The first ones: the running averages of
# ``BLOCK_C`` channels, for which a tile leaves no registers.
@triton.jit(do_not_specialize=["HW", "positions", "eps", "momentum"])
def batch_apply_kernel(
    x_ptr, residual_ptr, y_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr,
    HW, positions, eps, momentum,
    C: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    HW_FACTOR: tl.constexpr, AVERAGE_PROGRAMS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x -> y; mean and var into the running averages."""
    if tl.program_id(0) < AVERAGE_PROGRAMS:
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_range = c < C
        if PDL:
            gdc_wait()
        mean, var = _moments(c, in_range, mean_ptr, var_ptr)
        update_average(running_mean_ptr, c, in_range, mean, momentum)
        unbiased = var * (positions.to(tl.float32) / (positions - 1).to(tl.float32))
        update_average(running_var_ptr, c, in_range, unbiased, momentum)
    else:
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
        mean, var = _moments(c, in_range, mean_ptr, var_ptr)
        z = tl.fma(x - mean[None, :], (scale * inverse_deviation(var, eps))[None, :], offset[None, :])
        if residual_ptr is not None:
            z += residual
        tl.store(y_ptr + at, activate(z, ACTIVATION, PAIRS).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["partials"])
def batch_merge_sums_kernel(
    sums_ptr, dweight_ptr, dbias_ptr,
    partials,
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
        sum_columns(sums_ptr + partials.to(tl.int64) * C, dweight_ptr, partials, C, c, BLOCK_P)


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
    """dx = scale * (dz - dbias / positions - xhat * dweight / positions), or scale * dz without sums."""
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
    mean, var = _moments(c, in_range, mean_ptr, var_ptr)
    rstd = inverse_deviation(var, eps)
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
