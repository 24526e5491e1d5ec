"""diffusers' ``BasicTransformerBlock``: each residual add and the LayerNorm behind it as one kernel.

    norm1 - attn1 - (add, norm2) - attn2 - (add, norm3) - ff - add

The kernel writes the sum that the norm would read again: four transfers of a tensor instead of five, and
one launch instead of two. In plain inference on a GPU the last add is no kernel: the feed-forward's last
matrix product adds itself to the sum in place, which already has the layer's bias (``total_bias`` of
``add_layer_norm``). That is also one rounding less than stock. The bias of an attention's last linear
layer stays in its matrix product, which adds it before it writes.

Under a compiler the block is diffusers' own: the compiler makes the same kernel, and puts the division by
``rescale_output_factor`` into it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm
from sdfastgn.patches.core.fusion import ClassSwap, is_unhooked
from sdfastgn.patches.core.linear import is_plain_linear
from sdfastgn.patches.core.tested_sources import tested

__all__ = ["FUSION", "FusedBasicTransformerBlock"]


class FusedBasicTransformerBlock(BasicTransformerBlock):
    """``BasicTransformerBlock`` on sdfastgn's LayerNorm. hidden_states (N, tokens, dim) -> the same.

    Calls that are not plain run upstream's forward: GLIGEN's, deprecated or chunked ones, those
    with images as hidden states.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Any = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Any = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        options = cross_attention_kwargs or {}
        if not self._runs_fused(hidden_states, options):
            return super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                timestep,
                cross_attention_kwargs,
                class_labels,
                added_cond_kwargs,
            )
        h = self.attn1(
            _norm(self.norm1, hidden_states),
            encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
            attention_mask=attention_mask,
            **options,
        )
        if self.attn2 is not None:
            h, hidden_states = _add_norm(self.norm2, h, hidden_states)
            h = self.attn2(
                h,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                **options,
            )
        if _adds_in_product(self.ff, self.norm3, h, hidden_states):
            return _add_feed_forward(self.ff, self.norm3, h, hidden_states)
        h, hidden_states = _add_norm(self.norm3, h, hidden_states)
        return self.ff(h) + hidden_states

    def _runs_fused(self, hidden_states: Tensor, options: dict[str, Any]) -> bool:
        return not (
            torch.compiler.is_compiling()
            or not dispatch.has_kernels(hidden_states)
            or hidden_states.dim() != 3
            or self._chunk_size is not None
            or "gligen" in options
            or "scale" in options  # deprecated: upstream warns
            or not _has_layer_norms(self)
        )


def _has_layer_norms(block: Any) -> bool:
    """True if the block's norms take nothing but tokens, and attention takes them as they are."""
    return block.norm_type == "layer_norm" and block.pos_embed is None


# A node of autograd written in Python costs the CPU 0.1 to 0.3 ms on an H200's host, PyTorch's own
# norm 0.05. With fewer elements the GPU does not make up for that.
_TRAINING_ELEMENTS = 2**24


def _can_fuse(norm: nn.Module, x: Tensor) -> bool:
    return (
        type(norm) is nn.LayerNorm
        and norm.normalized_shape == x.shape[-1:]
        and is_unhooked(norm)
        and (x.numel() >= _TRAINING_ELEMENTS or not torch.is_grad_enabled())
    )


def _norm(norm: Any, x: Tensor) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps) if _can_fuse(norm, x) else norm(x)


def _add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) in one kernel where that is allowed."""
    # Two dtypes, as under autocast or with an attention in fp32, promote; another shape broadcasts.
    if x.dtype == residual.dtype and x.shape == residual.shape and _can_fuse(norm, x):
        return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
    total = x + residual
    return norm(total), total


def _adds_in_product(ff: Any, norm: Any, x: Tensor, residual: Tensor) -> bool:
    """True if ``ff`` ends with a plain linear layer that may be added in place to a sum like x."""
    if type(ff) is not FeedForward or not is_unhooked(ff) or type(ff.net) is not nn.ModuleList:
        return False
    last: Any = ff.net[-1]
    return (
        is_plain_linear(last)
        and _can_fuse(norm, x)
        and x.shape == residual.shape
        and x.dtype is residual.dtype is last.weight.dtype
        and last.out_features == x.shape[-1]
        and not torch.is_autocast_enabled(x.device.type)
        and dispatch.is_plain_inference(x, (residual, norm.weight, norm.bias, last.weight, last.bias))
    )


def _add_feed_forward(ff: Any, norm: Any, x: Tensor, residual: Tensor) -> Tensor:
    """total + ff(norm(total)) with total = x + residual."""
    *others, last = ff.net
    # The sum is memory that nobody else has seen: it may be written to.
    h, total = add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, total_bias=last.bias)
    for module in others:
        h = module(h)
    # After a hook or a replaced layer the add may promote or broadcast.
    if h.dtype != total.dtype or h.shape[:-1] != total.shape[:-1]:
        return F.linear(h, last.weight) + total
    total.view(-1, total.shape[-1]).addmm_(h.reshape(-1, h.shape[-1]), last.weight.t())
    return total


FUSION = ClassSwap(
    "transformer_block",
    BasicTransformerBlock,
    FusedBasicTransformerBlock,
    sources=(
        tested(BasicTransformerBlock, __init__="b7f87cf60dcd5e5e", forward="93553781856362db"),
        tested(FeedForward, __init__="6223e1c70dbf9b4c", forward="ce319c1e7f26d21f"),
    ),
    # Blocks with adaptive norms or positional embeddings have no add directly before a plain
    # LayerNorm.
    covers=_has_layer_norms,
)
