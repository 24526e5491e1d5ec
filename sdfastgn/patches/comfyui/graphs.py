"""ComfyUI's ``UNetModel``: runs outside of inference mode, and as a CUDA graph if no other node takes part.

Other nodes reach into a UNet through ``transformer_options``, with patches or replaced attentions. With any
of these, or with a ControlNet, a call runs eagerly. Without them the options only describe the call to other
nodes, and a graph does not need them. Wrappers of other nodes run around ``_forward``, outside of the graph.

Calls are counted for the report: ``begin_run`` marks the start of a sampler's run, and ``calls_of_run`` gives
the counts since then.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from comfy.ldm.modules.attention import CrossAttention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential, UNetModel
from torch import Tensor, nn

from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.graphs.forward import GraphedForward

__all__ = ["UNET", "FusedUNetModel", "begin_run", "calls_of_run", "graphs_of", "install"]

# Entries that ComfyUI's own sampling puts into ``transformer_options``, and those that a UNet's forward adds.
_HARMLESS = frozenset(
    (
        "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape",
        "patches", "patches_replace", "prefetch_dynamic_vbars", "sample_sigmas", "sigmas",
        "transformer_index", "uuids", "wrappers",
    )
)  # fmt: skip

# UNet -> its graphs. They stay after ``eject``, so that the next run uses them again.
_graphs: weakref.WeakKeyDictionary[nn.Module, GraphedForward] = weakref.WeakKeyDictionary()
# UNet -> (calls replayed, reason -> calls without a graph), both counted until the last run began.
_before_run: weakref.WeakKeyDictionary[nn.Module, tuple[int, Counter[str]]] = weakref.WeakKeyDictionary()


def begin_run(unet: nn.Module) -> None:
    """A run of the sampler begins: ``calls_of_run`` counts from here."""
    graphed = _graphs.get(unet)
    if graphed is not None:
        _before_run[unet] = graphed.replays, graphed.eager.copy()


def calls_of_run(unet: nn.Module) -> tuple[int, Counter[str]]:
    """(calls answered by a graph, reason -> calls without a graph) since the last run began."""
    graphed = _graphs.get(unet)
    if graphed is None:
        return 0, Counter()
    replays, eager = _before_run.get(unet, (0, Counter()))
    return graphed.replays - replays, graphed.eager - eager


def install(unet: nn.Module, mode: str | bool) -> None:
    """Let calls of ``unet`` become graphs. ``mode`` is as in ``optimize``; False also drops all graphs."""
    graphed = _graphs.setdefault(unet, GraphedForward(unet, mode))
    graphed.mode = mode
    if mode is False:
        graphed.clear()


def graphs_of(unet: nn.Module) -> GraphedForward | None:
    """The graphs of ``unet`` and the counts of its calls; None if it was never injected."""
    return _graphs.get(unet)


class FusedUNetModel(UNetModel):
    """``UNetModel``. x (N, C, H, W), timesteps (N,), context (N, tokens, D) -> (N, C_out, H, W)."""

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Any = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if transformer_options is None:  # called by a ``GraphedForward``: the call that is captured
            return super()._forward(x, timesteps, context, y, control, {}, **kwargs)
        return super().forward(x, timesteps, context, y, control, transformer_options, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Any = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        graphed = _graphs.get(self)
        others = _other_nodes(options)
        # With a ControlNet, the forward removes tensors from the caller's lists; a replay would not.
        reason = others or ("a ControlNet takes part" if control is not None else None)
        if reason is not None and graphed is not None:
            graphed.eager[reason] += 1
        # Patches may write into the caller's inference tensors, which is allowed in inference mode only.
        if others is not None:
            return super()._forward(x, timesteps, context, y, control, options, **kwargs)
        with outside_inference_mode():
            if graphed is None or reason is not None:
                return super()._forward(x, timesteps, context, y, control, options, **kwargs)
            return graphed(x, timesteps, context=context, y=y, **kwargs)


def _other_nodes(options: dict[str, Any]) -> str | None:
    """Names what other nodes run inside of the UNet; None if there is nothing."""
    names = {*options.get("patches", ()), *options.get("patches_replace", ()), *(options.keys() - _HARMLESS)}
    return f"other nodes take part: {', '.join(sorted(map(str, names)))}" if names else None


UNET = ClassSwap(
    "comfyui_unet",
    UNetModel,
    FusedUNetModel,
    sources=(
        tested(UNetModel, "forward", "_forward"),
        tested(TimestepEmbedSequential, "forward"),
        tested(openaimodel, "forward_timestep_embed", "apply_control"),
        tested(CrossAttention, "forward"),
    ),
)
