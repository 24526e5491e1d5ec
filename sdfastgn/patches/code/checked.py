"""Compares the code of optimized modules once in each outermost call that is no CUDA graph's.

``Checked`` replaces ``_call_impl`` of a module, which ``nn.Module.__call__`` calls. It does not replace
``forward``, because fused code does not run modules whose forward was replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.code.states import States, is_checked, running
from sdfastgn.patches.core.exclusive import call_entry, set_call_entry
from sdfastgn.patches.core.fusion import stock_class
from sdfastgn.patches.core.instance_entries import InstanceEntry, guard, unguard

__all__ = ["CALL", "Checked", "check_calls", "entrances", "stop_checking"]

# The method of a module that ``nn.Module.__call__`` calls.
CALL = "_call_impl"


class Checked(InstanceEntry):
    """Replaces ``_call_impl`` of its module: calls run stock's code while parts of that are replaced."""

    __slots__ = ("_states",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._states = States(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        call = type(module)._call_impl
        if torch.compiler.is_compiling() or is_checked():
            return call(module, *args, **kwargs)
        with running(bool(self._states.replaced(self._states.look()))):
            return call(module, *args, **kwargs)


def check_calls(root: nn.Module, compared: Collection[nn.Module] = ()) -> None:
    """Compare the code in calls of ``root``, and of the modules in it that other code may call by themselves.

    These are the children of ``root``: an autoencoder's ``decode`` calls its decoder. Modules without fused
    parts are left as they are. Idempotent.

    ``compared``: modules whose calls compare their code already, also that of the modules in them.
    """
    for module in () if root in compared else entrances(root):
        is_new = call_entry(module) is None and module not in compared
        if is_new and any(stock_class(part) is not type(part) for part in module.modules()):
            set_call_entry(module, Checked(module))
            guard(module)


def stop_checking(modules: Iterable[nn.Module]) -> None:
    """Undo ``check_calls`` for ``modules``."""
    for module in modules:
        if type(call_entry(module)) is Checked:
            set_call_entry(module, None)
            unguard(module)


def entrances(root: nn.Module) -> Iterator[nn.Module]:
    """``root`` and its children, those in lists and dicts of modules included."""
    yield root
    children = list(root.children())
    for child in children:
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            children += child.children()
        else:
            yield child
