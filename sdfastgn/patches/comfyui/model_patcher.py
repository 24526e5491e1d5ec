"""sdfastgn as an injection of ComfyUI's ``ModelPatcher``: clones carry it, loading and unloading call it."""

from __future__ import annotations

import copy
import logging
from typing import Any

from comfy.patcher_extension import CallbacksMP, PatcherInjection
from torch import nn

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
        logging.info(text_of_model(patcher))

    def heal(patcher: Any) -> None:
        # A clone that was made while its model was injected says so too, and ejects when it dies.
        if patcher.is_injected:
            inject(_root(patcher), cuda_graphs)

    def let_go(patcher: Any, unpatch_all: bool) -> None:
        if unpatch_all:
            drop_graphs(_root(patcher))

    clone.set_injections(_KEY, [PatcherInjection(put_in, lambda patcher: eject(_root(patcher)))])
    for kind, callback in ((CallbacksMP.ON_PRE_RUN, heal), (CallbacksMP.ON_DETACH, let_go)):
        clone.remove_callbacks_with_key(kind, _KEY)
        clone.add_callback_with_key(kind, _KEY, callback)
    return clone


def optimize_vae(vae: Any) -> Any:
    """A copy of ComfyUI's VAE on a patcher of its own; ``vae`` stays stock."""
    optimized = copy.copy(vae)
    optimized.patcher = optimize_model(vae.patcher, False)
    return optimized


def text_of_model(model: Any) -> str:
    """The report on a ``ModelPatcher``: what runs fused, what as stock, and why."""
    return text_of(_root(model))


def _root(patcher: Any) -> nn.Module:
    """A UNet of its own, a VAE as a whole."""
    return getattr(patcher.model, "diffusion_model", patcher.model)
