"""Defines a fusion: an object that finds modules it can make faster, changes them, and undoes the change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import has_any_global_hook
from sdfastgn.patches.swap.class_forward import change_class, has_foreign_forward
from sdfastgn.patches.swap.tested_sources import TestedSource, unknown_source


class Fusion(Protocol):
    """One entry of the list in ``registry.py``: how to make modules of certain classes faster.

    ``apply`` changes a module, and ``undo`` reverts this exactly. Both change only the given module and, if
    need be, its children.
    """

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[TestedSource, ...]:
        """The methods of diffusers or ComfyUI that the fusion replaces or relies on."""

    def claims(self, module: nn.Module) -> bool:
        """True if ``sdfastgn.report`` lists ``module`` under this fusion: as fused, fusable, or skipped."""

    def is_applied(self, module: nn.Module) -> bool: ...

    def reason_to_skip(self, module: nn.Module) -> str | None:
        """Why ``module`` cannot be fused; None if it can.

        This method is called only for modules that the fusion claims and that are not fused.
        """

    def apply(self, module: nn.Module) -> None: ...

    def undo(self, module: nn.Module) -> None: ...


def _no_reason(_: Any) -> str | None:
    return None


def _everything(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class ClassSwap:
    """A fusion that changes the class of a module from ``stock`` to ``fused``, a subclass of ``stock``.

    A class swap changes one instance; other instances of ``stock`` stay as they are. ``fused`` adds no
    attributes, so undo, deepcopy and pickle only have to deal with the class.

    Args:
        name: the fusion's name in reports.
        stock: the exact class whose instances are fused. Instances of a subclass may compute something else,
            so they are skipped.
        fused: the subclass that replaces ``stock``. It is defined at the top level of a Python module, where
            pickle finds it.
        sources: the methods of diffusers or ComfyUI that ``fused`` replaces or relies on. An instance is only
            fused if the installed code of all these methods was tested.
        check: called with an instance. Returns the reason to skip it, or None.
        covers: called with an instance. Returns False if ``fused`` cannot compute what ``stock`` computes
            with the instance's settings. Then the fusion does not claim the instance.
    """

    name: str
    stock: type[nn.Module]
    fused: type[nn.Module]
    sources: tuple[TestedSource, ...] = ()
    check: Callable[[Any], str | None] = _no_reason
    covers: Callable[[Any], bool] = _everything

    def __post_init__(self) -> None:
        register_fused(self.fused, self.stock)

    def claims(self, module: nn.Module) -> bool:
        if not is_about(module, self.stock):
            return False
        try:
            return self.is_applied(module) or self.covers(module)
        except AttributeError:  # a user's subclass may lack an attribute that ``covers`` reads
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


# Fused class -> the class of diffusers, ComfyUI or PyTorch that the fused class replaces.
_stock_of: dict[type[nn.Module], type[nn.Module]] = {}


def register_fused(fused: type[nn.Module], stock: type[nn.Module]) -> None:
    """Record that ``fused`` replaces ``stock``, and give ``fused`` the ``__name__`` of ``stock``.

    Regional compilation, device maps and LoRA trainers find modules by ``__name__``. Pickle finds the fused
    class by its ``__qualname__``, which is not changed.
    """
    fused.__name__ = stock.__name__
    _stock_of[fused] = stock


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``. If this is a fused class, the original class that the fused class replaces."""
    return _stock_of.get(type(module), type(module))


def restore_class(module: nn.Module) -> None:
    """Give ``module`` its original class again if it has a fused class; else do nothing."""
    stock = _stock_of.get(type(module))
    if stock is not None:
        change_class(module, stock)


def is_over_fused(module: nn.Module) -> bool:
    """True if other code has given ``module`` a class that it derived from the fused class."""
    cls = type(module)
    return cls not in _stock_of and any(base in _stock_of for base in cls.__mro__)


def is_about(module: nn.Module, *stock: type[nn.Module]) -> bool:
    """True if the class of ``module`` is one of the classes ``stock``, or a user's subclass of one of them.

    False if both the class in ``stock`` and its subclass come from diffusers or ComfyUI. Such a subclass
    belongs to another kind of model, and reports do not list it.
    """
    cls = type(module)
    if cls in stock:
        return True
    return issubclass(cls, stock) and not (_is_upstreams(cls) and _is_upstreams(stock[0]))


def _is_upstreams(cls: type) -> bool:
    return cls.__module__.startswith(("diffusers.", "comfy."))


