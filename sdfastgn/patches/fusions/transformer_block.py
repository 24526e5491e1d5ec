"""diffusers' ``BasicTransformerBlock``: each residual add and the LayerNorm after it as one kernel.

    norm1 - attn1 - (add, norm2) - attn2 - (add, norm3) - ff - add

A kernel of (add, norm) reads two tensors, and writes their sum and its norm: four transfers of a tensor in
one launch. diffusers makes five in two launches, because its norm reads the sum again.

On a GPU, without gradients, the last add is part of a matrix product: the last linear layer of the
feed-forward adds its result in place to the sum of (add, norm3). That kernel has already added the bias of
this linear layer (``total_bias`` of ``add_layer_norm``). So the result is rounded once less than in
diffusers.

If the context is a single token, as in Stable Video Diffusion, ``attn2`` adds the same vector to each token
of a sample, because its softmax has only one score. Then norm2, the queries and the attention are left out,
and the kernel of (add, norm3) adds this vector.

Under a compiler diffusers' own forward runs, because the compiler fuses these operations itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.layer_norm.grouped import Groups
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fusions.attention import FusedAttention, is_one_token
from sdfastgn.patches.fusions.geglu import FusedGEGLU
from sdfastgn.patches.layers.packed_weights import plain_parameters
from sdfastgn.patches.layers.rounding import rounded
from sdfastgn.patches.layers.tokens import (
    add_feed_forward,
    add_norm,
    feed_forward_weights,
    is_plain_norm,
    norm,
)
from sdfastgn.patches.lora.wrappers import wrapped_layer
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked, layer_of, stock_class
from sdfastgn.patches.swap.tested_sources import tested


class FusedBasicTransformerBlock(BasicTransformerBlock):
    """``BasicTransformerBlock`` with sdfastgn's LayerNorm. hidden_states and the result: (N, tokens, dim).

    diffusers' forward runs for calls with GLIGEN or the deprecated ``scale``, for feed-forward in chunks, for
    hidden states that are images, for adaptive norms and for positional embeddings. It also runs under a
    compiler, and where sdfastgn's kernels do not run.
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
        is_autocast = dispatch.is_autocast(hidden_states)
        may_be_fp8 = fp8.may_run_in(self) and attention_mask is encoder_attention_mask is None and not options
        context = encoder_hidden_states if self.only_cross_attention else None
        h = self._attend_first(hidden_states, context, attention_mask, options, may_be_fp8=may_be_fp8)
        ff, norm3, attn2 = layer_of(self, "ff"), layer_of(self, "norm3"), layer_of(self, "attn2")
        vector = None if options else self._vector(encoder_hidden_states, encoder_attention_mask)
        if vector is not None:
            groups = Groups(h.shape[1], added=vector)
            return add_feed_forward(ff, layers_of(ff), norm3, h, hidden_states, groups)
        if attn2 is not None:
            h, hidden_states = self._attend_second(
                h,
                hidden_states,
                encoder_hidden_states,
                encoder_attention_mask,
                options,
                may_be_fp8=may_be_fp8,
            )
        readers = _readers_of(ff) if is_autocast else None
        return add_feed_forward(ff, layers_of(ff), norm3, h, hidden_states, readers=readers)

    def _attend_first(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        options: dict[str, Any],
        *,
        may_be_fp8: bool,
    ) -> Tensor:
        """Computes ``attn1(norm1(x))``, with diffusers' arguments ``context`` and ``mask``."""
        attn1, norm1 = layer_of(self, "attn1"), layer_of(self, "norm1")
        found = _in_e4m3(attn1, norm1, x, None, context) if may_be_fp8 else None
        if found is not None:
            return found[0]
        h = _normed(norm, attn1 if dispatch.is_autocast(x) else None, norm1, x)
        return attn1(h, encoder_hidden_states=context, attention_mask=mask, **options)

    def _attend_second(
        self,
        h: Tensor,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        options: dict[str, Any],
        *,
        may_be_fp8: bool,
    ) -> tuple[Tensor, Tensor]:
        """Computes (``attn2(norm2(h + x))``, h + x), with diffusers' arguments ``context`` and ``mask``."""
        attn2, norm2 = layer_of(self, "attn2"), layer_of(self, "norm2")
        found = _in_e4m3(attn2, norm2, h, x, context) if may_be_fp8 else None
        if found is not None:
            return found
        h, x = _normed(add_norm, attn2 if dispatch.is_autocast(h) else None, norm2, h, x)
        return attn2(h, encoder_hidden_states=context, attention_mask=mask, **options), x

    def _vector(self, context: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """The vector (N, dim) that ``attn2`` adds to each token of a sample if the context is a single token.

        None if the context has several tokens, or if ``attn2`` must be called, for instance because of a
        hook.
        """
        if mask is not None or not is_one_token(context) or not isinstance(self.attn2, FusedAttention):
            return None
        return self.attn2.of_one_token(context) if all(map(is_plain_norm, (self.norm2, self.norm3))) else None

    def _runs_fused(self, hidden_states: Tensor, options: dict[str, Any]) -> bool:
        return not (
            torch.compiler.is_compiling()
            or not dispatch.has_kernels(hidden_states)
            or hidden_states.dim() != 3
            or self._chunk_size is not None
            or "gligen" in options
            or "scale" in options  # diffusers' forward warns of ``scale``, a deprecated option
            or not _has_layer_norms(self)
        )


def _in_e4m3(
    attn: Any, layer: Any, x: Tensor, residual: Tensor | None, context: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Computes (attn(layer(total)), total), where total is x + residual and ``layer`` a LayerNorm.

    This function is for an ``attn`` in which one matrix product in E4M3 (fp8) computes the layers that read
    the LayerNorm's result. Once the scale of this result is known, the kernel of the LayerNorm writes it in
    E4M3. Returns None if ``attn`` has no such product, or if ``attn`` does anything besides projections and
    attention.
    """
    product = attn.product(x, context) if isinstance(attn, FusedAttention) else None
    if product is None:
        return None
    if residual is None:
        h = product.written(partial(norm, layer, x))
    else:
        h, x = product.written(partial(add_norm, layer, x, residual))
    return attn.with_product(product, h, context), x


def products_in(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yields (module, weights) for each matrix product in transformer blocks that can run in E4M3 (fp8).

    One product may compute several linear layers with the same input: then ``module`` contains these layers,
    and there is a weight for each of them. Otherwise ``module`` is the linear layer. ``model`` may be fused
    already or not. A layer with a LoRA adapter counts as the layer without the adapter.
    """
    for block in model.modules():
        if stock_class(block) is not BasicTransformerBlock or not _has_layer_norms(block):
            continue
        for name in ("attn1", "attn2"):
            attn: Any = getattr(block, name)
            if attn is None or stock_class(attn) is not Attention:
                continue
            has_context = name == "attn2" or block.only_cross_attention
            linears = [wrapped_layer(layer) for layer in (attn.to_q, attn.to_k, attn.to_v)]
            found = plain_parameters(linears[:1] if has_context else linears)
            if found is not None and not found.biases:
                yield linears[0] if has_context else attn, found.weights
        for layer, weight in feed_forward_weights(layers_of(block.ff), without_adapters=True) or ():
            yield layer, [weight]


def _register_for_hooks() -> None:
    """Registers the fused transformer block with diffusers, for hooks of SkipLayerGuidance and AutoGuidance.

    These hooks skip transformer blocks, which they look up by exact class.
    """
    try:
        from diffusers.hooks._helpers import TransformerBlockRegistry

        stock = TransformerBlockRegistry.get(BasicTransformerBlock)
    except (ImportError, ValueError):  # diffusers before 0.35 lacks hooks that skip blocks
        return
    TransformerBlockRegistry.register(FusedBasicTransformerBlock, replace(stock))


def _has_layer_norms(block: Any) -> bool:
    """True if the block's norms are LayerNorms without adaptive parameters or positional embeddings."""
    return block.norm_type == "layer_norm" and block.pos_embed is None


def _normed(call: Any, reader: Any, *operands: Any) -> Any:
    """Calls ``call``, which computes a norm of ``operands``, or their sum and its norm.

    Under autocast, ``reader`` is the attention or feed-forward network that reads the result. If all layers
    that read the result cast it to half precision anyway, the norm's kernel writes half precision. Without
    autocast ``reader`` is None.
    """
    return call(*operands) if reader is None else rounded(call, *operands, readers=_readers_of(reader))


def _readers_of(module: Any) -> Sequence[Any] | None:
    """The layers in ``module``, an attention or a feed-forward network, that read the input of ``module``.

    None if other code in ``module`` may read the input.
    """
    if isinstance(module, FusedAttention):
        return module.readers()
    first = (layers_of(module) or [None])[0]
    return (layer_of(first, "proj"),) if type(first) is FusedGEGLU and is_unhooked(first) else None


def layers_of(ff: Any) -> list[Any] | None:
    """The layers that ``ff`` calls one after the other; None if ``ff`` does anything else."""
    if not (type(ff) is FeedForward and is_unhooked(ff)):
        return None
    net = layer_of(ff, "net")
    return list(net._modules.values()) if type(net) is nn.ModuleList else None


FUSION = ClassSwap(
    "transformer_block",
    BasicTransformerBlock,
    FusedBasicTransformerBlock,
    sources=(
        tested(BasicTransformerBlock, "__init__", "forward"),
        tested(FeedForward, "__init__", "forward"),
    ),
    # Blocks with adaptive norms or positional embeddings are not fused: the fused forward has no code for
    # these.
    covers=_has_layer_norms,
)
_register_for_hooks()
