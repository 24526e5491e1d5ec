"""Fusions of models whose parts share a product (``shared/one_product.py``): hooks on the model begin and end the calls in which they do.

The parts look for it by themselves. Their weights are put side by side when a model is optimised, and when it moves; a copy's, which is
found to be one at its first call, when it moves next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdfastgn.patches.core.fusion import ClassSwap, foreign_class, is_about
from sdfastgn.patches.core.hooks import remove_hooks
from sdfastgn.patches.shared.one_product import Sharing, begin_call, end_call

__all__ = ["SharingFusion"]


@dataclass(frozen=True)
class SharingFusion:
    """A fusion of whole models, for the parts that ``sharing`` is about.

    Args:
        name: in reports.
        models: exact types that are fused.
        parts: of a model: those that may share, fused or not.
        called: what they are called in a reason.
        rule: by which a part is fused; others share nothing.
        hooks: forward pre-hook and forward hook of the model, functions of a module's top level (pickle), which call ``begin`` and ``end``.
    """

    name: str
    models: tuple[type[nn.Module], ...]
    parts: Callable[[nn.Module], Iterable[nn.Module]]
    called: str
    rule: ClassSwap
    sharing: Sharing
    hooks: tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any], None]]

    def begin(self, model: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        if self.sharing.groups_of(model) is None:
            self._form(model)
        begin_call(model)

    def end(self, model: nn.Module) -> None:
        """After an exception too."""
        if not torch.compiler.is_compiling():
            end_call(model)

    def claims(self, module: nn.Module) -> bool:
        if self.is_applied(module):
            return True
        return is_about(module, *self.models) and sum(1 for _ in self.parts(module)) > 1

    def is_applied(self, module: nn.Module) -> bool:
        return self.hooks[0] in module._forward_pre_hooks.values()

    def reason_to_skip(self, module: nn.Module) -> str | None:
        reason = foreign_class(module, *self.models)
        if reason is not None:
            return reason
        found = [part for part in self.parts(module) if self.rule.claims(part)]
        able = [part for part in found if self.rule.is_applied(part) or not self.rule.reason_to_skip(part)]
        return None if len(able) > 1 else f"fewer than two of its {self.called} can be fused"

    def apply(self, module: nn.Module) -> None:
        self._form(module)
        self.sharing.pack(module)
        before, after = self.hooks
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def undo(self, module: nn.Module) -> None:
        remove_hooks(module, *self.hooks)
        end_call(module)
        self.sharing.dissolve(module)

    def _form(self, model: nn.Module) -> None:
        self.sharing.form(model, (part for part in self.parts(model) if self.rule.is_applied(part)))
