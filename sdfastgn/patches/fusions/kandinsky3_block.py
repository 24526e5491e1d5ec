"""diffusers' ``Kandinsky3Block`` and its norm: normalization, scale, shift and SiLU in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.unets.unet_kandinsky3 import Kandinsky3Block, Kandinsky3ConditionalGroupNorm
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.fusion import IDENTITY, ClassSwap, activation_reason, is_unhooked
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.group_norm import fused_activation, fused_norm

__all__ = ["BLOCK", "NORM"]


def _norm_act(norm: Any, act: nn.Module, x: Tensor, context: Tensor) -> Tensor | None:
    """Computes ``act(norm(x, context))`` in one kernel. None if stock's code has to run.

    x (N, C, H, W), context (N, K).
    """
    is_known = type(norm) in (Kandinsky3ConditionalGroupNorm, FusedKandinsky3ConditionalGroupNorm)
    if not (is_known and is_unhooked(norm) and context.dim() == 2 and dispatch.has_kernels(x)):
        return None
    name = fused_activation(norm.norm, act)
    if name is None:
        return None
    context = norm.context_mlp(context)
    if context.dtype != x.dtype:
        return None
    scale, shift = torch.chunk(context, 2, dim=1)
    return fused_norm(norm.norm, x, name, None, {"ada_scale": scale, "ada_shift": shift})


class FusedKandinsky3ConditionalGroupNorm(Kandinsky3ConditionalGroupNorm):
    """``Kandinsky3ConditionalGroupNorm``. x (N, C, H, W), context (N, K) -> (N, C, H, W)."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = _norm_act(self, IDENTITY, x, context)
        return super().forward(x, context) if y is None else y


class FusedKandinsky3Block(Kandinsky3Block):
    """``Kandinsky3Block``. x (N, C, H, W), time_embed (N, K) -> (N, C_out, H', W')."""

    def forward(self, x: Tensor, time_embed: Tensor) -> Tensor:
        y = _norm_act(self.group_norm, self.activation, x, time_embed)
        if y is None:
            return super().forward(x, time_embed)
        return self.down_sample(self.projection(self.up_sample(y)))


_SOURCE = tested(Kandinsky3ConditionalGroupNorm, "__init__", "forward")
NORM = ClassSwap(
    "kandinsky3_norm",
    Kandinsky3ConditionalGroupNorm,
    FusedKandinsky3ConditionalGroupNorm,
    sources=(_SOURCE,),
    layers=("norm",),
)
BLOCK = ClassSwap(
    "kandinsky3_block",
    Kandinsky3Block,
    FusedKandinsky3Block,
    sources=(tested(Kandinsky3Block, "__init__", "forward"), _SOURCE),
    check=lambda block: activation_reason(block.activation),
)
