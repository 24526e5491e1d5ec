"""Upsamples an image by two and applies a 3 x 3 convolution, computed at low resolution: ``upsample_conv2d``.

Formula: y = conv2d(upsample_nearest_2x(x), weight, bias, padding=[1, 1]).

Row i of y depends on the rows i - 1, i and i + 1 of the upsampled image. Two of the three are copies of the
same row of x. With i = 2h + a, and w0, w1, w2 the rows of the weight, row i of y is

    for a = 0:  w0 x[h - 1] + (w1 + w2) x[h]
    for a = 1:  (w0 + w1) x[h] + w2 x[h + 1]

The same holds for columns j = 2w + b. So the pixels of y belong to four *phases* (a, b), and each phase is a
2 x 2 convolution of x. The four convolutions need 4/9 of the multiplications, and no memory for an upsampled
image. There are three steps:

1. A kernel computes the 2 x 2 weights of the phases. It runs at each call, because the weight may have
   changed.
2. One convolution with padding 1 computes all phases: t (N, 4 C_out, H + 1, W + 1).
3. A kernel interleaves the phases and adds the bias:
   y[n, c, 2h + a, 2w + b] = t[n, (2a + b) C_out + c, h + a, w + b] + bias[c].

These steps run for channels-last images on a GPU, in calls without gradients, if they are faster
(``phases_pay``). Otherwise the image is upsampled and convolved.

Numerics: the weights of the phases are summed in fp32 and rounded once to the weight's dtype. If the
upsampled image is convolved instead, weights are not rounded. t is rounded to the dtype of x. The bias is
added in fp32.

Source: Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016, for
resizing as convolutions of phases.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import check_device, check_floating
from sdfastgn.kernels.common.layout import (
    dense,
    dense_is_channels_last,
    empty_laid_out,
    is_channels_last,
    laid_out,
)
from sdfastgn.kernels.statistics.op import channel_statistics
from sdfastgn.kernels.upsample.config import phases_pay
from sdfastgn.kernels.upsample.nearest import empty_image, upsample_nearest_2x


def reference_upsample_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``upsample_conv2d`` by upsampling the image and then convolving it.

    This function runs if the convolution at low resolution is not faster or cannot run. Tests take its
    results in fp64 as exact.
    """
    y = torch.ops.aten.conv2d.default(upsample_nearest_2x(x), weight, bias, padding=[1, 1])
    return laid_out(y, dense_is_channels_last(x))


def runs_in_phases(x: Tensor, weight: Tensor) -> bool:
    """True if ``upsample_conv2d(x, weight)`` convolves at low resolution instead of upsampling first."""
    N, C, H, W = x.shape
    return (
        dispatch.runs_in_triton(x)
        and not dispatch.is_op_off("upsample_conv2d", x)
        and x.numel() > 0
        and dense_is_channels_last(x)
        and phases_pay(N, C, weight.shape[0], H, W, x.itemsize)
    )


@dispatch.kernels_of("upsample_conv2d")
def convolve_phases(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, with_statistics: bool
) -> tuple[Tensor, Any]:
    """Computes ``upsample_conv2d`` at low resolution, even if upsampling first would be faster.

    Returns y and the statistics of y, or y and None if ``with_statistics`` is False. x must not be empty. x
    must be channels-last, or it must have gaps in memory and channels with stride 1. It is then copied to
    channels-last.
    """
    from sdfastgn.kernels.upsample import conv_kernels  # imported late: conv_kernels.py needs Triton

    C_out, C_in = weight.shape[:2]
    phases = empty_laid_out(weight, (4 * C_out, C_in, 2, 2), channels_last=True)
    conv_kernels.launch_phase_weights(dense(weight), phases)
    t = torch.ops.aten.conv2d.default(dense(x), phases, padding=[1, 1])
    # If x has one channel or one pixel, t can be channels-first. The kernel that reads t needs channels-last.
    if not is_channels_last(t):
        t = t.contiguous(memory_format=torch.channels_last)
    y = empty_image(x, C_out, 2 * x.shape[2], 2 * x.shape[3])
    statistics = None
    if with_statistics:
        statistics = y.new_empty(
            (2, y.shape[0], conv_kernels.statistics_chunks(y), C_out), dtype=torch.float32
        )
    conv_kernels.launch_interleave(t, None if bias is None else bias.contiguous(), y, statistics)
    return y, statistics


