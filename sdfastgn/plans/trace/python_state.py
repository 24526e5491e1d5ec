"""Checks the Python code of a call in a trace: it must not change modules, nor read values of tensors.

A plan runs only the traced ops, and would not repeat such things.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.plans.trace.refusals import is_tracing, refuse
from sdfastgn.plans.trace.tensors import TracedTensor

# ---- attributes of modules

_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}
# Two values of one of these types count as equal if ``==`` is true. Other objects must be identical.
_VALUES = {
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    frozenset,
}
# Objects of these types are not searched for attributes that a call may change.
_STATELESS = (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# Containers in containers, and attributes of objects in attributes, are compared down to this many levels.
_DEPTH = 3


class ModuleState:
    """Records the attributes of a model's modules before a trace, and finds and undoes changes after it.

    It also records lists, dicts and objects in these attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.namespaces: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self.contents: dict[int, tuple[Any, Any]] = {}  # id of a container -> the container and a copy
        self.objects: set[int] = set()
        # What the call has changed: (object, name of the attribute, True if it now keeps a tensor there).
        self.changed: list[tuple[Any, str, bool]] = []
        for module in model.modules():
            self._note_attributes(module, 0)
        self.random = _random_states()

    def _note_attributes(self, holder: Any, depth: int) -> None:
        now = vars(holder)
        self.namespaces.append((holder, now, now.copy()))
        for value in now.values():
            if type(value) not in _VALUES:
                self._note(value, depth + 1)

    def _note(self, value: Any, depth: int) -> None:
        if type(value) in _CONTAINERS:
            if id(value) in self.contents:
                return
            self.contents[id(value)] = value, _copy(value) if value else ()
            if value and depth < _DEPTH:
                for item in value.values() if isinstance(value, dict) else value:
                    if type(item) not in _VALUES:
                        self._note(item, depth + 1)
        elif depth < _DEPTH and id(value) not in self.objects:
            self.objects.add(id(value))
            if not isinstance(value, _STATELESS) and hasattr(value, "__dict__"):
                self._note_attributes(value, depth)

    def restore(self) -> list[str]:
        """Undoes all changes that the traced call has made, and returns a text for each of them.

        The texts say why the trace must not be used.
        """
        reasons: list[str] = []
        changed = {key for key, (value, copy) in self.contents.items() if not _has_same_items(value, copy)}
        for holder, now, before in self.namespaces:
            reasons += self._changes(holder, now, before, changed)
            if len(now) != len(before) or any(now.get(k, now) is not v for k, v in before.items()):
                now.clear()
                now.update(before)
        for key in changed:
            _refill(*self.contents[key])
        for (name, state, put_back), (_, now, _) in zip(self.random, _random_states(), strict=False):
            if state != now:
                put_back(state)
                reasons.append(f"the call draws random numbers from {name}")
        return reasons

    def kept(self) -> dict[nn.Module, set[str]]:
        """Returns, for each module, the names of its attributes that the call has changed.

        The result is empty if the call has stored no traced tensor in any of these attributes. It is also
        empty if the call has changed attributes of objects that are no modules.
        """
        found: dict[nn.Module, set[str]] = {}
        if any(is_tensor for *_, is_tensor in self.changed):
            for holder, name, _ in self.changed:
                found.setdefault(holder, set()).add(name)
        return found if all(isinstance(holder, nn.Module) for holder in found) else {}

    def _changes(self, holder: Any, now: Any, before: Any, changed: set[int]) -> Iterator[str]:
        for key, value in now.items():
            old = before.get(key, before)
            if value is old and not (changed and _contains(value, changed)):
                continue
            keeps_tensor = _holds_traced(value)
            if keeps_tensor or old is before or not self._is_equal(value, old):
                self.changed.append((holder, key, keeps_tensor))
                verb = "keeps a tensor in" if keeps_tensor else "changes"
                yield f"the call {verb} {type(holder).__name__}.{key}"
        for key in before.keys() - now.keys():
            self.changed.append((holder, key, False))
            yield f"the call deletes {type(holder).__name__}.{key}"

    def _is_equal(self, value: Any, old: Any) -> bool:
        """True if ``value`` equals what ``old`` was before the call, which may have changed ``old``."""
        _, items = self.contents.get(id(old), (None, None))
        if items is None:
            if type(value) is tuple is type(old) and len(value) == len(old):
                return all(map(self._is_equal, value, old))
            return value is old or (type(value) is type(old) and type(value) in _VALUES and value == old)
        if type(value) is not type(old) or len(value) != len(items):
            return False
        if not items:
            return True
        if isinstance(value, dict):
            return all(k in value and self._is_equal(value[k], v) for k, v in items.items())
        return value == items if isinstance(value, set) else all(map(self._is_equal, value, items))


