"""Finds out whether code of an unknown package could compute something else in the next call of a model.

It could if it sets globals, attributes or variables of its closure, if it refers to an object that may change
and lives longer than a call, or if it asks for random numbers or the time. Nothing is run.

Lists, dicts and sets that live longer than a call may be tables of constants, or caches. So their items are
compared: a ``CodeState`` notices when the items change, and undoes changes that a trace of the model makes.
It also notices when a global that such code reads gets another value. Containers in attributes of modules are
compared elsewhere (``graphs/watch.py``).
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import operator
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.code.reach import BUILTIN, MISSING, Reach, content_of, function_in, package_of
from sdfastgn.patches.code.reading import names_in
from sdfastgn.patches.swap.numpy_numbers import is_numpy_constant

# Bytecode instruction that sets or deletes an attribute or a global -> words for what it does.
_WRITES = {
    "STORE_ATTR": "sets the attribute",
    "DELETE_ATTR": "deletes the attribute",
    "STORE_GLOBAL": "sets the global",
    "DELETE_GLOBAL": "deletes the global",
}
# Builtin functions that set attributes or globals whose names the bytecode does not show.
_WRITERS = frozenset(("setattr", "delattr", "globals", "exec", "eval"))
# Python modules of the standard library whose functions may return something else at each call.
_CHANGING = frozenset(
    ("random", "time", "datetime", "os", "posix", "nt", "secrets", "uuid", "threading", "_thread")
)
# Packages whose code is trusted to keep no state between calls that changes a result. They compute on arrays,
# types and texts.
_STATELESS = frozenset(("einops", "numpy", "packaging", "torchvision", "typing_extensions"))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
# A container with more than _MAX_ITEMS items is not taken for a table of constants, because comparing its
# items takes long.
_MAX_ITEMS = 10_000
_BOUND = (types.MethodType, types.BuiltinFunctionType)
_Cached = type(functools.cache(lambda: None))
_FIXED = (
    bool, int, float, complex, str, bytes, type(None), range, type, types.ModuleType, types.FunctionType,
    property, staticmethod, classmethod, functools.cached_property, functools.partialmethod,
    types.MemberDescriptorType, types.GetSetDescriptorType, enum.Enum, re.Pattern, logging.Logger,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor, nn.Module,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip


def packages_of(root: nn.Module) -> frozenset[str]:
    """The packages in which the modules of ``root`` and the objects in their attributes were written."""
    found = set()
    for module in root.modules():
        for value in (module, *vars(module).values()):
            if type(value) in BUILTIN:
                continue
            function = function_in(value)
            name = type(value).__module__ if function is None else function.__globals__.get("__name__")
            found.add(package_of(name))
    return frozenset(found)


class CodeState:
    """Finds code of packages other than ``known`` in calls of ``root``, and the state that this code reads.

    Attributes:
        reason: why such code could have another result in a later call, without this object noticing it.
            None if it could not.
        functions: the functions of such code.
        packages: the packages of the modules in ``root`` and of the objects in their attributes. Empty if
            ``reason`` is about a function.
    """

    def __init__(self, root: nn.Module, known: Collection[str]) -> None:
        self._known = {*known, *_STATELESS}
        # A tuple for each recorded container: (its name for messages, the container, its items).
        self._contents: list[tuple[str, Any, list[Any]]] = []
        # (id of the dict of a module, the name of a global in it) -> (the dict, the global's value)
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._seen: set[int] = set()
        self.functions: list[types.FunctionType] = []
        self.packages: frozenset[str] = frozenset()
        reach = Reach()
        reach.see_model(root)
        self.reason = next(self._reasons(root, reach), None)

    def change(self) -> str:
        """The name of a container or global that has changed since it was recorded; empty if none has."""
        items = (name for name, container, items in self._contents if not _has(container, items))
        others = (
            f"{names.get('__name__')}.{name}"
            for (_, name), (names, value) in self._globals.items()
            if names.get(name) is not value
        )
        return next(items, "") or next(others, "")

    def same(self) -> bool:
        """True if no container and no global has changed since it was recorded."""
        return all(_has(container, items) for _, container, items in self._contents) and all(
            names.get(name) is value for (_, name), (names, value) in self._globals.items()
        )

    def globals(self) -> list[tuple[str, str, Any]]:
        """Returns (module, name, value) of each global that code of unknown packages reads."""
        return [(str(names.get("__name__")), name, v) for (_, name), (names, v) in self._globals.items()]

    @contextmanager
    def undoing(self) -> Iterator[list[str]]:
        """A context for a trace of ``root``. At its end, recorded containers get their former items back.

        It yields a list. At the end, the names of the containers that the trace has changed are put into this
        list.
        """
        before = [(name, container, _items(container)) for name, container, _ in self._contents]
        changed: list[str] = []
        try:
            yield changed
        finally:
            for name, container, items in before:
                if not _has(container, items):
                    changed.append(name)
                    _refill(container, items)

    def _is_known(self, module: Any) -> bool:
        return package_of(module) in self._known

    def _reasons(self, root: nn.Module, reach: Reach) -> Iterator[str]:
        todo = list(reach.functions.values())
        while todo:
            function = todo.pop()
            if id(function) not in self._seen and not self._is_known(function.__globals__.get("__name__")):
                self._seen.add(id(function))
                self.functions.append(function)
                yield from self._in_function(function)
                todo += _named_by(function)
        self.packages = packages_of(root)
        for entry in list(reach.entries.values()):
            owner = _written_in(entry.holder)
            if package_of(owner) in self.packages and not self._is_known(owner):
                yield from self._judged(entry.value, entry.words)
        for module in root.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, functools.partial):
                    yield from self._judged(value, f"{type(module).__name__}.{name}")

    def _in_function(self, function: types.FunctionType) -> Iterator[str]:
        code, named = function.__code__, f"{function.__module__}.{function.__qualname__}"
        yield from (f"{named} {found}" for found in _written(code, frozenset(code.co_freevars)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield from self._judged(content_of(cell), f"the variable {name} in the closure of {named}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self._judged(value, f"a default of an argument of {named}")
        for first, *rest in names_in(code).chains:
            value = function.__globals__.get(first, MISSING)
            if value is not MISSING:
                self._globals[id(function.__globals__), first] = function.__globals__, value
            called = first if value is MISSING and first in _WRITERS else _changing(value, rest)
            if called:
                yield f"{named} calls {called}"
            else:
                yield from self._judged(value, f"the global {first} of {function.__module__}")

    def _judged(self, value: Any, name: str) -> Iterator[str]:
        """Yields a message if ``value`` could change unnoticed. ``name``: what the message calls it."""
        if not self._is_noticed(value, name):
            yield f"code of the model reads {name}, which may change"

    def _is_noticed(self, value: Any, name: str) -> bool:
        """True if ``value`` cannot change, or if this object will notice its changes.

        The items of a container are recorded for this.
        """
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            return all(self._is_noticed(part, name) for part in parts)
        if isinstance(value, _BOUND):
            return self._is_noticed(value.__self__, name) and type(value.__self__) not in _CONTAINERS
        if isinstance(value, (tuple, frozenset)):
            return all(self._is_noticed(part, name) for part in value)
        if type(value) in _CONTAINERS:
            if id(value) in self._seen:
                return True
            self._seen.add(id(value))
            items = _items(value)
            self._contents.append((name, value, items))
            return len(items) <= _MAX_ITEMS and all(self._is_noticed(item, name) for item in items)
        return (
            value is MISSING
            or isinstance(value, _FIXED)
            or (isinstance(value, _Cached) and function_in(value) is not None)
            or type(value).__module__ in ("typing", "types", "_collections")
            or package_of(type(value).__module__) == "packaging"
            or type(value).__name__ == "ufunc"
            or is_numpy_constant(type(value))
        )


def _named_by(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions that ``function`` reads from globals, or from attributes of Python modules."""
    for first, *rest in names_in(function.__code__).chains:
        value = function.__globals__.get(first)
        for name in rest if isinstance(value, types.ModuleType) else ():
            value = vars(value).get(name) if isinstance(value, types.ModuleType) else None
        inner = function_in(value)
        if inner is not None:
            yield inner


