"""Every plain ``nn.GroupNorm`` on sdfastgn's kernel, and ``norm_act``, which also fuses an activation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm, reference_group_norm
from sdfastgn.kernels.group_norm.plain import channels_last_group_norm, is_channels_last_to_pytorch
from sdfastgn.patches.core.fusion import ClassSwap, activation_of, is_unhooked, stock_class
from sdfastgn.patches.core.known_norms import known_base
from sdfastgn.patches.core.statistics import take_statistics

__all__ = ["FUSION", "FusedGroupNorm", "can_fuse", "fused_norm_act", "norm_act"]


class FusedGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` on sdfastgn's kernel. The result has the input's layout.

    Shapes, dtypes and errors: ``sdfastgn.group_norm``.
    """

    # The class itself, if its forward is a norm and nothing else. A subclass with another forward inherits
    # the value of its base, which is not the subclass itself. So it does not count as a mere norm. This is
    # an attribute because torch.compile can trace it in all releases.
    norm_alone: type[nn.Module] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return self._fused(input, "identity") if dispatch.has_kernels(input) else self._in_pytorch(input)

    def _fused(self, x: Tensor, activation: str, **operands: Any) -> Tensor:
        """Norm and activation in one kernel. ``operands``: keyword operands of ``sdfastgn.group_norm``."""
        norm = self.num_groups, self.weight, self.bias, self.eps
        return group_norm(x, *norm, activation, statistics=take_statistics(x), **operands)

    def _in_pytorch(self, input: Tensor) -> Tensor:
        if not (input.is_cpu and is_channels_last_to_pytorch(input)):
            return nn.GroupNorm.forward(self, input)
        operands = input, self.num_groups, self.weight, self.bias, self.eps
        # PyTorch's channels-last kernel for CPUs where it is exact enough, else the reference.
        found = channels_last_group_norm(*operands)
        return reference_group_norm(*operands) if found is None else found[0]


FusedGroupNorm.norm_alone = FusedGroupNorm


def can_fuse(norm: nn.Module, act: nn.Module) -> bool:
    """True if ``act(norm(x))`` may run as one kernel: both modules are known, and neither has hooks."""
    return (
        isinstance(norm, FusedGroupNorm)
        and norm.norm_alone is type(norm)
        and activation_of(act) is not None
        and is_unhooked(norm)
        and is_unhooked(act)
    )


def norm_act(norm: Any, act: nn.Module, x: Tensor) -> Tensor:
    """``act(norm(x))`` for x (N, C, *spatial), in one kernel where that is allowed."""
    if can_fuse(norm, act) and dispatch.has_kernels(x):
        return fused_norm_act(norm, act, x)
    return act(norm(x))


def fused_norm_act(norm: Any, act: nn.Module, x: Tensor, **operands: Any) -> Tensor:
    """``act(norm(x))`` with keyword operands of ``sdfastgn.group_norm``. Only where ``can_fuse`` is true.

    If no kernel runs, ``group_norm`` computes in plain PyTorch.
    """
    return norm._fused(x, activation_of(act) or "identity", **operands)


# sdfastgn's own module, which runs the kernel already. Only its name is used: patches must not import
# modules.py.
_OURS = "sdfastgn.modules.GroupNorm"


def _has_no_other_fusion(norm: nn.Module) -> bool:
    kind = type(norm)
    is_ours = f"{kind.__module__}.{kind.__qualname__}" == _OURS
    return stock_class(norm) is kind and known_base(kind) is None and not is_ours


FUSION = ClassSwap("group_norm", nn.GroupNorm, FusedGroupNorm, covers=_has_no_other_fusion)
