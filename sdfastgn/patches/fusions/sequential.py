"""``nn.Sequential`` with a GroupNorm directly before an activation: the pair runs as one kernel."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.fusion import ClassSwap, activation_of
from sdfastgn.patches.fusions.group_norm import can_fuse, norm_act

__all__ = ["FUSION", "FusedSequential"]


class FusedSequential(nn.Sequential):
    """``nn.Sequential`` that runs each (GroupNorm, activation) pair as one kernel."""

    def forward(self, input: Tensor) -> Tensor:
        if not (isinstance(input, Tensor) and dispatch.has_kernels(input)):
            return super().forward(input)
        modules = list(self)
        i = 0
        while i < len(modules):
            if i + 1 < len(modules) and can_fuse(modules[i], modules[i + 1]):
                input = norm_act(modules[i], modules[i + 1], input)
                i += 2
            else:
                input = modules[i](input)
                i += 1
        return input


def _has_pair(module: nn.Module) -> bool:
    children = (child for child in module._modules.values() if child is not None)
    return any(isinstance(a, nn.GroupNorm) and activation_of(b) is not None for a, b in pairwise(children))


FUSION = ClassSwap("sequential", nn.Sequential, FusedSequential, covers=_has_pair)
