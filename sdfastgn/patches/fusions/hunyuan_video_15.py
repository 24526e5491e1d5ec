"""diffusers' autoencoders of HunyuanVideo 1.5 and of HunyuanImage's refiner: one pass per convolution.

Both models have the same blocks under different names. The norm, SiLU and padding before a convolution are
one pass. The norm is the RMSNorm of Wan's autoencoder.

Further differences from stock:

- In a residual block, the kernel of norm2 adds conv1's bias, and the kernel of the sum adds conv2's bias.
- An upsampling block moves channels to positions twice: for the result of its convolution, and for its input,
  which is the shortcut. Stock writes both and then their sum. Here one pass reads both and writes the sum.
  Downsampling moves positions to channels in the same way.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product.
- In HunyuanVideo 1.5, a frame attends to itself and to earlier frames. Stock computes the scores of all
  frames and masks later ones, with a mask that it fills in a Python loop. Here each frame is one attention
  call, which gets only the keys of itself and of earlier frames. Stock's mask fits one video, so stock raises
  a RuntimeError for a batch of two. The fused forward computes it.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one. Norms also run fused if gradients are wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.kernels.pad_frames.op import Norm
from sdfastgn.patches.layers.packing import downsampled, means_of, upsampled
from sdfastgn.patches.layers.video import (
    NORMS,
    FusedRMSNorm,
    activation_reason_of,
    add_into,
    channels_into,
    convolve_padded,
    is_plain_conv3d,
    is_plain_inference,
    norm_of,
)
from sdfastgn.patches.layers.wrapped_conv import WRAPPERS, FusedWrapper, convolve, is_plain_wrapper
from sdfastgn.patches.layout.left_alone import pads_quickly
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested

try:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as _video
except ImportError:  # a release of diffusers without HunyuanVideo 1.5
    _video = None
try:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanimage_refiner as _refiner
except ImportError:  # a release without HunyuanImage's refiner
    _refiner = None


def _is_pointwise(conv: Any, x: Tensor) -> bool:
    """True if ``conv`` is a plain 1x1x1 convolution that ``_pointwise`` can run on x (N, C, T, H, W)."""
    if not is_plain_conv3d(conv, x, x.shape[1]):
        return False
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.groups
    return sizes == ((1, 1, 1), (1, 1, 1), (0, 0, 0), 1)


def _pointwise(conv: Any, x: Tensor) -> Tensor:
    """Returns conv(x). x and the result are channels-last; ``_is_pointwise(conv, x)`` must be true."""
    return convolve_padded(conv, x, conv.bias, emits=False)


# The next classes have the fused forwards. Each fused class below is derived from one of them and from a
# stock class, so ``super().forward`` calls stock's forward.


class _FusedResnetBlock(nn.Module):
    """The fused forward of ``HunyuanVideo15ResnetBlock`` and of ``HunyuanImageRefinerResnetBlock``.

    x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        norms = self._norms(x)
        if norms is None:
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        h = convolve(self.conv1, x, norm=norms[0], has_bias=False)
        h = convolve(self.conv2, h, shift=self.conv1.conv.bias, norm=norms[1], has_bias=False)
        residual = x if self.conv_shortcut is None else _pointwise(self.conv_shortcut, x)
        return add_into(h, residual, self.conv2.conv.bias)

    def _norms(self: Any, x: Tensor) -> tuple[Norm, Norm] | None:
        """The operands for the kernels of both norms and their SiLU. None if stock's forward has to run."""
        if not (is_plain_inference(x) and is_plain_wrapper(self.conv1, x, x.shape[1])):
            return None
        if not is_plain_wrapper(self.conv2, x, self.conv1.conv.out_channels):
            return None
        if not (self.conv_shortcut is None or _is_pointwise(self.conv_shortcut, x)):
            return None
        first, second = (norm_of(norm, self.nonlinearity, x) for norm in (self.norm1, self.norm2))
        return None if first is None or second is None else (first, second)


class _FusedAttention(nn.Module):
    """The fused forward of ``HunyuanVideo15AttnBlock`` and of ``HunyuanImageRefinerAttnBlock``.

    x (N, C, T, H, W) -> the same. ``sees``: the frames to which a frame attends, "all", or "earlier" for
    itself and earlier frames.
    """

    sees: str

    def forward(self: Any, x: Tensor) -> Tensor:
        layers = self.to_q, self.to_k, self.to_v, self.proj_out
        if not (is_plain_inference(x) and all(_is_pointwise(layer, x) for layer in layers)):
            return super().forward(x)
        norm = norm_of(self.norm, None, x)
        if norm is None:
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        normed = channel_norm(x, *norm[:5])
        # (N, 1, T H W, C)
        q, k, v = (_pointwise(layer, normed).movedim(1, -1).flatten(1, 3)[:, None] for layer in layers[:3])
        if self.sees == "all":
            y = attend(q, k, v)
        else:
            image = q.shape[2] // x.shape[2]
            ends = range(image, q.shape[2] + 1, image)
            y = torch.cat([attend(q[:, :, e - image : e], k[:, :, :e], v[:, :, :e]) for e in ends], 2)
        y = y[:, 0].unflatten(1, x.shape[2:]).movedim(-1, 1)
        return add_into(_pointwise(self.proj_out, y), x, None)


