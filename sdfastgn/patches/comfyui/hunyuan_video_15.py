"""Fusions for ComfyUI's autoencoders of HunyuanVideo 1.5 and of HunyuanImage's refiner.

Before each convolution, one pass computes the norm and SiLU and repeats borders and frames. Stock's
resampling moves channels to positions (or positions to channels) twice: in the result of its convolution and
in its shortcut. Here one pass reads both and writes their sum. Videos are computed in chunks
(``carried.py``).
"""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from comfy.ldm.hunyuan_video import vae_refiner
from torch import Tensor, nn

from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.kernels.pad_frames.op import Norm
from sdfastgn.patches.comfyui.carried import (
    SOURCES,
    CarriedConv3d,
    Conv3d,
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
from sdfastgn.patches.layers.packing import downsampled, means_of, upsampled
from sdfastgn.patches.layers.video import (
    NORMS,
    FusedRMSNorm,
    add_into,
    channels_into,
    in_channels_last,
    is_plain_inference,
    norm_of,
)
from sdfastgn.patches.swap.fusion import ClassSwap, drops_nothing
from sdfastgn.patches.swap.tested_sources import tested

_ops: Any = comfy.ops


# --- parts of ComfyUI's general blocks ----------------------------------------------------------------

# ComfyUI's classes ``ResnetBlock`` and ``AttnBlock`` are also parts of image autoencoders. So their fused
# classes are in ``vae.py``, and call the functions below for a block of an autoencoder for videos.


def is_video_block(block: Any) -> bool:
    """True if the ``ResnetBlock`` ``block`` is of the VAE of HunyuanVideo 1.5 or HunyuanImage's refiner."""
    return isinstance(block.conv1, CarriedConv3d) and isinstance(block.norm1, vae_refiner.RMS_norm)


def result_of(
    block: Any, x: Tensor, temb: Any = None, carry_in: Any = None, carry_out: Any = None
) -> Tensor | None:
    """Runs a ``ResnetBlock`` for which ``is_video_block`` is true, or returns None if stock's must run.

    x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last.
    """
    C, C_out = block.in_channels, block.out_channels
    if temb is not None or not is_plain_inference(x) or block.use_conv_shortcut:
        return None
    if not drops_nothing(block.dropout):
        return None
    if not (is_plain_wrapper(block.conv1, x, C) and is_plain_wrapper(block.conv2, x, C_out)):
        return None
    if C_out != C and not is_plain_wrapper(block.nin_shortcut, x, C, 1):
        return None
    if not (fits(carry_in, 0, x, C) and fits(carry_in, 1, x, C_out)):
        return None
    first, second = (norm_of(norm, block.swish, x) for norm in (block.norm1, block.norm2))
    if first is None or second is None:
        return None
    _ops.run_every_op()  # raises an error if the user has interrupted the run
    x = laid_out(x, channels_last=True)
    conv1, conv2 = block.conv1.conv, block.conv2.conv
    y = convolve(block.conv1, x, carry_in, carry_out, norm=first, has_bias=False)
    y = convolve(block.conv2, y, carry_in, carry_out, norm=second, shift=conv1.bias, has_bias=False)
    if C_out != C:
        x = pointwise(block.nin_shortcut.conv, x, block.nin_shortcut.conv.bias)
    return add_into(y, x, conv2.bias)


def is_video_attention(block: Any) -> bool:
    """True if the ``AttnBlock`` ``block`` is of the VAE of HunyuanVideo 1.5 or HunyuanImage's refiner."""
    return isinstance(block.q, Conv3d) and isinstance(block.norm, vae_refiner.RMS_norm)


def attention_of(block: Any, x: Tensor) -> Tensor | None:
    """Runs an ``AttnBlock`` for which ``is_video_attention`` is true, or returns None if stock's must run.

    x (N, C, T, H, W) -> the same, channels-last. Every position attends to all positions of all frames.
    """
    layers = block.q, block.k, block.v, block.proj_out
    if not (is_plain_inference(x) and all(is_plain(layer, x, x.shape[1], 1) for layer in layers)):
        return None
    norm = norm_of(block.norm, None, x)
    if norm is None:
        return None
    x = laid_out(x, channels_last=True)
    normed = channel_norm(x, *norm[:5])
    return add_into(pointwise(block.proj_out, attended(block, normed), None), x, block.proj_out.bias)


# --- fused classes ----------------------------------------------------------------------------------


class FusedRMS(FusedRMSNorm, vae_refiner.RMS_norm):
    pass


class FusedUpSmpl(vae_refiner.UpSmpl):
    """``UpSmpl``, which upsamples. x (N, C, T, H, W) -> (N, C_out, T', 2 H, 2 W), channels-last.

    T' is T, or with ``tus`` 2 T. In the first chunk (no ``conv_carry_in``) ``tus`` does not double the first
    frame.
    """

    def forward(self, x: Tensor, conv_carry_in: Any = None, conv_carry_out: Any = None) -> Tensor:
        times = 2 if self.tus else 1
        if not (
            is_plain_inference(x)
            and is_plain_wrapper(self.conv, x, x.shape[1])
            and fits(conv_carry_in, 0, x, x.shape[1])
            and x.shape[1] % (4 * times) == 0
            and self.rp * x.shape[1] == self.conv.conv.out_channels
            and self.rp % times == 0
        ):
            return super().forward(x, conv_carry_in, conv_carry_out)
        x = laid_out(x, channels_last=True)
        h = convolve(self.conv, x, conv_carry_in, conv_carry_out)
        return upsampled(h, x, times, int(self.tus and conv_carry_in is None))


class FusedDnSmpl(vae_refiner.DnSmpl):
    """``DnSmpl``, which downsamples. x (N, C, T, H, W) -> (N, C_out, T', H / 2, W / 2), channels-last.

    T' is T, or with ``tds`` T / 2. In the first chunk (no ``conv_carry_in``) ``tds`` keeps the first frame as
    it is, and halves the number of the other frames.
    """

    def forward(self, x: Tensor, conv_carry_in: Any = None, conv_carry_out: Any = None) -> Tensor:
        times, alone = 2 if self.tds else 1, int(self.tds and conv_carry_in is None)
        _, C, T, H, W = x.shape
        if not (
            is_plain_inference(x)
            and is_plain_wrapper(self.conv, x, C)
            and fits(conv_carry_in, 0, x, C)
            and ((T - alone) % times, H % 2, W % 2) == (0, 0, 0)
            and self.conv.conv.out_channels * self.gs == C
            and self.gs % times == 0
        ):
            return super().forward(x, conv_carry_in, conv_carry_out)
        x = laid_out(x, channels_last=True)
        return downsampled(convolve(self.conv, x, conv_carry_in, conv_carry_out), x, times, alone)


def _last_norm(half: Any, x: Tensor) -> Norm | None:
    """The operands with which ``pad_frames`` computes the last norm of ``half``, and SiLU after it.

    ``half`` is an encoder or decoder. None if stock's forward of ``half`` has to run for its input ``x``.
    """
    if not (is_plain_inference(x) and is_plain_wrapper(half.conv_in, x, x.shape[1])):
        return None
    if not is_plain_wrapper(half.conv_out, x, channels_into(half.conv_out)):
        return None
    norm = norm_of(half.norm_out, None, x)
    return None if norm is None else norm._replace(activation="silu")


def _middle(half: Any, x: Tensor) -> Tensor:
    return half.mid.block_2(half.mid.attn_1(half.mid.block_1(x)))


class FusedEncoder(vae_refiner.Encoder):
    """``Encoder``. Videos (N, 3, T, H, W) -> (N, C, T', H', W'), channels-first, as stock's result."""

    def forward(self, x: Tensor) -> Tensor:
        norm = _last_norm(self, x)
        if norm is None:
            return super().forward(x)
        found = [
            run_stages(self.down, convolve(self.conv_in, chunk, *carried), *carried)
            for chunk, *carried in with_carries(chunks_of(x, self.ffactor_temporal))
        ]
        y = in_channels_last(_middle(self, torch.cat(found, 2)))
        z = convolve(self.conv_out, y, norm=norm)
        return self.regul(z.add_(means_of(y, z.shape[1])).contiguous())[0]


class FusedDecoder(vae_refiner.Decoder):
    """``Decoder``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W'), channels-first, as stock's."""

    def forward(self, z: Tensor) -> Tensor:
        norm = _last_norm(self, z)
        if norm is None:
            return super().forward(z)
        x = convolve(self.conv_in, z)
        x.movedim(1, -1).unflatten(-1, (z.shape[1], -1)).add_(z.movedim(1, -1)[..., None])
        chunks = _middle(self, x).split(2, 2)
        found = [
            convolve(self.conv_out, run_stages(self.up, y, *carried), *carried, norm=norm).contiguous()
            for y, *carried in with_carries(chunks)
        ]
        return torch.cat(found, 2)


# --- fusions ----------------------------------------------------------------------------------------

NORMS.add(FusedRMS)


def _is_video_model(module: nn.Module) -> bool:
    return bool(module.refiner_vae)


def _swap(name: str, stock: Any, fused: Any, check: Any) -> ClassSwap:
    sources = (tested(stock, "__init__", "forward"), *SOURCES)
    return ClassSwap(
        f"comfyui_hunyuan_{name}", stock, fused, sources=sources, check=check, covers=_is_video_model
    )


BLOCKS = (
    ClassSwap(
        "comfyui_hunyuan_norm",
        vae_refiner.RMS_norm,
        FusedRMS,
        sources=(tested(vae_refiner.RMS_norm, "__init__", "forward"),),
    ),
    _swap("upsample", vae_refiner.UpSmpl, FusedUpSmpl, reason_to_skip),
    _swap("downsample", vae_refiner.DnSmpl, FusedDnSmpl, reason_to_skip),
    _swap("encoder", vae_refiner.Encoder, FusedEncoder, reason_to_skip_ends),
    _swap("decoder", vae_refiner.Decoder, FusedDecoder, reason_to_skip_ends),
)
