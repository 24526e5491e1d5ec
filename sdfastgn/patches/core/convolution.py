"""Convolutions whose bias another kernel adds, which saves the pass in which cuDNN would add it.

Only in plain inference on a GPU, and only for a plain ``nn.Conv2d``. Anything else, such as a LoRA layer
or a hooked convolution, is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.patches.core.fusion import is_unhooked

__all__ = ["bias_can_move", "conv_without_bias", "pointwise"]


def bias_can_move(conv: nn.Module) -> bool:
    """True if the next kernel may add the bias of ``conv``."""
    return type(conv) is nn.Conv2d and conv.bias is not None and is_unhooked(conv)


def conv_without_bias(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(conv(x) less its bias, the bias) where another kernel may add it, else (conv(x), None)."""
    if bias_can_move(conv) and dispatch.is_plain_inference(x, (conv.weight, conv.bias)):
        return conv._conv_forward(x, conv.weight, None), conv.bias
    return conv(x), None


def pointwise(conv: Any, x: Tensor) -> Tensor:
    """conv(x) for x (N, C, H, W), as a matrix product where ``conv`` is 1x1 and x is channels-last.

    The product adds the bias before it writes.

    Only in 16 bits: a product in fp32 is not in TF32 by PyTorch's default, a convolution is.
    """
    if type(conv) is not nn.Conv2d or not _is_product(conv, x):
        return conv(x)
    N, C, H, W = x.shape
    rows = nn.functional.linear(
        x.permute(0, 2, 3, 1).reshape(N * H * W, C), conv.weight.flatten(1), conv.bias
    )
    return rows.view(N, H, W, conv.out_channels).permute(0, 3, 1, 2)


def _is_product(conv: nn.Conv2d, x: Tensor) -> bool:
    return (
        dispatch.is_plain_inference(x, (conv.weight, conv.bias))
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == conv.weight.dtype
        and x.dim() == 4
        and x.shape[1] == conv.in_channels
        and conv.kernel_size == (1, 1)
        and conv.stride == (1, 1)
        and conv.padding in ((0, 0), "valid", "same")
        and conv.groups == 1
        and is_unhooked(conv)
        and is_channels_last(x)
    )
