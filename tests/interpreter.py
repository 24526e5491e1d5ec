"""Triton's interpreter, several times as quick."""

from __future__ import annotations

import dataclasses
import types

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["make_quick"]


def make_quick() -> None:
    """Leaves out what takes most of the interpreter's time and changes no result.

    At each launch, and at each call from one ``@triton.jit`` function to another, it replaces the
    functions of ``triton.language``; here that happens once, and for good. And it looks for overflow
    in each addition and multiplication of integers, of which it tells no one unless it debugs.
    """
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: nothing_to_restore
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
