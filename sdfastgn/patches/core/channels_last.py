"""Channels-last layout for a whole model: weights once, images at its first and last convolution.

Weights of 2-D and 3-D convolutions become channels-last in place: the same Parameter objects with the
same values. Their former shapes and strides are remembered on the convolution. A hook on the first
convolution of a model converts its input; one on the last returns the output channels-first, as callers
of the stock model get it.

The layout pays only where kernels run. So weights are converted once they are on a GPU in a dtype that
has kernels: at once, or when the model is moved there (an ``_apply`` in the root's ``__dict__``, which
``.to()`` and its like call). Weights that leave the GPU keep it, because most are only parked there. The
first forward on a device without kernels restores their former layout.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone
from sdfastgn.patches.core.adapters import WRAPPED, adapted_layers
from sdfastgn.patches.core.fsdp import modules_in_fsdp
from sdfastgn.patches.core.hooks import remove_hooks
from sdfastgn.patches.core.instance_entries import InstanceEntry, guard, unguard
from sdfastgn.patches.core.left_alone import reason_to_leave

__all__ = [
    "apply",
    "converted_weights",
    "convertible_modules",
    "is_applied",
    "is_complete",
    "is_entry",
    "is_exit",
    "laid_out",
    "restore",
    "unconverted_weights",
]

# In the convolution's __dict__ while converted: (shape, strides). Goes wherever the module goes
# (deepcopy, pickle, a LoRA's base_layer).
_STOCK_LAYOUT = "_sdfastgn_stock_layout"

_FORMATS: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}
# How paths end of the convolutions through which a tensor enters a model or its autoencoder's middle, and
# leaves it: diffusers' names, and those of a UNet in CompVis' layout (ComfyUI).
_ENTRIES = (".conv_in", ".quant_conv", ".post_quant_conv", ".input_blocks.0.0")
_EXITS = (".conv_out", ".quant_conv", ".out.2")


def enter(conv: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a first convolution: image to channels-last."""
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 4:
        return None
    if dispatch.has_kernels(args[0]):
        return (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
    if _STOCK_LAYOUT in conv.__dict__ and not torch.compiler.is_compiling():
        _lay_out_as_stock(conv)
    return None


def leave(conv: Any, args: Any, output: Any) -> Any:
    """Forward hook of a last convolution: image to channels-first."""
    return output.contiguous() if isinstance(output, Tensor) and dispatch.has_kernels(output) else output


def is_entry(path: str, module: nn.Module) -> bool:
    """True if ``module`` is a 2-D convolution through which images come in. ``path`` is dotted."""
    return isinstance(module, nn.Conv2d) and _path_in_model(path).endswith(_ENTRIES)


def is_exit(path: str, module: nn.Module) -> bool:
    """True if ``module`` is a 2-D convolution through which images go out. ``path`` is dotted."""
    return isinstance(module, nn.Conv2d) and _path_in_model(path).endswith(_EXITS)


def _path_in_model(path: str) -> str:
    """Of a layer within an adapter the path that it has without one, after a dot."""
    names = path.split(".")
    while names and names[-1] in WRAPPED:
        names.pop()
    return "." + ".".join(names)


def convertible_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``root.named_modules()`` less those whose weights must stay as they are.

    What adapters have added is saved contiguous. The memory of what FSDP shards is FSDP's. Of a model
    that is faster as it is, none.
    """
    if reason_to_leave(root) is not None:
        return iter(())
    left = modules_in_fsdp(root)
    for _, layer in adapted_layers(root):
        added = (child for name, child in layer.named_children() if name not in WRAPPED)
        left.update(module for child in added for module in child.modules())
    return ((path, module) for path, module in root.named_modules() if module not in left)


# By id, to find the model that a convolution is in. Threads may add to it while others read ``valuerefs``.
_living: weakref.WeakValueDictionary[int, _Apply] = weakref.WeakValueDictionary()


class _Apply(InstanceEntry):
    """Stands for the ``_apply`` of one root: lays out the convolutions that a move has brought to a GPU."""

    __slots__ = ()

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        _living[id(self)] = self

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        root = self.module
        type(root)._apply(root, fn, recurse)
        if recurse:
            for _, module in convertible_modules(root):
                if _STOCK_LAYOUT not in vars(module):  # else the caller may have asked for another layout
                    _convert(module)
        return root


def apply(root: nn.Module) -> None:
    """Make the convolutions below ``root`` channels-last, now or once they are on a GPU. Idempotent."""
    for step in _steps(root):
        step()


def is_complete(root: nn.Module) -> bool:
    """True if ``apply(root)`` would change nothing."""
    return next(_steps(root), None) is None


def _steps(root: nn.Module) -> Iterator[Callable[[], Any]]:
    """What ``apply(root)`` has to do."""
    for path, module in convertible_modules(root):
        if is_entry(path, module) and enter not in module._forward_pre_hooks.values():
            yield functools.partial(module.register_forward_pre_hook, enter)
        if is_exit(path, module) and leave not in module._forward_hooks.values():
            yield functools.partial(module.register_forward_hook, leave)
        if _format_now(module) is not None:
            yield functools.partial(_convert, module)
    convolutions = (module for _, module in convertible_modules(root) if isinstance(module, tuple(_FORMATS)))
    if "_apply" not in vars(root) and next(convolutions, None) is not None:
        yield functools.partial(_follow_moves, root)


def _follow_moves(root: nn.Module) -> None:
    vars(root)["_apply"] = _Apply(root)
    guard(root)


def is_applied(root: nn.Module) -> bool:
    """True after ``apply(root)``, until ``restore``; where there is no convolution never."""
    return isinstance(vars(root).get("_apply"), _Apply) or converted_weights(root) > 0


def laid_out(root: nn.Module) -> set[nn.Module]:
    """Modules below ``root`` that ``apply`` has changed or hooked."""
    return {
        module
        for module in root.modules()
        if _STOCK_LAYOUT in vars(module)
        or isinstance(vars(module).get("_apply"), _Apply)
        or enter in module._forward_pre_hooks.values()
        or leave in module._forward_hooks.values()
    }


def _convert(module: nn.Module) -> None:
    """Make one convolution channels-last, if it is one that is not and gains by it."""
    memory_format = _format_now(module)
    if memory_format is None:
        return
    weight: Any = module._parameters["weight"]
    vars(module)[_STOCK_LAYOUT] = (weight.shape, weight.stride())
    _lay_out(weight, torch.empty_like(weight, device="meta", memory_format=memory_format).stride())


def _format_now(module: nn.Module) -> torch.memory_format | None:
    """The format in which the weight of ``module`` gains where it is now; None where it stays as it is."""
    memory_format = _new_format(module)
    weight: Any = None if memory_format is None else module._parameters["weight"]
    return memory_format if weight is not None and dispatch.has_kernels(weight) else None


def _new_format(module: nn.Module) -> torch.memory_format | None:
    """The format in which the weight of ``module`` gains on a GPU; None where it stays as it is."""
    memory_format = next((f for kind, f in _FORMATS.items() if isinstance(module, kind)), None)
    if memory_format is None:
        return None
    weight: Any = module._parameters.get("weight")
    # A subclass is quantized, one of several shards, or has no shape yet.
    if type(weight) not in (Tensor, nn.Parameter):
        return None
    if (
        weight.dim() != (5 if memory_format is torch.channels_last_3d else 4)
        or not weight.is_floating_point()
        or 0 in weight.stride()
    ):
        return None  # quantized weights are stored in other shapes, expanded ones have no memory for it
    return None if weight.is_contiguous(memory_format=memory_format) else memory_format


def unconverted_weights(module: nn.Module) -> int:
    """Number of convolutions below ``module`` whose weights ``apply`` would change, now or later."""
    return sum(_new_format(m) is not None for _, m in convertible_modules(module))


def converted_weights(module: nn.Module) -> int:
    """Number of convolutions below ``module`` whose weights are channels-last by ``apply``."""
    return sum(_STOCK_LAYOUT in vars(m) for m in module.modules())


def restore(module: nn.Module) -> None:
    """Undo ``apply`` on one module: hooks off, and a weight that kept its shape back to its strides."""
    remove_hooks(module, enter, leave)
    if isinstance(vars(module).get("_apply"), _Apply):
        del vars(module)["_apply"]
    unguard(module)
    _unconvert(module)


def _lay_out_as_stock(conv: nn.Module) -> None:
    """Give all weights of the model of ``conv`` their former layout, until the model moves again."""
    entries = [entry for ref in _living.valuerefs() if (entry := ref()) is not None]
    roots = [root for entry in entries if (root := entry._module()) is not None]
    for module in {conv, *(m for root in roots if conv in set(root.modules()) for m in root.modules())}:
        _unconvert(module)


def _unconvert(module: nn.Module) -> None:
    layout = vars(module).get(_STOCK_LAYOUT)
    if layout is None:
        return
    # Parametrizations, pruning and weight_norm keep the weight by another name.
    for weight in (*module.parameters(), _offloaded(module)):
        # One that was widened since (inpainting, more channels) is not ours: in the old strides its
        # elements would lie on each other.
        if weight is not None and weight.shape == layout[0] and weight.stride() != layout[1]:
            _lay_out(weight, layout[1])
    del vars(module)[_STOCK_LAYOUT]  # last: after an interrupt ``restore`` goes on here


def _lay_out(weight: Tensor, stride: tuple[int, ...]) -> None:
    """Give a dense ``weight`` these strides: in its own memory, unless something else has that too.

    A CUDA graph that was captured with them is right again once they come back (ComfyUI ejects and
    injects before every run). The weight has its values at every moment, so that Ctrl-C cannot spoil it.
    """
    in_place = is_alone(weight)
    # An inference tensor may be written to in inference mode alone, and memory made there would turn
    # any other into one.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        own = weight.data
        weight.data = torch.empty_strided(own.shape, stride, dtype=own.dtype, device=own.device).copy_(own)
        if in_place:
            weight.data = own.as_strided(own.shape, stride).copy_(weight.data)


def _offloaded(module: nn.Module) -> Tensor | None:
    """The weight that accelerate's hooks put into ``module`` at each call."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        weights = getattr(part, "weights_map", None)
        if weights is not None and "weight" in weights:
            return weights["weight"]
    return None
