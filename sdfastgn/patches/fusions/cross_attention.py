"""Models whose cross-attentions share one product for keys and values.

Hooks on the model begin and end the calls in which the attentions share it
(``shared/one_product.py``). Weights are put side by side when a model is optimized, and when it
moves. A copy's weights are packed when it next moves.
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

from sdfastgn.patches.core.fusion import foreign_class, is_about
from sdfastgn.patches.core.hooks import remove_hooks
from sdfastgn.patches.core.tested_sources import TestedSource
from sdfastgn.patches.fusions import attention
from sdfastgn.patches.shared import one_product

__all__ = ["FUSION"]

# Others pass their blocks more than one tensor, or so many rows of it (frames) that each product is
# large.
_MODELS = (UNet2DConditionModel, ControlNetModel)


def begin(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model."""
    if torch.compiler.is_compiling():
        return
    if not one_product.is_formed(model):
        _form(model)
    one_product.begin_call(model)


def end(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model; runs after an exception too."""
    if not torch.compiler.is_compiling():
        one_product.end_call(model)


def _cross_attentions(model: nn.Module) -> Iterator[Attention]:
    """What attends to the prompt in a Transformer2DModel's blocks."""
    for transformer in model.modules():
        if not isinstance(transformer, Transformer2DModel):
            continue
        for block in transformer.transformer_blocks:
            attn = block.attn2 if isinstance(block, BasicTransformerBlock) else None
            if isinstance(attn, Attention) and attn.is_cross_attention:
                yield attn


def _form(model: nn.Module) -> None:
    fused = (attn for attn in _cross_attentions(model) if attention.FUSION.is_applied(attn))
    one_product.form(model, fused)


class _CrossAttentionFusion:
    name = "cross_attention"
    sources: tuple[TestedSource, ...] = ()

    def claims(self, module: nn.Module) -> bool:
        if self.is_applied(module):
            return True
        return is_about(module, *_MODELS) and sum(1 for _ in _cross_attentions(module)) > 1

    def is_applied(self, module: nn.Module) -> bool:
        return begin in module._forward_pre_hooks.values()

    def reason_to_skip(self, module: nn.Module) -> str | None:
        reason = foreign_class(module, *_MODELS)
        if reason is not None:
            return reason
        rule = attention.FUSION
        found = [attn for attn in _cross_attentions(module) if rule.claims(attn)]
        able = [attn for attn in found if rule.is_applied(attn) or not rule.reason_to_skip(attn)]
        return None if len(able) > 1 else "fewer than two of its cross-attentions can be fused"

    def apply(self, module: nn.Module) -> None:
        _form(module)
        one_product.pack(module)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    def undo(self, module: nn.Module) -> None:
        remove_hooks(module, begin, end)
        one_product.end_call(module)
        one_product.dissolve(module)


FUSION = _CrossAttentionFusion()
