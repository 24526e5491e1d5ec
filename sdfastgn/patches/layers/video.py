"""Code that the fusions of ComfyUI's autoencoders for videos share, and some of diffusers' fusions.

It checks layers, and it computes norms, convolutions and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import GroupNorm, Norm, modulation_times
from sdfastgn.kernels.product.op import linear
from sdfastgn.kernels.statistics.op import add_kernel
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layers.statistics import take_statistics
from sdfastgn.patches.swap.fusion import activation_of, is_unhooked

# Stock and fused classes of norms that compute the same as ``WanRMS_norm``. Files such as
# ``comfyui/hunyuan_video_15.py`` add the classes of their model.
NORMS: set[type[nn.Module]] = set()
# Upstream divides by at least this norm: the default ``eps`` of F.normalize.
_EPS = 1e-12


def is_plain_inference(x: Tensor, dim: int = 5) -> bool:
    """True if the kernels can run on x: its dtype and device fit, it has ``dim`` axes and is not empty, and
    gradients, compilers, traces, dispatch modes and autocast are off.

    ``dim`` is 5 for videos (N, C, T, H, W) and 4 for images (N, C, H, W).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (dim, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )


# --- convolutions -------------------------------------------------------------------------------------


def channels_into(causal: Any) -> int:
    """Number of channels that the convolution in ``causal``, a causal convolution, reads.

    0 if an adapter or other code has put a wrapper around one of the two. Then checks such as
    ``is_plain_conv3d`` return False.
    """
    return getattr(getattr(causal, "conv", None), "in_channels", 0)


def is_plain_conv3d(conv: Any, x: Tensor, C: int, kind: type[nn.Conv3d]) -> bool:
    """True if ``conv`` can run fused on an input of C channels, in the dtype and on the device of x.

    A call must only run PyTorch's convolution, without hooks or replaced methods. ``kind``: the class that
    ``conv`` must have.
    """
    return (
        type(conv) is kind
        and is_unhooked(conv)
        and "_conv_forward" not in vars(conv)
        and (conv.padding_mode, type(conv.padding), conv.in_channels) == ("zeros", tuple, C)
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


def is_product(conv: Any, x: Tensor) -> bool:
    """True if ``conv``, a 3-D convolution without padding, should run as a matrix product.

    In fp32 it stays a convolution. By default, PyTorch uses the faster TF32 for fp32 convolutions, but not
    for fp32 matrix products.
    """
    is_pointwise = (conv.kernel_size, conv.stride, conv.groups) == ((1, 1, 1), (1, 1, 1), 1)
    return is_pointwise and x.dtype in (torch.float16, torch.bfloat16)


def product_of(conv: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``conv(x)`` as a matrix product. x (N, C, T, H, W) and the result are channels-last."""
    return linear(x.movedim(1, -1), conv.weight.flatten(1), bias).movedim(-1, 1)


# --- norms and activations ----------------------------------------------------------------------------


def can_fuse(norm: Any, act: nn.Module, x: Tensor, C: int) -> bool:
    """True if a kernel can compute ``act(norm(u))`` for a tensor u of C channels in the dtype of x.

    ``norm`` must be a GroupNorm with parameters in this dtype, ``act`` an activation that the kernels
    compute. Neither may have hooks.
    """
    return (
        type(norm) in (nn.GroupNorm, FusedGroupNorm)
        and norm.num_channels == C
        and (norm.weight is None or norm.weight.dtype == x.dtype)
        and activation_of(act) is not None
        and is_unhooked(norm)
        and is_unhooked(act)
    )


def norm_operands(norm: Any, act: nn.Module, x: Tensor, *, is_shifted: bool = False) -> GroupNorm:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(x))``.

    ``is_shifted``: True if the kernel adds a bias to x before the norm. Then statistics that were stored for
    x are not used, because the norm needs statistics of the sum.
    """
    statistics = None if is_shifted else take_statistics(x)
    activation = activation_of(act) or "identity"
    return GroupNorm(int(norm.num_groups), norm.weight, norm.bias, float(norm.eps), activation, statistics)


def is_upsampled_exactly(modulation: Sequence[int], x: Sequence[int]) -> bool:
    """True if ``pad_frames`` upsamples a modulation to the size of x as PyTorch does, bit by bit.

    Both shapes are (N, C, T, H, W). To find the nearest neighbor, PyTorch multiplies positions with a rounded
    factor. If sizes differ by a power of 2, this is exact. Otherwise PyTorch may find another neighbor than
    the kernel.
    """
    found = modulation_times(x, modulation)
    return found is not None and all(times & (times - 1) == 0 for times in found[0])


def norm_of(norm: Any, act: nn.Module | None, x: Tensor) -> Norm | None:
    """Returns the operands with which kernels compute ``act(norm(u))``, for u of the rank and dtype of x.

    None if kernels cannot compute it: the class of ``norm`` is not in ``NORMS``, the kernels do not know the
    activation ``act``, or ``norm`` or ``act`` has hooks.
    """
    activation = "identity" if act is None else activation_of(act)
    if activation is None or (act is not None and not is_unhooked(act)):
        return None
    if not (type(norm) in NORMS and is_unhooked(norm) and getattr(norm, "channel_first", True)):
        return None
    if norm.gamma.dim() != x.dim() - 1 or (norm.gamma.dtype, norm.gamma.device) != (x.dtype, x.device):
        return None
    bias = getattr(norm, "bias", None)
    if isinstance(bias, Tensor):
        bias = bias.flatten()
    elif bias:
        return None
    else:
        bias = None  # without a bias, the attribute is 0 in diffusers and None in ComfyUI
    return Norm(norm.gamma.flatten(), bias, norm.scale, _EPS, activation)


class FusedRMSNorm(nn.Module):
    """Base class of the fused ``WanRMS_norm``, and of other models' norms that compute the same.

    x (N, C, *spatial). The result has the same shape and is channels-last.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        norm = None
        if not torch.compiler.is_compiling() and dispatch.has_kernels(x):
            norm = norm_of(self, None, x)
        return super().forward(x) if norm is None else channel_norm(x, *norm[:5])


# --- sums and layouts ---------------------------------------------------------------------------------


def in_channels_last(x: Tensor) -> Tensor:
    """Returns x itself if it is channels-last, else a channels-last copy.

    Returning the same object keeps the statistics that are stored for it.
    """
    return x if is_channels_last(x) else laid_out(x, channels_last=True)


def add_into(y: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """Returns y + bias + residual for y (N, C, T, H, W). It may overwrite y."""
    if (
        dispatch.is_plain_inference(y, (residual, bias))
        and is_channels_last(y)
        and is_channels_last(residual)
    ):
        try:
            # The kernel requires equal strides. The strides of channels-last tensors may still differ in axes
            # of size 1, where they do not matter.
            return add_kernel(y, residual.as_strided(y.shape, y.stride()), bias, 1.0, emits=False, out=y)[0]
        except dispatch.KernelError:
            pass
    return (y if bias is None else y + bias.view(-1, 1, 1, 1)) + residual


def images_of(x: Tensor) -> Tensor:
    """The frames of videos as images: (N, C, T, H, W) -> (N T, C, H, W), a view if x is channels-last."""
    return x.movedim(2, 1).flatten(0, 1)


def video_of(images: Tensor, N: int) -> Tensor:
    """N videos from their frames: (N T, C, H, W) -> (N, C, T, H, W), a view."""
    return images.unflatten(0, (N, -1)).movedim(2, 1)
