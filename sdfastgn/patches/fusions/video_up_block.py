"""Up blocks of Stable Video Diffusion and AnimateDiff: a concatenation that also computes statistics.

One kernel concatenates an image and a skip from the first half of the UNet, and computes the statistics of
the next norm, as in ``up_block.py``. These blocks also have temporal layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.models.unets.unet_3d_blocks import CrossAttnUpBlockSpatioTemporal, UpBlockSpatioTemporal
from diffusers.models.unets.unet_motion_model import CrossAttnUpBlockMotion, UpBlockMotion
from torch import Tensor

from sdfastgn.patches.fusions.up_block import runs_fused, upsample
from sdfastgn.patches.layers.statistics import cat
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested


class FusedUpBlockSpatioTemporal(UpBlockSpatioTemporal):
    """``UpBlockSpatioTemporal`` with a faster concatenation.

    hidden_states: (N * frames, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: Sequence[Tensor],
        temb: Tensor | None = None,
        image_only_indicator: Tensor | None = None,
        upsample_size: Any = None,
    ) -> Tensor:
        if not runs_fused(self, hidden_states, res_hidden_states_tuple):
            return super().forward(
                hidden_states, res_hidden_states_tuple, temb, image_only_indicator, upsample_size
            )
        for i, resnet in enumerate(self.resnets, 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(hidden_states, temb, image_only_indicator=image_only_indicator)
        return upsample(self, hidden_states, upsample_size)


class FusedCrossAttnUpBlockSpatioTemporal(CrossAttnUpBlockSpatioTemporal):
    """``CrossAttnUpBlockSpatioTemporal`` with a faster concatenation.

    hidden_states: (N * frames, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: Sequence[Tensor],
        temb: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        image_only_indicator: Tensor | None = None,
        upsample_size: Any = None,
    ) -> Tensor:
        options: dict[str, Any] = {"image_only_indicator": image_only_indicator}
        if not runs_fused(self, hidden_states, res_hidden_states_tuple):
            return super().forward(
                hidden_states,
                res_hidden_states_tuple,
                temb,
                encoder_hidden_states,
                upsample_size=upsample_size,
                **options,
            )
        for i, (resnet, attn) in enumerate(zip(self.resnets, self.attentions, strict=False), 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(hidden_states, temb, **options)
            hidden_states = attn(
                hidden_states, encoder_hidden_states=encoder_hidden_states, **options, return_dict=False
            )[0]
        return upsample(self, hidden_states, upsample_size)


class FusedUpBlockMotion(UpBlockMotion):
    """``UpBlockMotion`` with a faster concatenation.

    hidden_states: (N * frames, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: Sequence[Tensor],
        temb: Tensor | None = None,
        upsample_size: Any = None,
        num_frames: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if args or kwargs or not runs_fused(self, hidden_states, res_hidden_states_tuple):
            return super().forward(
                hidden_states, res_hidden_states_tuple, temb, upsample_size, num_frames, *args, **kwargs
            )
        for i, (resnet, motion) in enumerate(zip(self.resnets, self.motion_modules, strict=False), 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(input_tensor=hidden_states, temb=temb)
            hidden_states = motion(hidden_states, num_frames=num_frames)
        return _upsample_by_name(self, hidden_states, upsample_size)


class FusedCrossAttnUpBlockMotion(CrossAttnUpBlockMotion):
    """``CrossAttnUpBlockMotion`` with a faster concatenation.

    hidden_states: (N * frames, C, H, W).
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
        num_frames: int = 1,
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
                hidden_states,
                res_hidden_states_tuple,
                temb,
                upsample_size=upsample_size,
                num_frames=num_frames,
                **attention,
            )
        blocks = zip(self.resnets, self.attentions, self.motion_modules, strict=False)
        for i, (resnet, attn, motion) in enumerate(blocks, 1):
            hidden_states = cat(hidden_states, res_hidden_states_tuple[-i])
            hidden_states = resnet(input_tensor=hidden_states, temb=temb)
            hidden_states = attn(hidden_states=hidden_states, **attention, return_dict=False)[0]
            hidden_states = motion(hidden_states, num_frames=num_frames)
        return _upsample_by_name(self, hidden_states, upsample_size)


def _upsample_by_name(block: Any, hidden_states: Tensor, size: Any) -> Tensor:
    """Runs the upsamplers of ``block`` with keyword arguments, which AnimateDiff's split inference needs.

    Split inference wraps layers in a module that splits only arguments given by keyword.
    """
    for upsampler in block.upsamplers or ():
        hidden_states = upsampler(hidden_states=hidden_states, output_size=size)
    return hidden_states


FUSIONS = tuple(
    ClassSwap(name, stock, fused, sources=(tested(stock, "__init__", "forward"),))
    for name, stock, fused in (
        ("up_block_spatio_temporal", UpBlockSpatioTemporal, FusedUpBlockSpatioTemporal),
        (
            "cross_attn_up_block_spatio_temporal",
            CrossAttnUpBlockSpatioTemporal,
            FusedCrossAttnUpBlockSpatioTemporal,
        ),
        ("up_block_motion", UpBlockMotion, FusedUpBlockMotion),
        ("cross_attn_up_block_motion", CrossAttnUpBlockMotion, FusedCrossAttnUpBlockMotion),
    )
)
