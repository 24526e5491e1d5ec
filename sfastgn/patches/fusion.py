"""What a fusion is: a rule that claims modules, says why it would leave one alone, and can be applied and undone exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as nn_module

from sfastgn.patches.own_forward import change_class, has_foreign_forward
from sfastgn.patches.upstream import unknown_source

__all__ = ["ClassSwap", "Fusion", "activation_of", "foreign_override", "is_plain", "keep_name"]


class Fusion(Protocol):
    """One entry of the registry. ``apply`` and ``undo`` are inverse and touch only the module given and, if need be, its children."""

    @property
    def name(self) -> str: ...

    def claims(self, module: nn.Module) -> bool:
        """True if this fusion is about ``module``, fused or not."""

    def is_applied(self, module: nn.Module) -> bool: ...

    def reason_to_skip(self, module: nn.Module) -> str | None:
        """Why a claimed, not yet fused ``module`` must stay as it is, or None. Changes nothing."""

    def apply(self, module: nn.Module) -> None: ...

    def undo(self, module: nn.Module) -> None: ...


def _no_reason(_: Any) -> str | None:
    return None


@dataclass(frozen=True)
class ClassSwap:
    """Fusion by giving one instance another class: ``fused``, a subclass of ``stock`` without state of its own.

    The class says everything, so that undo, deepcopy and pickle need nothing else, and other instances of ``stock`` are untouched.

    Args:
        name: the fusion's name in reports.
        stock: exact type that is claimed; subclasses may compute something else and are left alone.
        fused: its replacement, defined at the top level of a module (pickle).
        methods: upstream methods that ``fused`` replaces; their sources must be known.
        check: reason to skip that depends on the instance.
    """

    name: str
    stock: type[nn.Module]
    fused: type[nn.Module]
    methods: tuple[str, ...] = ()
    check: Callable[[Any], str | None] = _no_reason

    def __post_init__(self) -> None:
        keep_name(self.fused, self.stock)

    def claims(self, module: nn.Module) -> bool:
        return type(module) in (self.stock, self.fused)

    def is_applied(self, module: nn.Module) -> bool:
        return type(module) is self.fused

    def reason_to_skip(self, module: nn.Module) -> str | None:
        return foreign_override(module) or unknown_source(self.stock, *self.methods) or self.check(module)

    def apply(self, module: nn.Module) -> None:
        change_class(module, self.fused)

    def undo(self, module: nn.Module) -> None:
        change_class(module, self.stock)


def keep_name(fused: type, stock: type) -> None:
    """Regional compilation, device maps and LoRA trainers know modules by their classes' names. Pickle goes by ``__qualname__``."""
    fused.__name__ = stock.__name__


def foreign_override(module: nn.Module) -> str | None:
    """The reason if someone put a ``forward`` into the instance (accelerate's hooks do): a class swap would then be dead code."""
    if not has_foreign_forward(module):
        return None
    owner = "accelerate's hooks" if hasattr(module, "_hf_hook") else "other code"
    return f"{owner} replaced this instance's forward"


def is_plain(module: nn.Module) -> bool:
    """True if calling ``module`` does nothing but its class's forward: no hooks, no override. Asked at each call: hooks may come later."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_foreign_forward(module)
        or nn_module._has_any_global_hook()
    )


_ACTIVATION_NAMES: dict[type[nn.Module], str] = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Identity: "identity"}


def activation_of(module: nn.Module) -> str | None:
    """Name under which an activation module can be fused, or None. Exact types only: a subclass may compute something else."""
    name = _ACTIVATION_NAMES.get(type(module))
    if name is None and type(module) is nn.GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(module.approximate))
    return name
