"""Removes a module's hooks without their handles: it finds them by their functions.

Copies and pickles of a module have its hooks. But the handles that PyTorch returned when the hooks were
registered belong to the original module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["remove_hooks"]

_HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")
_OPTION_DICTS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def remove_hooks(module: nn.Module, *functions: Callable[..., Any]) -> None:
    """Remove every forward hook and forward pre-hook of ``module`` that is one of ``functions``."""
    for name in _HOOK_DICTS:
        hooks = getattr(module, name)
        for key in [k for k, hook in hooks.items() if hook in functions]:
            del hooks[key]
            for option in _OPTION_DICTS:
                getattr(module, option).pop(key, None)