# --- the public function --------------------------------------------------------------------------


@overload
def upsample_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, with_statistics: Literal[False] = False
) -> Tensor: ...


@overload
def upsample_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, with_statistics: Literal[True]
) -> tuple[Tensor, Tensor]: ...


def upsample_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, with_statistics: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Upsamples x by two and applies a 3 x 3 convolution, with 4/9 of the multiplications if that is faster.

    Args:
        x: (N, C_in, H, W).
        weight: (C_out, C_in, 3, 3), in the dtype and on the device of x.
        bias: (C_out,), in the dtype and on the device of x, or None.
        with_statistics: True to return also the mean and the sum of squared deviations of each channel of the
            result, for ``sdfastgn.group_norm(y, ..., statistics=...)``.

    Returns:
        y = conv2d(interpolate(x, scale_factor=2, mode="nearest"), weight, bias, padding=[1, 1]). If
        ``with_statistics``, (y, statistics of y). The statistics are (2, N, P, C_out) fp32, as from
        ``sdfastgn.channel_statistics``. If the convolution runs at low resolution, they need no further pass.

    Shapes: y is (N, C_out, 2H, 2W).
    Dtypes: fp16, bf16, fp32 or fp64, the same for all tensors. Under autocast all are cast first, as in
        conv2d.
    Layout: any. y is channels-last if x is, else channels-first. Only channels-last x can run at low
        resolution.
    Grad: x, weight and bias have gradients, of any order. Nothing is differentiated through the statistics.
        With gradients, in transforms of torch.func and in forward-mode AD, x is upsampled first.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or the dtypes differ.
        ValueError: a shape or a device does not fit.
        NotImplementedError: ``with_statistics`` in a transform of torch.func or in forward-mode AD.

    Source: Shi et al., 2016; torch.nn.functional.conv2d and interpolate for the interface.
    """
    _check(x, weight, bias)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _check_dtypes(x, weight, bias)
    if dispatch.is_plain_inference(x, (weight, bias)) and runs_in_phases(x, weight):
        try:
            y, statistics = convolve_phases(x, weight, bias, with_statistics=with_statistics)
            return (y, statistics) if with_statistics else y
        except dispatch.KernelError:
            pass
    y = reference_upsample_conv2d(x, weight, bias)
    return (y, channel_statistics(y)) if with_statistics else y


_NAME = f"{__name__}.upsample_conv2d"


def _check(x: Any, weight: Any, bias: Any) -> None:
    """Checks all arguments of ``upsample_conv2d``. ``_check_dtypes`` checks later that their dtypes agree."""
    for label, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is not None or label != "bias":
            check_floating(_NAME, label, t)
    if x.dim() != 4:
        raise ValueError(f"{_NAME}: x must be (N, C_in, H, W), got shape {tuple(x.shape)}")
    if weight.dim() != 4 or weight.shape[1:] != (x.shape[1], 3, 3):
        raise ValueError(
            f"{_NAME}: weight must be (C_out, {x.shape[1]}, 3, 3), got shape {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_NAME}: bias must be ({weight.shape[0]},), got shape {tuple(bias.shape)}")
    for label, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            check_device(_NAME, label, t, x)


def _check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks that weight and bias have the dtype of x. Under autocast, all three have been cast before."""
    for label, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{_NAME}: {label} must have the dtype of x, {x.dtype}, got {t.dtype}")
