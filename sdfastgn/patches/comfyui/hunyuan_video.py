"""Fusions for ComfyUI's autoencoder of HunyuanVideo 1.0.

Before each convolution, one pass computes the norm and SiLU, upsamples, and repeats borders and frames, as in
the fusions for diffusers (``fusions/hunyuan_video.py``). The kernels that add a convolution's bias also
compute the next norm's statistics. Unlike diffusers, ComfyUI runs the encoder before its middle block, and
the decoder after its middle block, for one chunk of the video at a time (``carried.py``). There each norm
uses the mean and variance of the chunk alone. All other layers run on the whole video. In attention, which is
in the middle block, each position attends to all positions of all frames.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.ldm.modules.diffusionmodules import model as comfy_model
from torch import Tensor, nn

from sdfastgn.kernels.group_norm.op import group_norm
from sdfastgn.patches.comfyui.carried import (
    SOURCES,
    CarriedConv3d,
    SharedClassSwap,
    attended,
    chunks_of,
    convolve,
    fits,
    is_plain,
    is_plain_wrapper,
    pointwise,
    reason_to_skip,
    reason_to_skip_ends,
    run_stages,
    with_carries,
)
from sdfastgn.patches.comfyui.inference_mode import outside_inference_mode
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.layers.video import (
    can_fuse,
    in_channels_last,
    is_plain_inference,
    norm_operands,
)
from sdfastgn.patches.swap.fusion import drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import TestedSource, tested

_ops: Any = comfy.ops
# The encoder and the decoder call a function for SiLU, and have no module for it. ``norm_operands`` takes a
# module, so it gets this ``nn.SiLU``.
_SILU = nn.SiLU()


class FusedVideoResnetBlock(comfy_model.ResnetBlock):
    """``ResnetBlock``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(
        self, x: Tensor, temb: Tensor | None = None, conv_carry_in: Any = None, conv_carry_out: Any = None
    ) -> Tensor:
        if temb is not None or not (is_plain_inference(x) and self._runs_fused(x, conv_carry_in)):
            return super().forward(x, temb, conv_carry_in, conv_carry_out)
        _ops.run_every_op()  # raises an error if the user has interrupted the run
        x, act, lists = in_channels_last(x), self.swish, (conv_carry_in, conv_carry_out)
        y = convolve(self.conv1, x, *lists, norm=norm_operands(self.norm1, act, x), has_bias=False)
        norm = norm_operands(self.norm2, act, y, is_shifted=True)
        y = convolve(self.conv2, y, *lists, norm=norm, shift=self.conv1.conv.bias, has_bias=False)
        if self.in_channels != self.out_channels:
            x = pointwise(self.nin_shortcut.conv, x, self.nin_shortcut.conv.bias)
        return add(y, x, self.conv2.conv.bias)

    def _runs_fused(self, x: Tensor, carry_in: Any) -> bool:
        C, C_out = self.in_channels, self.out_channels
        if not drops_nothing(self.dropout):
            return False
        if C_out != C and (self.use_conv_shortcut or not is_plain_wrapper(self.nin_shortcut, x, C, 1)):
            return False
        return (
            is_plain_wrapper(self.conv1, x, C)
            and is_plain_wrapper(self.conv2, x, C_out)
            and can_fuse(self.norm1, self.swish, x, C)
            and can_fuse(self.norm2, self.swish, x, C_out)
            and fits(carry_in, 0, x, C)
            and fits(carry_in, 1, x, C_out)
        )


class FusedVideoUpsample(comfy_model.Upsample):
    """``Upsample``. x (N, C, T, H, W) -> (N, C, T', 2 H, 2 W), channels-last.

    T' is T if time is not upsampled. Otherwise T' is 2 T, or 2 T - 1 in the first chunk (``conv_carry_in`` is
    None), whose first frame is not doubled.
    """

    def forward(self, x: Tensor, conv_carry_in: Any = None, conv_carry_out: Any = None) -> Tensor:
        given = self.scale_factor
        factor = given if isinstance(given, tuple) else (given,) * 3
        if not (
            factor[0] in (1, 2)
            and factor[1:] == (2, 2)
            and is_plain_inference(x)
            and is_plain_wrapper(self.conv, x, x.shape[1])
            and fits(conv_carry_in, 0, x, x.shape[1], 2)
        ):
            return super().forward(x, conv_carry_in, conv_carry_out)
        x, times = in_channels_last(x), int(factor[0])
        if times == 2 and conv_carry_in is not None:
            # ``pad_frames`` never doubles the first frame, which is right only in the first chunk. So all
            # frames of a later chunk are doubled here.
            rows = x.movedim(1, -1)
            x = rows[:, :, None].expand(-1, -1, 2, -1, -1, -1).flatten(1, 2).movedim(-1, 1)
            times = 1
        return convolve(self.conv, x, conv_carry_in, conv_carry_out, upsample=(times, 2, 2), emits=True)


