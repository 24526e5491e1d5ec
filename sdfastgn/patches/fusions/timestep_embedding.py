"""diffusers' ``TimestepEmbedding``, also SDXL's ``add_embedding``: both linear layers in two kernels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import TimestepEmbedding
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.linear import linear_of
from sdfastgn.patches.core.tested_sources import tested

__all__ = ["FUSION", "FusedTimestepEmbedding"]


class FusedTimestepEmbedding(TimestepEmbedding):
    """``TimestepEmbedding`` with the activation inside the second layer.

    sample (N, in_channels) -> (N, time_embed_dim).
    """

    def forward(self, sample: Tensor, condition: Any = None) -> Tensor:
        # A compiler gets upstream's own graph: it fuses the activation by itself.
        if torch.compiler.is_compiling() or not dispatch.has_kernels(sample):
            return super().forward(sample, condition)
        if condition is not None:
            sample = sample + self.cond_proj(condition)
        sample = linear_of(self.linear_2, self.act, linear_of(self.linear_1, None, sample))
        return sample if self.post_act is None else self.post_act(sample)


FUSION = ClassSwap(
    "timestep_embedding",
    TimestepEmbedding,
    FusedTimestepEmbedding,
    sources=(tested(TimestepEmbedding, __init__="7731fa596524f3ae", forward="2d40b4b0dc81cf90"),),
)
