"""Traced tensors that are still alive after a trace: something in Python or PyTorch keeps them."""

from __future__ import annotations

import functools
import gc
import weakref
from types import CellType, FrameType, FunctionType
from typing import Any

from torch import Tensor, nn

_Cache = type(functools.cache(lambda: None))
# Containers around a tensor are followed so far to find a name for what keeps it.
_DEPTH = 6


def kept(made: list[weakref.ref[Tensor]]) -> list[str]:
    """What still keeps tensors of a trace, as reasons not to use it.

    Caches of ``functools`` are emptied. The next call of their function computes its result anew, so they
    are no reason.
    """
    if not _alive(made):
        return []
    gc.collect()  # they may be in a cycle that nothing else refers to
    if not _alive(made):
        return []
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # the collector does not tell what frozen objects refer to
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
    """The caches of functools and the names of other holders that lead to ``tensors``."""
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
    """What a user calls ``holder``. Empty for containers without a name."""
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
