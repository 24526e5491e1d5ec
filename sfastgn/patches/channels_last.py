"""Channels-last from the first convolution of a model to the last: weights once, images at the model's doors.

Weights of 2-D and 3-D convolutions are laid out channels-last in place (same Parameter objects, same values) and their former shapes
and strides remembered on the convolution. A hook on the first convolution of each model converts what comes in from outside; one on the
last gives the output back channels-first, which is what callers of the stock model get.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sfastgn.patches.hooks import remove_hooks

__all__ = ["convert", "converted_weights", "is_entry", "is_exit", "restore", "unconverted_weights", "without_adapters"]

# In the convolution's __dict__ while converted: (shape, strides). Goes wherever the module goes (deepcopy, pickle, a LoRA's base_layer).
_STOCK_LAYOUT = "_sfastgn_stock_layout"

_FORMATS: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}
# diffusers' names for the convolutions through which a tensor enters a model or its autoencoder's middle, and leaves it.
_ENTRIES = ("conv_in", "quant_conv", "post_quant_conv")
_EXITS = ("conv_out", "quant_conv")
# peft's names for the layer of the model within an adapter; beside it is what the adapter has added or trains.
_ADAPTED = ("base_layer", "original_module")


def enter(conv: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a first convolution: image to channels-last."""
    if args and isinstance(args[0], Tensor) and args[0].dim() == 4:
        return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
    return None


def leave(conv: Any, args: Any, output: Any) -> Any:
    """Forward hook of a last convolution: image to channels-first."""
    return output.contiguous() if isinstance(output, Tensor) else output


def is_entry(path: str, module: nn.Module) -> bool:
    """True if ``module``, found at the dotted ``path``, is a 2-D convolution through which images come in."""
    return isinstance(module, nn.Conv2d) and path.rpartition(".")[2] in _ENTRIES


def is_exit(path: str, module: nn.Module) -> bool:
    """True if ``module``, found at the dotted ``path``, is a 2-D convolution through which images go out."""
    return isinstance(module, nn.Conv2d) and path.rpartition(".")[2] in _EXITS


def without_adapters(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root.named_modules()`` less what adapters have added: it is saved as it lies, and safetensors wants that contiguous."""
    added: set[nn.Module] = set()
    for module in root.modules():
        children = dict(module.named_children())
        if not children.keys().isdisjoint(_ADAPTED):
            added.update(m for name, child in children.items() if name not in _ADAPTED for m in child.modules())
    return ((path, module) for path, module in root.named_modules() if module not in added)


def convert(path: str, module: nn.Module) -> None:
    """Make one convolution channels-last; a module of another kind, or one that is converted already, stays as it is."""
    if is_entry(path, module) and enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(enter)
    if is_exit(path, module) and leave not in module._forward_hooks.values():
        module.register_forward_hook(leave)
    memory_format = _new_format(module)
    if memory_format is None:
        return
    weight: Any = module._parameters["weight"]
    vars(module)[_STOCK_LAYOUT] = (weight.shape, weight.stride())
    weight.data = weight.data.contiguous(memory_format=memory_format)


def _new_format(module: nn.Module) -> torch.memory_format | None:
    """The format that ``convert`` would give the weight of ``module``; None where it leaves it alone."""
    memory_format = next((f for kind, f in _FORMATS.items() if isinstance(module, kind)), None)
    weight = module._parameters.get("weight")
    if memory_format is None or weight is None or _STOCK_LAYOUT in vars(module):
        return None
    if weight.dim() != (5 if memory_format is torch.channels_last_3d else 4) or not weight.is_floating_point():
        return None  # quantised weights are stored in other shapes
    return None if weight.is_contiguous(memory_format=memory_format) else memory_format


def unconverted_weights(module: nn.Module) -> int:
    """Number of convolutions below ``module`` whose weights ``convert`` would make channels-last."""
    return sum(_new_format(m) is not None for _, m in without_adapters(module))


def converted_weights(module: nn.Module) -> int:
    """Number of convolutions below ``module`` whose weights are channels-last by ``convert``."""
    return sum(_STOCK_LAYOUT in vars(m) for m in module.modules())


def restore(module: nn.Module) -> None:
    """Undo ``convert``: hooks off, and the weight, if it still has its shape, back to its former strides."""
    remove_hooks(module, enter, leave)
    layout = vars(module).pop(_STOCK_LAYOUT, None)
    if layout is None:
        return
    for weight in (module._parameters.get("weight"), _offloaded(module)):
        # One that was widened since (inpainting, more channels) is not ours: in the old strides its elements would lie on each other.
        if weight is not None and weight.shape == layout[0] and weight.stride() != layout[1]:
            stock = torch.empty_strided(*layout, dtype=weight.dtype, device=weight.device)
            weight.data = stock.copy_(weight.data)


def _offloaded(module: nn.Module) -> Tensor | None:
    """The weight that accelerate's hooks put into ``module`` at each call."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights = getattr(part, "weights_map", None)
        if weights is not None and "weight" in weights:
            return weights["weight"]
    return None
