"""Lists sdfastgn's hooks for layouts, and removes hooks from modules.

``remove_hooks`` finds a hook by its function. The handle that PyTorch returned when the hook was registered
belongs to the original module, so it could not remove the hook from a copy or an unpickled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# The hooks of ``channels_last.py``. They change only the layout of tensors, never values.
LAYOUT_HOOKS: list[Callable[..., Any]] = []

_HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")
_OPTION_DICTS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def layout_hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds a hook to ``LAYOUT_HOOKS``."""
    LAYOUT_HOOKS.append(function)
    return function


def remove_hooks(module: nn.Module, *functions: Callable[..., Any]) -> None:
    """Remove every forward hook and forward pre-hook of ``module`` that is one of ``functions``."""
    for name in _HOOK_DICTS:
        hooks = getattr(module, name)
        for key in [k for k, hook in hooks.items() if hook in functions]:
            del hooks[key]
            for option in _OPTION_DICTS:
                getattr(module, option).pop(key, None)
