"""Gives ComfyUI's layers PyTorch's classes, unless they cast their weights at each call.

Fusions look for exact classes such as ``nn.Conv2d``, because they know what a call of these computes.
ComfyUI's ``disable_weight_init.Conv2d`` computes the same, unless it must prepare its weights at each call.
It does so if ``comfy_cast_weights`` is set (low VRAM, another dtype) or if there are functions on its weights
(LoRA with low VRAM). Every other layer gets PyTorch's class. ComfyUI changes these attributes only when it
loads or unloads weights, and ``eject`` is called before that.

If the user interrupts a run, ComfyUI's own layers notice it at their next call. PyTorch's layers do not. So
the run ends later: at the next layer that still has ComfyUI's class, or at the next step.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
from torch import nn

from sdfastgn.patches.core.class_forward import change_class
from sdfastgn.patches.core.fusion import foreign_override
from sdfastgn.patches.core.tested_sources import TestedSource, tested, unknown_source

__all__ = ["LAYERS"]

_ops: Any = comfy.ops.disable_weight_init
# Key in a layer's ``__dict__`` while the layer has PyTorch's class. Its value is the layer's ComfyUI class.
_STOCK_CLASS = "_sdfastgn_stock_class"


class _PlainLayer:
    """Changes layers of one of ComfyUI's classes to the class of PyTorch from which it is derived."""

    def __init__(self, stock: type[nn.Module], plain: type[nn.Module]) -> None:
        self.name = f"plain_{plain.__name__.lower()}"
        # If the code of this ``forward`` is known, it computes the same as PyTorch's for weights that need no
        # cast.
        self.sources: tuple[TestedSource, ...] = (tested(stock, "forward"),)
        self.stock, self._plain = stock, plain

    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or isinstance(module, self.stock)

    def is_applied(self, module: nn.Module) -> bool:
        return vars(module).get(_STOCK_CLASS) is self.stock

    def reason_to_skip(self, module: Any) -> str | None:
        if module.comfy_cast_weights or module.weight_function or module.bias_function:
            return "casts its weights at each call"
        if type(module) is not self.stock:
            return f"its class {type(module).__qualname__} is a subclass of ComfyUI's {self.stock.__name__}"
        return foreign_override(module) or unknown_source(*self.sources)

    def apply(self, module: nn.Module) -> None:
        change_class(module, self._plain)
        vars(module)[_STOCK_CLASS] = self.stock

    def undo(self, module: nn.Module) -> None:
        change_class(module, vars(module).pop(_STOCK_CLASS))


LAYERS = tuple(
    _PlainLayer(getattr(_ops, plain.__name__), plain)
    for plain in (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LayerNorm)
)
