"""What a captured graph took from a model's Python state, and a quick check that none of it changed.

A CUDA graph repeats kernels with the addresses and numbers of its capture. Whatever decides these is
watched: the modules and their classes; every attribute of each; hooks; parameters and buffers by
identity, storage and address; and what hangs on the attributes (attention processors, LoRA's dicts of
scales, lists), as deep as it goes. A replay reads what is written into tensors in place, so that needs
no watch. Tensors that stay on the CPU do: Python or a kernel's arguments have taken their values over.
A model with code of unknown origin is not captured, because that may keep its state anywhere. A function
comes from where its code was written: ``functools.wraps`` copies the name of another module.

Not seen: class attributes and module-level functions that are replaced, and a ``.data`` that becomes
another view of the same memory. Nor is a number or a list whose place an equal one of a user's class takes.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.patches.core.class_forward import has_foreign_forward
from sdfastgn.patches.core.instance_entries import GUARDS
from sdfastgn.patches.graphs.changes import Place, changed, difference_of, joined
from sdfastgn.patches.graphs.comparisons import (
    Attributes,
    Cells,
    Empty,
    Identities,
    Memory,
    Numbers,
    Types,
    Values,
    Writes,
)

__all__ = ["Watch"]

# Packages whose classes keep the state of a call in tensors and attributes. Others may keep it in
# closures or globals.
_TRUSTED = sys.stdlib_module_names | {
    "torch",
    "diffusers",
    "peft",
    "accelerate",
    "transformers",
    "comfy",
    "sdfastgn",
}
_TENSOR_TYPES = (Tensor, nn.Parameter)
_NUMBERS_AND_NAMES = (bool, int, float, complex, str, bytes, range, type(None))
_KINDS_OF_TENSORS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Compared by value, and hold nothing else that would have to be watched.
_LEAVES = (*_NUMBERS_AND_NAMES, *_KINDS_OF_TENSORS, type, types.ModuleType, weakref.ref)
_LEAVES_OF_NO_PACKAGE = frozenset((*_NUMBERS_AND_NAMES, *_KINDS_OF_TENSORS, weakref.ref))
# NumPy's numbers are leaves, because they are Python's float and complex. Its arrays are not.
_TRUSTED_LEAVES = _TRUSTED | {"numpy"}
_CONTAINERS = (dict, list, tuple, set, frozenset)
_BOUND = (types.MethodType, types.BuiltinFunctionType)
# What functions, methods and partials hold besides their ``__dict__``.
_PARTS = ("__self__", "__func__", "func", "args", "keywords", "__closure__", "__defaults__", "__kwdefaults__")
# What such an object holds cannot be asked for, or differs by thread.
_HIDDEN = (type(functools.lru_cache(len)), threading.local)
# Objects of one model, a bound on the time of a check.
_MAX_OBJECTS = 50_000
# Elements up to which a tensor on the CPU is compared by value; larger ones by their count of writes.
_FEW = 16

_OUR_ENTRY = "forward"
# What is in the dicts of each module that hold its parts.
_ENTRIES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Every module has these. Of them only three matter to a forward without gradients besides the
# hooks, which are watched as dicts. What stands for ``_apply`` (core/channels_last.py) moves
# weights, and their new memory is seen; what guards copies (core/instance_entries.py) is for those.
_INERT = frozenset((*vars(nn.Module()), "_apply", *GUARDS)) - {"training", "_parameters", "_modules"}


class Watch:
    """State of the tree below ``root``. Holds the watched objects, so no id is reused, but not ``root``.

    The memory of tensors is not held: a model that moves away frees it. Storages are known by weak
    references, which a new storage at an old address does not satisfy.

    Args:
        root: the module that is captured. Its own forward hooks run outside the graph and are not
            watched.
        is_harmless: of a function: true if inner modules may have it as a forward hook, because
            what it does is in the graph.
        device: of the capture. Tensors on the CPU that are not its own are watched for what is
            written into them.

    Attributes:
        reason: why the tree must not be captured, or None. ``unchanged`` then says whether what led
            to the reason is still so.
    """

    def __init__(
        self,
        root: nn.Module,
        is_harmless: Callable[[Any], bool] = lambda hook: False,
        device: torch.device | None = None,
    ) -> None:
        self.reason: str | None = None
        self._is_harmless = is_harmless
        self._is_elsewhere = device is not None and device.type != "cpu"
        self._seen: set[int] = set()
        self._objects: list[Any] = []  # visited, alive while their ids are in _seen
        self._keys: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._lora_scales: set[int] = set()  # ids of the dicts with the scales of LoRA layers
        self._empty, self._types, self._held = Empty(), Types(), Identities()
        self._memory, self._numbers, self._writes = Memory(), Numbers(), Writes()
        self._cells, self._attributes, self._plain = Cells(), Attributes(_INERT, _ENTRIES), Values()
        # The quickest first. No tensor is read before its memory is known to be there.
        self._comparisons: tuple[Comparison, ...] = (
            self._empty, self._types, self._held, self._memory, self._numbers, self._writes, self._cells,
            self._attributes, self._plain,
        )  # fmt: skip
        self._root_type = type(root)
        self._walk(root)
        for only_for_the_walk in (self._seen, self._objects, self._keys, self._lora_scales):
            only_for_the_walk.clear()
        self._root_values = _own_values(root)
        if self.reason is not None:  # some of them may have no address
            for tensors in (self._memory, self._numbers, self._writes):
                tensors.clear()
        for comparison in self._comparisons:
            comparison.freeze()
        self._checks = [comparison.same for comparison in self._comparisons]

    def is_in_place(self) -> bool:
        """True if all memory that a graph reads is there: no other change makes a replay unsafe.

        Tensors are held, so what lies at the address of one is its own.
        """
        return self._memory.is_in_place()

    def writes(self) -> list[int]:
        """How often each tensor was written into; inference tensors, which do not count it, left out."""
        return [tensor._version for tensor in self._memory.tensors if not tensor.is_inference()]

    def unchanged(self, root: nn.Module) -> bool:
        """True if everything is as it was.

        The comparisons run in C: SDXL's 1900 modules take less than a millisecond.
        """
        try:
            return (
                type(root) is self._root_type
                and all(same() for same in self._checks)
                and _same(_own_values(root), self._root_values)
            )
        except Exception:
            # An attribute is gone, a container changed while it was read, a tensor took the place
            # of a number: whatever it is, it is new.
            return False

    def what_changed(self, root: nn.Module) -> str:
        """The first difference that is found, in words. Slow: for after ``unchanged`` said False."""
        if type(root) is not self._root_type:
            return changed("the class of the model", self._root_type, type(root))
        for comparison in self._comparisons:
            with contextlib.suppress(Exception):  # as in ``unchanged``; the next one may know more
                found = comparison.difference()
                if found is not None:
                    return found
        before, now = (
            dict(zip(v[::2], v[1::2], strict=True)) for v in (self._root_values, _own_values(root))
        )
        own = difference_of(Place("", "attribute", {}, ()), before, now, operator.is_)
        return own or "something in the model changed"

    def _walk(self, root: nn.Module) -> None:
        todo: list[tuple[str, Any]] = [("", root)]
        while todo and self.reason is None:
            path, value = todo.pop()
            if type(value) in _LEAVES_OF_NO_PACKAGE or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._objects.append(value)
            if len(self._seen) > _MAX_OBJECTS:
                self.reason = f"it has more than {_MAX_OBJECTS} objects to watch"
            elif isinstance(value, Tensor):
                self._see_tensor(path, value)
            elif isinstance(value, nn.Module):
                todo += self._see_module(path, value, is_root=value is root)
            elif isinstance(value, types.CellType):
                self._cells.add(value, path)
                todo.append((path, value.cell_contents))
            elif type(value) in _CONTAINERS:
                todo += self._see_container(path, value)
            elif self._is_trusted(path, value) and not isinstance(value, _LEAVES):
                todo += self._see_object(path, value)

    def _place(self, name: str, kind: str, container: Any) -> Place:
        keys = tuple(container) if isinstance(container, dict) else ()
        # Modules of one class share the names of their attributes. A tuple for each would scatter over
        # memory what the comparisons read.
        return Place(name, kind, container, self._keys.setdefault(keys, keys))

    def _is_trusted(self, path: str, value: Any) -> bool:
        package = _package_of(value)
        if package not in (_TRUSTED_LEAVES if isinstance(value, _LEAVES) else _TRUSTED):
            name = (value if isinstance(value, (types.FunctionType, type)) else type(value)).__qualname__
            self.reason = f"{path or 'it'} has {name} of {package}, whose state cannot be watched"
        return self.reason is None

    def _see_object(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, _CONTAINERS):
            return self._see_container(path, value)
        found = [(joined(path, name), getattr(value, name)) for name in _PARTS if hasattr(value, name)]
        if isinstance(value, _BOUND):
            return found
        if isinstance(value, _HIDDEN) or not hasattr(value, "__dict__") or _has_slots(type(value)):
            self.reason = f"{path or 'it'} has a {type(value).__qualname__}, whose state cannot be watched"
        self._types.add(value, path)
        return found + self._see_container(path, vars(value), "attribute") if self.reason is None else []

    def _see_tensor(self, path: str, tensor: Tensor) -> None:
        if type(tensor) not in _TENSOR_TYPES or tensor.device.type == "meta":
            self.reason = f"{path} is a {type(tensor).__name__} on {tensor.device}"
            return
        self._memory.add(tensor, path)
        # One without dimensions is an argument of kernels wherever the others are.
        if tensor.device.type != "cpu" or (tensor.dim() and not self._is_elsewhere):
            return
        if tensor.numel() <= _FEW:
            self._numbers.add(tensor, path)
        elif tensor.is_inference():
            self.reason = f"{path} is on the CPU and does not count what is written into it"
        else:
            self._writes.add(tensor, path)

    def _see_module(self, path: str, module: nn.Module, *, is_root: bool) -> list[tuple[str, Any]]:
        attributes = vars(module)
        if not is_root:
            # Before any reason is found: its end has to be seen too.
            self._types.add(module, path)
            self._see_attributes(path, attributes)
            self._see_hooks(path, module)
        self.reason = self.reason or _reason_of(path or "it", module, is_root=is_root)
        if self.reason is not None or not self._is_trusted(path, module):
            return []
        if "scaling" in attributes and _is_lora(module):
            self._lora_scales.add(id(attributes["scaling"]))
        found: list[tuple[str, Any]] = []
        for name, kind in _ENTRIES.items():
            entries = attributes[name]
            place = self._place(path, kind, entries)
            (self._held if entries else self._empty).add(entries.values() if entries else entries, place)
            found += ((joined(path, key), value) for key, value in entries.items())
        inert = {*_INERT, *_ENTRIES, _OUR_ENTRY}
        return found + [(joined(path, key), value) for key, value in attributes.items() if key not in inert]

    def _see_attributes(self, path: str, attributes: dict[str, Any]) -> None:
        place = self._place(path, "attribute", attributes)
        self._attributes.add(place)
        if any(isinstance(value, Tensor) for value in attributes.values()):
            self._held.add(attributes.values(), place)

    def _see_hooks(self, path: str, module: nn.Module) -> None:
        for name in _FORWARD_HOOKS:
            hooks = getattr(module, name)
            place = self._place(path, "forward hook", hooks)
            (self._plain if hooks else self._empty).add(hooks.values() if hooks else hooks, place)
            if not all(map(self._is_harmless, hooks.values())):
                self.reason = f"there is a forward hook on {path}"

    def _see_container(self, path: str, value: Any, kind: str = "item") -> list[tuple[str, Any]]:
        """``kind``: of the items, as in ``Place``."""
        place = self._place(path, "LoRA scale" if id(value) in self._lora_scales else kind, value)
        pairs = list(dict.items(value) if isinstance(value, dict) else enumerate(value))
        if isinstance(value, (dict, list, set)):
            if isinstance(value, dict):
                self._plain.add(value, None)  # its keys
            has_tensors = any(isinstance(item, Tensor) for _, item in pairs)
            if not pairs:
                self._empty.add(value, place)
            else:
                (self._held if has_tensors else self._plain).add(
                    dict.values(value) if isinstance(value, dict) else value, place
                )
        found = [(place.child(key), item) for key, item in pairs]
        # diffusers' configs are dicts that keep attributes besides.
        return found + (
            self._see_container(path, vars(value), "attribute") if hasattr(value, "__dict__") else []
        )


class Comparison(Protocol):
    """One kind of state of the model: comparisons.py."""

    def freeze(self) -> None: ...

    def same(self) -> bool: ...

    def difference(self) -> str | None: ...


def _reason_of(path: str, module: nn.Module, *, is_root: bool) -> str | None:
    """Why a tree with this module in it cannot be captured, whatever its attributes hold."""
    attributes = vars(module)
    if isinstance(module, torch.jit.ScriptModule):
        return f"{path} is compiled by TorchScript"
    if attributes.get("_compiled_call_impl") is not None or type(module).__module__.startswith(
        "torch._dynamo"
    ):
        return f"{path} is compiled by torch.compile"
    if "_hf_hook" in attributes:
        return f"accelerate's hooks are on {path}"
    if not is_root and has_foreign_forward(module):
        return f"other code replaced the forward of {path}"
    return None


def _package_of(value: Any) -> str:
    """The package that the code of ``value`` is from, or of its class."""
    if isinstance(value, types.FunctionType):
        name = value.__globals__.get("__name__")
    elif isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, type) else type(value)).__module__
    return (name or "?").partition(".")[0]


def _is_lora(module: nn.Module) -> bool:
    return any(base.__module__.startswith("peft.tuners.lora.") for base in type(module).__mro__)


def _has_slots(kind: type) -> bool:
    """True if objects of ``kind`` keep attributes outside of their ``__dict__``."""
    slots = chain.from_iterable(vars(base).get("__slots__", ()) for base in kind.__mro__)
    return not {"__dict__", "__weakref__"}.issuperset(slots)


def _own_values(root: nn.Module) -> list[Any]:
    # Not through a kept reference to the dict: a dropped model has to go at once, not with
    # the next garbage collection.
    return [v for pair in vars(root).items() if pair[0] != _OUR_ENTRY and pair[0] not in _INERT for v in pair]


def _same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))
