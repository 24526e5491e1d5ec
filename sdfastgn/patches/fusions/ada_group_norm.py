"""diffusers' ``AdaGroupNorm``: normalization, scale, shift and the activation behind it in one kernel."""

from __future__ import annotations

import torch
from diffusers.models.normalization import AdaGroupNorm
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.patches.layers.statistics import take_statistics
from sdfastgn.patches.swap.fusion import IDENTITY, ClassSwap, activation_of, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested


def ada_norm_act(
    norm: AdaGroupNorm, act: nn.Module, x: Tensor, emb: Tensor, shift: Tensor | None = None
) -> Tensor | None:
    """Computes ``act(norm(x + shift, emb))`` in one kernel. Returns None if diffusers' own code has to run.

    Args:
        norm: an ``AdaGroupNorm``.
        act: the activation after it.
        x: (N, C, H, W).
        emb: (N, embedding_dim), the time embedding.
        shift: (C,), the bias of the convolution before the norm. None if there is nothing to add.
    """
    name = activation_of(act)
    is_known = type(norm) in (AdaGroupNorm, FusedAdaGroupNorm) and is_unhooked(norm, act)
    if name is None or not (is_known and dispatch.has_kernels(x)):
        return None
    emb = norm.linear(emb if norm.act is None else norm.act(emb))
    ada_scale, ada_shift = torch.chunk(emb, 2, dim=1)
    fixed = {"eps": norm.eps, "statistics": take_statistics(x), "shift": shift}
    if emb.dtype != x.dtype:  # as in diffusers, PyTorch promotes x and emb to the wider dtype
        y = group_norm(x, norm.num_groups, **fixed)
        return act(y * (1 + ada_scale[..., None, None]) + ada_shift[..., None, None])
    return group_norm(x, norm.num_groups, activation=name, ada_scale=ada_scale, ada_shift=ada_shift, **fixed)


class FusedAdaGroupNorm(AdaGroupNorm):
    """``AdaGroupNorm`` on sdfastgn's kernel. x (N, C, H, W), emb (N, embedding_dim) -> (N, C, H, W)."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = ada_norm_act(self, IDENTITY, x, emb)
        return super().forward(x, emb) if y is None else y


SOURCE = tested(AdaGroupNorm, "__init__", "forward")
FUSION = ClassSwap("ada_group_norm", AdaGroupNorm, FusedAdaGroupNorm, sources=(SOURCE,))
