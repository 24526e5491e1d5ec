"""Stable Video Diffusion's residual blocks of 5-D tensors: fuses both norms with their activations.

The time embedding is added in a separate pass. The norm's kernel could add it only if it were one number for
each sample and channel, but here it differs from frame to frame.
"""

from __future__ import annotations

from diffusers.models.resnet import TemporalResnetBlock
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.group_norm import norm_act

__all__ = ["FUSION", "FusedTemporalResnetBlock"]


class FusedTemporalResnetBlock(TemporalResnetBlock):
    """``TemporalResnetBlock`` with fused normalizations.

    input_tensor (N, C, F, H, W) for F frames, temb (N, F, temb_channels) or None -> (N, C_out, F, H, W).
    """

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        if not dispatch.has_kernels(input_tensor):
            return super().forward(input_tensor, temb)
        h = self.conv1(norm_act(self.norm1, self.nonlinearity, input_tensor))
        if self.time_emb_proj is not None:
            h = h + self.time_emb_proj(self.nonlinearity(temb)).transpose(1, 2)[..., None, None]
        h = self.conv2(self.dropout(norm_act(self.norm2, self.nonlinearity, h)))
        return (input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)) + h


FUSION = ClassSwap(
    "temporal_resnet_block",
    TemporalResnetBlock,
    FusedTemporalResnetBlock,
    sources=(tested(TemporalResnetBlock, "__init__", "forward"),),
    layers=("norm1", "norm2"),
)
