"""diffusers' ``Downsample2D``: the convolution's bias in a kernel that hands over the statistics of what it writes.

cuDNN adds the bias in a pass of its own in any case; the ResNet block that follows begins with a norm.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.downsampling import Downsample2D
from torch import Tensor, nn

from sfastgn.patches.convolution import conv_without_bias
from sfastgn.patches.fusion import ClassSwap
from sfastgn.patches.statistics import add_bias

__all__ = ["FUSION", "FusedDownsample2D"]


class FusedDownsample2D(Downsample2D):
    """``Downsample2D`` with a convolution and no norm. hidden_states (N, C, H, W) -> (N, C_out, H', W')."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.norm is not None or hidden_states.shape[1] != self.channels:
            return super().forward(hidden_states, *args, **kwargs)  # upstream's own words
        if self.padding == 0:
            hidden_states = nn.functional.pad(hidden_states, (0, 1, 0, 1))
        return add_bias(*conv_without_bias(self.conv, hidden_states))


class _DownsampleFusion(ClassSwap):
    # One that averages has no bias: not a case that is left out.
    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or (type(module) is self.stock and bool(module.use_conv))


FUSION = _DownsampleFusion("downsample", Downsample2D, FusedDownsample2D, ("__init__", "forward"))
