"""diffusers' ``AdaGroupNorm``: normalization, scale and shift in one kernel."""

from __future__ import annotations

import torch
from diffusers.models.normalization import AdaGroupNorm
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.patches.core.fusion import ClassSwap
from sdfastgn.patches.core.tested_sources import tested

__all__ = ["FUSION", "FusedAdaGroupNorm"]


class FusedAdaGroupNorm(AdaGroupNorm):
    """``AdaGroupNorm`` on sdfastgn's kernel. x (N, C, H, W), emb (N, embedding_dim) -> (N, C, H, W)."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if not dispatch.has_kernels(x):
            return super().forward(x, emb)
        emb = self.linear(emb if self.act is None else self.act(emb))
        ada_scale, ada_shift = torch.chunk(emb, 2, dim=1)
        if emb.dtype != x.dtype:  # upstream's result has the wider of the two dtypes
            one = 1 + ada_scale[..., None, None]
            return group_norm(x, self.num_groups, eps=self.eps) * one + ada_shift[..., None, None]
        return group_norm(x, self.num_groups, eps=self.eps, ada_scale=ada_scale, ada_shift=ada_shift)


FUSION = ClassSwap(
    "ada_group_norm",
    AdaGroupNorm,
    FusedAdaGroupNorm,
    sources=(tested(AdaGroupNorm, "__init__", "forward"),),
)
