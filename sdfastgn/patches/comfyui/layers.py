"""Lets fused blocks use ComfyUI's layers like PyTorch's, also layers that change their weights for each call.

Fusions look for layers of exact classes such as ``nn.Conv2d``, because they know what these compute.
ComfyUI's ``disable_weight_init.Conv2d`` computes the same. But some layers of this class *cast*: at each call
they prepare their weights, that is, convert, patch or move them. A layer casts if ``comfy_cast_weights`` is
set (low VRAM, weights in another dtype such as fp8) or if there are functions on its weights (LoRA with low
VRAM). ComfyUI changes these attributes only when it loads or unloads weights. Before that, ``eject``
(``inject.py``) undoes all fusions of the model. So a layer of a fused model never begins or stops to cast.

- A layer that does not cast gets PyTorch's class.
- A layer that casts keeps its class. A fused block calls ``prepared(layer, x)`` and gets a layer of PyTorch's
  class with the weights that ComfyUI has prepared for this call.
- With low VRAM, ComfyUI moves the weights of some layers to the GPU at each call. A step takes as long as
  these moves, so fusions would gain nothing, and the whole model is left as it is (``reason_of_moves``).

If the user interrupts a run, ComfyUI's layers notice this at their next call, and PyTorch's layers do not. So
the run of a fused model ends a little later: at the next call of a layer with ComfyUI's class, or at the next
step.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
from torch import Tensor, nn

from sdfastgn.patches.code.checked import stop_checking
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import foreign_override, is_unhooked, restore_class, stock_class
from sdfastgn.patches.swap.tested_sources import TestedSource, tested, unknown_source

_ops: Any = comfy.ops
# The key in the ``__dict__`` of a fused layer under which the layer's former class, ComfyUI's, is kept.
_STOCK_CLASS = "_sdfastgn_stock_class"
# The keys are names of ComfyUI's classes of layers. A value is the class of the layer that the function
# ``prepared`` returns for one call, instead of a layer of ComfyUI's class.
_CLASSES: dict[str, type[nn.Module]] = {
    "Conv2d": nn.Conv2d, "Linear": nn.Linear, "GroupNorm": FusedGroupNorm, "LayerNorm": nn.LayerNorm,
}  # fmt: skip
# The keys are ComfyUI's classes of layers. A value is the class of the layer that the function ``prepared``
# returns for one call, instead of a layer of ComfyUI's class. The layers of ComfyUI's ``manual_cast`` always
# cast: they are for models whose weights have another dtype than their activations.
_PREPARED: dict[type[nn.Module], type[nn.Module]] = {
    getattr(ops, name): cls
    for ops in (_ops.disable_weight_init, _ops.manual_cast)
    for name, cls in _CLASSES.items()
}


class _Layer:
    """The fusion that gives ComfyUI's layers of one kind PyTorch's class.

    ``plain``: PyTorch's class, such as ``nn.Conv2d``, on which ComfyUI's classes are based.
    """

    def __init__(self, plain: type[nn.Module]) -> None:
        self.name = f"plain_{plain.__name__.lower()}"
        self.stock: type[nn.Module] = getattr(_ops.disable_weight_init, plain.__name__)
        # ComfyUI's ``forward`` of the layer must be a tested version. Tested versions compute the same as
        # PyTorch's ``forward`` if the weights need no cast.
        self._when_plain = tested(self.stock, "forward")
        # ComfyUI's functions that cast, patch or move the weights for a call, and release them afterwards.
        # For a layer that casts, their versions must be tested ones too.
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


def restore(root: nn.Module) -> None:
    """Restore the modules in ``root``: classes, layers of ComfyUI's classes, and the layout of weights."""
    stop_checking(root.modules())
    for module in root.modules():
        restore_class(module)
        for layer in LAYERS:
            if layer.is_applied(module):
                layer.undo(module)
        channels_last.restore(module)


def _casts(module: Any) -> bool:
    return getattr(module, "comfy_cast_weights", False) or _has_functions(module)


def plain_class(layer: Any) -> type[nn.Module]:
    """PyTorch's class for ``layer`` if the layer does not cast; else the class that ComfyUI gave the layer.

    To cast means to convert, patch or move the weights at each call. The result is the same before and after
    the layer's class was changed to PyTorch's.
    """
    for each in LAYERS:
        if type(layer) is each.stock and not _casts(layer) and each.reason_to_skip(layer) is None:
            return each.plain
    return stock_class(layer)


def reason_to_cast(module: Any) -> str | None:
    """Why ComfyUI casts, patches or moves the weights of ``module`` at each call; None if it does not."""
    return "it casts its weights at each call" if _casts(module) else None


def reason_of_moves(root: nn.Module) -> str | None:
    """Why low VRAM forbids to fuse anything in ``root``; None if ComfyUI moves no weights at each call."""
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

    A conversion of the weights' dtype on the GPU becomes part of the graph. The result is False if the
    weights are moved at each call, patched by functions, or converted by unknown code.
    """
    has_other_class = vars(module).get(_STOCK_CLASS, type(module)) is not type(module)
    if has_other_class or not hasattr(module, "comfy_cast_weights"):
        return True
    if type(getattr(module, "weight", None)) not in (type(None), Tensor, nn.Parameter):
        return False  # a quantized weight, which unknown code converts
    if not _casts(module):
        return True
    if _has_low_vram(module) or _has_functions(module):
        return False
    own = (layer for layer in LAYERS if layer.claims(module))
    return any(layer.is_applied(module) or layer.reason_to_skip(module) is None for layer in own)


def prepared(layer: Any, x: Tensor, *others: Tensor) -> Any:
    """Returns a layer of PyTorch's class, or a ``FusedGroupNorm``, with the weights for one call on x.

    ComfyUI's code has converted and patched these weights for this call. Returns ``layer`` itself if its
    weights need no such preparation. Also returns ``layer`` itself if ComfyUI's code must run the layer: if
    the layer has hooks, if sdfastgn does not know how its weights are prepared, or if ``others``, the further
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
