"""Describes objects as text that is the same in every process, as long as the objects have equal content.

The text contains no addresses and no ids, and does not depend on the order of sets. If an object occurs
again, the text has the number of its first occurrence instead. So the text also tells which tensors and lists
are the same object.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common.private import storage_of
from sdfastgn.patches.code.reach import MISSING, content_of, function_in, package_of
from sdfastgn.patches.swap.numpy_numbers import is_numpy_constant

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), range))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_BUILTIN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_WRAPPERS = (classmethod, staticmethod, property, functools.cached_property, functools.partialmethod)
_Cached = type(functools.cache(lambda: None))


class Indescribable(Exception):  # noqa: N818  # callers catch it: then no plan is read from disk
    """The object has content that no text can describe, such as the state of a lock or of an open file."""


class Description:
    """Builds one text from all objects that are passed to ``add``.

    Attributes:
        classes: the classes of all described objects, and described objects that are classes themselves.
        functions: all described objects that are functions.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # objects stay alive, so that no new one can get the id of an old one
        self._storages: dict[int, int] = {}
        self.classes: dict[type, None] = {}
        self.functions: list[types.FunctionType] = []

    def digest(self) -> str:
        return hashlib.sha256("\0".join(self._text).encode("utf-8", "surrogatepass")).hexdigest()

    def note(self, *words: str) -> None:
        """Adds ``words`` to the text as they are. They must have no null characters, which separate words."""
        self._text += words

    def is_new(self, value: Any) -> bool:
        """True if ``value`` was not added before. Otherwise adds the number of its first occurrence."""
        first = self._seen.setdefault(id(value), len(self._seen))
        if first < len(self._kept):
            self._text.append(f"again {first}")
            return False
        self._kept.append(value)
        return True

    def add(self, value: Any) -> None:
        """Adds the text of ``value``, and of all objects that it refers to.

        Raises Indescribable if one of them has content that no text can describe.
        """
        kind = type(value)
        if kind in _PLAIN:
            self._text.append(repr(value))
        elif value is MISSING:
            self._text.append("missing")
        elif isinstance(value, _OF_TORCH):
            self._text.append(str(value))
        elif is_numpy_constant(kind):
            self._text += [kind.__name__, repr(value.item())]
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, types.ModuleType):
            self._text += ["module", value.__name__]
        elif isinstance(value, enum.Enum):
            self.add_class(kind)
            self._text.append(value.name)
            self.add(value.value)
        elif isinstance(value, tuple) or self.is_new(value):
            # A tuple is described at each occurrence: whether equal tuples are one object does not matter.
            self._add_object(kind, value)

    def add_class(self, kind: type) -> None:
        self.classes[kind] = None
        self._text += ["class", f"{kind.__module__}.{kind.__qualname__}"]

    def add_all(self, values: Mapping[Any, Any]) -> None:
        self._text.append(f"{len(values)} entries")
        for name, value in dict.items(values) if isinstance(values, dict) else values.items():
            self.add(name)
            # The order of the list ``_use_default_values`` does not count. It differs between processes,
            # because diffusers makes the list from a set.
            self.add(frozenset(value) if name == "_use_default_values" else value)

    def _add_object(self, kind: type, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(kind, value)
        elif isinstance(value, _CONTAINERS):
            self._add_container(kind, value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._text.append("method")
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, _BUILTIN):
            self._text += ["builtin", str(getattr(value, "__module__", "")), value.__qualname__]
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, types.ModuleType) and not type(owner).__module__.startswith("pybind11"):
                self.add(owner)
        elif isinstance(value, functools.partial):
            self._text.append("partial")
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, (*_WRAPPERS, _Cached)):
            self._text.append(kind.__name__)
            self.add(function_in(value))
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._text += ["op", str(value)]
        elif isinstance(value, logging.Logger):
            self._text += ["logger", value.name]
        elif isinstance(value, re.Pattern):
            self._text.append("pattern")
            self.add((value.pattern, value.flags))
        elif kind.__module__ in ("typing", "types", "_collections", "torch._C"):
            self._text.append(_without_address(value))
        else:
            self._add_instance(kind, value)

    def _add_tensor(self, kind: type, value: Tensor) -> None:
        if kind not in _TENSORS or value.layout is not torch.strided:
            raise Indescribable(kind.__name__)
        storage = self._storages.setdefault(storage_of(value), len(self._storages))
        known = tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
        lazy = value.is_inference(), value.is_conj(), value.is_neg()
        self._text.append(f"{kind.__name__} {known} {lazy} {storage} {value.storage_offset()}")

    def _add_container(self, kind: type, value: Any) -> None:
        self.add_class(kind)
        if isinstance(value, dict):
            self.add_all(value)
        elif isinstance(value, (set, frozenset)):
            self._text += [f"{len(value)} items", *sorted(map(self._separately, value))]
        else:
            self._text.append(f"{len(value)} items")
            for item in value:
                self.add(item)
        if hasattr(value, "default_factory"):
            self.add(value.default_factory)
        if hasattr(value, "__dict__"):
            self.add_all(vars(value))

    def _separately(self, value: Any) -> str:
        inner = Description()
        inner.add(value)
        self.classes |= inner.classes
        self.functions += inner.functions
        return inner.digest()

    def _add_function(self, value: types.FunctionType) -> None:
        self.functions.append(value)
        self._text += ["function", str(value.__globals__.get("__name__")), value.__qualname__]
        self._text.append(digest_of(value.__code__))
        self.add(value.__defaults__)
        self.add(value.__kwdefaults__)
        for cell in value.__closure__ or ():
            self.add(content_of(cell))
        # Attributes of PyTorch's functions are left out: the version of PyTorch, which is in the key of a
        # file, covers them.
        self.add_all({} if package_of(value.__globals__.get("__name__")) == "torch" else vars(value))

    def _add_instance(self, kind: type, value: Any) -> None:
        slots = {name for base in kind.__mro__ for name in vars(base).get("__slots__", ())}
        is_open = hasattr(value, "__dict__") and not slots - {"__dict__", "__weakref__"}
        if isinstance(value, weakref.ref) or not is_open:
            raise Indescribable(f"{kind.__module__}.{kind.__qualname__}")
        self.add_class(kind)
        self.add_all(vars(value))


@functools.cache
def digest_of(code: types.CodeType) -> str:
    """A hash of the bytecode, names and constants of ``code``. Line numbers and file names do not matter."""
    parts = [
        code.co_name, code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_code,
        getattr(code, "co_exceptiontable", b""),
    ]  # fmt: skip
    text = repr([*parts, *map(_constant, code.co_consts)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return digest_of(value)
    if isinstance(value, frozenset):
        return f"set {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return repr(value)


def _without_address(value: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        raise Indescribable(text)
    return text
