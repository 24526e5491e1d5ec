"""Collects which Python functions run in a call."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Frames", "running"]


class Frames:
    """The functions that ran: code object -> (globals, class of ``self`` or None)."""

    def __init__(self) -> None:
        self.found: dict[types.CodeType, tuple[dict[str, Any], type | None]] = {}

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self.found:
            return
        owner = None
        if code.co_argcount and code.co_varnames[0] in ("self", "cls"):
            first = frame.f_locals.get(code.co_varnames[0])
            owner = first if isinstance(first, type) else type(first)
        self.found[code] = frame.f_globals, owner


@contextmanager
def running() -> Iterator[Frames]:
    """A context that yields ``Frames`` with the functions that this thread runs in it.

    The profiler that was active before (``sys.setprofile``) sees nothing of the context, and is active again
    after it.
    """
    frames, before = Frames(), sys.getprofile()
    sys.setprofile(frames)
    try:
        yield frames
    finally:
        sys.setprofile(before)
