"""diffusers' autoencoders of Wan and Qwen-Image: norm, SiLU, cache and padding in one pass per convolution.

Both models have the same blocks under different names. They compute a video in chunks of frames. Each causal
convolution reads two frames before its chunk: the last frames of the previous chunk, which stock keeps in
``feat_cache``, or zeros. Stock makes one pass over memory for each of these steps: the norm, its factors,
SiLU, the copy into the cache, the concatenation with the cache, and padding. Here one kernel (``pad_frames``)
does all of them. It writes the padded input of the convolution and the new entry of ``feat_cache``, which has
the same frames and values as stock's.

Further differences from stock:

- The first chunk of a video, or an image, is a single frame with only zeros before it. So its convolution is
  2-D, with the last of the three slices of the weight along time.
- A convolution of several frames is also 2-D where that is faster (``is_faster_in_2d``). Then the three
  frames that it reads lie side by side as channels.
- conv1's bias is added by the kernel of norm2, conv2's bias by the sum with the residual.
- Upsampling and the convolution after it are one convolution at low resolution (``upsampling.py``).
- A 1x1x1 convolution is a matrix product of its input. Stock first copies the input, because it calls
  ``F.pad`` with zero widths.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one. Norms also run fused if gradients are wanted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import Norm, pad_frames
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.core.convolution import pointwise
from sdfastgn.patches.core.fusion import ClassSwap, activation_reason, is_unhooked
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.upsampling import convolves_at_low_resolution
from sdfastgn.patches.fusions.video import (
    NORMS,
    FusedRMSNorm,
    add_into,
    convolve_windows,
    images_of,
    in_channels_last,
    is_faster_in_2d,
    is_plain_inference,
    is_product,
    norm_of,
    product_of,
    video_of,
)

try:
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen_image
except ImportError:  # a diffusers before Qwen-Image
    qwen_image = None

__all__ = ["FUSIONS"]

# Maximum number of frames of an entry of ``feat_cache``, upstream's CACHE_T.
_CACHE_T = 2
# Classes of both models' convolutions (stock and fused) and upsampling layers (stock). ``_fusions`` adds
# them.
_CONVS: set[type[nn.Module]] = set()
_UPSAMPLES: set[type[nn.Module]] = set()


# --- what may run fused -----------------------------------------------------------------------------


def _is_plain_conv(conv: Any, x: Tensor) -> bool:
    """True if calling ``conv`` only pads as upstream does and runs PyTorch's convolution, in the dtype and
    on the device of x.
    """
    return (
        type(conv) in _CONVS
        and is_unhooked(conv)
        and "_conv_forward" not in vars(conv)
        and conv.padding_mode == "zeros"
        and (conv.weight.dtype, conv.weight.device) == (x.dtype, x.device)
    )


def _fits(cache: Any, x: Tensor, C: int) -> bool:
    """True if ``cache``, an entry of ``feat_cache``, can be used for a convolution of C channels.

    It is None, or it has the dtype, device, batch size, height and width of x, and at most ``_CACHE_T``
    frames.
    """
    if cache is None:
        return True
    return (
        isinstance(cache, Tensor)
        and (cache.dtype, cache.device) == (x.dtype, x.device)
        and (*cache.shape[:2], *cache.shape[3:]) == (x.shape[0], C, *x.shape[3:])
        and cache.shape[2] <= _CACHE_T
    )


# --- what runs --------------------------------------------------------------------------------------


def _convolve(
    conv: Any,
    x: Tensor,
    cache: Tensor | None = None,
    *,
    keep: int = 0,
    shift: Tensor | None = None,
    norm: Norm | None = None,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns (``conv(norm(x + shift), cache)``, kept), both channels-last.

    ``kept`` has the last ``keep`` frames that ``conv`` reads. It is None if ``keep`` is 0.

    Args:
        conv: a causal convolution, for which ``_is_plain_conv`` is true.
        x: (N, C, T, H, W).
        cache: the normalized frames before x, at most as many as ``conv`` pads; or None for zeros.
        keep: number of frames of ``kept``.
        shift, norm: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
    """
    bias = conv.bias if has_bias else None
    w, _, h, _, front, _ = conv._padding
    taps, where = conv.kernel_size, (conv.dilation, conv.groups)
    # x is a single frame, and the frames before it are zeros. So only the weight's last slice matters.
    is_alone = cache is None and (x.shape[2], taps[0], conv.dilation[0]) == (1, front + 1, 1) and keep <= 1
    frames, kept = in_channels_last(x), None
    if is_alone:
        if norm is not None or shift is not None:
            frames, _ = pad_frames(frames, shift=shift, norm=norm)
        if keep:
            kept = frames.clone() if frames is x else frames
    elif norm is not None or shift is not None or front:
        window = taps[0] if front == taps[0] - 1 and is_faster_in_2d(conv, x) else 1
        frames, kept = pad_frames(
            frames, cache if front else None, front=front, keep=keep, shift=shift, norm=norm, window=window
        )
        if window > 1:
            return convolve_windows(conv, frames, bias, (h, w)), kept
    if not (w or h or front) and is_product(conv, x):
        return product_of(conv, frames, bias), kept
    if is_alone:
        image, weight = frames[:, :, 0], conv.weight[:, :, -1]
        y = F.conv2d(image, weight, bias, conv.stride[1:], (h, w), conv.dilation[1:], conv.groups)
        return y[:, :, None], kept
    return F.conv3d(frames, conv.weight, bias, conv.stride, (0, h, w), *where), kept


