"""Fuses a model of ComfyUI while it is loaded, and restores it afterwards.

ComfyUI calls ``inject`` after it has loaded and patched the weights of a model. ComfyUI calls ``eject``
before it changes the weights again: to move them, to add or remove a LoRA, or to run a clone with other
patches. So weights do not change while the model is fused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from sdfastgn.patches.code.checked import check_calls
from sdfastgn.patches.comfyui import (
    graphs,
    tiled_decode,
    unet,
    vae,
)
from sdfastgn.patches.comfyui.layers import LAYERS, has_steady_weights, reason_of_moves, restore
from sdfastgn.patches.fusions import sequential
from sdfastgn.patches.layers import group_norm
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.layout.left_alone import reason_of_cudnn
from sdfastgn.patches.swap.fusion import Fusion

# The name of sdfastgn's injection and callbacks in a ``ModelPatcher``.
KEY = "sdfastgn"

_BLOCKS = (
    *unet.BLOCKS,
    *vae.BLOCKS,
    *tiled_decode.AUTOENCODERS,
    graphs.UNET,
    graphs.CONTROL_NET,
)
# The fusions of ComfyUI's own classes. The report uses them to find what will be fused once a model is
# loaded.
CLAIMING: tuple[Fusion, ...] = (*LAYERS, *_BLOCKS)
# All fusions, in the two stages in which they are applied. The first stage, ``LAYERS``, gives ComfyUI's
# layers PyTorch's classes. It must come first, because the fusions of the second stage look for layers with
# exactly these classes.
_STAGES: tuple[tuple[Any, ...], ...] = (LAYERS, (group_norm.FUSION, sequential.FUSION, *_BLOCKS))


def root_of(patcher: Any) -> nn.Module:
    """The module inside ``patcher`` that is optimized: the UNet of ComfyUI's MODEL, or the whole VAE."""
    return getattr(patcher.model, "diffusion_model", patcher.model)


def has_blocks(root: nn.Module) -> bool:
    """True if ``root`` contains a block of a kind that can be fused.

    A model without such a block is left as it is.
    """
    known = tuple(fusion.stock for fusion in _BLOCKS)
    return any(
        isinstance(module, known) and any(fusion.claims(module) for fusion in _BLOCKS)
        for module in root.modules()
    )


def reason_to_stay(root: nn.Module) -> str | None:
    """Why nothing in ``root`` can be fused at the moment; None if there is no such reason."""
    return reason_of_cudnn(root.modules()) or reason_of_moves(root)


@functools.cache
def _about(cls: Any, stage: int) -> tuple[Any, ...]:
    """The fusions that may apply to modules of the class ``cls``.

    ``stage``: an index into ``_STAGES``; only the fusions of this stage are returned. The result is cached
    for each class, because a UNet has 2000 modules but few classes.
    """
    return tuple(fusion for fusion in _STAGES[stage] if issubclass(cls, fusion.stock))


def inject(
    root: nn.Module,
    cuda_graphs: str | bool = "auto",
    install: Callable[[nn.Module, str | bool], None] = graphs.install,
) -> None:
    """Fuse what can be fused in ``root``. What is fused already stays as it is.

    If an error occurs, ``root`` is restored before the error is raised.

    ``install``: called with each model whose class can have CUDA graphs, and with the mode of the graphs.
    """
    if not has_blocks(root):
        return
    if reason_to_stay(root) is not None:
        drop_graphs(root)
        return
    try:
        for module in root.modules():
            graphs.keep_at_moves(module)
        for stage in range(len(_STAGES)):
            for module in root.modules():
                kind: Any = type(module)
                for fusion in _about(kind, stage):
                    _apply(fusion, module)
        channels_last.apply(root)
        for module in root.modules():
            if graphs.is_capturable(module):
                install(module, cuda_graphs if is_loaded(module) else False)
        check_calls(root)
    except BaseException:
        eject(root)
        raise


def _apply(fusion: Fusion, module: nn.Module) -> None:
    is_new = fusion.claims(module) and not fusion.is_applied(module)
    if is_new and fusion.reason_to_skip(module) is None:
        fusion.apply(module)


def eject(root: nn.Module) -> None:
    """Restore ``root`` as it was before ``inject``: classes, hooks and the weights' strides.

    A second call changes nothing. Only one thing stays: a UNet that may have CUDA graphs gets its own method
    ``_apply``, which drops the graphs when the UNet is moved. The method stays until this move, or until the
    next ``inject``.
    """
    restore(root)
    for module in root.modules():
        graphs.drop_at_next_move(module)


def drop_graphs(root: nn.Module) -> None:
    """Drop the CUDA graphs of all UNets in ``root``, so that the graphs' memory is freed."""
    for module in root.modules():
        graphs.drop(module)


def is_loaded(root: nn.Module) -> bool:
    """True if all weights in ``root`` stay at one address while the model is loaded.

    It is False if ComfyUI moves or patches some of the weights at each call.
    """
    return all(has_steady_weights(module) for module in root.modules())