class _FusedUpsample(nn.Module):
    """The fused forward of ``HunyuanVideo15Upsample`` and of ``HunyuanImageRefinerUpsampleDCAE``.

    x (N, C, T, H, W) -> (N, C_out, T', 2 H, 2 W), channels-last.

    ``alone``: function of T. Returns how many frames at the beginning are not doubled if the block doubles
    the number of frames.
    """

    alone: Any

    def forward(self: Any, x: Tensor) -> Tensor:
        times = 2 if self.add_temporal_upsample else 1
        if not (
            is_plain_inference(x)
            and is_plain_wrapper(self.conv, x, x.shape[1])
            and x.shape[1] % (4 * times) == 0
            and self.repeats * x.shape[1] == self.conv.conv.out_channels
            and self.repeats % times == 0
        ):
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        alone = self.alone(x.shape[2]) if times == 2 else 0
        return upsampled(convolve(self.conv, x), x, times, alone)


class _FusedDownsample(nn.Module):
    """The fused forward of ``HunyuanVideo15Downsample`` and of ``HunyuanImageRefinerDownsampleDCAE``.

    x (N, C, T, H, W) -> (N, C_out, T', H / 2, W / 2), channels-last.

    ``alone``: function of T. Returns how many frames at the beginning stay single if the block merges pairs
    of frames.
    """

    alone: Any

    def forward(self: Any, x: Tensor) -> Tensor:
        times = 2 if self.add_temporal_downsample else 1
        if not (is_plain_inference(x) and is_plain_wrapper(self.conv, x, x.shape[1])):
            return super().forward(x)
        _, C, T, H, W = x.shape
        C_h = self.conv.conv.out_channels
        alone = self.alone(T) if times == 2 else 0
        if (T - alone) % times or H % 2 or W % 2 or C_h * self.group_size != C or self.group_size % times:
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        return downsampled(convolve(self.conv, x), x, times, alone)


class _FusedHalf(nn.Module):
    """Base class of the fused encoders and decoders.

    Its method tells whether these layers can run fused: the first convolution, and the last norm, SiLU and
    convolution.
    """

    def _norm(self: Any, x: Tensor) -> Norm | None:
        """The operands for the kernel of the last norm and its SiLU. None if stock's forward has to run.

        x: the input of the encoder or decoder.
        """
        if not (is_plain_inference(x) and is_plain_wrapper(self.conv_in, x, x.shape[1])):
            return None
        if not is_plain_wrapper(self.conv_out, x, channels_into(self.conv_out)):
            return None
        return norm_of(self.norm_out, self.conv_act, x)


