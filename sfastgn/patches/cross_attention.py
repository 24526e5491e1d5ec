"""Models whose cross-attentions all read the same encoder_hidden_states: hooks begin and end the calls within which they share a product.

``shared_product.py`` says what is shared and why nothing of it is stale. The attentions look for it by themselves (``attention.py``).
Their weights are put side by side when a model is optimised, and when it moves; a copy's, which is found to be one at its first call,
when it moves next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models import ControlNetModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from sfastgn.patches import attention
from sfastgn.patches.attention import FusedAttention
from sfastgn.patches.hooks import remove_hooks
from sfastgn.patches.shared_context import CONTEXT
from sfastgn.patches.shared_product import begin_call, end_call

__all__ = ["FUSION"]

# Others pass their blocks more than one tensor, or so many rows of it (frames) that each product is large.
_MODELS: tuple[type[nn.Module], ...] = (UNet2DConditionModel, ControlNetModel)


def begin(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model."""
    if torch.compiler.is_compiling():
        return
    if CONTEXT.groups_of(model) is None:
        CONTEXT.form(model, _fused(model))
    begin_call(model)


def end(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model; runs after an exception too."""
    if not torch.compiler.is_compiling():
        end_call(model)


def _cross_attentions(model: nn.Module) -> Iterator[Attention]:
    """What attends to the prompt in a Transformer2DModel's blocks."""
    for transformer in model.modules():
        if not isinstance(transformer, Transformer2DModel):
            continue
        for block in transformer.transformer_blocks:
            attn = block.attn2 if isinstance(block, BasicTransformerBlock) else None
            if isinstance(attn, Attention) and attn.is_cross_attention:
                yield attn


def _fused(model: nn.Module) -> list[Attention]:
    return [attn for attn in _cross_attentions(model) if type(attn) is FusedAttention]


class _CrossAttentionFusion:
    name = "cross_attention"

    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or (type(module) in _MODELS and sum(1 for _ in _cross_attentions(module)) > 1)

    def is_applied(self, module: nn.Module) -> bool:
        return begin in module._forward_pre_hooks.values()

    def reason_to_skip(self, module: nn.Module) -> str | None:
        found = [attn for attn in _cross_attentions(module) if attention.FUSION.claims(attn)]
        able = [
            attn for attn in found if attention.FUSION.is_applied(attn) or not attention.FUSION.reason_to_skip(attn)
        ]
        return None if len(able) > 1 else "fewer than two of its cross-attentions can be fused"

    def apply(self, module: nn.Module) -> None:
        CONTEXT.form(module, _fused(module))
        CONTEXT.pack(module)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    def undo(self, module: nn.Module) -> None:
        remove_hooks(module, begin, end)
        end_call(module)
        CONTEXT.dissolve(module)


FUSION = _CrossAttentionFusion()