class FusedVideoDownsample(comfy_model.Downsample):
    """``Downsample``. x (N, C, T, H, W) -> (N, C, T', H', W'), channels-last."""

    def forward(self, x: Tensor, conv_carry_in: Any = None, conv_carry_out: Any = None) -> Tensor:
        stride = self.conv.conv.stride
        if not (
            is_plain_inference(x)
            and is_plain_wrapper(self.conv, x, x.shape[1], stride=stride)
            and fits(conv_carry_in, 0, x, x.shape[1])
        ):
            return super().forward(x, conv_carry_in, conv_carry_out)
        return convolve(self.conv, x, conv_carry_in, conv_carry_out, emits=True)


def _runs_fused(half: Any, x: Tensor) -> bool:
    """True if the first convolution, the last norm, SiLU and the last convolution of ``half`` can run fused.

    ``half``: the encoder or the decoder. x: its input.
    """
    if not (is_plain_inference(x) and half.carried and is_plain_wrapper(half.conv_in, x, x.shape[1])):
        return False
    C = half.norm_out.num_channels
    return can_fuse(half.norm_out, _SILU, x, C) and is_plain_wrapper(half.conv_out, x, C)


def _middle(half: Any, x: Tensor) -> Tensor:
    return half.mid.block_2(_attention(half.mid.attn_1, half.mid.block_1(x)))


def _attention(block: Any, x: Tensor) -> Tensor:
    """Runs an ``AttnBlock``. x (N, C, T, H, W) -> the same; channels-last if it runs fused.

    The fused encoder and decoder call this function instead of the block. So the block keeps its class, which
    ``vae.py`` replaces in other autoencoders.
    """
    norm, layers = block.norm, (block.q, block.k, block.v, block.proj_out)
    if not (
        # If ComfyUI has chosen xformers or sliced attention, stock's forward runs.
        block.optimized_attention is comfy_model.pytorch_attention
        and type(block) is comfy_model.AttnBlock
        and is_unhooked(block)
        and all(is_plain(layer, x, x.shape[1], 1) for layer in layers)
        and can_fuse(norm, _SILU, x, x.shape[1])
    ):
        return block(x)
    x = in_channels_last(x)
    normed = group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return add(pointwise(block.proj_out, attended(block, normed), None), x, block.proj_out.bias)


def _leave(half: Any, x: Tensor, carry_in: Any = None, carry_out: Any = None) -> Tensor:
    """Runs the last norm, SiLU and convolution. The result is channels-first, like stock's."""
    x = in_channels_last(x)
    norm = norm_operands(half.norm_out, _SILU, x)
    return convolve(half.conv_out, x, carry_in, carry_out, norm=norm).contiguous()


class FusedVideoEncoder(comfy_model.Encoder):
    """``Encoder``. Videos (N, 3, T, H, W) -> (N, C, T', H', W'), channels-first."""

    def forward(self, x: Tensor) -> Tensor:
        if not _runs_fused(self, x):
            return super().forward(x)
        with outside_inference_mode():
            found = [
                run_stages(self.down, convolve(self.conv_in, chunk, *carried, emits=True), *carried)
                for chunk, *carried in with_carries(chunks_of(x, self.time_compress))
            ]
            return _leave(self, _middle(self, torch.cat(found, 2)))


class FusedVideoDecoder(comfy_model.Decoder):
    """``Decoder``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W'), channels-first."""

    def forward(self, z: Tensor, **kwargs: Any) -> Tensor:
        if kwargs or self.tanh_out or not _runs_fused(self, z):
            return super().forward(z, **kwargs)
        with outside_inference_mode():
            chunks = _middle(self, convolve(self.conv_in, z, emits=True)).split(2, 2)
            found = [
                _leave(self, run_stages(reversed(self.up), y, *carried), *carried)
                for y, *carried in with_carries(chunks)
            ]
            return torch.cat(found, 2)


# --- fusions ----------------------------------------------------------------------------------------


def _is_video_block(block: Any) -> bool:
    return isinstance(block.conv1, CarriedConv3d) and isinstance(block.norm1, nn.GroupNorm)


def _has_video_conv(block: Any) -> bool:
    return bool(block.with_conv and isinstance(block.conv, CarriedConv3d))


def _is_video_model(half: Any) -> bool:
    return isinstance(half.conv_in, CarriedConv3d)


def _swap(
    name: str, stock: Any, fused: Any, covers: Any, check: Any = reason_to_skip, *sources: TestedSource
) -> SharedClassSwap:
    sources = (tested(stock, "__init__", "forward"), *sources, *SOURCES)
    return SharedClassSwap(f"comfyui_video_{name}", stock, fused, sources=sources, check=check, covers=covers)


# The fused encoder and decoder run the layers of an ``AttnBlock`` themselves (``_attention``). So they rely
# on its code too.
_ATTENTION = (
    tested(comfy_model.AttnBlock, "__init__", "forward"),
    tested(comfy_model, "pytorch_attention"),
)
_HALF = (_is_video_model, reason_to_skip_ends, *_ATTENTION)
BLOCKS = (
    _swap("resnet_block", comfy_model.ResnetBlock, FusedVideoResnetBlock, _is_video_block),
    _swap("upsample", comfy_model.Upsample, FusedVideoUpsample, _has_video_conv),
    _swap("downsample", comfy_model.Downsample, FusedVideoDownsample, _has_video_conv),
    _swap("encoder", comfy_model.Encoder, FusedVideoEncoder, *_HALF),
    _swap("decoder", comfy_model.Decoder, FusedVideoDecoder, *_HALF),
)
