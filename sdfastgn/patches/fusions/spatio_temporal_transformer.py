"""Stable Video Diffusion's ``TransformerSpatioTemporalModel``, without copies of the tokens.

Before each temporal block, which attends over the frames, diffusers copies the tokens, so that the tokens of
a pixel are neighbors. After the block it copies them back. Here all tokens stay in the order of the
channels-last image, as in ``temporal_transformer.py``. Further differences:

- a LayerNorm and the sum before it (with a residual or with the embedding of the frames) are one kernel;
- the last matrix product of each feed-forward network adds its result to the residual in place;
- if the image prompt is a single token, cross-attention adds the same vector to all tokens of a video
  (``transformer_block.py``). If it has more tokens, their keys and values are computed once for each video.
  diffusers computes them once for each pixel;
- one pass mixes the results of the two blocks (``alpha_blender.py``);
- the result is channels-last, and the last sum computes the statistics of the next block's norm.

diffusers' forward runs with gradients, under autocast or a compiler, and if a temporal block has hooks,
replaced layers or a feed-forward in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import FeedForward, TemporalBasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_temporal import (
    TransformerSpatioTemporalModel,
    TransformerTemporalModelOutput,
)
from torch import Tensor

from sdfastgn.kernels.layer_norm.grouped import Groups
from sdfastgn.patches.fusions.alpha_blender import SOURCE, factors_of, is_plain_blender
from sdfastgn.patches.fusions.attention import FusedAttention
from sdfastgn.patches.fusions.temporal_transformer import attends_over_frames, image_of, tokens_of
from sdfastgn.patches.fusions.transformer_block import layers_of
from sdfastgn.patches.layers.linear import call_linear
from sdfastgn.patches.layers.statistics import add, blend
from sdfastgn.patches.layers.tokens import add_feed_forward, add_norm, is_plain_norm, norm
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked, kernels_may_run
from sdfastgn.patches.swap.tested_sources import tested


class FusedTransformerSpatioTemporalModel(TransformerSpatioTemporalModel):
    """``TransformerSpatioTemporalModel`` without copies of the image.

    hidden_states (N * F, C, H, W) for F frames, encoder_hidden_states (N * F, tokens, D),
    image_only_indicator (N, F) -> (N * F, C, H, W).
    """

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        image_only_indicator: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        if (
            not kernels_may_run(hidden_states, dim=4)
            or encoder_hidden_states is None
            or image_only_indicator is None
            or not self._runs_fused(hidden_states, encoder_hidden_states)
        ):
            return super().forward(hidden_states, encoder_hidden_states, image_only_indicator, return_dict)
        frames = image_only_indicator.shape[-1]
        # As in diffusers' own code, temporal blocks attend to the context of each video's first frame.
        context = encoder_hidden_states.unflatten(0, (-1, frames))[:, 0]
        embedding = self._embedding_of_frames(len(context), frames, hidden_states)
        factors = factors_of(self.time_mixer, image_only_indicator, hidden_states)
        x = call_linear(self.proj_in, tokens_of(self.norm(hidden_states)))
        blocks = zip(self.transformer_blocks, self.temporal_transformer_blocks, strict=False)
        for block, temporal_block in blocks:
            x = block(x, encoder_hidden_states=encoder_hidden_states)
            video = x.reshape(len(context), -1, x.shape[-1])
            mixed = _over_frames(temporal_block, video, frames, embedding, context).view(x.shape)
            x = blend(mixed.mT, x.mT, None, factors, is_normalized=False).mT
        output = add(image_of(call_linear(self.proj_out, x), hidden_states), hidden_states)
        return TransformerTemporalModelOutput(sample=output) if return_dict else (output,)

    def _embedding_of_frames(self, videos: int, frames: int, x: Tensor) -> Tensor:
        """The embedding of each frame's number in its video: (videos * frames, C), in the dtype of x."""
        numbers = torch.arange(frames, device=x.device).repeat(videos)
        return self.time_pos_embed(self.time_proj(numbers).to(x.dtype))

    def _runs_fused(self, x: Tensor, context: Tensor) -> bool:
        return (
            context.dim() == 3
            and len(context) == len(x)
            and is_plain_blender(self.time_mixer)
            and all(_is_plain(block, tokens_of(x[:1])) for block in self.temporal_transformer_blocks)
        )


def _is_plain(block: Any, tokens: Tensor) -> bool:
    """True if ``_over_frames``, the fused code, computes what a call of the temporal block ``block`` would.

    ``tokens``: (1, tokens, C), the tokens of one frame.
    """
    # If a module has a hook, diffusers' forward must run: the fused code would call the hook with tokens of
    # another shape than diffusers does.
    if type(block) is not TemporalBasicTransformerBlock or not all(map(is_unhooked, block.modules())):
        return False
    norms = (block.norm_in, block.norm1, block.norm2, block.norm3)
    return (
        block.is_res
        and block._chunk_size is None
        and all(layer is None or is_plain_norm(layer) for layer in norms)
        and attends_over_frames(block.attn1, tokens)
    )


def _over_frames(block: Any, x: Tensor, frames: int, embedding: Tensor, context: Tensor) -> Tensor:
    """Runs a ``TemporalBasicTransformerBlock`` on x + embedding. Tokens are ordered by frame, then by pixel.

    x (N, frames * pixels, C), embedding (N * frames, C), context (N, tokens, D) -> the shape of x.
    """
    groups = Groups(x.shape[1] // frames, added=embedding)
    x = add_feed_forward(block.ff_in, layers_of(block.ff_in), block.norm_in, x, None, groups)
    h = block.attn1.over_frames(norm(block.norm1, x), frames)
    groups_of_videos = None
    if block.attn2 is not None:
        attn = block.attn2
        vector = attn.of_one_token(context) if isinstance(attn, FusedAttention) else None
        if vector is not None:
            groups_of_videos = Groups(x.shape[1], added=vector)
        else:
            h, x = add_norm(block.norm2, h, x)
            h = attn(h, encoder_hidden_states=context)
    return add_feed_forward(block.ff, layers_of(block.ff), block.norm3, h, x, groups_of_videos)


FUSION = ClassSwap(
    "transformer_spatio_temporal",
    TransformerSpatioTemporalModel,
    FusedTransformerSpatioTemporalModel,
    sources=(
        tested(TransformerSpatioTemporalModel, "__init__", "forward"),
        tested(TemporalBasicTransformerBlock, "__init__", "forward"),
        tested(Attention, "__init__", "forward"),
        tested(FeedForward, "__init__", "forward"),
        SOURCE,
    ),
)
