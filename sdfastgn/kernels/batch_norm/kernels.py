"""Triton kernels of BatchNorm + residual + activation that GroupNorm does not use.

Op: ``batch_norm/op.py``. Launches: ``plans.py`` and ``backward_plans.py``. Formulas of the gradients:
``backward.py``.

Layout: x without gaps is (samples, rows, width) if channels-last, else (samples, width, rows). The class
``Rows`` in ``batch_norm/config.py`` explains these sizes. Column ``j`` belongs to channel ``j % C``.

Pointers have the same meaning in all kernels. ``residual``, ``weight``, ``bias``, ``running_mean`` and
``running_var`` may be None:

- ``x``, ``residual``, ``y``: the input, the tensor that is added before the activation, and the output, all
  in the same layout;
- ``mean``, ``var``: (C,), mean and biased variance of the batch in fp32, or the running averages in their own
  dtype;
- ``weight``, ``bias``: (C,);
- ``running_mean``, ``running_var``: (C,), updated in place;
- ``dy``, ``dx``: gradients of y and x, in the layout of x;
- ``dz``: the gradient of the activation's argument, which is also the gradient of the residual, in the layout
  of x;
- ``sums``: (2, P, C) fp32, the sums of dz and of dz * xhat in each of the P chunks of a channel;
- ``dbias``, ``dweight``: (C,) fp32, the sums of dz and of dz * xhat over all chunks.
  ``batch_apply_grad_kernel`` gets None for both if mean and var are running averages, because dx then does
  not depend on the sums.

There are two ways to launch the kernels. ``small_config`` chooses one. In both, GroupNorm's kernels get the
whole batch as one sample, and each channel as a group:

- *small*, one launch: ``channels_kernel`` or ``small_grad_kernel`` of GroupNorm holds all positions of a few
  channels in registers;
- *split*: in the forward, the kernel of ``statistics/kernels.py`` and GroupNorm's ``merge_kernel`` compute
  mean and var, and ``batch_apply_kernel`` normalizes. In the backward, GroupNorm's ``sums_kernel`` and
  ``batch_merge_sums_kernel`` compute two sums for each channel, and ``batch_apply_grad_kernel`` computes dx.
  If mean and var are running averages, ``batch_apply_kernel`` and ``batch_apply_grad_kernel`` can run alone.
  That is why these two kernels read mean and var, and not a table of scales, as GroupNorm's kernel does.

If the gradient of the residual is wanted, ``sums_kernel`` stores dz. ``batch_apply_grad_kernel`` then reads
dz instead of dy and the residual, unless the residual's dtype cannot hold all values of the dtype of x.

With programmatic dependent launch (``PDL``) a kernel starts while the kernel before it still runs, and calls
``gdc_wait`` before it reads what that kernel writes. ``batch_apply_kernel`` and ``batch_apply_grad_kernel``
read x, dy and the residual before ``gdc_wait`` (``AHEAD``) if an earlier kernel of the same call has waited
for these tensors.

Numerics: the kernels compute in fp32, and round each result once when they store it. If
``batch_apply_grad_kernel`` reads dz, dz has been rounded before. Sums have a fixed order and no atomics.
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
    """Loads (mean, variance) of channels ``c`` in fp32."""
    mean = tl.load(mean_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    return mean, tl.load(var_ptr + c, mask=in_range, other=1.0).to(tl.float32)


@triton.jit(do_not_specialize=["HW", "positions", "eps", "momentum"])
def batch_apply_kernel(
    x_ptr, residual_ptr, y_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr,
    HW, positions, eps, momentum,
    C: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    HW_FACTOR: tl.constexpr, AVERAGE_PROGRAMS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program computes y for ``BLOCK_C`` columns at ``BLOCK_HW`` rows.

    Usually a row is a position, and a column is a channel. In some channels-last tensors a row is several
    neighboring positions (``Rows`` in ``batch_norm/config.py``).

    The first ``AVERAGE_PROGRAMS`` programs compute no y. Each of them updates the running averages of
    ``BLOCK_C`` channels. A program that computes y has no registers left for this.

    Numbers:
        HW: number of rows of a sample.
        positions: number of values of a channel.
        momentum: weight of this batch in the running averages.

    Constants:
        WIDTH: number of columns.
        EVEN: True if no element is masked.
        AHEAD: True if x and the residual are read before ``gdc_wait``.
        HW_FACTOR: a divisor of HW. It tells the compiler how loads are aligned.
    """
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
        # The first programs with tiles take the last rows, which the statistics kernel has left in L2.
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
    """A program adds up the chunks' sums of dz, or of dz * xhat, for ``BLOCK_C`` channels.

    dz is the gradient of the activation's argument, xhat the normalized x. ``partials``: P, the number of
    chunks of a channel.
    """
    c = tl.program_id(0) // 2 * BLOCK_C + tl.arange(0, BLOCK_C)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) % 2 == 0:
        sum_columns(sums_ptr, dbias_ptr, partials, C, c, BLOCK_P)
    else:
        sum_columns(sums_ptr + partials.to(tl.int64) * C, dweight_ptr, partials, C, c, BLOCK_P)


@triton.jit(do_not_specialize=["HW", "positions", "eps"])
def batch_apply_grad_kernel(
    x_ptr, dy_ptr, residual_ptr, dx_ptr, dweight_ptr, dbias_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr,
    HW, positions, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    HW_FACTOR: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program computes dx for ``BLOCK_C`` columns at ``BLOCK_HW`` rows.

    dz is the gradient of the activation's argument, xhat the normalized x. With scale = weight /
    sqrt(var + eps), dx is scale * (dz - dbias / positions - xhat * dweight / positions), or scale * dz if
    ``dweight`` is None. Rows, columns, numbers and constants mean the same as in ``batch_apply_kernel``.
    """
    # The first programs take the last rows, which ``sums_kernel`` has left in L2.
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
