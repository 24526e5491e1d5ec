"""Adds sdfastgn to a ``ModelPatcher`` of ComfyUI as an injection.

An injection is a pair of functions. ComfyUI calls one after it has loaded the model, and the other before it
changes or unloads the model. Clones of the ``ModelPatcher`` inherit injections.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.sd
from comfy.patcher_extension import CallbacksMP, PatcherInjection
from torch import nn

from sdfastgn.patches.comfyui import control_nets, dynamic_vram
from sdfastgn.patches.comfyui.fused_vae import FusedVAE
from sdfastgn.patches.comfyui.graphs import begin_run, is_capturable
from sdfastgn.patches.comfyui.inject import KEY, drop_graphs, eject, inject, root_of
from sdfastgn.patches.comfyui.report import text_of
from sdfastgn.patches.comfyui.staying import stay_fused
from sdfastgn.patches.graphs.install import INFERENCE_MODES


def optimize_model(
    model: Any,
    cuda_graphs: str | bool = "auto",
    after_run: Callable[[str], None] | None = None,
    *,
    fuse: Callable[[nn.Module, str | bool], None] = inject,
    restore: Callable[[nn.Module], None] = eject,
    describe: Callable[[Any], str] = text_of,
) -> Any:
    """Returns a clone of the ``ModelPatcher`` ``model``. While the clone is loaded, its model is fused.

    The clone's model stays fused between two runs of the sampler (``staying.py``), and during a run also its
    ControlNets are fused. ``model`` itself runs ComfyUI's code. Under DynamicVRAM the clone has a second
    model, whose weights stay on the GPU. If the GPU has too little memory, the clone runs ComfyUI's code.

    Args:
        model: ComfyUI's MODEL, a ``ModelPatcher``.
        cuda_graphs: calls of one kind have the same shapes, dtypes and other arguments. "auto" captures the
            second call of a kind, True the first, False none.
        after_run: called with the text of the report whenever the sampler has run the model.
        fuse: called with the model and ``cuda_graphs`` when ComfyUI has loaded the model.
        restore: called with the model before ComfyUI changes it.
        describe: makes the text of the report on a ``ModelPatcher``.

    Raises:
        TypeError: ``model`` is no ``ModelPatcher``, or ComfyUI is too old to have injections.
        ValueError: ``cuda_graphs`` is none of the three.
    """
    _check_model(model, cuda_graphs)
    clone = dynamic_vram.clone(model)
    stay_fused(clone)
    optimize = partial(optimize_model, cuda_graphs=cuda_graphs, fuse=fuse, restore=restore)
    control_nets.optimize_in_runs(clone, cuda_graphs, optimize)

    def put_in(patcher: Any) -> None:
        if not dynamic_vram.is_dynamic(patcher):
            fuse(root_of(patcher), cuda_graphs)

    def take_out(patcher: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # ComfyUI also ejects when Python exits, and then modules that ``eject`` needs may be gone.
        if not is_finalizing():
            restore(root_of(patcher))

    def begin(patcher: Any) -> None:
        # ``patcher.is_injected`` may be True although the model is not fused. This happens if ``patcher`` was
        # cloned while its model was fused: the clone shares the model, and restores it when the clone is
        # deleted. Then the model is fused again here.
        if patcher.is_injected and not is_capturable(root_of(patcher)):
            put_in(patcher)
        begin_run(root_of(patcher))

    def end(patcher: Any) -> None:
        if after_run is not None:
            after_run(describe(patcher))

    def let_go(patcher: Any, unpatch_all: bool) -> None:
        if unpatch_all:
            drop_graphs(root_of(patcher))

    clone.set_injections(KEY, [PatcherInjection(put_in, take_out)])
    for kind, callback in (
        (CallbacksMP.ON_PRE_RUN, begin),
        (CallbacksMP.ON_CLEANUP, end),
        (CallbacksMP.ON_DETACH, let_go),
    ):
        clone.remove_callbacks_with_key(kind, KEY)
        clone.add_callback_with_key(kind, KEY, callback)
    return clone


def _check_model(model: Any, cuda_graphs: Any) -> None:
    if not hasattr(model, "set_injections"):
        raise TypeError(f"sdfastgn: expected a MODEL of ComfyUI, got {type(model).__name__}")
    if type(cuda_graphs) not in (bool, str) or cuda_graphs not in INFERENCE_MODES:
        raise ValueError(f'sdfastgn: cuda_graphs={cuda_graphs!r} must be "auto", True or False')


def optimize_vae(vae: Any) -> Any:
    """Returns a copy of ComfyUI's VAE ``vae``. While the copy is loaded, its model is fused.

    ``fused_vae.py`` says what else differs. ``vae`` itself runs ComfyUI's code.

    Raises:
        TypeError: ``vae`` is no VAE of ComfyUI.
        ValueError: ``vae`` has no model.
    """
    check_vae(vae)
    optimized = copy.copy(vae)
    if type(vae) is comfy.sd.VAE:
        optimized.__class__ = FusedVAE
    optimized.patcher = optimize_model(vae.patcher, False)
    optimized.patcher.remove_callbacks_with_key(CallbacksMP.ON_INJECT_MODEL, KEY)
    optimized.first_stage_model = optimized.patcher.model
    if optimized.first_stage_model is not vae.first_stage_model:
        # ``vae`` is under DynamicVRAM, so ``optimized`` has a second model, whose weights have the dtype of
        # the file. A layer under DynamicVRAM would convert them at each call. The layers of the second model
        # are not under DynamicVRAM, so the weights are converted here, once.
        optimized.first_stage_model.to(vae.vae_dtype)
    return optimized


def call_after_load(
    vae: Any, key: str, after_load: Callable[[str], None], describe: Callable[[Any], str]
) -> None:
    """Let ``after_load`` be called with ``describe(patcher)``, the report, before each decode and encode.

    ``patcher`` is the ``ModelPatcher`` of ``vae``, whose model is loaded by then. ``after_load`` replaces a
    function that was registered before with the same ``key``.

    Raises:
        TypeError: ``vae`` is no VAE of ComfyUI.
        ValueError: ``vae`` has no model.
    """
    check_vae(vae)
    vae.patcher.remove_callbacks_with_key(CallbacksMP.ON_INJECT_MODEL, key)
    vae.patcher.add_callback_with_key(
        CallbacksMP.ON_INJECT_MODEL, key, lambda patcher: after_load(describe(patcher))
    )


def check_vae(vae: Any) -> None:
    """Raise TypeError if ``vae`` is no VAE of ComfyUI, and ValueError if it is a VAE without a model."""
    # ComfyUI makes a VAE without a model if a checkpoint has no weights of a VAE. Such a VAE has no
    # ``patcher`` either.
    if getattr(vae, "first_stage_model", vae) is None:
        raise ValueError(
            "sdfastgn: the VAE is empty (its first_stage_model is None), because the file that it was loaded "
            "from has no VAE that ComfyUI knows. Load a VAE with the node Load VAE."
        )
    if not hasattr(vae, "patcher"):
        raise TypeError(f"sdfastgn: expected a VAE of ComfyUI, got {type(vae).__name__}")
