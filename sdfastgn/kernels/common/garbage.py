"""Turns Python's garbage collector off during work that it would slow down."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """A context in which the garbage collector is off, in all threads.

    A full collection in a process with a UNet of SDXL takes 0.2 to 0.8 s. Code that makes many objects starts
    several full collections, and each of them visits all objects again.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
