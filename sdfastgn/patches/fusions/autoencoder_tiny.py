"""diffusers' ``AutoencoderTiny`` (TAESD): channels-last, and convolutions with ReLU and skip in one call.

The model has no norms. Besides convolutions, diffusers spends time on upsampling, and on one pass over the
tensor for each bias, ReLU and sum with a skip. Here cuDNN's convolution adds bias and skip and applies ReLU
before it writes its result. Upsampling and the convolution after it run as one convolution at low resolution
where that is faster, as in ``upsample_2d.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderTiny, EncoderTiny
from diffusers.models.unets.unet_2d_blocks import AutoencoderTinyBlock
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.layers.convolution import conv_relu
from sdfastgn.patches.layers.upsampling import convolves_at_low_resolution
from sdfastgn.patches.swap.fusion import ClassSwap, activation_reason, is_unhooked, stock_class
from sdfastgn.patches.swap.tested_sources import tested


def _runs_fused(module: Any, x: Tensor, layers: nn.Module) -> bool:
    checkpointed = torch.is_grad_enabled() and getattr(module, "gradient_checkpointing", False)
    return (
        not checkpointed
        and x.dim() == 4
        and dispatch.has_kernels(x)
        and not torch.compiler.is_compiling()
        and not dispatch.is_transformed()
        and stock_class(layers) is nn.Sequential
        and is_unhooked(layers)
    )


def _chain(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Run ``layers`` in order and return the result.

    A convolution runs in one call with a ReLU that follows it, or with an upsampling directly before it.
    """
    todo = list(layers)
    while todo:
        layer, following = todo.pop(0), todo[0] if todo else None
        if _is_relu(following) and isinstance(layer, nn.Conv2d):
            x = conv_relu(layer, todo.pop(0), x)
        elif not _is_upsampling(layer):
            x = layer(x)
        elif following is not None and convolves_at_low_resolution(following, x):
            conv: Any = todo.pop(0)
            x = upsample_conv2d(x, conv.weight, conv.bias)
        else:
            x = upsample_nearest_2x(x)
    return x


def _is_relu(module: nn.Module | None) -> bool:
    return type(module) is nn.ReLU


def _is_upsampling(module: Any) -> bool:
    return (
        type(module) is nn.Upsample
        and (module.mode, module.size) == ("nearest", None)
        and module.scale_factor == 2
        and is_unhooked(module)
    )


class FusedTinyBlock(AutoencoderTinyBlock):
    """``AutoencoderTinyBlock``: one call of cuDNN computes a convolution, the sum and the ReLU after it.

    x (N, C, H, W) -> (N, C_out, H, W).
    """

    def forward(self, x: Tensor) -> Tensor:
        if not _runs_fused(self, x, self.conv):
            return super().forward(x)
        *inner, last = self.conv
        return conv_relu(last, self.fuse, _chain(inner, x), self.skip(x))


class FusedEncoderTiny(EncoderTiny):
    """``EncoderTiny``, channels-last inside. x (N, 3, H, W) -> (N, latent channels, H / 8, W / 8)."""

    def forward(self, x: Tensor) -> Tensor:
        if not _runs_fused(self, x, self.layers):
            return super().forward(x)
        x = x.add(1).div(2).contiguous(memory_format=torch.channels_last)
        return _chain(self.layers, x).contiguous()


class FusedDecoderTiny(DecoderTiny):
    """``DecoderTiny``, channels-last inside. x (N, latent channels, H, W) -> (N, 3, 8 H, 8 W)."""

    def forward(self, x: Tensor) -> Tensor:
        if not _runs_fused(self, x, self.layers):
            return super().forward(x)
        x = (torch.tanh(x / 3) * 3).contiguous(memory_format=torch.channels_last)
        return _chain(self.layers, x).mul(2).sub(1).contiguous()


def _check(block: Any) -> str | None:
    if stock_class(block.conv) is not nn.Sequential:
        return f"its convolutions are in a {type(block.conv).__name__}"
    return activation_reason(block.conv[1], nn.ReLU)


BLOCK = ClassSwap(
    "autoencoder_tiny_block",
    AutoencoderTinyBlock,
    FusedTinyBlock,
    sources=(tested(AutoencoderTinyBlock, "__init__", "forward"),),
    check=_check,
)
ENCODER = ClassSwap(
    "encoder_tiny",
    EncoderTiny,
    FusedEncoderTiny,
    sources=(tested(EncoderTiny, "__init__", "forward"),),
)
DECODER = ClassSwap(
    "decoder_tiny",
    DecoderTiny,
    FusedDecoderTiny,
    sources=(tested(DecoderTiny, "__init__", "forward"),),
)
