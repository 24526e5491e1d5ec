"""Gives a ``ContextVar`` a value for the time of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which ``variable`` has ``value``. Its end restores the former value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
