"""Models whose ResNet blocks all read the same time embedding: its projections for all are one kernel (``shared/time_embedding.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers.models import ControlNetModel, UNet2DConditionModel, UNet2DModel
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from sdfastgn.patches.fusions import resnet_block
from sdfastgn.patches.shared.fusion import SharingFusion
from sdfastgn.patches.shared.time_embedding import EMBEDDING

__all__ = ["FUSION"]


def begin(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model."""
    FUSION.begin(model)


def end(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model."""
    FUSION.end(model)


def _projecting_blocks(model: nn.Module) -> Iterator[ResnetBlock2D]:
    for block in model.modules():
        if isinstance(block, ResnetBlock2D) and block.time_emb_proj is not None:
            yield block


FUSION = SharingFusion(
    "time_projections",
    models=(UNet2DConditionModel, UNet2DModel, ControlNetModel),
    parts=_projecting_blocks,
    called="ResNet blocks",
    rule=resnet_block.FUSION,
    sharing=EMBEDDING,
    hooks=(begin, end),
)
