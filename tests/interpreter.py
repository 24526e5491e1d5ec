"""Triton's interpreter, several times as quick."""

from __future__ import annotations

import dataclasses
import types

import triton
import triton.language as tl
from triton.runtime import interpreter

from sdfastgn.versions import never_run

__all__ = ["make_quick"]


def make_quick() -> None:
    """Leaves out what takes most of the interpreter's time and changes no result.

    At each launch, and at each call from one ``@triton.jit`` function to another, it replaces the
    functions of ``triton.language``; here that happens once, and for good. And it looks for overflow
    in each addition and multiplication of integers, of which it tells no one unless it debugs.

    These are Triton's private names: a version that was never run stays as it is, and takes longer.
    """
    if never_run("triton", triton.__version__):
        return
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: nothing_to_restore
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
