"""Changes the class of a module, and replaces its old bound ``forward`` wherever other code keeps it.

Hooks of accelerate and diffusers, and wrappers of other code, keep the module's bound method ``forward`` so
that they can call it. When such a hook is removed, it puts the method into the instance's ``__dict__``. If
the module's class changes, the kept method still runs the code of the old class, and a ``super()`` call in
that code could fail.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from sdfastgn.patches.swap.instance_entries import InstanceEntry, guard, unguard

# A module's bound method ``forward``, or the object with CUDA graphs that replaces this method.
Forward = Callable[..., Any]
Entry = TypeVar("Entry", bound="MethodEntry")

_CALLABLES = (types.MethodType, types.FunctionType, functools.partial)
_OPAQUE = (nn.Module, Tensor, type, types.ModuleType, str, int, float, type(None))
# Maximum number of objects that are searched for a kept ``forward``. Hooks and wrappers keep it only a few
# references away from the module, so the search finds it long before this limit.
_MAX_OBJECTS = 1000


def class_forward(module: nn.Module, name: str = "forward") -> types.MethodType:
    """The method ``name`` of the class of ``module``, bound to ``module``."""
    return types.MethodType(getattr(type(module), name), module)


class MethodEntry(InstanceEntry):
    """An object in a module's ``__dict__`` that replaces a method of this module, such as ``forward``.

    To other code it looks like the method. ``put`` registers the object, so that it can be found by its
    module.

    Args:
        module: the module.
        method: the name of the method.
        replaces_entry: True if the module's ``__dict__`` already had an entry ``method`` with the method of
            the module's own class. ``take_off`` puts the method there again.

    Attributes:
        is_on: False after ``take_off``. If other code still calls this object then, it calls the class's
            method.
    """

    __slots__ = ("is_on", "method", "replaces_entry")

    def __init__(self, module: nn.Module, method: str = "forward", replaces_entry: bool = False) -> None:
        super().__init__(module)
        self.method, self.replaces_entry, self.is_on = method, replaces_entry, True

    @classmethod
    def of(cls: type[Entry], module: nn.Module) -> Entry | None:
        """The object of exactly this class that runs calls of ``module``; None if there is none.

        Other code may have wrapped the object.
        """
        found = [each for each in cls.all_of(module) if type(each) is cls]
        if not found:
            return None
        place = place_in(module, found[-1].method)
        is_taken_out = place is not None and vars(module).get(place) is not found[-1]
        return None if is_taken_out else found[-1]

    def put(self, place: str) -> None:
        """Let this object run the calls of its module.

        ``place``: its key in the module's ``__dict__``, as ``place_in`` has returned it.
        """
        self.is_on = True
        self.register()
        vars(self.module)[place] = self
        guard(self.module)

    def take_off(self) -> None:
        """Let the module run its own method again instead of this object."""
        module, self.is_on = self.module, False
        self.unregister()
        if vars(module).get(self.method) is self and not self.replaces_entry:
            del vars(module)[self.method]
        # A hook of another library may have kept this object, in order to call it or to put it back later.
        # So the method of the class replaces this object in such hooks too.
        replace_kept(module, self, class_forward(module, self.method))  # type: ignore[arg-type]
        unguard(module)

    def moved(self) -> None:
        """A method for subclasses. It is called after the module was moved to another device or dtype.

        The module may have been moved as a part of another module.
        """

    # ``inspect.signature`` reads ``__wrapped__``, and torch.export reads the other properties.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return class_forward(self.module, self.method)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return getattr(type(self.module), self.method)

    @property
    def __code__(self) -> types.CodeType:
        return self.__func__.__code__


def has_foreign_forward(module: nn.Module, name: str = "forward") -> bool:
    """True if other code has replaced the method ``name`` of the instance ``module``.

    That is, the ``__dict__`` of ``module`` has an entry ``name`` other than the bound method of its class.
    Entries of sdfastgn, which run this method in the end, do not count.
    """
    if name not in module.__dict__:
        return False
    forward = module.__dict__[name]
    if isinstance(forward, InstanceEntry):
        return False
    # ``forward == class_forward(module)`` would be simpler. But torch.compile traces this function, and it
    # cannot trace ``class_forward``, which creates a method. So the parts of the method are compared.
    is_own = isinstance(forward, types.MethodType) and forward.__func__ is getattr(type(module), name)
    return not (is_own and forward.__self__ is module)


def place_in(module: nn.Module, method: str = "forward") -> str | None:
    """The key in the module's ``__dict__`` under which an object can replace ``method``.

    None if other code has replaced the method. If accelerate offloads the model as a whole, its hook replaces
    ``forward``, and calls the entry ``_old_forward`` after it has moved the weights. Then the key is
    "_old_forward".
    """
    if not has_foreign_forward(module, method):
        return method
    kept = vars(module).get("_old_forward")
    is_kept = isinstance(kept, MethodEntry) or kept == class_forward(module)
    return "_old_forward" if method == "forward" and is_kept and is_offloaded_whole(module) else None


def is_offloaded_whole(module: nn.Module) -> bool:
    """True if accelerate's hook ``CpuOffload`` is on ``module``, as after ``enable_model_cpu_offload``.

    Before a call of ``module``, this hook moves all weights of ``module`` to the GPU, unless they are there.
    The weights stay on the GPU until the next model of the pipeline is called or the image is done. The hook
    keeps the ``forward`` that it wraps as the attribute ``_old_forward`` of ``module``.
    """
    # ``getattr`` also finds the hook if ``torch.compile`` has wrapped the model. The hook is an attribute of
    # the wrapped module then.
    hook = type(getattr(module, "_hf_hook", None))
    return (hook.__module__, hook.__qualname__) == ("accelerate.hooks", "CpuOffload")


def accelerate_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that accelerate has put on ``module``, for example to offload it; empty without any."""
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` the class ``cls``, and replace its old ``forward`` wherever other code keeps it."""
    old = class_forward(module)
    module.__class__ = cls
    new = class_forward(module)
    if new != old:
        replace_kept(module, old, new)


def replace_kept(module: nn.Module, old: Forward, new: Forward) -> None:
    """Replace the ``forward`` ``old`` by ``new`` wherever ``module``, its hooks or its wrappers keep it."""
    attributes = vars(module)
    _replace(attributes, old, new)
    todo = [value for name, value in attributes.items() if name == "forward" or isinstance(value, _CALLABLES)]
    seen: set[int] = set()
    for value in todo:  # breadth first: objects that are found are appended to ``todo`` during the loop
        if len(seen) < _MAX_OBJECTS and id(value) not in seen and not isinstance(value, _OPAQUE):
            seen.add(id(value))
            todo += _rebound(value, old, new)


def _rebound(value: Any, old: Forward, new: Forward) -> list[Any]:
    """Replace ``old`` by ``new`` in ``value``, and return the objects that ``value`` refers to."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if type(value) is dict:
        return _replace(value, old, new)
    kept: list[Any] = []
    if type(value) is list:
        for i in [i for i, part in enumerate(value) if _same(part, old)]:
            value[i] = new
        kept += value
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            # Reading a variable of a closure that was not set yet raises ValueError.
            with contextlib.suppress(ValueError):
                if _same(cell.cell_contents, old):
                    cell.cell_contents = new
                kept.append(cell.cell_contents)
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args]
        if any(_same(part, old) for part in parts):
            func, *args = (new if _same(part, old) else part for part in parts)
            value.__setstate__((func, tuple(args), value.keywords, vars(value)))  # type: ignore[attr-defined]
        kept += [*parts, *_replace(value.keywords, old, new)]
    attributes = getattr(value, "__dict__", None)
    return kept + _replace(attributes, old, new) if isinstance(attributes, dict) else kept


def _replace(values: dict[Any, Any], old: Forward, new: Forward) -> list[Any]:
    """Replace ``old`` by ``new`` among the values of a dict, and return all its values."""
    for key in [key for key, value in values.items() if _same(value, old)]:
        values[key] = new
    return list(values.values())


def _same(value: Any, forward: Forward) -> bool:
    return type(value) is type(forward) and bool(value == forward)
