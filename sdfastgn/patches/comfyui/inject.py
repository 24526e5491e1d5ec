"""Fuses a model of ComfyUI while it is loaded, and restores it afterwards.

ComfyUI calls ``inject`` after it has loaded and patched the weights of a model. It calls ``eject`` before
it changes them again: to move them, to add or remove a LoRA, or to run a clone with other patches. So no
layer changes in between.
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

__all__ = ["CLAIMING", "drop_graphs", "eject", "has_blocks", "inject", "is_loaded", "root_of"]

_BLOCKS = (*unet.BLOCKS, *vae.BLOCKS, graphs.UNET)
# Fusions that claim ComfyUI's own classes. With them a report can describe a model that is not fused yet.
CLAIMING: tuple[Fusion, ...] = (*LAYERS, *_BLOCKS)
# In the order in which they are applied. Layers come first: the others look for PyTorch's exact classes.
_STAGES: tuple[tuple[Any, ...], ...] = (LAYERS, (group_norm.FUSION, sequential.FUSION, *_BLOCKS))


def root_of(patcher: Any) -> nn.Module:
    """The module of a ``ModelPatcher`` that is fused: the UNet inside of a MODEL, or a whole VAE."""
    return getattr(patcher.model, "diffusion_model", patcher.model)


def has_blocks(root: nn.Module) -> bool:
    """True if ``root`` has a block that can be fused. A model without one is left as it is."""
    known = tuple(fusion.stock for fusion in _BLOCKS)
    return any(isinstance(module, known) for module in root.modules())


@functools.cache
def _about(cls: Any, stage: int) -> tuple[Any, ...]:
    """Fusions of a stage that may claim modules of ``cls``. Cached, because a UNet has 2000 modules."""
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
    """Restore everything below ``root`` as it was before ``inject``, also weights' strides. Idempotent."""
    for module in root.modules():
        restore_class(module)
        for layer in LAYERS:
            if layer.is_applied(module):
                layer.undo(module)
        channels_last.restore(module)


def drop_graphs(root: nn.Module) -> None:
    """Drop all graphs of UNets below ``root``, which frees their memory."""
    for module in root.modules():
        graphed = graphs.graphs_of(module)
        if graphed is not None:
            graphed.clear()


def is_loaded(root: nn.Module) -> bool:
    """True if no layer below ``root`` casts its weights at each call, as it would with low VRAM."""
    return not any(getattr(module, "comfy_cast_weights", False) for module in root.modules())
