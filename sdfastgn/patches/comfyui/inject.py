"""Puts the fusions into a model of ComfyUI while it is loaded, and takes them out again.

ComfyUI calls ``inject`` after it has loaded and patched the weights of a model, and ``eject`` before it
touches them: to move them, to add or take away a LoRA, to run a clone with other patches. So the state
of every layer is fixed in between.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from sdfastgn.patches.comfyui import graphs, unet, vae
from sdfastgn.patches.comfyui.layers import LAYERS
from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.fusion import Fusion, restore_class
from sdfastgn.patches.fusions import group_norm, sequential

__all__ = ["CLAIMING", "drop_graphs", "eject", "has_blocks", "inject", "is_loaded"]

_BLOCKS = (*unet.BLOCKS, *vae.BLOCKS, graphs.UNET)
# Those that know ComfyUI's classes, and say what can be fused in a model that is not injected too.
CLAIMING: tuple[Fusion, ...] = (*LAYERS, *_BLOCKS)
# In the order in which they are applied: all others ask for PyTorch's layers.
_STAGES: tuple[tuple[Any, ...], ...] = (LAYERS, (group_norm.FUSION, sequential.FUSION, *_BLOCKS))


def has_blocks(root: nn.Module) -> bool:
    """True if there is any block below ``root`` that is known. Other models stay ComfyUI's altogether."""
    known = tuple(fusion.stock for fusion in _BLOCKS)
    return any(isinstance(module, known) for module in root.modules())


@functools.cache
def _about(cls: Any, stage: int) -> tuple[Any, ...]:
    """Those of a stage that may be about modules of a class: a UNet has two thousand to ask for."""
    return tuple(fusion for fusion in _STAGES[stage] if issubclass(cls, fusion.stock))


def inject(root: nn.Module, cuda_graphs: str | bool = "auto") -> None:
    """Fuse what can be fused below ``root``. Undoes itself if anything fails. Idempotent."""
    if not has_blocks(root):
        return
    try:
        for stage in range(len(_STAGES)):
            for module in root.modules():
                kind: Any = type(module)
                for fusion in _about(kind, stage):
                    _apply(fusion, module)
        channels_last.apply(root)
        for module in root.modules():
            if graphs.UNET.is_applied(module):
                graphs.install(module, cuda_graphs if is_loaded(module) else False)
    except BaseException:
        eject(root)
        raise


def _apply(fusion: Fusion, module: nn.Module) -> None:
    is_new = fusion.claims(module) and not fusion.is_applied(module)
    if is_new and fusion.reason_to_skip(module) is None:
        fusion.apply(module)


def eject(root: nn.Module) -> None:
    """Everything below ``root`` as it was before ``inject``, strides of weights too. Idempotent."""
    for module in root.modules():
        restore_class(module)
        for layer in LAYERS:
            if layer.is_applied(module):
                layer.undo(module)
        channels_last.restore(module)


def drop_graphs(root: nn.Module) -> None:
    """Give back the memory of the graphs below ``root``."""
    for module in root.modules():
        graphed = graphs.graphs_of(module)
        if graphed is not None:
            graphed.clear()


def is_loaded(root: nn.Module) -> bool:
    """False if any layer gets its weights at each call."""
    return not any(getattr(module, "comfy_cast_weights", False) for module in root.modules())
