"""diffusers' ``UpBlock2D`` and ``CrossAttnUpBlock2D``: a fast concatenation that also computes statistics.

A *skip* is an image from the first half of the UNet. The concatenation of an image and a skip is the input of
a ResNet block. The block begins with a norm, which needs mean and variance of the concatenation. Here one
kernel concatenates and computes them. ``torch.cat`` of channels-last tensors alone takes two to three times
as long as this kernel.

diffusers' forward runs with gradients, with checkpointing, with deprecated arguments, under compilers, and
with FreeU, which changes both tensors before the concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.statistics import cat
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested


class FusedUpBlock2D(UpBlock2D):
    """``UpBlock2D`` with a faster concatenation.

    hidden_states (N, C, H, W), res_hidden_states_tuple: skips (N, C', H, W) -> (N, C_out, H', W'). The last
    skip is used first.
    """

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: Sequence[Tensor],
        temb: Tensor | None = None,
        upsample_size: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if args or kwargs or not runs_fused(self, hidden_states, res_hidden_states_tuple):
            return super().forward(
                hidden_states, res_hidden_states_tuple, temb, upsample_size, *args, **kwargs
            )
        for i, resnet in enumerate(self.resnets, 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(hidden_states, temb)
        return upsample(self, hidden_states, upsample_size)


class FusedCrossAttnUpBlock2D(CrossAttnUpBlock2D):
    """``CrossAttnUpBlock2D`` with a faster concatenation.

    hidden_states (N, C, H, W), res_hidden_states_tuple: skips (N, C', H, W) -> (N, C_out, H', W'). A
    transformer follows each ResNet block. The context of the transformers is encoder_hidden_states
    (N, tokens, D).
    """

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: Sequence[Tensor],
        temb: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        upsample_size: Any = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        attention: dict[str, Any] = {
            "encoder_hidden_states": encoder_hidden_states,
            "cross_attention_kwargs": cross_attention_kwargs,
            "attention_mask": attention_mask,
            "encoder_attention_mask": encoder_attention_mask,
        }
        is_deprecated = (cross_attention_kwargs or {}).get("scale") is not None
        if is_deprecated or not runs_fused(self, hidden_states, res_hidden_states_tuple):
            return super().forward(
                hidden_states, res_hidden_states_tuple, temb, upsample_size=upsample_size, **attention
            )
        for i, (resnet, attn) in enumerate(zip(self.resnets, self.attentions, strict=False), 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(hidden_states, temb)
            hidden_states = attn(hidden_states, **attention, return_dict=False)[0]
        return upsample(self, hidden_states, upsample_size)


def runs_fused(block: Any, hidden_states: Tensor, skips: Sequence[Tensor]) -> bool:
    return (
        dispatch.is_plain_inference(hidden_states, tuple(skips))
        and not (block.gradient_checkpointing and torch.is_grad_enabled())
        # If all of these four attributes are set, FreeU is on, and diffusers' forward must run.
        and not all(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2"))
    )


def upsample(block: Any, hidden_states: Tensor, size: Any) -> Tensor:
    for upsampler in block.upsamplers or ():
        hidden_states = upsampler(hidden_states, size)
    return hidden_states


FUSION = ClassSwap(
    "up_block",
    UpBlock2D,
    FusedUpBlock2D,
    sources=(tested(UpBlock2D, "__init__", "forward"),),
)
CROSS_ATTENTION = ClassSwap(
    "cross_attn_up_block",
    CrossAttnUpBlock2D,
    FusedCrossAttnUpBlock2D,
    sources=(tested(CrossAttnUpBlock2D, "__init__", "forward"),),
)
