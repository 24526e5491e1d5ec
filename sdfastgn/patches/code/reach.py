"""Finds what the code of a model depends on besides tensors: functions, and all that they read by name.

``Reach.see_model`` reads the bytecode of the original (not fused) forward of each module in a model, of the
functions that this forward names, of the functions that those name, and so on. Nothing is run: no memory, no
GPU and no random numbers are needed, and hooks and counters of other code notice nothing.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sdfastgn.patches.code.reading import Item, names_in

MISSING: Any = object()

# Methods that run in each call of a module, although no code names them.
_CALL = "__call__"
_CALLS = frozenset((_CALL, "_wrapped_call_impl", "_call_impl", "forward"))
# The packages whose code is read, in addition to the packages of the classes in a model.
_READ = frozenset(("diffusers", "transformers", "peft", "accelerate", "comfy"))
# The parts of PyTorch whose Python code computes results. Their code is read too.
_READ_OF_TORCH = ("torch.nn.modules.", "torch.nn.functional")
# Code of these packages is not read, even if the model has classes of them, except ``_READ_OF_TORCH``.
_NOT_READ = sys.stdlib_module_names | {"sdfastgn", "torch"}
# Methods that operators and indexing call on tensors, such as ``__add__``. Bytecode does not name them, but
# they are looked up too, because other code may replace them.
_OPERATORS = frozenset(
    name
    for each in dir(operator)
    if each.startswith("__") and callable(getattr(operator, each))
    for name in (each, f"__r{each[2:]}")
)
# A dict with more than _MAX_TABLE entries is not taken for a table of functions, so its entries are not
# compared.
_MAX_TABLE = 64
# A module's attribute may hold an object with attributes, which hold objects, and so on. Code is searched for
# in objects down to this number of levels.
_DEPTH = 3
# Types of most attributes of modules. Their code cannot be replaced, so it is not read.
BUILTIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset, type, OrderedDict)
)


class Entry(NamedTuple):
    """A name that code reads, and the value that the name had.

    Attributes:
        holder: where the name is looked up: a class, the dict of a Python module, or another dict.
        name: the attribute of the class, or the key in the dict.
        value: the value when the code was read; ``MISSING`` if the name did not exist. A name that is added
            later then counts as a change.
        owner: the name of the Python module or class, for messages.
    """

    holder: Any
    name: Any
    value: Any
    owner: str

    @property
    def words(self) -> str:
        """The dotted name for messages, such as "torch.nn.functional.interpolate"."""
        return f"{self.owner}.{self.name}"

    @property
    def namespace(self) -> Mapping[Any, Any]:
        return vars(self.holder) if isinstance(self.holder, type) else self.holder


class Reach:
    """Collects the names that code of models reads, as ``Entry`` objects, and the functions among them."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Any], Entry] = {}
        self.functions: dict[int, types.FunctionType] = {}
        # A pair for each global that code sets: (id of the dict of globals, name).
        self._stored: set[tuple[int, str]] = set()
        self._packages = set(_READ)
        # False while the bytecode of a function from an unknown package is read. Other functions from unknown
        # packages that this bytecode names are not read.
        self._is_in_model = True
        self._attributes: set[str] = set()
        self._classes: dict[type, None] = {torch.Tensor: None}
        self._settled = (0, 0)

    def see_model(self, root: nn.Module) -> None:
        """Record the functions that calls of ``root`` run without fused blocks, and the names they read."""
        for module in root.modules():
            self._classes[type(module)] = None
            self._packages |= {package_of(type(module).__module__)} - _NOT_READ
            # The values of the module's attributes are copied into a list, because another thread may add
            # attributes during the loop.
            for value in list(vars(module).values()):
                self._see_object(value, _DEPTH)
        self._settle()

    def _is_read(self, module: Any) -> bool:
        """True if the bytecode of functions in the Python module ``module`` is read."""
        return package_of(module) in self._packages or str(module).startswith(_READ_OF_TORCH)

    def compared(self) -> list[Entry]:
        """The names whose values must stay the same: all but globals that the code sets, such as counters."""
        return [e for e in list(self.entries.values()) if (id(e.holder), e.name) not in self._stored]

    def forget(self, entries: Iterable[Entry]) -> None:
        """Leave the names ``entries`` out of the results of ``compared`` from now on."""
        self._stored |= {(id(entry.holder), entry.name) for entry in entries}

    def _see_object(self, value: Any, depth: int) -> None:
        """Read the code of ``value``: its bytecode if it is a function, else the methods of its class.

        ``value``: the value of a module's attribute, or an object in attributes of this value. ``depth``: to
        how many further levels attributes of ``value`` are searched.
        """
        kind = type(value)
        if kind in BUILTIN or isinstance(value, (nn.Module, torch.Tensor)):
            return
        function = function_in(value)
        # An attribute of a module may hold a function. ``graphs/watch.py`` compares whether it is still the
        # same function, so here only the function's code is read.
        if function is not None:
            self._read_function(function)
        elif package_of(kind.__module__) not in _NOT_READ:
            self._classes[kind] = None
            self._packages.add(package_of(kind.__module__))
            for inner in list(getattr(value, "__dict__", {}).values()) if depth else ():
                self._see_object(inner, depth - 1)

    def _settle(self) -> None:
        """Read the methods whose names occur in code that was read, until no further method is found."""
        while self._settled != (now := (len(self._attributes), len(self._classes))):
            self._settled = now
            for kind in list(self._classes):
                self._see_methods(kind)

    def _see_methods(self, kind: type) -> None:
        bases = [base for base in kind.__mro__ if base.__flags__ & _IS_HEAP_TYPE]
        for i, base in enumerate(bases):
            if not (
                base is torch.Tensor
                or self._is_read(base.__module__)
                or base.__module__.startswith("sdfastgn.")
            ):
                continue
            wanted = _CALLS if base is nn.Module else self._attributes | _CALLS
            if base is torch.Tensor:
                for name in filter(functools.partial(hasattr, base), self._attributes | _OPERATORS):
                    self._see_entry(base, name, _name_of(base))
                continue
            for name in wanted.intersection(vars(base)):
                for one in bases[: i + 1]:
                    self._see_entry(one, name, _name_of(one))

    def _see_entry(self, holder: Any, name: Any, owner: str) -> Any:
        entry = self.entries.get((id(holder), name))
        if entry is None:
            namespace = vars(holder) if isinstance(holder, type) else holder
            entry = Entry(holder, name, namespace.get(name, MISSING), owner)
            self.entries[id(holder), name] = entry
            self._see_value(entry.value, owner)
        return entry.value

    def _see_value(self, value: Any, owner: str) -> None:
        function = function_in(value)
        if function is not None:
            self._follow(function)
        elif type(value) is dict and 0 < len(value) <= _MAX_TABLE and all(map(_is_code, value.values())):
            for key in value:
                self._see_entry(value, key, f"a table in {owner}")

    def _follow(self, function: types.FunctionType) -> None:
        if id(function) in self.functions:
            return
        self.functions[id(function)] = function
        for cell in function.__closure__ or ():
            inner = function_in(content_of(cell))
            if inner is not None:
                self._follow(inner)
        self._read_function(function)

    def _read_function(self, function: types.FunctionType) -> None:
        """Read the bytecode of ``function`` if its package is one whose code is read.

        A function of an unknown package is read too if code of the model names it: other code has then put
        it in the place of a function of the model.
        """
        module = function.__globals__.get("__name__")
        is_replacement = self._is_in_model and package_of(module) not in _NOT_READ
        if self._is_read(module) or is_replacement:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            self._read(function.__code__, function.__globals__, cells)

    def _read(self, code: types.CodeType, names: dict[str, Any], cells: dict[str, types.CellType]) -> None:
        before, self._is_in_model = self._is_in_model, self._is_read(names.get("__name__"))
        found = names_in(code)
        self._attributes |= found.attributes
        self._stored |= {(id(names), name) for name in found.stored}
        for chain in sorted(found.chains, key=len):
            self._walk(chain, names, cells)
        self._is_in_model = before

    def _walk(self, chain: tuple[Any, ...], names: dict[str, Any], cells: dict[str, types.CellType]) -> None:
        first, *rest = chain
        if first in cells:
            value = content_of(cells[first])
        elif first in names:
            value = self._see_entry(names, first, str(names.get("__name__")))
        else:  # ``first`` is the name of a builtin, such as ``len``
            return
        for part in rest:
            if isinstance(part, Item):
                if type(value) is not dict or part.key not in value:
                    return
                value = self._see_entry(value, part.key, "a dict")
            elif isinstance(value, types.ModuleType):
                if package_of(value.__name__) in sys.stdlib_module_names:
                    return
                value = self._see_entry(vars(value), part, value.__name__)
            elif isinstance(value, type):
                value = self._attribute_of_class(value, part)
            else:
                break
        if isinstance(value, type) and self._is_read(value.__module__):
            self._classes[value] = None

    def _attribute_of_class(self, kind: type, name: str) -> Any:
        for base in kind.__mro__:
            if base.__flags__ & _IS_HEAP_TYPE:
                value = self._see_entry(base, name, _name_of(base))
                if value is not MISSING:
                    return value
        return MISSING


# The bit in ``__flags__`` of classes that Python code has defined. Attributes of all other classes cannot be
# replaced.
_IS_HEAP_TYPE = 1 << 9


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def content_of(cell: types.CellType) -> Any:
    """The value of a variable of a closure; ``MISSING`` if it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


_Cached = type(functools.cache(lambda: None))


def function_in(value: Any) -> types.FunctionType | None:
    """The Python function behind a method, property, partial, cache or function; None if there is none."""
    while value is not None and not isinstance(value, types.FunctionType):
        if isinstance(value, (classmethod, staticmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, (functools.partial, functools.partialmethod, functools.cached_property)):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, _Cached):
            value = value.__wrapped__
        else:
            return None
    return value


def _is_code(value: Any) -> bool:
    return isinstance(value, type) or function_in(value) is not None


def package_of(name: Any) -> str:
    """The top-level package in the dotted ``name`` of a Python module; "?" if ``name`` is no name."""
    return name.partition(".")[0] if isinstance(name, str) and name else "?"
