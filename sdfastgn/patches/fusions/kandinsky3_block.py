"""diffusers' ``Kandinsky3ResNetBlock``, the four blocks in it, and their norms.

One kernel computes a norm, its scale and shift, and SiLU. It also adds the bias of the convolution before the
norm. The sum at the end adds the last bias, and stores the statistics of its result.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.unets.unet_kandinsky3 import (
    Kandinsky3Block,
    Kandinsky3ConditionalGroupNorm,
    Kandinsky3ResNetBlock,
)
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import conv_without_bias, pointwise
from sdfastgn.patches.layers.group_norm import fused_activation, fused_norm
from sdfastgn.patches.layers.linear import linear_of
from sdfastgn.patches.layers.statistics import add, add_bias
from sdfastgn.patches.lora.merging import plain_layer
from sdfastgn.patches.swap.fusion import IDENTITY, ClassSwap, activation_reason, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested


def _norm_act(
    norm: Any, act: nn.Module, x: Tensor, context: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    """Computes ``act(norm(x + bias, context))`` in one kernel. None if stock's code has to run.

    x (N, C, H, W), context (N, K). ``bias`` (C,): None if there is nothing to add.
    """
    is_known = type(norm) in (Kandinsky3ConditionalGroupNorm, FusedKandinsky3ConditionalGroupNorm)
    if not (is_known and is_unhooked(norm) and context.dim() == 2 and dispatch.has_kernels(x)):
        return None
    name = fused_activation(norm.norm, act)
    if name is None:
        return None
    context = _projected(norm.context_mlp, context)
    if context.dtype != x.dtype:
        return None
    scale, shift = torch.chunk(context, 2, dim=1)
    return fused_norm(norm.norm, x, name, None, {"shift": bias, "ada_scale": scale, "ada_shift": shift})


def _projected(mlp: Any, context: Tensor) -> Tensor:
    """Computes ``mlp(context)``, where ``mlp`` is a SiLU and a linear layer, in one kernel if possible."""
    if type(mlp) is nn.Sequential and len(mlp) == 2 and is_unhooked(mlp):
        return linear_of(mlp[1], mlp[0], context)
    return mlp(context)


class FusedKandinsky3ConditionalGroupNorm(Kandinsky3ConditionalGroupNorm):
    """``Kandinsky3ConditionalGroupNorm``. x (N, C, H, W), context (N, K) -> (N, C, H, W)."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = _norm_act(self, IDENTITY, x, context)
        return super().forward(x, context) if y is None else y


class FusedKandinsky3Block(Kandinsky3Block):
    """``Kandinsky3Block``. x (N, C, H, W), time_embed (N, K) -> (N, C_out, H', W')."""

    def forward(self, x: Tensor, time_embed: Tensor) -> Tensor:
        y = _norm_act(self.group_norm, self.activation, x, time_embed)
        if y is None:
            return super().forward(x, time_embed)
        return self.down_sample(self.projection(self.up_sample(y)))


class FusedKandinsky3ResNetBlock(Kandinsky3ResNetBlock):
    """``Kandinsky3ResNetBlock``. x (N, C, H, W), time_embed (N, K) -> (N, C_out, H', W')."""

    def forward(self, x: Tensor, time_embed: Tensor) -> Tensor:
        if not dispatch.has_kernels(x):
            return super().forward(x, time_embed)
        out, bias = x, None
        for block in self.resnet_blocks:
            out, bias = _without_bias(block, out, bias, time_embed)
        x = pointwise(self.shortcut_projection, self.shortcut_up_sample(x))
        return add(out, self.shortcut_down_sample(x), bias)


def _without_bias(
    block: Any, x: Tensor, bias: Tensor | None, time_embed: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``block(x + bias, time_embed)``, without the bias of its last convolution if possible.

    Returns (result, the bias that is still to be added, or None).
    """
    is_fused = type(block) is FusedKandinsky3Block and is_unhooked(block, block.down_sample)
    y = _norm_act(block.group_norm, block.activation, x, time_embed, bias) if is_fused else None
    if y is None:
        return block(add_bias(x, bias), time_embed), None
    y = block.up_sample(y)
    if type(block.down_sample) is not nn.Identity:
        return conv_without_bias(block.down_sample, block.projection(y))
    if getattr(plain_layer(block.projection), "kernel_size", None) == (1, 1):
        return pointwise(block.projection, y), None
    return conv_without_bias(block.projection, y)


_SOURCE = tested(Kandinsky3ConditionalGroupNorm, "__init__", "forward")
NORM = ClassSwap(
    "kandinsky3_norm",
    Kandinsky3ConditionalGroupNorm,
    FusedKandinsky3ConditionalGroupNorm,
    sources=(_SOURCE,),
)
BLOCK = ClassSwap(
    "kandinsky3_block",
    Kandinsky3Block,
    FusedKandinsky3Block,
    sources=(tested(Kandinsky3Block, "__init__", "forward"), _SOURCE),
    check=lambda block: activation_reason(block.activation),
)
RESNET_BLOCK = ClassSwap(
    "kandinsky3_resnet_block",
    Kandinsky3ResNetBlock,
    FusedKandinsky3ResNetBlock,
    sources=(tested(Kandinsky3ResNetBlock, "__init__", "forward"), *BLOCK.sources),
)
