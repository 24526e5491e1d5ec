"""Finds out whether code of an unknown package could compute something else in the next call.

It could if it sets globals, attributes or variables of its closure, if it refers to a dict or list that lives
longer than a call, or if it asks for random numbers or the time. Lists and dicts in attributes of modules do
not count, because a ``Watch`` compares them. Nothing is run.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.code.reach import MISSING, Reach, content_of, function_in, package_of
from sdfastgn.patches.code.reading import names_in

__all__ = ["packages_of", "state_in"]

# Instructions that set an attribute or a global, and words for it.
_WRITES = {
    "STORE_ATTR": "sets the attribute",
    "DELETE_ATTR": "deletes the attribute",
    "STORE_GLOBAL": "sets the global",
    "DELETE_GLOBAL": "deletes the global",
}
# Modules whose functions may return something else at each call.
_CHANGING = frozenset(("random", "time", "datetime", "os", "secrets", "uuid", "threading"))
_FIXED = (
    bool, int, float, complex, str, bytes, type(None), range, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, property, staticmethod, classmethod, functools.partial,
    torch.dtype, torch.device, torch.Tensor, nn.Module, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip


def packages_of(root: nn.Module) -> frozenset[str]:
    """The packages in which the modules of ``root`` and the objects in their attributes were written."""
    found = set()
    for module in root.modules():
        for value in (module, *vars(module).values()):
            function = function_in(value)
            name = type(value).__module__ if function is None else function.__globals__.get("__name__")
            found.add(package_of(name))
    return frozenset(found)


def state_in(root: nn.Module, known: Collection[str]) -> str | None:
    """What code of packages other than ``known`` could change between calls of ``root``; None if nothing."""
    reach = Reach()
    reach.see_model(root)
    for function in list(reach.functions.values()):
        if package_of(function.__globals__.get("__name__")) not in known:
            found = next(_kept(function), None)
            if found is not None:
                return f"{function.__module__}.{function.__qualname__} {found}"
    return None


def _kept(function: types.FunctionType) -> Iterator[str]:
    yield from _written(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not _is_fixed(content_of(cell)):
            yield f"has the variable {name} in its closure, which may change"
    for first, *rest in names_in(function.__code__).chains:
        value = function.__globals__.get(first, MISSING)
        if isinstance(value, types.ModuleType) and _is_changing(value.__name__, rest):
            yield f"calls {value.__name__}.{rest[0] if rest else '?'}"
        elif value is not MISSING and not _is_fixed(value):
            yield f"reads the global {first}, which may change"


def _written(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WRITES:
            yield f"{_WRITES[instruction.opname]} {instruction.argval}"
        elif instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars:
            yield f"sets the variable {instruction.argval} of its closure"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _written(constant)


def _is_changing(module: str, rest: list[Any]) -> bool:
    is_random = module.partition(".")[0] == "numpy" and rest[:1] == ["random"]
    return is_random or (module in sys.stdlib_module_names and module in _CHANGING)


def _is_fixed(value: Any) -> bool:
    """True if ``value`` cannot change, or if its changes are noticed elsewhere."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    return value is MISSING or isinstance(value, _FIXED)