class _FusedEncoder(_FusedHalf):
    """Videos (N, 3, T, H, W) -> (N, C, T', H', W'), channels-first, like stock's result."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        norm = self._norm(hidden_states)
        if norm is None:
            return super().forward(hidden_states)
        x = convolve(self.conv_in, hidden_states)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        y = convolve(self.conv_out, x, norm=norm)
        return y.add_(means_of(x, x.shape[1] // self.group_size)).contiguous()


class _FusedDecoder(_FusedHalf):
    """Latents (N, C, T, H, W) -> videos (N, 3, T', H', W'), channels-first, like stock's result."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        norm = self._norm(hidden_states)
        if norm is None:
            return super().forward(hidden_states)
        x = convolve(self.conv_in, hidden_states)
        x.movedim(1, -1).unflatten(-1, (-1, self.repeat)).add_(hidden_states.movedim(1, -1)[..., None])
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(x)
        return convolve(self.conv_out, x, norm=norm).contiguous()


# --- fused classes ----------------------------------------------------------------------------------

if _video is not None:

    class FusedHunyuanVideo15RMSNorm(FusedRMSNorm, _video.HunyuanVideo15RMS_norm):
        pass

    class FusedHunyuanVideo15CausalConv3d(FusedWrapper, _video.HunyuanVideo15CausalConv3d):
        pass

    class FusedHunyuanVideo15ResnetBlock(_FusedResnetBlock, _video.HunyuanVideo15ResnetBlock):
        pass

    class FusedHunyuanVideo15AttnBlock(_FusedAttention, _video.HunyuanVideo15AttnBlock):
        sees = "earlier"

    class FusedHunyuanVideo15Upsample(_FusedUpsample, _video.HunyuanVideo15Upsample):
        alone = staticmethod(lambda T: 1)

    class FusedHunyuanVideo15Downsample(_FusedDownsample, _video.HunyuanVideo15Downsample):
        alone = staticmethod(lambda T: 1)

    class FusedHunyuanVideo15Encoder3D(_FusedEncoder, _video.HunyuanVideo15Encoder3D):
        pass

    class FusedHunyuanVideo15Decoder3D(_FusedDecoder, _video.HunyuanVideo15Decoder3D):
        pass


if _refiner is not None:

    class FusedHunyuanImageRefinerRMSNorm(FusedRMSNorm, _refiner.HunyuanImageRefinerRMS_norm):
        pass

    class FusedHunyuanImageRefinerCausalConv3d(FusedWrapper, _refiner.HunyuanImageRefinerCausalConv3d):
        pass

    class FusedHunyuanImageRefinerResnetBlock(_FusedResnetBlock, _refiner.HunyuanImageRefinerResnetBlock):
        pass

    class FusedHunyuanImageRefinerAttnBlock(_FusedAttention, _refiner.HunyuanImageRefinerAttnBlock):
        sees = "all"

    class FusedHunyuanImageRefinerUpsample(_FusedUpsample, _refiner.HunyuanImageRefinerUpsampleDCAE):
        alone = staticmethod(lambda T: T)

    class FusedHunyuanImageRefinerDownsample(_FusedDownsample, _refiner.HunyuanImageRefinerDownsampleDCAE):
        alone = staticmethod(lambda T: T)

    class FusedHunyuanImageRefinerEncoder3D(_FusedEncoder, _refiner.HunyuanImageRefinerEncoder3D):
        pass

    class FusedHunyuanImageRefinerDecoder3D(_FusedDecoder, _refiner.HunyuanImageRefinerDecoder3D):
        pass


# --- fusions ----------------------------------------------------------------------------------------


def _fusions(family: str, **classes: type[nn.Module]) -> tuple[ClassSwap, ...]:
    """Returns one fusion for each of ``classes``, {name: fused class}. The last base of a fused class is the
    stock class.
    """
    stock: dict[str, Any] = {name: fused.__bases__[-1] for name, fused in classes.items()}
    NORMS.update((stock["norm"], classes["norm"]))
    WRAPPERS.update((stock["conv"], classes["conv"]))
    norm, conv = (tested(stock[name], "__init__", "forward") for name in ("norm", "conv"))
    # Methods that stock's forward calls and the fused forward does not. Their code must be the tested one.
    others = {"upsample": "_dcae_upsample_rearrange", "downsample": "_dcae_downsample_rearrange"}
    if hasattr(stock["attention"], "prepare_causal_attention_mask"):
        others["attention"] = "prepare_causal_attention_mask"
    found = []
    for name, fused in classes.items():
        own = tested(stock[name], "__init__", "forward", *filter(None, (others.get(name),)))
        parts = () if name in ("norm", "conv") else (norm, conv)
        found.append(
            ClassSwap(
                f"{family}_{name}",
                stock[name],
                fused,
                sources=(own, *parts),
                check=activation_reason_of,
            )
        )
        if name == "conv":
            pads_quickly(found[-1])
    return tuple(found)


FUSIONS: tuple[ClassSwap, ...] = ()
if _video is not None:
    FUSIONS += _fusions(
        "hunyuan_video_15",
        norm=FusedHunyuanVideo15RMSNorm,
        conv=FusedHunyuanVideo15CausalConv3d,
        resnet_block=FusedHunyuanVideo15ResnetBlock,
        attention=FusedHunyuanVideo15AttnBlock,
        upsample=FusedHunyuanVideo15Upsample,
        downsample=FusedHunyuanVideo15Downsample,
        encoder=FusedHunyuanVideo15Encoder3D,
        decoder=FusedHunyuanVideo15Decoder3D,
    )
if _refiner is not None:
    FUSIONS += _fusions(
        "hunyuan_image_refiner",
        norm=FusedHunyuanImageRefinerRMSNorm,
        conv=FusedHunyuanImageRefinerCausalConv3d,
        resnet_block=FusedHunyuanImageRefinerResnetBlock,
        attention=FusedHunyuanImageRefinerAttnBlock,
        upsample=FusedHunyuanImageRefinerUpsample,
        downsample=FusedHunyuanImageRefinerDownsample,
        encoder=FusedHunyuanImageRefinerEncoder3D,
        decoder=FusedHunyuanImageRefinerDecoder3D,
    )
