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
- In a residual block, the kernel of norm2 adds conv1's bias, and the kernel of the sum adds conv2's bias.
- Upsampling and the convolution after it are one convolution at low resolution where that is faster
  (``upsampling.py``).
- A 1x1x1 convolution in fp16 or bf16 is a matrix product of its input. Stock first copies the input, because
  it calls ``F.pad`` with zero widths.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one. Norms also run fused if gradients are wanted.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import Norm
from sdfastgn.patches.core.fusion import ClassSwap, drops_nothing, is_unhooked
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions import causal
from sdfastgn.patches.fusions.video import (
    NORMS,
    FusedRMSNorm,
    activation_reason_of,
    add_into,
    is_plain_inference,
    norm_of,
)

try:
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen_image
except ImportError:  # a diffusers before Qwen-Image
    qwen_image = None

__all__ = ["FUSIONS"]

# Classes of Wan's and Qwen-Image's autoencoders: ``_CONVS`` has the causal convolutions, stock and fused, and
# ``_UPSAMPLES`` has stock's upsampling layers. ``_fusions`` fills both sets.
_CONVS: set[type[nn.Module]] = set()
_UPSAMPLES: set[type[nn.Module]] = set()


# --- what may run fused -----------------------------------------------------------------------------


def _is_plain_conv(conv: Any, x: Tensor) -> bool:
    """``causal.is_plain_conv`` for the causal convolutions of Wan and Qwen-Image."""
    return causal.is_plain_conv(conv, x, _CONVS)


# --- fused classes ----------------------------------------------------------------------------------

# The next classes have the fused forwards. Each fused class below is derived from one of them and from a
# stock class, so ``super().forward`` calls stock's forward.


class _FusedConv(nn.Module):
    """``WanCausalConv3d``. x: (N, C, T, H, W). cache_x: the frames before x, or None.

    The result has the layout of x.
    """

    def forward(self: Any, x: Tensor, cache_x: Any = None) -> Tensor:
        front = self._padding[4]
        fits = front == 0 or (
            causal.fits(cache_x, x, x.shape[1]) and (cache_x is None or cache_x.shape[2] <= front)
        )
        if not (fits and is_plain_inference(x) and _is_plain_conv(self, x)):
            return super().forward(x, cache_x)
        y, _ = causal.convolve(self, x, cache_x if front else None)
        return y if is_channels_last(x) else y.contiguous()


class _FusedResidualBlock(nn.Module):
    """``WanResidualBlock``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        norms = self._norms(x, feat_cache, feat_idx)
        if norms is None:
            return super().forward(x, feat_cache, *causal.given(feat_idx))
        x = laid_out(x, channels_last=True)
        residual = x
        if isinstance(self.conv_shortcut, nn.Conv3d):
            residual, _ = causal.convolve(self.conv_shortcut, x)
        y = causal.step(self.conv1, x, feat_cache, feat_idx, norm=norms[0], has_bias=False)
        y = causal.step(
            self.conv2, y, feat_cache, feat_idx, norm=norms[1], shift=self.conv1.bias, has_bias=False
        )
        return add_into(y, residual, self.conv2.bias)

    def _norms(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> tuple[Norm, Norm] | None:
        """The operands for the kernels of both norms and their SiLU. None if stock's forward has to run."""
        if not (is_plain_inference(x) and drops_nothing(self.dropout)):
            return None
        shortcut = self.conv_shortcut
        if not (type(shortcut) is nn.Identity and is_unhooked(shortcut)) and not _is_plain_conv(shortcut, x):
            return None
        if not (_is_plain_conv(self.conv1, x) and _is_plain_conv(self.conv2, x)):
            return None
        if not causal.next_fit(feat_cache, feat_idx, x, self.in_dim, self.out_dim):
            return None
        first, second = (norm_of(norm, self.nonlinearity, x) for norm in (self.norm1, self.norm2))
        return None if first is None or second is None else (first, second)


class _FusedResample(nn.Module):
    """``WanResample``. x (N, C, T, H, W) -> (N, C', T or 2T, 2H, 2W), channels-last.

    Only upsampling is fused. For downsampling, stock's forward runs.
    """

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
        if not (
            self.mode in ("upsample2d", "upsample3d")
            and is_plain_inference(x)
            and causal.is_plain_upsampling(self, x, feat_cache, feat_idx, _UPSAMPLES, _is_plain_conv)
        ):
            return super().forward(x, feat_cache, *causal.given(feat_idx))
        x = causal.with_new_frames(self, x, feat_cache, feat_idx)
        return causal.upsample_and_convolve(self.resample[1], x)

    def _twice_the_frames(self: Any, x: Tensor, feat_cache: Any, i: int) -> Tensor:
        """Runs ``time_conv``, and splits its 2 C channels into two frames for each frame of x.

        x (N, C, T, H, W) -> (N, C, 2 T, H, W), channels-last. Renews entry ``i`` of ``feat_cache``.
        """
        cache = None if isinstance(feat_cache[i], str) else feat_cache[i]
        y, feat_cache[i] = causal.convolve(self.time_conv, x, cache, keep=causal.CACHE_T, has_bias=False)
        return causal.pairs_as_frames(y, self.time_conv.bias)


class _FusedAttentionBlock(nn.Module):
    """``WanAttentionBlock``. x (N, C, T, H, W) -> the same; each frame attends to itself."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_inference(x):
            return super().forward(x)
        return causal.attend_in_frames(x, self.norm, self.to_qkv, self.proj)


class _FusedHalf(nn.Module):
    """Base class of the fused encoders and decoders: their first convolution, and their last norm, SiLU and
    convolution run fused.

    x is (N, C, T, H, W). The result is channels-first, like stock's. The subclasses define ``_middle``, which
    runs the blocks between these layers.
    """

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, **options: Any) -> Tensor:
        norm = self._norm(x, feat_cache, feat_idx)
        if norm is None:
            return super().forward(x, feat_cache, *causal.given(feat_idx), **options)
        x = causal.step(self.conv_in, x, feat_cache, feat_idx)
        x = self._middle(x, feat_cache, feat_idx, **options)
        return causal.step(self.conv_out, x, feat_cache, feat_idx, norm=norm).contiguous()

    def _norm(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> Norm | None:
        """The operands for the kernel of the last norm and its SiLU. None if stock's forward has to run."""
        if not (
            is_plain_inference(x) and _is_plain_conv(self.conv_in, x) and _is_plain_conv(self.conv_out, x)
        ):
            return None
        if not causal.next_fit(feat_cache, feat_idx, x, x.shape[1]):
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
    return causal.check_cache(module) or activation_reason_of(module)


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
