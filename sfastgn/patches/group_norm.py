"""Any ``nn.GroupNorm``: the same normalisation by sfastgn's kernel, without an activation; and the call that fuses one that follows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sfastgn.kernels.group_norm import group_norm
from sfastgn.patches.fusion import ClassSwap, activation_of, is_plain
from sfastgn.patches.statistics import take_statistics

__all__ = ["FUSION", "FusedGroupNorm", "can_fuse", "norm_act"]


class FusedGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` on sfastgn's kernel; keeps the input's layout. Shapes, dtypes and errors: ``sfastgn.group_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = take_statistics(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, statistics=statistics)


def can_fuse(norm: nn.Module, act: nn.Module) -> bool:
    """True if ``act(norm(x))`` may run as one kernel: both are what they seem, and nobody watches the value in between."""
    return type(norm) is FusedGroupNorm and activation_of(act) is not None and is_plain(norm) and is_plain(act)


def norm_act(norm: Any, act: nn.Module, x: Tensor, **operands: Any) -> Tensor:
    """``act(norm(x))`` for x (N, C, *spatial), in one kernel where that is allowed.

    ``operands``: keyword operands of ``sfastgn.group_norm``, only if ``can_fuse(norm, act)``.
    """
    if not can_fuse(norm, act):
        return act(norm(x))
    name = activation_of(act) or "identity"
    statistics = take_statistics(x)
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, name, statistics=statistics, **operands)


class _GroupNormFusion(ClassSwap):
    # Subclasses are claimed so that the report names them, and skipped.
    def claims(self, module: nn.Module) -> bool:
        return isinstance(module, nn.GroupNorm)

    def is_applied(self, module: nn.Module) -> bool:
        return isinstance(module, FusedGroupNorm)


def _check(norm: nn.GroupNorm) -> str | None:
    return (
        None
        if type(norm) is nn.GroupNorm
        else f"{type(norm).__name__}, a subclass of GroupNorm, has a forward of its own"
    )


FUSION = _GroupNormFusion("group_norm", nn.GroupNorm, FusedGroupNorm, check=_check)
