"""Models whose cross-attentions read the same encoder_hidden_states: keys and values of all are one product.

The product is that of ``shared/encoder_states.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers.models import ControlNetModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from sdfastgn.patches.fusions import attention
from sdfastgn.patches.shared.encoder_states import CONTEXT
from sdfastgn.patches.shared.fusion import SharingFusion

__all__ = ["FUSION"]


def begin(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model."""
    FUSION.begin(model)


def end(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model."""
    FUSION.end(model)


def _cross_attentions(model: nn.Module) -> Iterator[Attention]:
    """What attends to the prompt in a Transformer2DModel's blocks."""
    for transformer in model.modules():
        if not isinstance(transformer, Transformer2DModel):
            continue
        for block in transformer.transformer_blocks:
            attn = block.attn2 if isinstance(block, BasicTransformerBlock) else None
            if isinstance(attn, Attention) and attn.is_cross_attention:
                yield attn


FUSION = SharingFusion(
    "cross_attention",
    # Others pass their blocks more than one tensor, or so many rows of it (frames) that each product is large.
    models=(UNet2DConditionModel, ControlNetModel),
    parts=_cross_attentions,
    called="cross-attentions",
    rule=attention.FUSION,
    sharing=CONTEXT,
    hooks=(begin, end),
)
