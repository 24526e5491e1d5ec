"""Caches of launch plans, bounded."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["remember"]

_REMEMBERED_MAX = 4096
Value = TypeVar("Value")


def remember(cache: dict[tuple[Any, ...], Value], key: tuple[Any, ...], value: Value) -> Value:
    """Puts ``value`` into ``cache`` and returns it. Bounded: a server that sees ever new shapes must not leak."""
    if len(cache) >= _REMEMBERED_MAX:
        cache.clear()
    cache[key] = value
    return value
