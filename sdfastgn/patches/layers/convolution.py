"""Calls convolutions without separate passes over the result for bias, residual and ReLU.

Either the kernel that reads the result adds the bias (``conv_without_bias``), or cuDNN adds bias and residual
and applies ReLU before it writes the result (``conv_relu``). ``pointwise`` computes 1x1 convolutions as
matrix products. All three need a call on a GPU without gradients, and a plain ``nn.Conv2d``;
``conv_without_bias`` also takes a plain ``nn.Conv1d`` or ``nn.Conv3d``. Every other convolution, for example
one with hooks, is simply called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import is_unhooked, parameters_of

# cuDNN fuses convolution, bias and ReLU only if the numbers of channels are multiples of this number, so that
# the channels of a pixel are a multiple of 16 bytes.
_CUDNN_CHANNELS = 8
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_plain_conv(conv: nn.Module) -> bool:
    """True if calling ``conv`` runs PyTorch's convolution and nothing else.

    ``_conv_forward`` is checked too, because code for seamless tiling replaces it in the instance.
    """
    return type(conv) in _CONVOLUTIONS and "_conv_forward" not in conv.__dict__ and is_unhooked(conv)


def keeps_size(conv: nn.Conv2d) -> bool:
    """True for a 3 x 3 convolution with stride 1 and zero padding of one pixel. It keeps height and width."""
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return sizes == ((3, 3), (1, 1), (1, 1), (1, 1)) and conv.padding_mode == "zeros"


def conv_without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Computes conv(x), without the bias if a later kernel can add the bias.

    Returns (result, bias). The caller must add the bias to the result, unless the bias is None.
    """
    conv = plain_layer(conv)
    if is_plain_conv(conv):
        weight, bias = parameters_of(conv)
        if bias is not None and dispatch.is_plain_inference(x, (weight, bias)):
            return conv._conv_forward(x, weight, None), bias
    return conv(x), None


def conv_relu(conv: Any, relu: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes ``relu(conv(x) + residual)``, in one call of cuDNN if cuDNN can fuse it.

    ``residual``: a tensor of the result's shape. None if there is nothing to add.
    """
    conv = plain_layer(conv)
    is_plain = is_plain_conv(conv) and type(relu) is nn.ReLU and is_unhooked(relu)
    if not (is_plain and _fits_cudnn(conv, x, residual)):
        y = conv(x)
        return relu(y if residual is None else y + residual)
    where = conv.stride, conv.padding, conv.dilation, conv.groups
    if residual is None:
        return torch.cudnn_convolution_relu(x, conv.weight, conv.bias, *where)
    return torch.cudnn_convolution_add_relu(x, conv.weight, residual, 1.0, conv.bias, *where)


def _fits_cudnn(conv: nn.Conv2d, x: Tensor, residual: Tensor | None) -> bool:
    return (
        x.is_cuda
        and dispatch.is_plain_inference(x, (conv.weight, conv.bias, residual))
        and x.dtype in (torch.float16, torch.bfloat16)
        and all(t is None or t.dtype == x.dtype for t in (conv.weight, conv.bias, residual))
        and (x.dim(), x.shape[1]) == (4, conv.in_channels)
        and (residual is None or keeps_size(conv))
        and (residual is None or residual.shape == (len(x), conv.out_channels, *x.shape[2:]))
        and (conv.padding_mode, type(conv.padding)) == ("zeros", tuple)
        and conv.in_channels % _CUDNN_CHANNELS == conv.out_channels % _CUDNN_CHANNELS == 0
        and x.numel() > 0
        and not torch.is_autocast_enabled("cuda")
        and torch.backends.cudnn.enabled
        and not (torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
        and hasattr(torch, "cudnn_convolution_add_relu")  # PyTorch without cuDNN has no fused convolutions
    )


def pointwise(conv: Any, x: Tensor) -> Tensor:
    """Computes conv(x) for x (N, C, H, W), as a matrix product if ``conv`` is 1x1 and x is channels-last.

    The product is faster because it adds the bias before it writes the result. In fp32 the convolution is
    called instead. By default, PyTorch uses the faster TF32 for fp32 convolutions, but not for fp32 matrix
    products.
    """
    conv = plain_layer(conv)
    product = _as_linear(conv, x, x.shape[1]) if x.dim() == 4 and is_channels_last(x) else None
    if product is None:
        return conv(x)
    N, C, H, W = x.shape
    # Without ``as_strided``, x and the result would each need two calls, such as ``permute`` and ``view``.
    # One of them takes half as much CPU time as a kernel launch.
    rows = linear(x.as_strided((N * H * W, C), (C, 1)), *product)
    C = rows.shape[1]
    return rows.as_strided((N, C, H, W), (H * W * C, 1, W * C, C))


def pointwise_tokens(conv: Any, tokens: Tensor, H: int, W: int) -> Tensor:
    """Computes the 1x1 ``conv`` of the image with the pixels ``tokens`` (N, HW, C): (N, HW, C_out)."""
    conv = plain_layer(conv)
    product = _as_linear(conv, tokens, tokens.shape[-1])
    if product is not None:
        return linear(tokens, *product)
    return conv(tokens.unflatten(1, (H, W)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)


def _as_linear(conv: Any, x: Tensor, C: int) -> tuple[Tensor, Tensor | None] | None:
    """The weight (C_out, C) and the bias of the linear layer that computes ``conv`` of each pixel of x.

    None if ``conv`` itself must be called. C: number of channels of x.
    """
    if not is_plain_conv(conv):
        return None
    weight, bias = parameters_of(conv)
    is_product = (
        conv.kernel_size == (1, 1)
        and conv.stride == (1, 1)
        and conv.padding in ((0, 0), "valid", "same")
        and conv.groups == 1
        and conv.in_channels == C
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and dispatch.is_plain_inference(x, (weight, bias))
    )
    return (weight.flatten(1), bias) if is_product else None
