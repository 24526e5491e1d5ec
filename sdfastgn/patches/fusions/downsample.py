"""diffusers' ``Downsample2D``: the convolution's bias in a kernel that stores statistics.

cuDNN would add the bias in a pass of its own; the ResNet block that follows begins with a norm.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.downsampling import Downsample2D
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.convolution import conv_without_bias
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.statistics import add_bias
from sdfastgn.patches.core.tested_sources import tested

__all__ = ["FUSION", "FusedDownsample2D"]


class FusedDownsample2D(Downsample2D):
    """``Downsample2D`` with a convolution and no norm.

    hidden_states (N, C, H, W) -> (N, C_out, H', W').
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Upstream warns about deprecated arguments, and refuses other channels.
        is_usual = not (args or kwargs) and self.norm is None and hidden_states.shape[1] == self.channels
        if not (is_usual and dispatch.has_kernels(hidden_states)):
            return super().forward(hidden_states, *args, **kwargs)
        if self.padding == 0:
            hidden_states = nn.functional.pad(hidden_states, (0, 1, 0, 1))
        return add_bias(*conv_without_bias(self.conv, hidden_states))


def _has_conv(module: Downsample2D) -> bool:
    """One that averages has no bias."""
    return bool(module.use_conv)


FUSION = ClassSwap(
    "downsample",
    Downsample2D,
    FusedDownsample2D,
    sources=(tested(Downsample2D, __init__="3b24d26d3089ac74", forward="2af7a45865853bbf"),),
    covers=_has_conv,
)
