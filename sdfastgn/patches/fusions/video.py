"""What the fusions of autoencoders for video share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import Norm
from sdfastgn.kernels.product.op import linear
from sdfastgn.kernels.statistics.op import add_kernel
from sdfastgn.patches.core.fusion import activation_of, is_unhooked

__all__ = [
    "NORMS",
    "FusedRMSNorm",
    "add_up",
    "images_of",
    "is_plain_inference",
    "is_pointwise_3d",
    "norm_of",
    "pointwise_3d",
    "video_of",
]

# Stock and fused classes of norms as ``WanRMS_norm`` is. The files of their fusions add them.
NORMS: set[type[nn.Module]] = set()
# Least norm that upstream divides by: the default of F.normalize.
_EPS = 1e-12


def is_plain_inference(x: Tensor, rank: int = 5) -> bool:
    """True if kernels take x, which has this rank, and there is no gradient, compiler, trace, mode or
    autocast.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (rank, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )


# --- RMSNorm over the channels ------------------------------------------------------------------------


def norm_of(norm: Any, act: nn.Module | None, x: Tensor) -> Norm | None:
    """``act(norm(u))`` as operands of a kernel, for u of the rank and dtype of x; None if it is not plain."""
    activation = "identity" if act is None else activation_of(act)
    if activation is None or (act is not None and not is_unhooked(act)):
        return None
    if not (type(norm) in NORMS and is_unhooked(norm) and norm.channel_first):
        return None
    has_bias = isinstance(norm.bias, Tensor)
    if norm.gamma.dim() != x.dim() - 1 or norm.gamma.dtype != x.dtype or not (has_bias or norm.bias == 0):
        return None
    return Norm(norm.gamma.flatten(), norm.bias.flatten() if has_bias else None, norm.scale, _EPS, activation)


class FusedRMSNorm(nn.Module):
    """``WanRMS_norm`` and its copies, before which it stands as a base. x (N, C, *spatial) -> the same,
    channels-last.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        norm = None
        if not torch.compiler.is_compiling() and dispatch.has_kernels(x):
            norm = norm_of(self, None, x)
        return super().forward(x) if norm is None else channel_norm(x, *norm[:5])


# --- sums, layouts and products -----------------------------------------------------------------------


def add_up(y: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias + residual for y (N, C, T, H, W), which is written to."""
    if (
        dispatch.is_plain_inference(y, (residual, bias))
        and is_channels_last(y)
        and is_channels_last(residual)
    ):
        try:
            # Axes of one element may have other strides.
            return add_kernel(y, residual.as_strided(y.shape, y.stride()), bias, 1.0, emits=False, out=y)[0]
        except dispatch.KernelError:
            pass
    return (y if bias is None else y + bias.view(-1, 1, 1, 1)) + residual


def images_of(x: Tensor) -> Tensor:
    """(N, C, T, H, W) -> (N T, C, H, W), a view if x is channels-last."""
    return x.movedim(2, 1).flatten(0, 1)


def video_of(images: Tensor, N: int) -> Tensor:
    """(N T, C, H, W) -> (N, C, T, H, W), a view."""
    return images.unflatten(0, (N, -1)).movedim(2, 1)


def is_pointwise_3d(conv: Any, x: Tensor) -> bool:
    """True if a call of ``conv`` on x (N, C, T, H, W) is PyTorch's 1x1x1 convolution, in the dtype of x."""
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.groups, conv.in_channels
    return (
        type(conv) is nn.Conv3d
        and sizes == ((1, 1, 1), (1, 1, 1), (0, 0, 0), 1, x.shape[1])
        and is_unhooked(conv)
        and "_conv_forward" not in vars(conv)
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


def pointwise_3d(conv: Any, x: Tensor) -> Tensor:
    """conv(x), channels-last, for x (N, C, T, H, W), channels-last, if ``is_pointwise_3d(conv, x)``.

    It is a matrix product. In fp32 it stays a convolution: by PyTorch's default convolutions run in TF32,
    and matrix products in fp32, which is slower.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return linear(x.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)
    y = F.conv3d(x, conv.weight, conv.bias)
    # Convolutions of a CPU may return another layout.
    return y if is_channels_last(y) else laid_out(y, channels_last=True)
