"""``refuse`` ends a trace. Its error says why the call cannot be traced, and which line is the cause."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from sdfastgn.plans.trace.traced import Untraceable

aten = torch.ops.aten
# Random ops that may be traced. They fill a new tensor, which has the same strides when a plan runs the
# traced ops. If the plan runs them in the same order, it draws the same numbers as the model's code.
DRAWN = (aten.randn.default, aten.randn.generator, aten.rand.default, aten.rand.generator)


@functools.cache
def is_random(op: Any) -> bool:
    """True if ``op`` is an op of PyTorch whose results depend on random numbers."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


_thread = threading.local()
# If a call cannot be traced, the error names the line of code that is the cause. Lines in these packages are
# skipped, because the cause is the code that has called them.
_SKIPPED = {"torch", "sdfastgn", "contextlib", "functools", "numpy"}


def is_tracing() -> bool:
    """True if the current thread is tracing a call."""
    return getattr(_thread, "reasons", None) is not None


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """A context that marks this thread as tracing. Yields a list, to which ``refuse`` adds its reasons."""
    reasons: list[str] = []
    _thread.reasons = reasons
    try:
        yield reasons
    finally:
        _thread.reasons = None


def refuse(reason: str) -> NoReturn:
    """Raises Untraceable, and records the reason.

    Because of the record, the trace fails even if the traced code catches the exception.
    """
    place = _place(_outer(sys._getframe(1)))
    text = f"{reason} ({place})" if place else reason
    if is_tracing():
        _thread.reasons.append(text)
    raise Untraceable(text)


def reason_of(error: Exception) -> str:
    """Returns a text that says why a call cannot be traced, from an exception that its code has raised."""
    if isinstance(error, Untraceable):
        return str(error)
    place = _place(_innermost(error.__traceback__))
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    return f"the call raises {text}" + (f" ({place})" if place else "")


def _is_callers(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _SKIPPED


def _outer(frame: Any) -> FrameType | None:
    while frame is not None and not _is_callers(frame):
        frame = frame.f_back
    return frame


def _innermost(traceback: TracebackType | None) -> tuple[FrameType, int] | None:
    found = None
    while traceback is not None:
        if _is_callers(traceback.tb_frame):
            found = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def _place(where: Any) -> str:
    """Returns the Python module and line of ``where``: a frame or (frame, line). Empty for None."""
    if where is None:
        return ""
    frame, line = where if isinstance(where, tuple) else (where, where.f_lineno)
    return f"{frame.f_globals.get('__name__', '?')}, line {line}"
