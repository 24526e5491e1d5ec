"""Triton functions that the kernels of GroupNorm and BatchNorm share.

``group_norm/kernels.py`` explains the pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdfastgn.kernels.common.tiles import LANE_AXIS, STEP_AXIS


@triton.jit
def channel_affine(
    n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
):
    """Computes (scale, offset) of channels ``c`` in sample ``n``, fp32.

    The activation's argument is xhat * scale + offset, where xhat is the normalized x. Kernels call this
    function before they sum, so that its loads run at the same time as the loads of x.
    """
    offset = tl.zeros_like(c).to(tl.float32)
    scale = offset + 1
    if weight_ptr is not None:
        scale *= tl.load(weight_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        offset += tl.load(bias_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    if ada_scale_ptr is not None:
        ada_scale = 1 + tl.load(ada_scale_ptr + n * ada_scale_stride + c, mask=in_range, other=0.0).to(
            tl.float32
        )
        scale *= ada_scale
        offset *= ada_scale
    if ada_shift_ptr is not None:
        offset += tl.load(ada_shift_ptr + n * ada_shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def update_average(running_ptr, c, mask, value, momentum):
    """Updates BatchNorm's running average of channels ``c`` with ``value``.

    Does nothing if ``running_ptr`` is None.
    """
    if running_ptr is not None:
        old = tl.load(running_ptr + c, mask=mask, other=0.0).to(tl.float32)
        new = (1 - momentum) * old + momentum * value
        tl.store(running_ptr + c, new.to(running_ptr.dtype.element_ty), mask=mask)


@triton.jit
def channel_sum(d):
    """Sums a (lanes, warps, steps, channels) tile to (1, 1, 1, channels)."""
    d = tl.sum(d, STEP_AXIS, keep_dims=True)
    return tl.sum(tl.sum(d, LANE_AXIS, keep_dims=True), 1, keep_dims=True)