def _step(conv: Any, x: Tensor, feat_cache: Any, feat_idx: Any, **options: Any) -> Tensor:
    """Runs ``_convolve`` with the next entry of ``feat_cache``, and replaces the entry by the new frames.

    ``feat_idx[0]`` is the index of the next entry. If ``feat_cache`` is None, there is no cache.
    """
    if feat_cache is None:
        return _convolve(conv, x, **options)[0]
    i = feat_idx[0]
    cache = feat_cache[i]
    keep = min(_CACHE_T, x.shape[2] + (0 if cache is None else cache.shape[2]))
    y, feat_cache[i] = _convolve(conv, x, cache, keep=keep, **options)
    feat_idx[0] += 1
    return y


def _given(feat_idx: Any) -> tuple[Any, ...]:
    """Returns ``(feat_idx,)`` for stock's forward, or () if ``feat_idx`` was not given."""
    return () if feat_idx is None else (feat_idx,)


# --- fused classes ----------------------------------------------------------------------------------

# The next classes have the fused forwards. The bases of each fused class are one of these and the stock
# class, whose forward ``super().forward`` calls.


class _FusedConv(nn.Module):
    """``WanCausalConv3d``. x: (N, C, T, H, W). cache_x: the frames before x, or None.

    The result has the layout of x.
    """

    def forward(self: Any, x: Tensor, cache_x: Any = None) -> Tensor:
        front = self._padding[4]
        fits = front == 0 or (
            _fits(cache_x, x, x.shape[1]) and (cache_x is None or cache_x.shape[2] <= front)
        )
        if not (fits and is_plain_inference(x) and _is_plain_conv(self, x)):
            return super().forward(x, cache_x)
        y, _ = _convolve(self, x, cache_x if front else None)
        return y if is_channels_last(x) else y.contiguous()


class _FusedResidualBlock(nn.Module):
    """``WanResidualBlock``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        norms = self._norms(x, feat_cache, feat_idx)
        if norms is None:
            return super().forward(x, feat_cache, *_given(feat_idx))
        x = laid_out(x, channels_last=True)
        residual = x
        if isinstance(self.conv_shortcut, nn.Conv3d):
            residual, _ = _convolve(self.conv_shortcut, x)
        y = _step(self.conv1, x, feat_cache, feat_idx, norm=norms[0], has_bias=False)
        y = _step(self.conv2, y, feat_cache, feat_idx, norm=norms[1], shift=self.conv1.bias, has_bias=False)
        return add_into(y, residual, self.conv2.bias)

    def _norms(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> tuple[Norm, Norm] | None:
        """The operands of the two norms, with their activations. None if stock's forward has to run."""
        if (
            not is_plain_inference(x)
            or (self.dropout.training and self.dropout.p)
            or not is_unhooked(self.dropout)
        ):
            return None
        shortcut = self.conv_shortcut
        if not (type(shortcut) is nn.Identity and is_unhooked(shortcut)) and not _is_plain_conv(shortcut, x):
            return None
        if not (_is_plain_conv(self.conv1, x) and _is_plain_conv(self.conv2, x)):
            return None
        if feat_cache is not None and not (
            feat_idx is not None
            and _fits(feat_cache[feat_idx[0]], x, self.in_dim)
            and _fits(feat_cache[feat_idx[0] + 1], x, self.out_dim)
        ):
            return None
        first, second = (norm_of(norm, self.nonlinearity, x) for norm in (self.norm1, self.norm2))
        return None if first is None or second is None else (first, second)


