"""Runs every plain ``nn.GroupNorm`` in sdfastgn's kernel.

Other fusions call ``norm_act``, which runs a norm and the activation after it in one kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm, reference_group_norm
from sdfastgn.kernels.group_norm.plain import channels_last_group_norm, is_channels_last_to_pytorch
from sdfastgn.patches.layers.known_norms import known_base
from sdfastgn.patches.layers.rounding import rounded
from sdfastgn.patches.layers.statistics import take_statistics
from sdfastgn.patches.swap.fusion import ClassSwap, activation_of, is_unhooked, parameters_of, stock_class


class FusedGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` on sdfastgn's kernel. The result has the input's memory format.

    ``sdfastgn.group_norm`` documents the shapes, dtypes and errors.
    """

    # A class whose ``forward`` only normalizes is itself the value of this attribute. A subclass whose
    # ``forward`` does more inherits the value from its base class. So ``cls.norm_alone is cls`` is True only
    # if ``cls`` only normalizes. Every release of torch.compile can trace this comparison.
    norm_alone: type[nn.Module] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return self._fused(input, "identity") if dispatch.has_kernels(input) else self._in_pytorch(input)

    def _fused(self, x: Tensor, activation: str, **operands: Any) -> Tensor:
        """Normalizes x and applies ``activation``, in one kernel.

        ``operands``: further operands of ``sdfastgn.group_norm``, by keyword, such as ``shift``.
        """
        norm = self.num_groups, *parameters_of(self), self.eps
        return group_norm(x, *norm, activation, statistics=take_statistics(x), **operands)

    def _in_pytorch(self, input: Tensor) -> Tensor:
        if dispatch.is_stock_code() or not (input.is_cpu and is_channels_last_to_pytorch(input)):
            return nn.GroupNorm.forward(self, input)
        operands = input, self.num_groups, self.weight, self.bias, self.eps
        # ``found`` has the result of PyTorch's channels-last kernel. It is None if this result would be
        # inaccurate for this input, if the kernel's backward would crash, and in traces.
        found = channels_last_group_norm(*operands)
        return reference_group_norm(*operands) if found is None else found[0]


FusedGroupNorm.norm_alone = FusedGroupNorm


def _is_fused(norm: nn.Module) -> bool:
    return isinstance(norm, FusedGroupNorm) and norm.norm_alone is type(norm)


def fused_activation(norm: nn.Module, act: nn.Module) -> str | None:
    """The name by which the norm's kernel knows ``act``. None if ``act(norm(x))`` cannot run as one kernel.

    One kernel can compute it if ``norm`` is a ``FusedGroupNorm``, the kernel has the activation ``act``, and
    neither module has hooks.
    """
    name = activation_of(act) if _is_fused(norm) else None
    return name if name is not None and is_unhooked(norm, act) else None


def norm_tokens(norm: Any, x: Tensor) -> Tensor:
    """Computes ``norm(x)`` for x (N, C, H, W). Returns the result as tokens (N, HW, C)."""
    if _is_fused(norm) and is_unhooked(norm) and dispatch.has_kernels(x):
        return norm._fused(x, "identity", tokens=True)
    return norm(x).permute(0, 2, 3, 1).flatten(1, 2)


def norm_act(norm: Any, act: nn.Module, x: Tensor, reader: Any = None) -> Tensor:
    """Computes ``act(norm(x))`` for x (N, C, *spatial), in one kernel if that is possible.

    ``reader``: the only layer that reads the result; None if other code may read the result. If this layer
    would cast the result to autocast's dtype, the norm may write this dtype (``rounding.py``).
    """
    name = fused_activation(norm, act)
    if name is None or not dispatch.has_kernels(x):
        return act(norm(x))
    return fused_norm(norm, x, name, reader, {})


def fused_norm(norm: Any, x: Tensor, activation: str, reader: Any, operands: dict[str, Any]) -> Tensor:
    """Computes ``norm`` of x and the activation in one kernel.

    ``operands``: further arguments of the function ``group_norm``, by keyword.

    ``reader``: the only layer that reads the result; None if other code may read the result.
    """
    readers = None if reader is None else (reader,)
    return rounded(_run_fused, norm, x, activation, operands, readers=readers)


def _run_fused(norm: Any, x: Tensor, activation: str, operands: dict[str, Any]) -> Tensor:
    return norm._fused(x, activation, **operands)


# Full name of ``sdfastgn.GroupNorm``, which runs the kernel already and is not fused. Classes are compared
# with the name, because files in ``patches`` must not import ``modules.py``.
_OURS = "sdfastgn.modules.GroupNorm"


def _has_no_other_fusion(norm: nn.Module) -> bool:
    kind = type(norm)
    is_ours = f"{kind.__module__}.{kind.__qualname__}" == _OURS
    return stock_class(norm) is kind and known_base(kind) is None and not is_ours


FUSION = ClassSwap("group_norm", nn.GroupNorm, FusedGroupNorm, covers=_has_no_other_fusion)
