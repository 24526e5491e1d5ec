"""Fusions for the blocks of ComfyUI's UNet (SD 1.5, SD 2, SDXL).

The functions that compute are the same as for diffusers' blocks. This file passes them the layers of
ComfyUI's blocks. ``layers.py`` has already given most layers PyTorch's classes. If ComfyUI converts or
patches the weights of a layer at each call, ``prepared`` gives a layer of PyTorch's class for one call.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.attention import (
    GEGLU,
    BasicTransformerBlock,
    CrossAttention,
    FeedForward,
    SpatialTransformer,
)
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, Upsample
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdfastgn.kernels.attention.few_keys import attend_to_few
from sdfastgn.kernels.attention.wide_heads import is_replaced
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.patches.comfyui.layers import prepared
from sdfastgn.patches.layers.convolution import conv_without_bias, pointwise
from sdfastgn.patches.layers.group_norm import norm_act
from sdfastgn.patches.layers.linear import call_linear
from sdfastgn.patches.layers.residual import NO_EMBEDDING, Embedding, conv_norm_act
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.layers.tokens import add_feed_forward, add_norm, linear_geglu, norm
from sdfastgn.patches.layers.upsampling import conv_of_upsampled
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked, stock_class
from sdfastgn.patches.swap.tested_sources import tested


class FusedResBlock(ResBlock):
    """``ResBlock`` with fused norms. x (N, C, H, W), emb (N, emb_channels) -> (N, C_out, H', W')."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if not _runs_fused_resblock(self, x, emb):
            return super().forward(x, emb)
        first_norm, first_act, conv = self.in_layers
        second_norm, second_act, dropout, last = self.out_layers
        h = norm_act(prepared(first_norm, x), first_act, x)
        if self.updown:
            h, x = self.h_upd(h), self.x_upd(x)
        embedding = NO_EMBEDDING
        if not self.skip_t_emb:
            act, linear = self.emb_layers
            embedding = Embedding(emb, prepared(linear, emb), act, self.use_scale_shift_norm)
        conv, second_norm = prepared(conv, h), prepared(second_norm, h)
        h = conv_norm_act(h, conv, second_norm, second_act, self.out_channels, embedding)
        h, bias = conv_without_bias(prepared(last, h), dropout(h))
        return add(h, pointwise(prepared(self.skip_connection, x), x), bias)


def _runs_fused_resblock(block: Any, x: Tensor, emb: Tensor) -> bool:
    return (
        dispatch.has_kernels(x)
        and x.dim() == 4
        and (block.skip_t_emb or emb.dtype == x.dtype)
        and not (block.use_checkpoint and torch.is_grad_enabled())
        and _is_plain_sequential(block.in_layers)
        and _is_plain_sequential(block.out_layers)
        and (block.skip_t_emb or _is_plain_sequential(block.emb_layers))
    )


def _is_plain_sequential(layers: Any) -> bool:
    return stock_class(layers) is nn.Sequential and is_unhooked(layers)


def _is_image_resblock(block: Any) -> bool:
    """True for residual blocks of images. False for residual blocks of video models, which mix frames."""
    layers = block.in_layers
    is_image = isinstance(layers, nn.Sequential) and isinstance(layers[-1], nn.Conv2d)
    return is_image and not block.exchange_temb_dims


class FusedSpatialTransformer(SpatialTransformer):
    """``SpatialTransformer`` whose output is channels-last. x and the result: (N, C, H, W).

    ComfyUI's forward ends with ``.contiguous()``, which makes its output channels-first. Then all later
    layers would be channels-first too, and slower.
    """

    def forward(self, x: Tensor, context: Any = None, transformer_options: Any = None) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        if not (dispatch.has_kernels(x) and x.dim() == 4):
            return super().forward(x, context, options)
        contexts = context if isinstance(context, list) else [context] * len(self.transformer_blocks)
        # Like ComfyUI's forward, this one sets the entries ``activations_shape`` and ``block_index`` of
        # ``transformer_options``, which other nodes read.
        options["activations_shape"] = list(x.shape)
        _, _, H, W = x.shape
        h = prepared(self.norm, x)(x)
        if not self.use_linear:
            h = pointwise(prepared(self.proj_in, h), h)
        h = h.permute(0, 2, 3, 1).flatten(1, 2)
        if self.use_linear:
            h = call_linear(prepared(self.proj_in, h), h)
        for i, block in enumerate(self.transformer_blocks):
            options["block_index"] = i
            h = block(h, context=contexts[i], transformer_options=options)
        if self.use_linear:
            h = call_linear(prepared(self.proj_out, h), h)
        h = h.reshape(h.shape[0], H, W, h.shape[-1]).permute(0, 3, 1, 2)
        if not self.use_linear:
            h = pointwise(prepared(self.proj_out, h), h)
        return add(h, x)


class FusedBasicTransformerBlock(BasicTransformerBlock):
    """``BasicTransformerBlock`` with each LayerNorm fused with the sum before it.

    x and the result: (N, tokens, C). If other nodes run code inside of the block, ComfyUI's forward runs.
    """

    def forward(self, x: Tensor, context: Tensor | None = None, transformer_options: Any = None) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        if not (dispatch.has_kernels(x) and x.dim() == 3 and has_no_patches(options)):
            return super().forward(x, context, options)
        own = context if self.disable_self_attn else None
        h = norm(prepared(self.norm1, x), x)
        h = self.attn1(h, context=own, value=None, transformer_options={_OVERRIDE: _attention, **options})
        h, x = add_norm(prepared(self.norm2, h, x), h, x)
        to_prompt = {_OVERRIDE: _attention_to_prompt, **options}
        h = self.attn2(h, context=context, value=None, transformer_options=to_prompt)
        is_known = type(self.ff) is FeedForward and type(self.ff.net) is nn.Sequential
        is_known = is_known and is_unhooked(self.ff) and is_unhooked(self.ff.net)
        norm3 = prepared(self.norm3, h, x)
        layers = [*self.ff.net[:-1], prepared(self.ff.net[-1], h, x)] if is_known else None
        return add_feed_forward(self.ff, layers, norm3, h, x)


