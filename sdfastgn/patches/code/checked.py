"""Finds replaced functions and new adapters at each outermost call of an optimized model without CUDA graphs.

``Checked`` replaces ``_call_impl`` of a module, which ``nn.Module.__call__`` calls. It does not replace
``forward``, because fused code does not run modules whose forward was replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.code.states import States, is_checked, running
from sdfastgn.patches.lora.adapters import takes_adapters
from sdfastgn.patches.lora.merging import adopt_new, give_back
from sdfastgn.patches.offload.repeated import until_it_fits
from sdfastgn.patches.swap.exclusive import call_entry, set_call_entry
from sdfastgn.patches.swap.fusion import stock_class
from sdfastgn.patches.swap.instance_entries import InstanceEntry, guard, unguard

# The name of the method that ``nn.Module.__call__`` calls.
CALL = "_call_impl"


class Checked(InstanceEntry):
    """Replaces ``_call_impl`` of its module, and so runs at each call of the module.

    New adapters are merged into the weights. If other code has replaced functions of the model, and fused
    blocks would not call the replacements, the call runs without fused blocks. If memory is short, merged
    weights are freed, and the call is made again.

    ``compares``: False if no part of the module is fused. Then calls do not look for replaced functions,
    until new adapters were merged and a part is fused.
    """

    __slots__ = ("_call", "_states")

    def __init__(self, module: nn.Module, compares: bool = True) -> None:
        super().__init__(module)
        # While torch.compile traces a call, it cannot read a method of a class that diffusers has marked with
        # ``allow_in_graph``. So ``_call_impl`` is read here, before any call.
        self._call = type(module)._call_impl
        self._states = States(module) if compares else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        call = functools.partial(self._call, module)
        if torch.compiler.is_compiling() or is_checked():
            return call(*args, **kwargs)
        if adopt_new(module) and self._states is None and _has_fused(module):
            self._states = States(module)
        states = self._states
        if states is None:
            return call(*args, **kwargs)
        with running(bool(states.replaced(states.look()))):
            return until_it_fits(call, args, kwargs, lambda: bool(give_back(module)))


def _has_fused(root: nn.Module) -> bool:
    return any(stock_class(part) is not type(part) for part in root.modules())


def check_calls(root: nn.Module, compared: Collection[nn.Module] = ()) -> None:
    """Let each call of ``root``, and each call of its children, look for replaced functions.

    Children are included, because they may be called on their own: an autoencoder's ``decode`` calls its
    decoder. Modules without fused parts are left as they are, except for a ``root`` that may get adapters. A
    second call of this function changes nothing.

    ``compared``: modules whose calls already look for replaced functions, also in the modules inside them.
    """
    for module in () if root in compared else entrances(root):
        if call_entry(module) is not None or module in compared:
            continue
        is_fused = _has_fused(module)
        if is_fused or (module is root and takes_adapters(list(root.modules()))):
            set_call_entry(module, Checked(module, is_fused))
            guard(module)


def stop_checking(modules: Iterable[nn.Module]) -> None:
    """Undo ``check_calls``: calls of ``modules`` no longer look for replaced functions."""
    for module in modules:
        if type(call_entry(module)) is Checked:
            set_call_entry(module, None)
            unguard(module)


def entrances(root: nn.Module) -> Iterator[nn.Module]:
    """Yields ``root`` and its children. A ModuleList or ModuleDict is replaced by the modules in it."""
    yield root
    children = list(root.children())
    for child in children:
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            children += child.children()
        else:
            yield child
