"""Any ``nn.GroupNorm`` on sdfastgn's kernel, and ``norm_act``, which fuses the activation behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm, reference_group_norm
from sdfastgn.kernels.group_norm.plain import channels_last_group_norm, is_channels_last_to_pytorch
from sdfastgn.patches.core.fusion import ClassSwap, activation_of, is_unhooked
from sdfastgn.patches.core.statistics import take_statistics

__all__ = ["FUSION", "FusedGroupNorm", "can_fuse", "norm_act"]


class FusedGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` on sdfastgn's kernel; keeps the input's layout.

    Shapes, dtypes and errors: ``sdfastgn.group_norm``.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not dispatch.has_kernels(input):
            return self._in_pytorch(input)
        statistics = take_statistics(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, statistics=statistics)

    def _in_pytorch(self, input: Tensor) -> Tensor:
        if not (input.is_cpu and is_channels_last_to_pytorch(input)):
            return super().forward(input)
        operands = input, self.num_groups, self.weight, self.bias, self.eps
        # Stock's kernel for CPUs, but where that is wrong.
        found = channels_last_group_norm(*operands)
        return reference_group_norm(*operands) if found is None else found[0]


def can_fuse(norm: nn.Module, act: nn.Module) -> bool:
    """True if ``act(norm(x))`` may run as one kernel: both are known, and neither has hooks."""
    return (
        type(norm) is FusedGroupNorm
        and activation_of(act) is not None
        and is_unhooked(norm)
        and is_unhooked(act)
    )


def norm_act(norm: Any, act: nn.Module, x: Tensor, **operands: Any) -> Tensor:
    """``act(norm(x))`` for x (N, C, *spatial), in one kernel where that is allowed.

    ``operands``: keyword operands of ``sdfastgn.group_norm``, only if ``can_fuse(norm, act)``.
    """
    # With operands it is ``group_norm``'s to compute, also where kernels were turned off since.
    if not (can_fuse(norm, act) and (operands or dispatch.has_kernels(x))):
        return act(norm(x))
    name = activation_of(act) or "identity"
    statistics = take_statistics(x)
    return group_norm(
        x, norm.num_groups, norm.weight, norm.bias, norm.eps, name, statistics=statistics, **operands
    )


FUSION = ClassSwap("group_norm", nn.GroupNorm, FusedGroupNorm)
