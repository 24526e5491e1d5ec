"""Finds code of PyTorch, diffusers and other known packages that somebody else has replaced.

A fused forward computes what the packages' own code computes. If other code was put into its place, for
instance SageAttention for ``F.scaled_dot_product_attention``, a fused forward would ignore it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any

from torch.nn import functional as F

from sdfastgn.patches.code.reach import MISSING, Entry, function_in, package_of

# Packages that replace functions of each other, and of themselves, without changing what these compute.
# For instance, torch._dynamo wraps functions that it has compiled, and accelerate wraps ``torch.empty``.
OWN = sys.stdlib_module_names | {
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "comfy",
    "sdfastgn",
}
# Classes of functions that were written in C. Some of these functions do not name their Python module.
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Fused forwards call these functions by name, as diffusers' own forwards do: if one is replaced, its
# replacement runs.
_CALLED_BY_FUSED = ((vars(F), "scaled_dot_product_attention"),)


def replaced_in(entries: Iterable[Entry]) -> list[str]:
    """The names that other code has given another function, except those that fused forwards call as well.

    ``entries``: names that the code of a model reads, with their values.
    """
    return [entry.words for entry in entries if _is_foreign(entry) and not _is_honoured(entry)]


def ignored(changed: Iterable[Entry]) -> list[str]:
    """The names of those entries in ``changed`` whose new values fused forwards would ignore.

    ``changed``: entries (names that code reads) whose values were recorded when no code was replaced, and are
    different now.
    """
    return [
        entry.words
        for entry in changed
        if not (
            _is_honoured(entry)
            or any(_is_wrapper(entry, v) for v in (entry.value, entry.namespace.get(entry.name, MISSING)))
        )
    ]


def is_counter(entry: Entry) -> bool:
    """True if ``entry`` is data that functions of its own Python module set: a counter, flag or cache."""
    values = entry.value, entry.namespace.get(entry.name, MISSING)
    is_data = not any(_is_callable(value) for value in values if value is not MISSING)
    return (
        is_data
        and not isinstance(entry.holder, type)
        and entry.name in _names_of(_module_of(entry.holder))[1]
    )


def _is_wrapper(entry: Entry, value: Any) -> bool:
    """True if ``value`` is a function of another package in ``OWN`` than the package of ``entry``.

    The packages in ``OWN`` replace functions of each other without changing what these compute.
    """
    package = "" if function_in(value) is None else package_of(_written_in(value))
    return package in OWN and package != package_of(_module_of(entry.holder))


def _is_honoured(entry: Entry) -> bool:
    """True if fused forwards call the function ``entry`` by its name, as diffusers' own forwards do."""
    return any(entry.holder is holder and entry.name == name for holder, name in _CALLED_BY_FUSED)


def _is_foreign(entry: Entry) -> bool:
    """True if the value of ``entry`` is a function or class that other code has put there.

    Such a value was written in an unknown package, or is a method that was written in another class than the
    class that has it now.
    """
    value = entry.value
    if value is MISSING or isinstance(value, types.ModuleType) or not _is_callable(value):
        return False
    home, written_in = _module_of(entry.holder), _written_in(value)
    if package_of(home) not in OWN:
        return False
    if package_of(written_in) in OWN or package_of(written_in) == package_of(home):
        return isinstance(entry.holder, type) and _is_of_another_class(value, entry.holder)
    return entry.name not in _names_of(home)[0]


def _is_of_another_class(value: Any, kind: type) -> bool:
    """True if ``value`` is a method that was written in a class other than ``kind`` and its bases."""
    name = "" if isinstance(value, type) else getattr(function_in(value), "__qualname__", "")
    where = name.rpartition(".")[0]
    return where not in ("", *(base.__qualname__ for base in kind.__mro__)) and "<locals>" not in where


def _is_callable(value: Any) -> bool:
    return callable(value) or function_in(value) is not None


def _module_of(holder: Any) -> str:
    """The name of the Python module of ``holder``, a class or a module's dict; "" for any other dict."""
    return holder.__module__ if isinstance(holder, type) else str(holder.get("__name__", ""))


def _written_in(value: Any) -> str:
    """The Python module in which the code of ``value`` was written."""
    function = function_in(value)
    if function is not None:
        # The function's ``__module__`` is not used: functools.wraps may have copied it from another function.
        return str(function.__globals__.get("__name__"))
    if isinstance(value, _BUILT_IN):
        return "torch"
    return value.__module__ if isinstance(value, type) else type(value).__module__


@functools.cache
def _names_of(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns (names that a Python module imports, names that its functions set with ``global``)."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return frozenset(), frozenset()
    imported: set[str] = set()
    changed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global):
            changed |= set(node.names)
    for node in ast.walk(tree):  # an assignment such as ``name = package.function`` counts as an import
        if isinstance(node, ast.Assign) and _first_name(node.value) in imported:
            imported |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(imported), frozenset(changed)


def _first_name(node: ast.expr) -> str:
    """Returns ``a`` for the expressions ``a`` and ``a.b.c``, and an empty text for other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
