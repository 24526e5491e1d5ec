"""ComfyUI's ``UNetModel``: runs outside of inference mode, and as a CUDA graph if no other node takes part.

Other nodes reach into a UNet through ``transformer_options``, with patches or replaced attentions. With any
of these, or with a ControlNet, a call runs eagerly. Without them the options only describe the call to other
nodes, and a graph does not need them. Wrappers of other nodes run around ``_forward``, outside of the graph.
"""

from __future__ import annotations

import weakref
from typing import Any

from comfy.ldm.modules.attention import CrossAttention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential, UNetModel
from torch import Tensor, nn

from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.graphs.forward import GraphedForward

__all__ = ["UNET", "FusedUNetModel", "graphs_of", "install"]

# Entries that ComfyUI's own sampling puts into ``transformer_options``, and those that a UNet's forward adds.
_HARMLESS = frozenset(
    (
        "activations_shape", "block", "block_index", "callbacks", "cond_or_uncond", "original_shape",
        "patches", "patches_replace", "sample_sigmas", "sigmas", "transformer_index", "uuids", "wrappers",
    )
)  # fmt: skip

# UNet -> its graphs. They stay after ``eject``, so that the next run uses them again.
_graphs: weakref.WeakKeyDictionary[nn.Module, GraphedForward] = weakref.WeakKeyDictionary()


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
        # Patches may write into the caller's inference tensors, which is allowed in inference mode only.
        if not _is_alone(options):
            return super()._forward(x, timesteps, context, y, control, options, **kwargs)
        with outside_inference_mode():
            graphed = _graphs.get(self)
            # With a ControlNet, the forward removes tensors from the caller's lists; a replay would not.
            if graphed is None or control is not None:
                return super()._forward(x, timesteps, context, y, control, options, **kwargs)
            return graphed(x, timesteps, context=context, y=y, **kwargs)


def _is_alone(options: dict[str, Any]) -> bool:
    """True if no other node runs anything inside of the UNet."""
    return _HARMLESS.issuperset(options) and not (options.get("patches") or options.get("patches_replace"))


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
