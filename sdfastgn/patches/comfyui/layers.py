"""Lets fused blocks use ComfyUI's layers like PyTorch's, also layers that change their weights for each call.

Fusions look for layers of exact classes such as ``nn.Conv2d``, because they know what these compute.
ComfyUI's ``disable_weight_init.Conv2d`` computes the same. But some of its instances *cast*: at each call
they prepare their weights, that is, convert, patch or move them. A layer casts if ``comfy_cast_weights`` is
set (low VRAM, weights in another dtype such as fp8) or if there are functions on its weights (LoRA with low
VRAM). ComfyUI changes these attributes only when it loads or unloads weights. Before that, ``eject``
(``inject.py``) makes the model stock again. So a layer of a fused model never begins or stops to cast.

- A layer that does not cast gets PyTorch's class.
- A layer that casts keeps its class. A fused block calls ``prepared(layer, x)`` and gets a layer of PyTorch's
  class with the weights that ComfyUI has prepared for this call.
- With low VRAM, ComfyUI moves the weights of some layers to the GPU at each call. A step takes as long as
  these moves, so fusions would gain nothing, and the whole model stays stock (``reason_of_moves``).

If the user interrupts a run, ComfyUI's layers notice this at their next call, and PyTorch's layers do not. So
the run ends a little later: at the next call of a layer with ComfyUI's class, or at the next step.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
from torch import Tensor, nn

from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import foreign_override, is_unhooked, stock_class
from sdfastgn.patches.swap.tested_sources import TestedSource, tested, unknown_source

_ops: Any = comfy.ops
# Key that ``_Layer.apply`` puts into the ``__dict__`` of each layer to which it is applied. Its value is the
# class that the layer had before: ComfyUI's.
_STOCK_CLASS = "_sdfastgn_stock_class"
# Name of ComfyUI's class -> the class of the layer that ``prepared`` returns.
_CLASSES: dict[str, type[nn.Module]] = {
    "Conv2d": nn.Conv2d, "Linear": nn.Linear, "GroupNorm": FusedGroupNorm, "LayerNorm": nn.LayerNorm,
}  # fmt: skip
# ComfyUI's class -> the class of the layer that ``prepared`` returns. The layers of ``manual_cast`` always
# cast: they are for models whose weights have another dtype than their activations.
_PREPARED: dict[type[nn.Module], type[nn.Module]] = {
    getattr(ops, name): cls
    for ops in (_ops.disable_weight_init, _ops.manual_cast)
    for name, cls in _CLASSES.items()
}


class _Layer:
    """The fusion of one kind of layer. ``plain``: PyTorch's class, the base of ComfyUI's classes."""

    def __init__(self, plain: type[nn.Module]) -> None:
        self.name = f"plain_{plain.__name__.lower()}"
        self.stock: type[nn.Module] = getattr(_ops.disable_weight_init, plain.__name__)
        # ComfyUI's ``forward`` of the layer. If it is a version that was tested, it computes the same as
        # PyTorch's for weights that need no cast.
        self._when_plain = tested(self.stock, "forward")
        # ComfyUI's code that casts, patches or moves the weights for a call, and releases them afterwards.
        self._when_casting = (
            tested(self.stock, "forward_comfy_cast_weights"),
            tested(_ops, "cast_bias_weight", "uncast_bias_weight"),
        )
        self.sources: tuple[TestedSource, ...] = (self._when_plain, *self._when_casting)
        self.plain = plain

    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or isinstance(module, self.stock)

    def is_applied(self, module: nn.Module) -> bool:
        return issubclass(vars(module).get(_STOCK_CLASS, object), self.stock)

    def reason_to_skip(self, module: Any) -> str | None:
        if type(module) not in _PREPARED:
            return f"its class {type(module).__qualname__} is a subclass of ComfyUI's {self.stock.__name__}"
        reason = foreign_override(module, "forward_comfy_cast_weights") or unknown_source(self._when_plain)
        if reason is not None or not _casts(module):
            return reason
        return unknown_source(*self._when_casting)

    def apply(self, module: nn.Module) -> None:
        vars(module)[_STOCK_CLASS] = type(module)
        if not _casts(module):
            change_class(module, self.plain)

    def undo(self, module: nn.Module) -> None:
        change_class(module, vars(module).pop(_STOCK_CLASS))


LAYERS = tuple(_Layer(plain) for plain in (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LayerNorm))


def _casts(module: Any) -> bool:
    return getattr(module, "comfy_cast_weights", False) or _has_functions(module)


def plain_class(layer: Any) -> type[nn.Module]:
    """PyTorch's class for ``layer`` if the layer does not cast; else the layer's own stock class.

    The result is the same whether the fusions of ``LAYERS`` have already changed the layer's class or not.
    """
    for each in LAYERS:
        if type(layer) is each.stock and not _casts(layer) and each.reason_to_skip(layer) is None:
            return each.plain
    return stock_class(layer)


def reason_to_cast(module: Any) -> str | None:
    """Why ComfyUI casts, patches or moves the weights of ``module`` at each call; None if it does not."""
    return "it casts its weights at each call" if _casts(module) else None


def reason_of_moves(root: nn.Module) -> str | None:
    """Why ``root`` must stay stock as a whole, because of low VRAM; None if it is not in low VRAM."""
    if any(map(_has_low_vram, root.modules())):
        return "GPU memory is short, so ComfyUI moves some of its weights at each call"
    return None


def _has_functions(module: Any) -> bool:
    """True if ComfyUI applies functions, such as a LoRA, to the weights of ``module`` at each call."""
    return bool(getattr(module, "weight_function", ()) or getattr(module, "bias_function", ()))


def _has_low_vram(module: nn.Module) -> bool:
    """True if ComfyUI has left the weights of ``module`` in main memory, because GPU memory is short."""
    return hasattr(module, "prev_comfy_cast_weights")


def has_steady_weights(module: Any) -> bool:
    """True if calls of ``module`` can be part of a CUDA graph, because its weights stay at one address.

    A cast on the GPU becomes part of the graph. The result is False if the weights are moved at each call,
    patched by functions, or cast by unknown code.
    """
    has_other_class = vars(module).get(_STOCK_CLASS, type(module)) is not type(module)
    if has_other_class or not hasattr(module, "comfy_cast_weights"):
        return True
    if type(getattr(module, "weight", None)) not in (type(None), Tensor, nn.Parameter):
        return False  # the weight is quantized, so unknown code casts it
    if not _casts(module):
        return True
    if _has_low_vram(module) or _has_functions(module):
        return False
    own = (layer for layer in LAYERS if layer.claims(module))
    return any(layer.is_applied(module) or layer.reason_to_skip(module) is None for layer in own)


def prepared(layer: Any, x: Tensor, *others: Tensor) -> Any:
    """Returns a layer of PyTorch's class, or a ``FusedGroupNorm``, with the weights for one call on x.

    ComfyUI has cast and patched these weights.

    Returns ``layer`` itself if it does not cast. Also returns ``layer`` itself if ComfyUI's code must run it:
    because it has hooks, because sdfastgn does not know how it casts, or because ``others``, the further
    inputs of the fused call, have another dtype than x.
    """
    if (
        type(layer) is not vars(layer).get(_STOCK_CLASS)
        or not is_unhooked(layer)
        or any(other.dtype != x.dtype for other in others)
    ):
        return layer
    weight, bias, lent = _ops.cast_bias_weight(layer, x, offloadable=True)
    _ops.uncast_bias_weight(layer, weight, bias, lent)
    cls = _PREPARED[type(layer)]
    found = cls.__new__(cls)
    vars(found).update(vars(layer), _parameters={"weight": weight, "bias": bias})
    return found
