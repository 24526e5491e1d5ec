"""Refusals: the reason why a call cannot be traced, and the line of code that is the cause."""

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
# Random ops that are not refused. They fill a new tensor, which has the same strides in a plan. A plan that
# runs them in the same order draws the numbers that the model's code would draw.
DRAWN = (aten.randn.default, aten.randn.generator, aten.rand.default, aten.rand.generator)


@functools.cache
def is_random(op: Any) -> bool:
    """True if ``op`` is an op of PyTorch whose results depend on random numbers."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


_thread = threading.local()
# Packages whose code is not the cause of a refusal, but what the cause calls.
_SKIPPED = {"torch", "sdfastgn", "contextlib", "functools", "numpy"}


def is_tracing() -> bool:
    """True in a thread that is tracing a call."""
    return getattr(_thread, "reasons", None) is not None


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Marks this thread as tracing, and yields the list of reasons that ``refuse`` notes."""
    reasons: list[str] = []
    _thread.reasons = reasons
    try:
        yield reasons
    finally:
        _thread.reasons = None


def refuse(reason: str) -> NoReturn:
    """Raises Untraceable. The trace fails even if the call's code catches the exception."""
    place = _place(_outer(sys._getframe(1)))
    text = f"{reason} ({place})" if place else reason
    if is_tracing():
        _thread.reasons.append(text)
    raise Untraceable(text)


def reason_of(error: Exception) -> str:
    """The reason that an exception in the call's code gives."""
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
    """The file and line of a frame, or of a (frame, line). Empty for None."""
    if where is None:
        return ""
    frame, line = where if isinstance(where, tuple) else (where, where.f_lineno)
    return f"{frame.f_globals.get('__name__', '?')}, line {line}"
