"""``nn.Sequential`` with a GroupNorm directly before an activation: the pair runs as one kernel."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from sfastgn.patches.fusion import ClassSwap, activation_of
from sfastgn.patches.group_norm import can_fuse, norm_act

__all__ = ["FUSION", "FusedSequential"]


class FusedSequential(nn.Sequential):
    """``nn.Sequential`` that runs each (GroupNorm, activation) pair as one kernel."""

    def forward(self, input: Tensor) -> Tensor:
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


class _SequentialFusion(ClassSwap):
    def claims(self, module: nn.Module) -> bool:
        if self.is_applied(module):
            return True
        return type(module) is nn.Sequential and any(
            isinstance(a, nn.GroupNorm) and activation_of(b) is not None for a, b in pairwise(module)
        )


FUSION = _SequentialFusion("sequential", nn.Sequential, FusedSequential)