class _FusedResample(nn.Module):
    """``WanResample``. x (N, C, T, H, W) -> (N, C', T or 2T, 2H, 2W), channels-last.

    Only upsampling is fused. For downsampling, stock's forward runs.
    """

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        if not (is_plain_inference(x) and self._is_plain_upsampling(x, feat_cache, feat_idx)):
            return super().forward(x, feat_cache, *_given(feat_idx))
        x = laid_out(x, channels_last=True)
        if self.mode == "upsample3d" and feat_cache is not None:
            i = feat_idx[0]
            feat_idx[0] += 1
            if feat_cache[i] is None:
                feat_cache[i] = "Rep"  # as upstream: marks the first chunk, whose frame is not doubled
            else:
                x = self._twice_the_frames(x, feat_cache, i)
        images, conv = images_of(x), self.resample[1]
        if convolves_at_low_resolution(conv, images):
            return video_of(upsample_conv2d(images, conv.weight, conv.bias), x.shape[0])
        return video_of(conv(upsample_nearest_2x(images)), x.shape[0])

    def _is_plain_upsampling(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> bool:
        if self.mode not in ("upsample2d", "upsample3d") or not is_unhooked(self.resample):
            return False
        upsample = self.resample[0]
        if not (type(upsample) in _UPSAMPLES and is_unhooked(upsample)):
            return False
        if (upsample.scale_factor, upsample.mode, upsample.size) != ((2.0, 2.0), "nearest-exact", None):
            return False
        if self.mode == "upsample2d" or feat_cache is None:
            return True
        if feat_idx is None or not _is_plain_conv(self.time_conv, x):
            return False
        cache = feat_cache[feat_idx[0]]
        return (isinstance(cache, str) and cache == "Rep") or _fits(cache, x, x.shape[1])

    def _twice_the_frames(self: Any, x: Tensor, feat_cache: Any, i: int) -> Tensor:
        """Runs ``time_conv``, and splits its 2 C channels into two frames for each frame of x.

        x (N, C, T, H, W) -> (N, C, 2 T, H, W), channels-last. Renews entry ``i`` of ``feat_cache``.
        """
        cache = None if isinstance(feat_cache[i], str) else feat_cache[i]
        y, feat_cache[i] = _convolve(self.time_conv, x, cache, keep=_CACHE_T, has_bias=False)
        pairs = y.movedim(1, -1).unflatten(-1, (2, -1)).movedim(4, 2)  # (N, T, 2, H, W, C)
        frames = torch.empty(pairs.shape, dtype=y.dtype, device=y.device)
        bias = self.time_conv.bias
        if bias is None:
            frames.copy_(pairs)
        else:
            torch.add(pairs, bias.view(2, 1, 1, -1), out=frames)
        return frames.flatten(1, 2).movedim(-1, 1)


class _FusedAttentionBlock(nn.Module):
    """``WanAttentionBlock``. x (N, C, T, H, W) -> the same; each frame attends to itself."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_inference(x):
            return super().forward(x)
        N, _, _, H, W = x.shape
        images = self.norm(laid_out(images_of(x), channels_last=True))
        q, k, v = pointwise(self.to_qkv, images).movedim(1, -1).flatten(1, 2)[:, None].chunk(3, -1)
        y = attend(q, k, v)[:, 0].unflatten(1, (H, W)).movedim(-1, 1)
        return video_of(pointwise(self.proj, y), N) + x


class _FusedHalf(nn.Module):
    """What ``WanEncoder3d`` and ``WanDecoder3d`` share: the first convolution and the last norm, SiLU and
    convolution are fused.

    x is (N, C, T, H, W). The result is channels-first, like stock's.
    """

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, **options: Any) -> Tensor:
        norm = self._norm(x, feat_cache, feat_idx)
        if norm is None:
            return super().forward(x, feat_cache, *_given(feat_idx), **options)
        x = _step(self.conv_in, x, feat_cache, feat_idx)
        x = self._middle(x, feat_cache, feat_idx, **options)
        return _step(self.conv_out, x, feat_cache, feat_idx, norm=norm).contiguous()

    def _norm(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> Norm | None:
        """The operands of the last norm, with its activation. None if stock's forward has to run."""
        if not (
            is_plain_inference(x) and _is_plain_conv(self.conv_in, x) and _is_plain_conv(self.conv_out, x)
        ):
            return None
        if feat_cache is not None and (feat_idx is None or not _fits(feat_cache[feat_idx[0]], x, x.shape[1])):
            return None
        return norm_of(self.norm_out, self.nonlinearity, x)


class _FusedEncoder(_FusedHalf):
    def _middle(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> Tensor:
        cached = {} if feat_cache is None else {"feat_cache": feat_cache, "feat_idx": feat_idx}
        for layer in self.down_blocks:
            x = layer(x, **cached)
        return self.mid_block(x, **cached)


class _FusedDecoder(_FusedHalf):
    def _middle(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any, **options: Any) -> Tensor:
        cached = {} if feat_cache is None else {"feat_cache": feat_cache, "feat_idx": feat_idx}
        x = self.mid_block(x, **cached)
        for block in self.up_blocks:
            x = block(x, **cached, **options)
        return x


class FusedWanRMSNorm(FusedRMSNorm, wan.WanRMS_norm):
    pass


class FusedWanCausalConv3d(_FusedConv, wan.WanCausalConv3d):
    pass


class FusedWanResidualBlock(_FusedResidualBlock, wan.WanResidualBlock):
    pass


class FusedWanResample(_FusedResample, wan.WanResample):
    pass


class FusedWanAttentionBlock(_FusedAttentionBlock, wan.WanAttentionBlock):
    pass


class FusedWanEncoder3d(_FusedEncoder, wan.WanEncoder3d):
    pass


class FusedWanDecoder3d(_FusedDecoder, wan.WanDecoder3d):
    pass


if qwen_image is not None:

    class FusedQwenImageRMSNorm(FusedRMSNorm, qwen_image.QwenImageRMS_norm):
        pass

    class FusedQwenImageCausalConv3d(_FusedConv, qwen_image.QwenImageCausalConv3d):
        pass

    class FusedQwenImageResidualBlock(_FusedResidualBlock, qwen_image.QwenImageResidualBlock):
        pass

    class FusedQwenImageResample(_FusedResample, qwen_image.QwenImageResample):
        pass

    class FusedQwenImageAttentionBlock(_FusedAttentionBlock, qwen_image.QwenImageAttentionBlock):
        pass

    class FusedQwenImageEncoder3d(_FusedEncoder, qwen_image.QwenImageEncoder3d):
        pass

    class FusedQwenImageDecoder3d(_FusedDecoder, qwen_image.QwenImageDecoder3d):
        pass


# --- fusions ----------------------------------------------------------------------------------------


def _check(module: Any) -> str | None:
    """Reason to skip ``module``: upstream caches another number of frames, or its activation has no kernel.

    None if there is no such reason.
    """
    frames = getattr(sys.modules[type(module).__module__], "CACHE_T", None)
    if frames != _CACHE_T:
        return f"its cache has {frames} frames, and sdfastgn was tested with {_CACHE_T}"
    act = getattr(module, "nonlinearity", None)
    return None if act is None else activation_reason(act)


def _fusions(
    family: str, upsample: type[nn.Module], classes: dict[str, type[nn.Module]]
) -> tuple[ClassSwap, ...]:
    """Returns one fusion for each of ``classes``, {name: fused class}. The last base of a fused class is the
    stock class.
    """
    stock: dict[str, Any] = {name: fused.__bases__[-1] for name, fused in classes.items()}
    norm, conv = (tested(stock[name], "__init__", "forward") for name in ("norm", "conv"))
    relied: dict[str, tuple[Any, ...]] = {
        "residual_block": (norm, conv),
        "resample": (conv, tested(upsample, "forward")),
        "encoder": (norm, conv),
        "decoder": (norm, conv),
    }
    layers = {
        "residual_block": ("norm1", "conv1", "norm2", "conv2", "conv_shortcut"),
        "resample": ("resample.1", "time_conv"),
        "attention": ("to_qkv", "proj"),
        **dict.fromkeys(("encoder", "decoder"), ("conv_in", "norm_out", "conv_out")),
    }
    NORMS.update((stock["norm"], classes["norm"]))
    _CONVS.update((stock["conv"], classes["conv"]))
    _UPSAMPLES.add(upsample)
    return tuple(
        ClassSwap(
            f"{family}_{name}",
            stock[name],
            fused,
            sources=(tested(stock[name], "__init__", "forward"), *relied.get(name, ())),
            check=_check,
            layers=layers.get(name, ()),
        )
        for name, fused in classes.items()
    )


FUSIONS: tuple[ClassSwap, ...] = _fusions(
    "wan",
    wan.WanUpsample,
    {
        "norm": FusedWanRMSNorm,
        "conv": FusedWanCausalConv3d,
        "residual_block": FusedWanResidualBlock,
        "resample": FusedWanResample,
        "attention": FusedWanAttentionBlock,
        "encoder": FusedWanEncoder3d,
        "decoder": FusedWanDecoder3d,
    },
)
if qwen_image is not None:
    FUSIONS += _fusions(
        "qwen_image",
        qwen_image.QwenImageUpsample,
        {
            "norm": FusedQwenImageRMSNorm,
            "conv": FusedQwenImageCausalConv3d,
            "residual_block": FusedQwenImageResidualBlock,
            "resample": FusedQwenImageResample,
            "attention": FusedQwenImageAttentionBlock,
            "encoder": FusedQwenImageEncoder3d,
            "decoder": FusedQwenImageDecoder3d,
        },
    )