def _random_states() -> list[tuple[str, Any, Callable[[Any], object]]]:
    """Lists random generators outside of PyTorch: (name, state, function that sets the state)."""
    found: list[tuple[str, Any, Callable[[Any], object]]] = [
        ("Python's module random", random.getstate(), random.setstate)
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found.append(("NumPy", (kind, tuple(keys.tolist()), *rest), numpy.random.set_state))
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)  # ``dict`` copies an OrderedDict in a tenth of the time of the method ``copy``
    return set(value) if isinstance(value, set) else list(value)


def _has_same_items(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    if not copy:
        return True
    if isinstance(value, dict):
        return all(value.get(k, value) is v for k, v in copy.items())
    return value == copy if isinstance(value, set) else all(a is b for a, b in zip(value, copy, strict=True))


def _refill(value: Any, copy: Any) -> None:
    value.clear()
    value.extend(copy) if isinstance(value, list | deque) else value.update(copy)


def _contains(value: Any, containers: set[int], depth: int = 0) -> bool:
    """True if ``value`` is, or contains, one of the containers with the ids ``containers``."""
    if id(value) in containers:
        return True
    if depth > _DEPTH or type(value) not in {*_CONTAINERS, tuple}:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_contains(item, containers, depth + 1) for item in items)


def _holds_traced(value: Any, depth: int = 0) -> bool:
    if type(value) is TracedTensor:
        return True
    if depth > _DEPTH or not isinstance(value, list | tuple | dict | deque):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_traced(item, depth + 1) for item in items)


# ---- changes that affect all threads: methods that read tensors without an op, and torch.compile

_READERS = ("numpy", "tolist", "__array__", "__dlpack__")
_lock = threading.Lock()
_traces = 0
_changes = contextlib.ExitStack()


def _refusing(name: str, function: Any) -> Any:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            refuse(f"the call uses Tensor.{name}")
        return function(self, *args, **kwargs)

    return read


def _set_data(self: Tensor, value: Tensor) -> None:
    if type(value) is TracedTensor:  # a traced tensor has no memory to give to another tensor
        refuse("the call assigns to Tensor.data, as Module.to does")
    Tensor.__base__.data.__set__(self, value)  # type: ignore[union-attr]


_DATA = property(lambda self: Tensor.__base__.data.__get__(self), _set_data)  # type: ignore[union-attr]


@contextlib.contextmanager
def _refusing_readers() -> Iterator[None]:
    """A context in which methods that read a tensor's values raise an error in threads that trace.

    An assignment of a traced tensor to ``Tensor.data`` raises an error too. In other threads nothing changes.
    """
    refusing = {name: _refusing(name, getattr(Tensor, name)) for name in _READERS}
    own = {name: Tensor.__dict__.get(name) for name in (*refusing, "data")}
    for name, instead in (*refusing.items(), ("data", _DATA)):
        setattr(Tensor, name, instead)
    try:
        yield
    finally:
        for name, function in own.items():
            delattr(Tensor, name) if function is None else setattr(Tensor, name, function)


@contextlib.contextmanager
def _without_compilation() -> Iterator[None]:
    """A context in which functions that torch.compile would compile run as they are written, in all threads.

    A trace is a dispatch mode. Dynamo never compiles a function that it has met inside of a dispatch mode.
    """
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        # If the traced call has imported Dynamo, Dynamo has met only functions of this call. It forgets them
        # here, so that it can compile them later.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


@contextlib.contextmanager
def shared_state() -> Iterator[None]:
    """A context for a trace. It makes changes that affect all threads, and undoes them after the last trace.

    They stop torch.compile, and make methods that read values of tensors fail in threads that trace. Raises
    RuntimeError inside of a function that runs under torch.compile.
    """
    global _traces
    with _lock:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_compilation())
            if not _traces:
                stack.enter_context(_refusing_readers())
                _changes.push(stack.pop_all())
        _traces += 1
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                _changes.close()


# ---- settings


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """A context in which autocast does not cache the casts of weights.

    In a trace the casts are tensors without memory. From a cache, autocast would use them in later calls.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
