"""UNets whose cross-attentions may share a product, and how many products with a prompt they run."""

from __future__ import annotations

import copy
import weakref
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

import sdfastgn
from tests.patches.cases import agree, noise

__all__ = ["agree", "noise"]

TEXT = 12


X = noise(2, 4, 8, 8)


def context(seed: int = 1) -> Tensor:
    return noise(2, 5, TEXT, seed=seed) + 1


SIZES: dict[str, Any] = {
    "block_out_channels": (20, 40),
    "norm_num_groups": 5,
    "layers_per_block": 1,
    "cross_attention_dim": TEXT,
    "attention_head_dim": 2,
}
SD = {
    **SIZES,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
SDXL = {
    **SIZES,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + 8,
}
XL_INPUTS = {"added_cond_kwargs": {"text_embeds": noise(2, 8), "time_ids": torch.ones(2, 6)}}


def unet(sizes: dict[str, Any] = SD) -> Any:
    torch.manual_seed(2)
    return UNet2DConditionModel(sample_size=8, **sizes).eval()


def twins(sizes: dict[str, Any] = SD) -> tuple[Any, Any]:
    """(optimized, stock) with the same weights."""
    stock = unet(sizes)
    return sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=False), stock


def call(model: Any, states: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(X.to(states.dtype), 3, states, **options).sample


def members(model: nn.Module) -> list[Any]:
    """In the order of their calls: down_blocks, mid_block, up_blocks."""
    found = {n: m for n, m in model.named_modules() if n.endswith("attn2") and isinstance(m, Attention)}
    return [m for _, m in sorted(found.items())]


def widths(model: nn.Module) -> list[int]:
    return [2 * m.to_k.out_features for m in members(model)]


class Products:
    """Columns of each product with a tensor of a prompt's width, which nothing else in these models
    has.
    """

    def __init__(self) -> None:
        self.found: list[int] = []
        self.results: list[weakref.ref[Tensor]] = []

    def of(self, model: nn.Module, states: Tensor, **options: Any) -> list[int]:
        """Of one call."""
        self.found.clear()
        self.results.clear()
        stock = F.linear

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = stock(x, weight, bias)
            if x.shape[-1] == TEXT:
                self.found.append(weight.shape[0])
                self.results.append(weakref.ref(y))
            return y

        with mock.patch.object(F, "linear", linear):
            call(model, states, **options)
        return list(self.found)

    def alive(self) -> int:
        """Results that are still there."""
        return sum(result() is not None for result in self.results)
