"""diffusers' ``TransformerTemporalModel`` and AnimateDiff's motion modules, without copies of the tokens.

diffusers copies the image to (N, H, W, frames, C), so that the tokens of a pixel are neighbors. At the end it
copies the result back, to a channels-first image. Here the tokens stay in the order of the channels-last
image, (N, frames, H, W, C). Only attention depends on the order of tokens. Its kernel reads the tokens of a
pixel with a stride.

Each residual add and the LayerNorm after it are one kernel, which also adds the positional embedding of the
frames, as in ``transformer_block.py``. The last sum also computes the statistics of the next block's norm.

diffusers' forward runs with gradients, under autocast or a compiler, if text or another optional argument is
given, and for blocks with FreeNoise, hooks or a feed-forward in chunks.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import SinusoidalPositionalEmbedding
from diffusers.models.transformers.transformer_temporal import (
    TransformerTemporalModel,
    TransformerTemporalModelOutput,
)
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from torch import Tensor

from sdfastgn.kernels.layer_norm.grouped import Groups
from sdfastgn.patches.fusions.attention import FusedAttention
from sdfastgn.patches.fusions.transformer_block import layers_of
from sdfastgn.patches.layers.linear import call_linear
from sdfastgn.patches.layers.statistics import add, as_video
from sdfastgn.patches.layers.tokens import add_feed_forward, grouped_norm, is_plain_norm
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked, kernels_may_run, stock_class
from sdfastgn.patches.swap.tested_sources import tested


class FusedTransformerTemporalModel(TransformerTemporalModel):
    """``TransformerTemporalModel`` without copies of the image.

    hidden_states and the result: (N * frames, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Any = None,
        class_labels: Any = None,
        num_frames: int = 1,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        others = encoder_hidden_states, timestep, class_labels
        if cross_attention_kwargs or not _runs_fused(self, hidden_states, num_frames, others):
            return super().forward(
                hidden_states, *others, num_frames, cross_attention_kwargs, return_dict=return_dict
            )
        output = _over_frames(self, hidden_states, num_frames, None)
        return TransformerTemporalModelOutput(sample=output) if return_dict else (output,)


class FusedAnimateDiffTransformer3D(AnimateDiffTransformer3D):
    """``AnimateDiffTransformer3D`` without copies of the image.

    hidden_states and the result: (N * frames, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Any = None,
        class_labels: Any = None,
        num_frames: int = 1,
        cross_attention_kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        others = encoder_hidden_states, timestep, class_labels
        if cross_attention_kwargs or not _runs_fused(self, hidden_states, num_frames, others):
            return super().forward(hidden_states, *others, num_frames, cross_attention_kwargs)
        return _over_frames(self, hidden_states, num_frames, "input")


def tokens_of(images: Tensor) -> Tensor:
    """The pixels of images as tokens: (N, C, *spatial) -> (N, tokens, C), a view of channels-last images."""
    return images.movedim(1, -1).flatten(1, -2)


def image_of(tokens: Tensor, like: Tensor) -> Tensor:
    """The image (N, C, H, W) whose pixels, row by row, are ``tokens`` (N, H W, C). It is a view.

    ``like``: (N, _, H, W), a tensor with the sizes of the image.
    """
    N, _, H, W = like.shape
    return tokens.reshape(N, H, W, tokens.shape[-1]).permute(0, 3, 1, 2)


def attends_over_frames(attn: Any, x: Tensor) -> bool:
    """True if ``attn.over_frames`` can replace diffusers' attention over frames. x: (N, tokens, C)."""
    return isinstance(attn, FusedAttention) and attn.runs_over_frames(x)


def _runs_fused(model: Any, x: Tensor, frames: int, others: tuple[Any, ...]) -> bool:
    return (
        kernels_may_run(x, dim=4)
        and len(x) % frames == 0
        and all(other is None for other in others)
        and all(_block_is_plain(block, x, frames) for block in model.transformer_blocks)
    )


def _block_is_plain(block: Any, x: Tensor, frames: int) -> bool:
    """True if ``_block``, the fused code, computes what a call of the transformer block ``block`` would.

    x: the images, (N * frames, C, H, W).
    """
    # If a module has a hook, diffusers' forward must run: the fused code would call the hook with tokens of
    # another shape than diffusers does.
    if stock_class(block) is not BasicTransformerBlock or not all(map(is_unhooked, block.modules())):
        return False
    tokens = tokens_of(x[:1])
    attentions = (block.attn1,) if block.attn2 is None else (block.attn1, block.attn2)
    norms = (block.norm1, block.norm3) if block.attn2 is None else (block.norm1, block.norm2, block.norm3)
    return (
        block.norm_type == "layer_norm"
        and block._chunk_size is None
        and all(map(is_plain_norm, norms))
        and all(attends_over_frames(attn, tokens) for attn in attentions)
        and (block.pos_embed is None or _fits(block.pos_embed, x, frames))
    )


def _fits(embedding: Any, x: Tensor, frames: int) -> bool:
    if type(embedding) is not SinusoidalPositionalEmbedding:
        return False
    pe = embedding.pe
    return frames <= pe.shape[1] and (pe.dtype, pe.device) == (x.dtype, x.device)


def _over_frames(model: Any, x: Tensor, frames: int, name: str | None) -> Tensor:
    """Runs ``model``, a transformer over frames, fused. x and the result: images (N * frames, C, H, W).

    ``name``: the keyword by which diffusers passes tokens to the first and last linear layer; None if it
    passes them by position.
    """
    tokens = call_linear(model.proj_in, tokens_of(model.norm(as_video(x, frames))), name)
    for block in model.transformer_blocks:
        tokens = _block(block, tokens, frames)
    return add(image_of(call_linear(model.proj_out, tokens, name), x), x)


def _block(block: Any, x: Tensor, frames: int) -> Tensor:
    """Runs a ``BasicTransformerBlock`` whose attention is over frames.

    x and the result: (N, frames * pixels, C). Tokens are ordered by frame, then by pixel.
    """
    pixels = x.shape[1] // frames
    position = None if block.pos_embed is None else block.pos_embed.pe[0, :frames]
    groups = Groups(pixels, position=position)
    h, _ = grouped_norm(block.norm1, x, groups)
    h = block.attn1.over_frames(h, frames)
    if block.attn2 is not None:
        h, x = grouped_norm(block.norm2, h, groups, x)
        h = block.attn2.over_frames(h, frames)
    return add_feed_forward(block.ff, layers_of(block.ff), block.norm3, h, x)


_SOURCES = (
    tested(BasicTransformerBlock, "__init__", "forward"),
    tested(Attention, "__init__", "forward"),
    tested(FeedForward, "__init__", "forward"),
    tested(SinusoidalPositionalEmbedding, "__init__", "forward"),
)
FUSION = ClassSwap(
    "transformer_temporal",
    TransformerTemporalModel,
    FusedTransformerTemporalModel,
    sources=(tested(TransformerTemporalModel, "__init__", "forward"), *_SOURCES),
)
MOTION = ClassSwap(
    "motion_module",
    AnimateDiffTransformer3D,
    FusedAnimateDiffTransformer3D,
    sources=(tested(AnimateDiffTransformer3D, "__init__", "forward"), *_SOURCES),
)
