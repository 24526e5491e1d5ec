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

    ``undo`` reverts ``apply``. Both change only the given module and, if need be, its children.
    """

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[TestedSource, ...]:
        """Upstream methods that the fusion replaces or relies upon."""

    def claims(self, module: nn.Module) -> bool:
        """True if a report lists ``module`` under this fusion: as fused, fusable, or skipped."""

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
    """A fusion that changes the class of one instance to ``fused``, a subclass of ``stock``.

    ``fused`` adds no attributes, so undo, deepcopy and pickle need nothing but the class. Other instances
    of ``stock`` stay as they are.

    Args:
        name: the fusion's name in reports.
        stock: exact type that is fused; a subclass may compute something else and is skipped.
        fused: its replacement, defined at the top level of a module (pickle).
        sources: upstream methods that ``fused`` replaces or relies upon; they must be known.
        check: reason to skip that depends on the instance.
        covers: False for an instance whose settings make ``stock`` do something that has no fused form. Such
            an instance is not claimed.
        layers: paths of the children that ``fused`` replaces by kernels. If such a child has an adapter,
            ``fused`` calls it as stock does, and the report names the child.
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
        except AttributeError:  # a subclass whose own __init__ sets other attributes
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


# Fused class -> the stock class that it replaces.
_stock_of: dict[type[nn.Module], type[nn.Module]] = {}


def register_fused(fused: type[nn.Module], stock: type[nn.Module]) -> None:
    """Note that ``fused`` replaces ``stock``, and give it the same ``__name__``.

    Regional compilation, device maps and LoRA trainers find modules by this name. Pickle uses
    ``__qualname__``, which stays the fused class's own.
    """
    fused.__name__ = stock.__name__
    _stock_of[fused] = stock


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``; if that is a fused class, the stock class that it replaces."""
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
    """True if the class of ``module`` is a ``stock`` class, or one that other code derived from it.

    False for subclasses that diffusers or ComfyUI define themselves. They belong to other models, so
    reports do not list them.
    """
    cls = type(module)
    if cls in stock:
        return True
    return issubclass(cls, stock) and not (_is_upstreams(cls) and _is_upstreams(stock[0]))


def _is_upstreams(cls: type) -> bool:
    return cls.__module__.startswith(("diffusers.", "comfy."))


def foreign_class(module: nn.Module, *stock: type[nn.Module]) -> str | None:
    """The reason to skip ``module`` if its class is only derived from one of ``stock``; else None."""
    cls = type(module)
    if cls in stock or cls in _stock_of:
        return None
    name = f"{cls.__module__}.{cls.__qualname__}"
    if is_over_fused(module):
        return f"other code changed its fused class to {name}"
    base = next(base for base in cls.__mro__ if base in stock)
    return f"its class {name} is a subclass of {base.__name__}"


def foreign_override(module: nn.Module, *methods: str) -> str | None:
    """The reason to skip ``module`` if other code has put a ``forward`` into the instance; else None.

    The fused class's ``forward`` would then never run.

    Args:
        module: the module.
        methods: further methods that must not be replaced in the instance, because the fused class does not
            call them or relies on what they do.
    """
    if has_foreign_forward(module):
        owner = "accelerate's hooks" if hasattr(module, "_hf_hook") else "other code"
        return f"{owner} replaced this instance's forward"
    replaced = next((name for name in methods if name != "forward" and name in vars(module)), None)
    return None if replaced is None else f"other code replaced this instance's {replaced}"


def is_unhooked(module: nn.Module) -> bool:
    """True if a call of ``module`` runs its class's forward and nothing else: no hooks, no override.

    Fused code asks at each call, because hooks may be added at any time.
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

    Only exact classes have one, because a subclass may compute something else. ``stock``: the class of
    ``module`` before it was fused; None if it was not.
    """
    kind = stock or type(module)
    name = _ACTIVATION_NAMES.get(kind)
    if name is None and kind is nn.GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(module.approximate))
    return name


def activation_reason(act: nn.Module, *kinds: type[nn.Module]) -> str | None:
    """Why an activation module cannot be fused, or None.

    ``kinds``: the classes that can be fused here; by default all that have a fused form.
    """
    if activation_of(act) is not None and (not kinds or type(act) in kinds):
        return None
    return f"activation {type(act).__name__} has no fused form"
