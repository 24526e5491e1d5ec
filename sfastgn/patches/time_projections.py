"""Models whose ResNet blocks all read the same time embedding: hooks begin and end the calls within which they share a kernel.

``shared_product.py`` says what is shared and why nothing of it is stale. The blocks look for it by themselves (``resnet_block.py``). Their
weights are put side by side when a model is optimised, and when it moves; a copy's, which is found to be one at its first call, when it
moves next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models import ControlNetModel, UNet2DConditionModel, UNet2DModel
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from sfastgn.patches import resnet_block
from sfastgn.patches.hooks import remove_hooks
from sfastgn.patches.resnet_block import FusedResnetBlock2D
from sfastgn.patches.shared_embedding import EMBEDDING
from sfastgn.patches.shared_product import begin_call, end_call

__all__ = ["FUSION"]

_MODELS: tuple[type[nn.Module], ...] = (UNet2DConditionModel, UNet2DModel, ControlNetModel)


def begin(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of the model."""
    if torch.compiler.is_compiling():
        return
    if EMBEDDING.groups_of(model) is None:
        EMBEDDING.form(model, _fused(model))
    begin_call(model)


def end(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model; runs after an exception too."""
    if not torch.compiler.is_compiling():
        end_call(model)


def _blocks(model: nn.Module) -> Iterator[ResnetBlock2D]:
    """ResNet blocks that project the time embedding."""
    for block in model.modules():
        if isinstance(block, ResnetBlock2D) and block.time_emb_proj is not None:
            yield block


def _fused(model: nn.Module) -> list[ResnetBlock2D]:
    return [block for block in _blocks(model) if type(block) is FusedResnetBlock2D]


class _TimeProjectionFusion:
    name = "time_projections"

    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or (type(module) in _MODELS and sum(1 for _ in _blocks(module)) > 1)

    def is_applied(self, module: nn.Module) -> bool:
        return begin in module._forward_pre_hooks.values()

    def reason_to_skip(self, module: nn.Module) -> str | None:
        rule = resnet_block.FUSION
        found = [block for block in _blocks(module) if rule.claims(block)]
        able = [block for block in found if rule.is_applied(block) or not rule.reason_to_skip(block)]
        return None if len(able) > 1 else "fewer than two of its ResNet blocks can be fused"

    def apply(self, module: nn.Module) -> None:
        EMBEDDING.form(module, _fused(module))
        EMBEDDING.pack(module)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    def undo(self, module: nn.Module) -> None:
        remove_hooks(module, begin, end)
        end_call(module)
        EMBEDDING.dissolve(module)


FUSION = _TimeProjectionFusion()
