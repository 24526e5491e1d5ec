"""What a fusion is: a rule that claims modules, gives reasons to skip, and has an exact undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from sdfastgn.kernels.common.private import has_any_global_hook
from sdfastgn.patches.core.class_forward import change_class, has_foreign_forward
from sdfastgn.patches.core.tested_sources import TestedSource, unknown_source

__all__ = [
    "ClassSwap",
    "Fusion",
    "activation_of",
    "activation_reason",
    "foreign_class",
    "foreign_override",
    "is_about",
    "is_over_fused",
    "is_unhooked",
    "register_fused",
    "restore_class",
    "stock_class",
]


class Fusion(Protocol):
    """One entry of the registry.

    ``apply`` and ``undo`` are inverse and touch only the module given and, if need be, its
    children.
    """

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[TestedSource, ...]:
        """Upstream methods that it replaces or relies upon."""

    def claims(self, module: nn.Module) -> bool:
        """True if this fusion is about ``module``: fused, fusable, or skipped with a reason."""

    def is_applied(self, module: nn.Module) -> bool: ...

    def reason_to_skip(self, module: nn.Module) -> str | None:
        """Why a claimed, not yet fused ``module`` must stay as it is, or None. Changes nothing."""

    def apply(self, module: nn.Module) -> None: ...

    def undo(self, module: nn.Module) -> None: ...


def _no_reason(_: Any) -> str | None:
    return None


def _everything(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class ClassSwap:
    """Fusion by giving one instance another class: ``fused``, a subclass of ``stock`` without own state.

    The class says everything, so that undo, deepcopy and pickle need nothing else, and other
    instances of ``stock`` are untouched.

    Args:
        name: the fusion's name in reports.
        stock: exact type that is fused; a subclass may compute something else and is skipped.
        fused: its replacement, defined at the top level of a module (pickle).
        sources: upstream methods that ``fused`` replaces or relies upon; they must be known.
        check: reason to skip that depends on the instance.
        covers: False for an instance that is not claimed: another operation by the same class.
        layers: paths of the children whose call ``fused`` replaces while they are plain layers. One with
            an adapter is called as in stock, and the report names it.
    """

    name: str
    stock: type[nn.Module]
    fused: type[nn.Module]
    sources: tuple[TestedSource, ...] = ()
    check: Callable[[Any], str | None] = _no_reason
    covers: Callable[[Any], bool] = _everything
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        register_fused(self.fused, self.stock)

    def claims(self, module: nn.Module) -> bool:
        if not is_about(module, self.stock):
            return False
        try:
            return self.is_applied(module) or self.covers(module)
        except AttributeError:  # a subclass with an __init__ of its own
            return False

    def is_applied(self, module: nn.Module) -> bool:
        return _stock_of.get(type(module)) is self.stock

    def reason_to_skip(self, module: nn.Module) -> str | None:
        return (
            foreign_class(module, self.stock)
            or foreign_override(module, *(name for source in self.sources for name in source.methods))
            or unknown_source(*self.sources)
            or self.check(module)
        )

    def apply(self, module: nn.Module) -> None:
        change_class(module, self.fused)

    def undo(self, module: nn.Module) -> None:
        restore_class(module)


# Fused class -> the stock class that it stands for.
_stock_of: dict[type[nn.Module], type[nn.Module]] = {}


def register_fused(fused: type[nn.Module], stock: type[nn.Module]) -> None:
    """Say that ``fused`` stands for ``stock``, by the same name.

    Regional compilation, device maps and LoRA trainers know modules by their classes' names. Pickle
    goes by ``__qualname__``.
    """
    fused.__name__ = stock.__name__
    _stock_of[fused] = stock


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, or the one that a fused class stands for."""
    return _stock_of.get(type(module), type(module))


def restore_class(module: nn.Module) -> None:
    """Give ``module`` its stock class again, if its class is a fused one."""
    stock = _stock_of.get(type(module))
    if stock is not None:
        change_class(module, stock)


def is_over_fused(module: nn.Module) -> bool:
    """True if other code has derived the class of ``module`` from a fused one."""
    cls = type(module)
    return cls not in _stock_of and any(base in _stock_of for base in cls.__mro__)


def is_about(module: nn.Module, *stock: type[nn.Module]) -> bool:
    """True if ``module`` is of a ``stock`` class or of one that other code derived from it.

    Upstream's own subclasses of its classes are other models and their parts: nobody expects them
    to be fused, and a report that lists them would say nothing.
    """
    cls = type(module)
    if cls in stock:
        return True
    return issubclass(cls, stock) and not (_is_upstreams(cls) and _is_upstreams(stock[0]))


def _is_upstreams(cls: type) -> bool:
    return cls.__module__.startswith(("diffusers.", "comfy."))


def foreign_class(module: nn.Module, *stock: type[nn.Module]) -> str | None:
    """The reason to skip if the class of ``module`` is none of ``stock`` but derived from one."""
    cls = type(module)
    if cls in stock or cls in _stock_of:
        return None
    name = f"{cls.__module__}.{cls.__qualname__}"
    if is_over_fused(module):
        return f"other code changed its fused class to {name}"
    base = next(base for base in cls.__mro__ if base in stock)
    return f"its class {name} is a subclass of {base.__name__}"


def foreign_override(module: nn.Module, *methods: str) -> str | None:
    """The reason if someone replaced the instance's ``forward``, which makes a class swap dead code.

    ``methods``: others that the fused class does not call, or whose work it relies upon.
    """
    if has_foreign_forward(module):
        owner = "accelerate's hooks" if hasattr(module, "_hf_hook") else "other code"
        return f"{owner} replaced this instance's forward"
    replaced = next((name for name in methods if name != "forward" and name in vars(module)), None)
    return None if replaced is None else f"other code replaced this instance's {replaced}"


def is_unhooked(module: nn.Module) -> bool:
    """True if calling ``module`` does nothing but its class's forward: no hooks, no override.

    Asked at each call: hooks may come later.
    """
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_foreign_forward(module)
        or has_any_global_hook()
    )


_ACTIVATION_NAMES: dict[type[nn.Module], str] = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Identity: "identity"}


def activation_of(module: nn.Module, stock: type[nn.Module] | None = None) -> str | None:
    """Name under which an activation module can be fused, or None.

    Exact types only: a subclass may compute something else. ``stock``: the type that the module's own
    stands for.
    """
    kind = stock or type(module)
    name = _ACTIVATION_NAMES.get(kind)
    if name is None and kind is nn.GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(module.approximate))
    return name


def activation_reason(act: nn.Module, *kinds: type[nn.Module]) -> str | None:
    """Why an activation module cannot be fused, or None. ``kinds``: those that alone can be here."""
    if activation_of(act) is not None and (not kinds or type(act) in kinds):
        return None
    return f"activation {type(act).__name__} has no fused form"
