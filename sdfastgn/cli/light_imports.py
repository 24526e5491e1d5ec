"""Imports diffusers' model classes in two seconds instead of nine.

When diffusers imports its first model class, it also imports accelerate, peft, transformers, SciPy and
torch's compiler, which takes seven seconds. A process that leaves these out can neither load an adapter nor
compile. So this file is only for processes that do nothing but inspect models or their source code.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_NEEDLESS = ("accelerate", "peft", "scipy", "sklearn", "transformers")


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _undecorated


def import_model_classes() -> None:
    """Import diffusers and the fusions. Does nothing if the process has imported diffusers already."""
    if "diffusers" in sys.modules:
        return
    # A module with only two decorators replaces torch's compiler. diffusers' import needs nothing else of
    # the compiler.
    compiler: Any = types.ModuleType("torch._dynamo")
    compiler.allow_in_graph = compiler.disable = _undecorated
    stand_ins: dict[str, Any] = {**dict.fromkeys(_NEEDLESS), compiler.__name__: compiler}
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("sdfastgn.patches.registry")
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
