"""diffusers' autoencoder of CogVideoX: norm, SiLU, cached frames and padding in one pass per convolution.

The model computes a video in batches of frames. Each causal convolution reads two frames before its input:
the last frames of the previous batch, which stock keeps in ``conv_cache``, or copies of the first frame.
Stock makes one pass over memory for each of these steps: the norm, its factors and offsets, SiLU, the
concatenation with the cache, and the copy into the cache. Here one kernel (``pad_frames``) does all of them.
It writes the padded input of the convolution and the new entry of ``conv_cache``, which has the same frames
and values as stock's.

Further differences from stock:

- A spatial norm multiplies the result of a GroupNorm with a factor and adds an offset. Both are 1x1x1
  convolutions of the latents. Stock first upsamples the latents to the size of the norm's input. A 1x1x1
  convolution computes each position by itself, so here it runs on the small latents, and the kernel of the
  norm upsamples its result. These convolutions get no entry in ``conv_cache``, because stock never reads it.
- In a residual block, the kernels of norm2 add conv1's bias. The kernel of the sum adds conv2's bias, and
  computes the statistics that the next norm reads.
- Upsampling and the convolution after it are one convolution at low resolution where that is faster
  (``upsampling.py``). This convolution computes each frame by itself, so frames are repeated after it instead
  of before.
- Downsampling along time writes the means of pairs of frames directly into the padded input of the
  convolution.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    CogVideoXCausalConv3d,
    CogVideoXDecoder3D,
    CogVideoXEncoder3D,
    CogVideoXResnetBlock3D,
    CogVideoXSafeConv3d,
    CogVideoXSpatialNorm3D,
)
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last
from sdfastgn.kernels.pad_frames.op import GroupNorm, pad_frames
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.layers.convolution import conv_without_bias, is_plain_conv
from sdfastgn.patches.layers.statistics import add, add_bias
from sdfastgn.patches.layers.upsampling import convolves_at_low_resolution
from sdfastgn.patches.layers.video import (
    activation_reason_of,
    can_fuse,
    convolve_padded,
    images_of,
    in_channels_last,
    is_plain_conv3d,
    is_plain_inference,
    is_upsampled_exactly,
    norm_operands,
    video_of,
)
from sdfastgn.patches.swap.fusion import IDENTITY, ClassSwap, drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

__all__ = ["CONV", "FUSIONS", "convolve", "is_plain"]

# Maximum size in GiB of a convolution's input, counted as 2 bytes per element. Upstream splits larger inputs
# along time and convolves the parts one by one.
_LARGEST_INPUT = 2

# --- what may run fused -----------------------------------------------------------------------------


def is_plain(conv: Any, x: Tensor, C: int) -> bool:
    """True if ``conv`` can run fused on an input of C channels, in the dtype and on the device of x.

    A call must only pad as upstream does and run PyTorch's convolution, without hooks or replaced methods.
    """
    return (
        type(conv) in (CogVideoXCausalConv3d, FusedCogVideoXCausalConv3d)
        and is_unhooked(conv)
        and is_plain_conv3d(conv.conv, x, C, CogVideoXSafeConv3d)
        and conv.conv.dilation == (1, 1, 1)
        and conv.pad_mode != "replicate"  # this model repeats no borders
    )


def _fits(cache: Any, conv: Any, x: Tensor, C: int) -> bool:
    """True if ``conv`` can use ``cache``, an entry of ``conv_cache`` or None.

    An entry must have C channels, the frames that ``conv`` reads before its input, and the size, dtype and
    device of x.
    """
    return cache is None or (
        isinstance(cache, Tensor)
        and (cache.dtype, cache.device) == (x.dtype, x.device)
        and cache.shape == (x.shape[0], C, conv.time_kernel_size - 1, *x.shape[3:])
    )


def _has_plain_norm(norm: Any, act: nn.Module, x: Tensor, C: int, zq: Tensor | None) -> bool:
    """True if a kernel can compute ``act(norm(u, zq))``, for u of C channels in the size and dtype of x.

    ``zq``: the latents that a spatial norm reads. None if ``norm`` is a GroupNorm.
    """
    if zq is None:
        return can_fuse(norm, act, x, C)
    if type(norm) not in (CogVideoXSpatialNorm3D, FusedCogVideoXSpatialNorm3D) or not is_unhooked(norm):
        return False
    if (zq.dim(), zq.dtype, zq.device, len(zq)) != (5, x.dtype, x.device, len(x)):
        return False
    return (
        is_upsampled_exactly(zq.shape, x.shape)
        and can_fuse(norm.norm_layer, act, x, C)
        and all(
            is_plain(conv, zq, zq.shape[1])
            and (conv.conv.kernel_size, conv.conv.stride) == ((1, 1, 1), (1, 1, 1))
            and conv.conv.out_channels == C
            for conv in (norm.conv_y, norm.conv_b)
        )
    )


# --- helpers of the fused forwards ------------------------------------------------------------------


def _norm(norm: Any, act: nn.Module, x: Tensor, zq: Tensor | None, *, is_shifted: bool = False) -> GroupNorm:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(x, zq))``.

    ``_has_plain_norm`` must be true. ``is_shifted``: True if the kernel adds a bias to x before the norm.
    """
    if zq is None:
        return norm_operands(norm, act, x, is_shifted=is_shifted)
    zq = in_channels_last(zq)
    convs = norm.conv_y.conv, norm.conv_b.conv
    modulation = torch.cat([convolve_padded(conv, zq, conv.bias).movedim(1, -1) for conv in convs], -1)
    operands = norm_operands(norm.norm_layer, act, x, is_shifted=is_shifted)
    return operands._replace(modulation=modulation.movedim(-1, 1))


