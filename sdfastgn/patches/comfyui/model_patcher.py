"""Adds sdfastgn to a ``ModelPatcher`` as an injection: ComfyUI calls it when it loads and unloads the model.

Clones of the ``ModelPatcher`` inherit the injection.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from comfy.patcher_extension import CallbacksMP, PatcherInjection
from torch import nn

from sdfastgn.patches.comfyui.graphs import UNET
from sdfastgn.patches.comfyui.inject import drop_graphs, eject, inject
from sdfastgn.patches.comfyui.report import text_of
from sdfastgn.patches.graphs.install import MODES

__all__ = ["optimize_model", "optimize_vae", "text_of_model"]

_KEY = "sdfastgn"


def optimize_model(model: Any, cuda_graphs: str | bool = "auto") -> Any:
    """A clone of a ``ModelPatcher`` whose model is fused while it is loaded; ``model`` stays stock.

    Args:
        model: ComfyUI's MODEL.
        cuda_graphs: "auto" captures the second call of a kind, True the first, False none.

    Raises:
        TypeError: ``model`` is no ``ModelPatcher`` with injections.
        ValueError: ``cuda_graphs`` is none of the three.
    """
    if not hasattr(model, "set_injections"):
        raise TypeError(f"sdfastgn: expected a MODEL of ComfyUI, got {type(model).__name__}")
    if type(cuda_graphs) not in (bool, str) or cuda_graphs not in MODES:
        raise ValueError(f'sdfastgn: cuda_graphs={cuda_graphs!r} must be "auto", True or False')
    clone = model.clone()

    def put_in(patcher: Any) -> None:
        inject(_root(patcher), cuda_graphs)

    def take_out(patcher: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python exits, ModelPatchers that are still alive eject, but half of the modules are gone.
        if not is_finalizing():
            eject(_root(patcher))

    def heal(patcher: Any) -> None:
        # A clone of an injected patcher shares its model, also has ``is_injected`` set, and ejects the model
        # when it is deleted. So ``patcher`` may say that it is injected although its model is stock.
        if patcher.is_injected and not UNET.is_applied(_root(patcher)):
            inject(_root(patcher), cuda_graphs)

    def let_go(patcher: Any, unpatch_all: bool) -> None:
        if unpatch_all:
            drop_graphs(_root(patcher))

    clone.set_injections(_KEY, [PatcherInjection(put_in, take_out)])
    for kind, callback in ((CallbacksMP.ON_PRE_RUN, heal), (CallbacksMP.ON_DETACH, let_go)):
        clone.remove_callbacks_with_key(kind, _KEY)
        clone.add_callback_with_key(kind, _KEY, callback)
    return clone


def optimize_vae(vae: Any) -> Any:
    """A copy of ComfyUI's VAE whose model is fused while it is loaded; ``vae`` stays stock.

    Raises TypeError if ``vae`` is no VAE of ComfyUI, or has no weights.
    """
    if not hasattr(vae, "patcher"):
        raise TypeError(f"sdfastgn: expected a VAE of ComfyUI with weights, got {type(vae).__name__}")
    optimized = copy.copy(vae)
    optimized.patcher = optimize_model(vae.patcher, False)
    return optimized


def text_of_model(model: Any) -> str:
    """The report on a ``ModelPatcher``: what runs fused, what as stock, and why."""
    return text_of(_root(model))


def _root(patcher: Any) -> nn.Module:
    """The module to fuse: the UNet inside of a MODEL, or a whole VAE."""
    return getattr(patcher.model, "diffusion_model", patcher.model)
