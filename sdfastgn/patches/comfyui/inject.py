"""Puts the fusions into a model of ComfyUI while it is loaded, and takes them out again.

ComfyUI calls ``inject`` after it has loaded and patched the weights of a model, and ``eject`` before it
touches them: to move them, to add or take away a LoRA, to run a clone with other patches. So the state
of every layer is fixed in between.
"""

from __future__ import annotations

from torch import nn

from sdfastgn.patches.comfyui import graphs, unet, vae
from sdfastgn.patches.comfyui.layers import LAYERS
from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.fusion import Fusion
from sdfastgn.patches.fusions import group_norm, sequential

__all__ = ["CLAIMING", "drop_graphs", "eject", "inject", "is_loaded"]

_BLOCKS: tuple[Fusion, ...] = (*unet.BLOCKS, *vae.BLOCKS, graphs.UNET)
# Those that know ComfyUI's classes, and say what can be fused in a model that is not injected too.
CLAIMING: tuple[Fusion, ...] = (*LAYERS, *_BLOCKS)
# In the order in which they are applied: all others ask for PyTorch's layers.
_FUSIONS: tuple[Fusion, ...] = (*LAYERS, group_norm.FUSION, sequential.FUSION, *_BLOCKS)


def inject(root: nn.Module, cuda_graphs: str | bool = "auto") -> None:
    """Fuse what can be fused below ``root``. Undoes itself if anything fails. Idempotent."""
    try:
        for fusion in _FUSIONS:
            for module in root.modules():
                if (
                    fusion.claims(module)
                    and not fusion.is_applied(module)
                    and fusion.reason_to_skip(module) is None
                ):
                    fusion.apply(module)
        channels_last.apply(root)
        for module in root.modules():
            if graphs.UNET.is_applied(module):
                graphs.install(module, cuda_graphs if is_loaded(module) else False)
    except BaseException:
        eject(root)
        raise


def eject(root: nn.Module) -> None:
    """Everything below ``root`` as it was before ``inject``, strides of weights too. Idempotent."""
    for module in root.modules():
        for fusion in reversed(_FUSIONS):
            if fusion.is_applied(module):
                fusion.undo(module)
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