def _written(code: types.CodeType, outside: frozenset[str]) -> Iterator[str]:
    """Yields what ``code`` sets, in words. ``outside``: variables of its closure that outlive a call."""
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in _WRITES:
            yield f"{_WRITES[instruction.opname]} {name}"
        elif instruction.opname == "STORE_DEREF" and name in outside:
            yield f"sets the variable {name} of its closure"
        elif instruction.opname == "IMPORT_NAME" and _is_changing(name, ""):
            yield f"imports {name}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _written(constant, outside - {*code.co_cellvars})


def _is_changing(module: str, name: Any) -> bool:
    """True if the function ``name`` of the Python module ``module`` may have another result at each call."""
    if (module, name) in (("os", "path"), ("threading", "current_thread")):
        return False
    is_random = module.startswith("numpy.random") or (module == "numpy" and name == "random")
    return is_random or (module in sys.stdlib_module_names and module in _CHANGING)


def _changing(value: Any, rest: list[Any]) -> str:
    """The name of a function that code reads through a global, if its result may differ at each call.

    Empty if there is no such function. ``value``: the global, a function or a Python module. ``rest``: the
    attributes that the code reads from the module.
    """
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}.{rest[0]}" if rest and _is_changing(value.__name__, rest[0]) else ""
    module = "" if isinstance(value, (type, dict)) else _written_in(value)
    return f"{module}.{getattr(value, '__name__', '?')}" if _is_changing(module, "") else ""


def _written_in(value: Any) -> str:
    """The name of the Python module in which a class, a function or the dict of a module was written."""
    if isinstance(value, dict):
        name = value.get("__name__")
    else:
        name = value.__module__ if isinstance(value, (type, types.FunctionType, *_BOUND)) else ""
    return name if isinstance(name, str) else ""


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _has(container: Any, items: list[Any]) -> bool:
    now = _items(container)
    return len(now) == len(items) and all(map(operator.is_, now, items))


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(items) // 2
        container.update(zip(items[:half], items[half:], strict=True))
    else:
        (container.update if isinstance(container, set) else container.extend)(items)
