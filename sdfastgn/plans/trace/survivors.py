"""Finds out whether something keeps traced tensors alive after a trace.

If something does, the call has stored tensors for later calls. A plan of the call would not store them. Nor
could later calls use the traced tensors, which have no memory.
"""

from __future__ import annotations

import functools
import gc
import weakref
from types import CellType, FrameType, FunctionType
from typing import Any

from torch import Tensor, nn

_Cache = type(functools.cache(lambda: None))
# Maximum number of steps from a tensor to an object with a name that keeps it alive. One step goes from an
# object to the objects that refer to it.
_DEPTH = 6


def kept(made: list[weakref.ref[Tensor]]) -> list[str]:
    """Finds what still keeps tensors of a trace, and returns it as reasons why the trace cannot be used.

    Caches of ``functools`` are emptied, and are no reason: the next call of the cached function computes its
    result anew.

    ``made``: weak references to all tensors of the trace.
    """
    if not _alive(made):
        return []
    gc.collect()  # frees tensors that only their own reference cycle keeps alive
    if not _alive(made):
        return []
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # otherwise ``gc.get_referrers`` would not find objects that are frozen
    try:
        return _reasons(made)
    finally:
        if is_frozen:
            gc.freeze()


def _reasons(made: list[weakref.ref[Tensor]]) -> list[str]:
    caches, _ = _keepers(_alive(made))
    for cache in caches:
        cache.cache_clear()
    del caches
    tensors = _alive(made)
    if not tensors:
        return []
    _, names = _keepers(tensors)
    return [f"the call keeps a tensor in {names[0] if names else 'an object that the trace cannot see'}"]


def _alive(made: list[weakref.ref[Tensor]]) -> list[Any]:
    return [t for reference in made if (t := reference()) is not None]


def _keepers(tensors: list[Any]) -> tuple[list[Any], list[str]]:
    """Lists the ``functools`` caches that keep ``tensors``, and the names of other objects that keep them."""
    caches, names = [], []
    seen = {id(tensors)}
    level: list[Any] = tensors
    for _ in range(_DEPTH):
        found = gc.get_referrers(*level)
        seen.add(id(level))
        level = []
        for holder in found:
            if id(holder) in seen or isinstance(holder, FrameType):
                continue
            seen.add(id(holder))
            if isinstance(holder, _Cache):
                caches.append(holder)
            elif name := _name(holder):
                names.append(name)
            elif not isinstance(holder, weakref.ref):
                level.append(holder)
        seen.add(id(found))
        del found
        if not level:
            break
    return caches, names


def _name(holder: Any) -> str:
    """Describes ``holder``, which keeps a tensor, in words that users know. Empty for unnamed containers."""
    if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
        return f"a global variable of {holder['__name__']}"
    if isinstance(holder, FunctionType):
        return f"a variable of {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, type):
        return f"the class {holder.__name__}"
    if isinstance(holder, Tensor | CellType | list | tuple | dict | set):
        return ""
    return (
        f"a {type(holder).__name__}" if isinstance(holder, nn.Module) or hasattr(holder, "__dict__") else ""
    )
