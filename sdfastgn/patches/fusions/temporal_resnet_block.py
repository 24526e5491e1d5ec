"""diffusers' residual blocks of 5-D tensors: both norms with their activations.

``TemporalResnetBlock`` is of Stable Video Diffusion, ``HunyuanVideoResnetBlockCausal3D`` of HunyuanVideo's
VAE. A time embedding differs from frame to frame, so it is no constant per (n, c) and stays an addition.
"""

from __future__ import annotations

from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoResnetBlockCausal3D
from diffusers.models.resnet import TemporalResnetBlock
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.fusion import ClassSwap, activation_reason
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.group_norm import norm_act

__all__ = ["CAUSAL", "FUSION", "FusedCausalResnetBlock", "FusedTemporalResnetBlock"]


class FusedTemporalResnetBlock(TemporalResnetBlock):
    """``TemporalResnetBlock`` with fused normalizations.

    input_tensor (N, C, F, H, W), temb (N, F, temb_channels) or None.
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
    sources=(tested(TemporalResnetBlock, __init__="10dc3eb120f73c58", forward="cb41e04a61aa231a"),),
    layers=("norm1", "norm2"),
)


class FusedCausalResnetBlock(HunyuanVideoResnetBlockCausal3D):
    """``HunyuanVideoResnetBlockCausal3D`` with fused normalizations. hidden_states (N, C, F, H, W)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not dispatch.has_kernels(hidden_states):
            return super().forward(hidden_states)
        residual = hidden_states.contiguous()
        h = self.conv1(norm_act(self.norm1, self.nonlinearity, residual))
        h = self.conv2(self.dropout(norm_act(self.norm2, self.nonlinearity, h)))
        return h + (residual if self.conv_shortcut is None else self.conv_shortcut(residual))


CAUSAL = ClassSwap(
    "causal_resnet_block",
    HunyuanVideoResnetBlockCausal3D,
    FusedCausalResnetBlock,
    sources=(
        tested(HunyuanVideoResnetBlockCausal3D, __init__="e45974e1ceff28c7", forward="fed59704419cc349"),
    ),
    check=lambda block: activation_reason(block.nonlinearity),
    layers=("norm1", "norm2"),
)