# Names of the entries of ``transformer_options["patches"]`` that hold code of other nodes for the inside of a
# ``BasicTransformerBlock``.
_INNER_PATCHES = {"attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch"}


def has_no_patches(options: dict[str, Any]) -> bool:
    """True if no other node runs code inside of transformer blocks. ``options``: ``transformer_options``.

    Such code is in the entries ``patches`` and ``patches_replace``.
    """
    replaced = options.get("patches_replace", {})
    return _INNER_PATCHES.isdisjoint(options.get("patches", ())) and not (
        replaced.get("attn1") or replaced.get("attn2")
    )


def _is_plain_block(block: Any) -> bool:
    """True for transformer blocks of images. False for blocks of video models, which mix frames."""
    is_video = block.ff_in or block.attn2 is None or block.switch_temporal_ca_to_sa
    return block.is_res and not is_video


# The entry of ``transformer_options`` with a function that runs in place of ComfyUI's attention.
_OVERRIDE = "optimized_attention_override"
# ComfyUI's attention by PyTorch, as ComfyUI passes it to an override. Users may choose other attentions.
_BY_PYTORCH = inspect.unwrap(attention.attention_pytorch)
# GPUs on which PyTorch itself tries cuDNN's attention first. ComfyUI 0.33 tries FlashAttention first. On an
# H200 a step of SDXL took 32.1 ms with ComfyUI's attention, and in another run 30.3 with ``_attention``.
_CUDNN_IS_FASTER = {(9, 0), (10, 0)}
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Arguments of an attention that change no result. With others ComfyUI's function runs.
_HARMLESS = {"attn_precision", "transformer_options", "_inside_attn_wrapper"}


def _attention(
    stock: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, *, is_prompt: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of q (N, L, C) to k and v (N, keys, C): (N, L, C). An override for ComfyUI.

    ``stock``: the attention that ComfyUI or the user has chosen. It runs unless it is PyTorch's.
    ``is_prompt``: True if k and v come from a prompt. Then the kernel for few keys may run.
    """
    own = stock is _BY_PYTORCH and mask is None and options.keys() <= _HARMLESS and not is_replaced()
    if own and dispatch.has_kernels(q) and dispatch.is_plain_inference(q, (k, v)):
        parts = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)]
        # The kernel is compiled for each number of keys, which for an image would differ with its size.
        found = attend_to_few(*parts) if is_prompt else None
        if found is not None:
            return found
        if gpu.compute_capability(q.device) in _CUDNN_IS_FASTER:
            with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
                h = torch.nn.functional.scaled_dot_product_attention(*parts)
            return h.transpose(1, 2).flatten(2)
    return stock(q, k, v, heads, mask, **options)


_attention_to_prompt = partial(_attention, is_prompt=True)


class FusedGEGLU(GEGLU):
    """``GEGLU``: a matrix product, then one kernel for GELU and gate. x (..., dim_in) -> (..., dim_out)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_geglu(prepared(self.proj, x), x) if dispatch.has_kernels(x) else super().forward(x)


class FusedUpsample(Upsample):
    """``Upsample``: upsampling and its convolution run together. x (N, C, H, W) -> (N, C_out, 2H, 2W)."""

    def forward(self, x: Tensor, output_shape: Any = None) -> Tensor:
        is_double = output_shape is None or tuple(output_shape[2:4]) == (2 * x.shape[2], 2 * x.shape[3])
        fits = x.dim() == 4 and x.shape[1] == self.channels
        if not (is_double and fits and dispatch.has_kernels(x) and is_channels_last(x)):
            return super().forward(x, output_shape)
        return conv_of_upsampled(prepared(self.conv, x), x)


def _has_conv(module: Any) -> bool:
    return bool(module.use_conv and module.dims == 2)


BLOCKS = (
    ClassSwap(
        "resblock",
        ResBlock,
        FusedResBlock,
        sources=(tested(ResBlock, "__init__", "forward", "_forward"),),
        covers=_is_image_resblock,
    ),
    ClassSwap(
        "spatial_transformer",
        SpatialTransformer,
        FusedSpatialTransformer,
        sources=(tested(SpatialTransformer, "__init__", "forward"),),
    ),
    ClassSwap(
        "comfyui_transformer_block",
        BasicTransformerBlock,
        FusedBasicTransformerBlock,
        sources=(
            tested(BasicTransformerBlock, "__init__", "forward"),
            tested(CrossAttention, "forward"),
            tested(FeedForward, "__init__", "forward"),
        ),
        covers=_is_plain_block,
    ),
    ClassSwap(
        "comfyui_geglu",
        GEGLU,
        FusedGEGLU,
        sources=(tested(GEGLU, "__init__", "forward"),),
    ),
    ClassSwap(
        "comfyui_upsample",
        Upsample,
        FusedUpsample,
        sources=(tested(Upsample, "__init__", "forward"),),
        covers=_has_conv,
    ),
)
