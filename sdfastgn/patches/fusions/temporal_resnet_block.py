"""Stable Video Diffusion's residual blocks over time: fuses norms with activations, and the last sums.

``TemporalResnetBlock`` convolves 5-D tensors along time. Both norms are fused with their activations. The
time embedding differs from frame to frame, so the norm's kernel cannot add it. One pass adds it together with
the first convolution's bias, and computes the statistics of the norm that follows.

``SpatioTemporalResBlock`` runs a ``ResnetBlock2D`` on each frame and then a ``TemporalResnetBlock``, and
mixes both results. The first block returns x. The second block returns x + h, where h is the result of its
last convolution. So the mix is a sum of x and h, each times a factor. One pass computes this sum, adds the
bias of the last convolution, and computes the statistics of the next block's norm.
"""

from __future__ import annotations

import torch
from diffusers.models.resnet import SpatioTemporalResBlock, TemporalResnetBlock
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.fusions.alpha_blender import SOURCE, factors_of, is_plain_blender
from sdfastgn.patches.layers.convolution import conv_without_bias
from sdfastgn.patches.layers.group_norm import norm_act
from sdfastgn.patches.layers.linear import fused_linear
from sdfastgn.patches.layers.statistics import add_bias, as_video, blend
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked, kernels_may_run
from sdfastgn.patches.swap.tested_sources import tested


class FusedTemporalResnetBlock(TemporalResnetBlock):
    """``TemporalResnetBlock``, with each norm and the activation after it in one kernel.

    input_tensor (N, C, F, H, W) for F frames, temb (N, F, temb_channels) or None -> (N, C_out, F, H, W).
    """

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        if not dispatch.has_kernels(input_tensor):
            return super().forward(input_tensor, temb)
        if kernels_may_run(input_tensor, dim=5):
            h, bias = self.before_sum(input_tensor, temb)
            h = add_bias(h, bias)
        else:
            h = self.conv1(norm_act(self.norm1, self.nonlinearity, input_tensor))
            if self.time_emb_proj is not None:
                h = h + self.time_emb_proj(self.nonlinearity(temb)).transpose(1, 2)[..., None, None]
            h = self.conv2(self.dropout(norm_act(self.norm2, self.nonlinearity, h)))
        return (input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)) + h

    def before_sum(self, x: Tensor, temb: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Runs the block up to the residual sum. Returns (h, bias): h + bias must be added to the residual.

        The residual is x, or the result of ``conv_shortcut``. bias is None if h includes it. x and temb are
        the arguments of ``forward``. Call this method only if ``kernels_may_run(x, dim=5)`` is True.
        """
        frames = x.shape[2]
        h, bias = conv_without_bias(self.conv1, norm_act(self.norm1, self.nonlinearity, x))
        h = h.transpose(1, 2).flatten(0, 1)
        if self.time_emb_proj is not None and temb is not None:
            shift = fused_linear(self.time_emb_proj, self.nonlinearity, temb.flatten(0, 1))
            if shift is None:
                shift = self.time_emb_proj(self.nonlinearity(temb)).flatten(0, 1)
            bias = shift if bias is None else shift + bias
        h = as_video(add_bias(h, bias), frames)
        h = norm_act(self.norm2, self.nonlinearity, h)
        return conv_without_bias(self.conv2, self.dropout(h))


class FusedSpatioTemporalResBlock(SpatioTemporalResBlock):
    """``SpatioTemporalResBlock``, where one pass computes the mix and the last residual sum.

    hidden_states (N * F, C, H, W) for F frames, temb (N * F, temb_channels) or None, image_only_indicator
    (N, F) -> (N * F, C_out, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        temb: Tensor | None = None,
        image_only_indicator: Tensor | None = None,
    ) -> Tensor:
        if not self._runs_fused(hidden_states) or image_only_indicator is None:
            return super().forward(hidden_states, temb, image_only_indicator)
        frames = image_only_indicator.shape[-1]
        x = self.spatial_res_block(hidden_states, temb)
        if temb is not None:
            temb = temb.unflatten(0, (-1, frames))
        h, bias = self.temporal_res_block.before_sum(as_video(x, frames), temb)
        # The mix of the results of both blocks is spatial * x + temporal * (x + h + bias).
        spatial, temporal = factors_of(self.time_mixer, image_only_indicator, x)
        return blend(h.transpose(1, 2).flatten(0, 1), x, bias, torch.stack((spatial + temporal, temporal)))

    def _runs_fused(self, hidden_states: Tensor) -> bool:
        block = self.temporal_res_block
        return (
            kernels_may_run(hidden_states, dim=4)
            and type(block) is FusedTemporalResnetBlock
            and is_unhooked(block)
            and block.conv_shortcut is None
            and is_plain_blender(self.time_mixer)
        )


FUSION = ClassSwap(
    "temporal_resnet_block",
    TemporalResnetBlock,
    FusedTemporalResnetBlock,
    sources=(tested(TemporalResnetBlock, "__init__", "forward"),),
)
SPATIO_TEMPORAL = ClassSwap(
    "spatio_temporal_res_block",
    SpatioTemporalResBlock,
    FusedSpatioTemporalResBlock,
    sources=(tested(SpatioTemporalResBlock, "__init__", "forward"), SOURCE),
)
