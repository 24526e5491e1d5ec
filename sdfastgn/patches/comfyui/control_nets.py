"""Optimizes the ControlNets that the sampler runs beside an optimized UNet.

In ComfyUI a ControlNet is part of the conditioning (the prompts with their settings), so a node that
optimizes a UNet does not see it. When the sampler loads an optimized UNet, the run gets a copy of its
conditioning, in which the models of ControlNets are optimized. The workflow's own conditioning stays as it
is.

This is done for ControlNets of SD 1.5, SD 2 and SDXL. T2I-Adapters, Control-LoRAs and ControlNets of other
nodes' own classes run as stock, and so do ControlNets that are chained before such a class.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from comfy.controlnet import ControlNet
from torch import nn

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.comfyui import dynamic_vram
from sdfastgn.patches.comfyui.graphs import CONTROL_NET
from sdfastgn.patches.comfyui.inject import KEY, root_of
from sdfastgn.patches.comfyui.staying import staying, wrap_load

# The attribute of a stock ControlNet's ``ModelPatcher`` that keeps a ``_Clone`` for the next run.
_CLONE = "_sdfastgn_clone"
# A dict from a UNet to the ControlNets in the sampler's last run: the optimized ``ModelPatcher`` objects, and
# the reasons why others run as stock.
_last_run: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[Any]], list[str]]]
_last_run = weakref.WeakKeyDictionary()


def of_last_run(unet: nn.Module) -> tuple[list[Any], list[str]]:
    """What the sampler's last run of ``unet`` did with ControlNets.

    Returns the ``ModelPatcher`` objects of optimized ControlNets, and the reasons why others ran as stock.
    """
    clones, reasons = _last_run.get(unet, ([], []))
    return [found for each in clones if (found := each()) is not None], reasons


def optimize_in_runs(patcher: Any, cuda_graphs: str | bool, optimize: Callable[[Any], Any]) -> None:
    """Let each run of the sampler with ``patcher``, an optimized UNet, optimize the run's ControlNets.

    ``cuda_graphs``: says when calls become CUDA graphs. ``optimize``: returns an optimized clone of the
    ``ModelPatcher`` of a ControlNet.
    """

    def load(executor: Any, patcher: Any, noise_shape: Any, conds: Any, *args: Any, **options: Any) -> Any:
        nets = _Nets(patcher, cuda_graphs, optimize)
        conds = {name: [nets.in_entry(entry) for entry in entries] for name, entries in conds.items()}
        with contextlib.ExitStack() as stack:
            for each in nets.clones:
                stack.enter_context(staying(each))
            loaded = executor(patcher, noise_shape, conds, *args, **options)
        for each in nets.clones:
            each.pre_run()
        _last_run[root_of(patcher)] = [weakref.ref(each) for each in nets.clones], nets.reasons
        return loaded

    wrap_load(patcher, KEY, load)


class _Clone(NamedTuple):
    """The optimized ``patcher`` of a ControlNet.

    ``key``: the mode of CUDA graphs, and ComfyUI's mark of the patches of the weights, when it was made.
    """

    key: tuple[str | bool, Any]
    patcher: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A deep copy of a stock ``ModelPatcher`` has another model, so it gets no clone."""


class _Nets:
    """Copies the ControlNets of one run, with optimized models.

    Attributes:
        clones: the optimized ``ModelPatcher`` objects.
        reasons: why the models of other ControlNets are not optimized.
    """

    def __init__(self, unet: Any, cuda_graphs: str | bool, optimize: Callable[[Any], Any]) -> None:
        self._unet, self._cuda_graphs, self._optimize = unet, cuda_graphs, optimize
        self._copies: dict[Any, Any] = {}
        self.clones: list[Any] = []
        self.reasons: list[str] = []

    def in_entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        """``entry``, one prompt of the conditioning, with a copy of its ControlNet."""
        return {**entry, "control": self._copy_of(entry["control"])} if "control" in entry else entry

    def _copy_of(self, control: Any) -> Any:
        """A copy of ``control`` and of the ControlNets that are chained before it.

        Returns ``control`` itself if it is another node's object.
        """
        if not _is_comfyuis(control):
            return control
        if control not in self._copies:
            found = self._copies[control] = copy.copy(control)
            found.previous_controlnet = self._copy_of(control.previous_controlnet)
            # A ControlNet with ``multigpu_clones`` has more models, on other GPUs.
            if (
                type(control) is ControlNet
                and CONTROL_NET.claims(control.control_model)
                and control.control_model is control.control_model_wrapped.model
                and not getattr(control, "multigpu_clones", None)
            ):
                found.control_model_wrapped = self._clone_of(control.control_model_wrapped)
                found.control_model = found.control_model_wrapped.model
        return self._copies[control]

    def _clone_of(self, stock: Any) -> Any:
        if dynamic_vram.is_dynamic(stock):
            reason = dynamic_vram.reason_to_stay(stock, beside=(self._unet, *self.clones))
            if reason is not None:
                self.reasons.append(reason)
                return stock
        key = self._cuda_graphs, stock.patches_uuid
        kept = vars(stock).get(_CLONE)
        if kept is None or kept.key != key:
            try:
                kept = vars(stock)[_CLONE] = _Clone(key, self._optimize(stock))
            except Exception as error:  # the run goes on with stock's model, and the report says why
                self.reasons.append(f"Its model cannot be copied: {one_line(error)}")
                return stock
        if kept.patcher not in self.clones:
            self.clones.append(kept.patcher)
        return kept.patcher


def _is_comfyuis(control: Any) -> bool:
    """True if ``control`` has a class of ComfyUI, and other nodes have replaced none of its methods.

    Only such an object is copied. A replaced method may be bound to the object.
    """
    kind = type(control)
    return kind.__module__ == ControlNet.__module__ and not any(hasattr(kind, name) for name in vars(control))