def foreign_class(module: nn.Module, *stock: type[nn.Module]) -> str | None:
    """Why ``module`` is skipped because of its class, a subclass of one of the classes ``stock``.

    None if its class is one of the classes ``stock``, or a fused class. A class that other code has derived
    from a fused class is a reason too.
    """
    cls = type(module)
    if cls in stock or cls in _stock_of:
        return None
    name = f"{cls.__module__}.{cls.__qualname__}"
    if is_over_fused(module):
        return f"other code changed its fused class to {name}"
    base = next(base for base in cls.__mro__ if base in stock)
    return f"its class {name} is a subclass of {base.__name__}"


def foreign_override(module: nn.Module, *methods: str) -> str | None:
    """Why ``module`` is skipped, if other code replaced its ``forward`` or one of ``methods``; else None.

    Only replacements in the ``__dict__`` of the instance are looked for. With a ``forward`` there, the
    ``forward`` of the fused class would never run.

    Args:
        module: the module.
        methods: names of other methods that must not be replaced either. The fused class would not call the
            replacement, or relies on what the original method does.
    """
    if has_foreign_forward(module):
        owner = "accelerate's hooks" if hasattr(module, "_hf_hook") else "other code"
        return f"{owner} replaced this instance's forward"
    replaced = next((name for name in methods if name != "forward" and name in vars(module)), None)
    return None if replaced is None else f"other code replaced this instance's {replaced}"


def is_unhooked(*modules: nn.Module, except_for: Sequence[Callable[..., Any]] = ()) -> bool:
    """True if calling any of ``modules`` runs the forward of its class and nothing else.

    That is, there are no hooks on the modules, no global module hooks, and other code has put no ``forward``
    into a module's ``__dict__``. Fused code checks this at each call, because hooks may be added at any time.

    ``except_for``: forward hooks and forward pre-hooks that are allowed. If a module has one, a call runs it
    too.
    """
    for module in modules:
        # Reading hooks from ``module.__dict__`` takes two thirds of the time of ``module._forward_hooks``.
        own = module.__dict__
        if (
            (own["_forward_hooks"] and _has_others(own["_forward_hooks"], except_for))
            or (own["_forward_pre_hooks"] and _has_others(own["_forward_pre_hooks"], except_for))
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or ("forward" in own and has_foreign_forward(module))
        ):
            return False
    return not has_any_global_hook()


def _has_others(hooks: dict[int, Any], allowed: Sequence[Any]) -> bool:
    return any(hook not in allowed for hook in hooks.values())


def kernels_may_run(x: Tensor, dim: int) -> bool:
    """True if kernels may run on x: its dtype and device fit, it has ``dim`` axes and is not empty, and
    gradients, compilers, traces, dispatch modes and autocast are off.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (dim, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )


def drops_nothing(layer: Any) -> bool:
    """True if ``layer`` is a Dropout whose call would only return its input."""
    return type(layer) is nn.Dropout and not (layer.training and layer.p) and is_unhooked(layer)


def dropped_out(layer: Any, x: Tensor) -> Tensor:
    """Returns ``layer(x)``. A Dropout that would only return x is not called."""
    return x if drops_nothing(layer) else layer(x)


def layer_of(module: nn.Module, name: str) -> Any:
    """Returns the submodule ``name`` of ``module``, in a third of the CPU time of ``getattr``.

    Other code may have put a function in the submodule's place, as an entry of the instance's ``__dict__``.
    Then the function is returned.
    """
    own = module.__dict__
    modules = own["_modules"]
    return modules[name] if name in modules and name not in own else getattr(module, name)


def parameters_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Returns ``(layer.weight, layer.bias)``, in a quarter of the CPU time of reading both attributes."""
    own = layer.__dict__
    parameters = own["_parameters"]
    if "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own:
        return parameters["weight"], parameters["bias"]
    # The weight may not be in ``_parameters``: FSDP, for example, turns it into a plain attribute.
    return layer.weight, layer.bias


_ACTIVATION_NAMES: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    nn.Mish: "mish",
    nn.Identity: "identity",
}


# For functions that run a norm and then an activation: the activation to pass if no activation follows.
IDENTITY = nn.Identity()


def activation_of(module: nn.Module, stock: type[nn.Module] | None = None) -> str | None:
    """The name by which kernels know the activation that ``module`` computes; None if no kernel computes it.

    None also for a subclass of a known activation, because it may compute something else. ``stock``: the
    class that ``module`` had before it was fused; None if it is not fused.
    """
    kind = stock or type(module)
    name = _ACTIVATION_NAMES.get(kind)
    if name is None and kind is nn.GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(module.approximate))
    return name


def activation_reason(act: nn.Module, *kinds: type[nn.Module]) -> str | None:
    """Why the activation module ``act`` cannot be fused; None if it can.

    ``kinds``: the activation classes that the caller can fuse. If it is empty, the caller can fuse every
    activation that the kernels compute.
    """
    if activation_of(act) is not None and (not kinds or type(act) in kinds):
        return None
    return f"activation {type(act).__name__} has no fused form"