def convolve(
    conv: Any,
    x: Tensor,
    cache: Tensor | None,
    *,
    shift: Tensor | None = None,
    norm: GroupNorm | None = None,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns (``conv(norm(x + shift), cache)``, new cache), both channels-last.

    Args:
        conv: a causal convolution, for which ``is_plain`` is true.
        x: (N, C, T, H, W).
        cache: the normalized frames before x, or None.
        shift, norm: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
    """
    inner, front = conv.conv, conv.time_kernel_size - 1
    frames, kept = in_channels_last(x), None
    # The inner convolution pads each frame with zeros.
    if norm is not None or shift is not None or front:
        where: Any = {"front": front, "mode": "replicate", "keep": front}
        frames, kept = pad_frames(frames, cache if front else None, shift=shift, norm=norm, **where)
    bias = inner.bias if has_bias else None
    size = frames.numel() * 2 / 1024**3
    if size <= _LARGEST_INPUT or inner.stride[0] > 1:
        return convolve_padded(inner, frames, bias), kept
    T = frames.shape[2] - front
    step = math.ceil(T / (int(size / _LARGEST_INPUT) + 1))
    parts = (in_channels_last(frames[:, :, at : at + step + front]) for at in range(0, T, step))
    return add_bias(torch.cat([convolve_padded(inner, part, None) for part in parts], 2), bias), kept


class FusedCogVideoXCausalConv3d(CogVideoXCausalConv3d):
    """``CogVideoXCausalConv3d``. inputs (N, C, T, H, W). The result has the layout of ``inputs``."""

    def forward(self, inputs: Tensor, conv_cache: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, C = inputs, inputs.shape[1]
        if not (is_plain_inference(x) and is_plain(self, x, C) and _fits(conv_cache, self, x, C)):
            return super().forward(x, conv_cache)
        y, kept = convolve(self, x, conv_cache)
        return y if is_channels_last(x) else y.contiguous(), kept


class FusedCogVideoXSpatialNorm3D(CogVideoXSpatialNorm3D):
    """``CogVideoXSpatialNorm3D``. f (N, C, T, H, W) -> the same, channels-last."""

    def forward(self, f: Tensor, zq: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, Any]]:
        if not (is_plain_inference(f) and _has_plain_norm(self, IDENTITY, f, f.shape[1], zq)):
            return super().forward(f, zq, conv_cache)
        f = in_channels_last(f)
        y, _ = pad_frames(f, norm=_norm(self, IDENTITY, f, zq))
        return y, {"conv_y": None, "conv_b": None}


class FusedCogVideoXResnetBlock3D(CogVideoXResnetBlock3D):
    """``CogVideoXResnetBlock3D``. inputs (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(
        self, inputs: Tensor, temb: Any = None, zq: Tensor | None = None, conv_cache: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        cache, act = conv_cache or {}, self.nonlinearity
        if temb is not None or not (is_plain_inference(inputs) and self._runs_fused(inputs, zq, cache)):
            return super().forward(inputs, temb, zq, conv_cache)
        x, new = in_channels_last(inputs), {}
        norm = _norm(self.norm1, act, x, zq)
        h, new["conv1"] = convolve(self.conv1, x, cache.get("conv1"), norm=norm, has_bias=False)
        norm, shift = _norm(self.norm2, act, h, zq, is_shifted=True), self.conv1.conv.bias
        h, new["conv2"] = convolve(self.conv2, h, cache.get("conv2"), shift=shift, norm=norm, has_bias=False)
        if self.in_channels != self.out_channels:
            if self.use_conv_shortcut:
                x, new["conv_shortcut"] = convolve(self.conv_shortcut, x, cache.get("conv_shortcut"))
            else:
                x = convolve_padded(self.conv_shortcut, x, self.conv_shortcut.bias)
        return add(h, x, self.conv2.conv.bias), new

    def _runs_fused(self, x: Tensor, zq: Tensor | None, cache: Any) -> bool:
        if not drops_nothing(self.dropout):
            return False
        C, C_out = self.in_channels, self.out_channels
        if C_out != C:
            shortcut = self.conv_shortcut
            has_plain_shortcut = (
                is_plain(shortcut, x, C) and _fits(cache.get("conv_shortcut"), shortcut, x, C)
                if self.use_conv_shortcut
                else is_plain_conv3d(shortcut, x, C, CogVideoXSafeConv3d)
            )
            if not has_plain_shortcut:
                return False
        return (
            x.shape[1] == C
            and all(
                is_plain(conv, x, channels) and _fits(cache.get(name), conv, x, channels)
                for name, conv, channels in (("conv1", self.conv1, C), ("conv2", self.conv2, C_out))
            )
            and _has_plain_norm(self.norm1, self.nonlinearity, x, C, zq)
            and _has_plain_norm(self.norm2, self.nonlinearity, x, C_out, zq)
        )


def _is_plain_2d(conv: Any, x: Tensor) -> bool:
    """True if calling ``conv`` on the frames of x only runs PyTorch's convolution, in the dtype of x."""
    return (
        is_plain_conv(conv)
        and (conv.padding_mode, type(conv.padding), conv.in_channels) == ("zeros", tuple, x.shape[1])
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


class FusedCogVideoXUpsample3D(CogVideoXUpsample3D):
    """``CogVideoXUpsample3D``. inputs (N, C, T, H, W) -> (N, C_out, T', 2H, 2W), channels-last.

    T' is 2 T if ``compress_time`` and T is even, 2 T - 1 if ``compress_time`` and T is odd, else T.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if not (is_plain_inference(inputs) and _is_plain_2d(self.conv, inputs)):
            return super().forward(inputs)
        N, _, T, _, _ = inputs.shape
        images, bias = images_of(in_channels_last(inputs)), None
        if convolves_at_low_resolution(self.conv, images):
            y = upsample_conv2d(images, self.conv.weight, self.conv.bias)
        else:
            y, bias = conv_without_bias(self.conv, upsample_nearest_2x(images))
        y = in_channels_last(video_of(y, N))
        if self.compress_time and T > 1:
            # With ``upsample``, ``pad_frames`` repeats all frames except the first. Stock repeats the first
            # frame too if T is even. Then ``front=1`` adds the copy.
            where: Any = {"front": 1 - T % 2, "mode": "replicate", "upsample": (2, 1, 1)}
            return pad_frames(y, shift=bias, **where)[0]
        return add_bias(y, bias)


class FusedCogVideoXDownsample3D(CogVideoXDownsample3D):
    """``CogVideoXDownsample3D``. x (N, C, T, H, W) -> (N, C_out, T', H // 2, W // 2), channels-last.

    T' is T / 2 rounded up if ``compress_time``, else T.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (is_plain_inference(x) and _is_plain_2d(self.conv, x)):
            return super().forward(x)
        x = in_channels_last(x)
        N, C, T, H, W = x.shape
        single = T % 2 if self.compress_time else T
        shape = (N, C, single + (T - single) // 2, H + 1, W + 1)
        padded = empty_laid_out(x, shape, channels_last=True)
        padded[..., H:, :] = padded[..., W:] = 0
        centre = padded[..., :H, :W]
        centre[:, :, :single] = x[:, :, :single]
        if single < T:
            pairs = x[:, :, single:].unflatten(2, (-1, 2))
            torch.mean(pairs, 3, out=centre[:, :, single:])
        y, bias = conv_without_bias(self.conv, images_of(padded))
        return add_bias(in_channels_last(video_of(y, N)), bias)


def _leave(half: Any, x: Tensor, zq: Tensor | None, cache: Any, new: dict[str, Any]) -> Tensor:
    """Runs the last norm, SiLU and convolution of an encoder or decoder, fused if possible.

    Reads the old entries of ``conv_cache`` from ``cache``, and writes the new ones to ``new``. The result is
    channels-first, like stock's.
    """
    norm, act, conv, C = half.norm_out, half.conv_act, half.conv_out, x.shape[1]
    given = cache.get("conv_out")
    if _has_plain_norm(norm, act, x, C, zq) and is_plain(conv, x, C) and _fits(given, conv, x, C):
        x, new["conv_out"] = convolve(conv, x, given, norm=_norm(norm, act, x, zq))
        return x.contiguous()
    if zq is None:
        x = norm(x)
    else:
        x, new["norm_out"] = norm(x, zq, conv_cache=cache.get("norm_out"))
    x, new["conv_out"] = conv(act(x), conv_cache=given)
    return x.contiguous()


class FusedCogVideoXEncoder3D(CogVideoXEncoder3D):
    """``CogVideoXEncoder3D``. Videos (N, 3, T, H, W) -> (N, C, T', H', W')."""

    def forward(
        self, sample: Tensor, temb: Any = None, conv_cache: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if temb is not None or not is_plain_inference(sample):
            return super().forward(sample, temb, conv_cache)
        cache, new = conv_cache or {}, {}
        x, new["conv_in"] = self.conv_in(in_channels_last(sample), conv_cache=cache.get("conv_in"))
        for i, block in enumerate(self.down_blocks):
            name = f"down_block_{i}"
            x, new[name] = block(x, None, None, cache.get(name))
        x, new["mid_block"] = self.mid_block(x, None, None, conv_cache=cache.get("mid_block"))
        return _leave(self, x, None, cache, new), new


class FusedCogVideoXDecoder3D(CogVideoXDecoder3D):
    """``CogVideoXDecoder3D``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(
        self, sample: Tensor, temb: Any = None, conv_cache: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if temb is not None or not is_plain_inference(sample):
            return super().forward(sample, temb, conv_cache)
        cache, new = conv_cache or {}, {}
        zq = in_channels_last(sample)
        x, new["conv_in"] = self.conv_in(zq, conv_cache=cache.get("conv_in"))
        blocks = {f"up_block_{i}": block for i, block in enumerate(self.up_blocks)}
        for name, block in ({"mid_block": self.mid_block} | blocks).items():
            x, new[name] = block(x, None, zq, conv_cache=cache.get(name))
        return _leave(self, x, zq, cache, new), new


# --- fusions ----------------------------------------------------------------------------------------

# Upstream's methods that the fused causal convolution replaces or relies on.
CONV = (
    tested(CogVideoXCausalConv3d, "__init__", "forward", "fake_context_parallel_forward"),
    tested(CogVideoXSafeConv3d, "forward"),
)
_NORM = tested(CogVideoXSpatialNorm3D, "__init__", "forward")


def _fusion(name: str, fused: Any, *relied: Any) -> ClassSwap:
    """The fusion of a fused class, whose base is the stock class.

    Args:
        name: the fusion's name without "cogvideox_".
        fused: the fused class.
        relied: methods of other upstream classes on which the fused class relies. Their code must be tested.
    """
    stock = fused.__bases__[0]
    own = tested(stock, "__init__", "forward")
    return ClassSwap(
        f"cogvideox_{name}",
        stock,
        fused,
        sources=relied if stock is CogVideoXCausalConv3d else (own, *relied),
        check=activation_reason_of,
    )


FUSIONS: tuple[ClassSwap, ...] = (
    _fusion("conv", FusedCogVideoXCausalConv3d, *CONV),
    _fusion("spatial_norm", FusedCogVideoXSpatialNorm3D, *CONV),
    _fusion("resnet_block", FusedCogVideoXResnetBlock3D, _NORM, *CONV),
    _fusion("upsample", FusedCogVideoXUpsample3D),
    _fusion("downsample", FusedCogVideoXDownsample3D),
    _fusion("encoder", FusedCogVideoXEncoder3D, *CONV),
    _fusion("decoder", FusedCogVideoXDecoder3D, _NORM, *CONV),
)
