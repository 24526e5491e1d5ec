"""diffusers' autoencoder of HunyuanImage: norms with SiLU, and shortcuts around resampling without copies.

Differences from stock:

- A norm and its SiLU are one pass. In a residual block, the kernel of norm2 adds conv1's bias. The kernel of
  the sum adds conv2's bias, and computes the statistics that the next norm reads.
- An upsampling block moves channels to positions twice: for the result of its convolution, and for its input,
  which is the shortcut. Stock writes both and then their sum. Here one pass reads both and writes the sum.
  Downsampling moves positions to channels in the same way.
- In fp16 and bf16, the 1x1 convolutions of attention run as matrix products. Attention itself runs as in
  ``attention.py``.

If a layer has hooks, another dtype or an adapter that is not merged, the fused forward calls the layer as
stock does. With gradients enabled, under autocast, compilers and traces, only ResNet blocks run fused, and
stock's forward runs in all other blocks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sdfastgn.kernels.attention.wide_heads import attend
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import empty_laid_out, laid_out
from sdfastgn.patches.layers.convolution import conv_without_bias, is_plain_conv, pointwise
from sdfastgn.patches.layers.group_norm import norm_act
from sdfastgn.patches.layers.packing import means_of, pack_sum, unpack_sum
from sdfastgn.patches.layers.residual import conv_norm_act
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.layers.video import activation_reason_of, is_plain_inference
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested

try:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanimage as _image
except ImportError:  # a diffusers before HunyuanImage
    _image = None

__all__ = ["FUSIONS"]

# A cell of 2 x 2 pixels of one frame (``packing.py``). Downsampling moves the pixels of each cell to
# channels. Upsampling moves channels to the pixels of a cell.
_CELL = (1, 2, 2)


class _FusedResnetBlock(nn.Module):
    """``HunyuanImageResnetBlock``. x (N, C, H, W) -> the same."""

    def forward(self: Any, x: Tensor) -> Tensor:
        # If a block has a ``conv_shortcut``, stock's forward runs: upstream convolves conv2's result instead
        # of the block's input, and no released model has this layer.
        if self.conv_shortcut is not None or not dispatch.has_kernels(x):
            return super().forward(x)
        h = norm_act(self.norm1, self.nonlinearity, x)
        h = conv_norm_act(h, self.conv1, self.norm2, self.nonlinearity, self.out_channels)
        h, bias = conv_without_bias(self.conv2, h)
        return add(h, x, bias)


class _FusedAttention(nn.Module):
    """``HunyuanImageAttentionBlock``. x (N, C, H, W) -> the same."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_inference(x, 4):
            return super().forward(x)
        normed = laid_out(self.norm(x), channels_last=True)
        q, k, v = (
            pointwise(conv, normed).movedim(1, -1).flatten(1, 2)[:, None]
            for conv in (self.to_q, self.to_k, self.to_v)
        )
        y = attend(q, k, v)[:, 0].unflatten(1, x.shape[2:]).movedim(-1, 1)
        y = laid_out(pointwise(self.proj, y), channels_last=True)
        return add(y, laid_out(x, channels_last=True))


class _FusedUpsample(nn.Module):
    """``HunyuanImageUpsample``. x (N, C, H, W) -> (N, C_out, 2 H, 2 W), channels-last."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not (
            is_plain_inference(x, 4)
            and is_plain_conv(self.conv)
            and x.shape[1] % 4 == 0
            and self.repeats * x.shape[1] == self.conv.out_channels
        ):
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        h = self.conv(x)
        N, C, H, W = h.shape
        y = empty_laid_out(x, (N, C // 4, 2 * H, 2 * W), channels_last=True)
        unpack_sum(y[:, :, None], h[:, :, None], x[:, :, None], _CELL)
        return y


class _FusedDownsample(nn.Module):
    """``HunyuanImageDownsample``. x (N, C, H, W) -> (N, C_out, H / 2, W / 2), channels-last."""

    def forward(self: Any, x: Tensor) -> Tensor:
        N, C, H, W = x.shape
        if not (
            is_plain_inference(x, 4)
            and is_plain_conv(self.conv)
            and (H % 2, W % 2) == (0, 0)
            and self.conv.out_channels * self.group_size == C
        ):
            return super().forward(x)
        x = laid_out(x, channels_last=True)
        h = self.conv(x)
        y = empty_laid_out(x, (N, 4 * h.shape[1], H // 2, W // 2), channels_last=True)
        pack_sum(y[:, :, None], h[:, :, None], means_of(x[:, :, None], h.shape[1]), _CELL)
        return y


class _FusedEncoder(nn.Module):
    """``HunyuanImageEncoder2D``. Images (N, 3, H, W) -> (N, C, H', W')."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_inference(x, 4):
            return super().forward(x)
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        y = self.conv_out(norm_act(self.norm_out, self.nonlinearity, x))
        return y + x.unflatten(1, (-1, self.group_size)).mean(2)


class _FusedDecoder(nn.Module):
    """``HunyuanImageDecoder2D``. Latents (N, C, H, W) -> images (N, 3, H', W')."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_plain_inference(x, 4):
            return super().forward(x)
        h = self.mid_block(self.conv_in(x) + x.repeat_interleave(self.repeat, 1))
        for block in self.up_blocks:
            h = block(h)
        return self.conv_out(norm_act(self.norm_out, self.nonlinearity, h))


if _image is not None:

    class FusedHunyuanImageResnetBlock(_FusedResnetBlock, _image.HunyuanImageResnetBlock):
        pass

    class FusedHunyuanImageAttentionBlock(_FusedAttention, _image.HunyuanImageAttentionBlock):
        pass

    class FusedHunyuanImageUpsample(_FusedUpsample, _image.HunyuanImageUpsample):
        pass

    class FusedHunyuanImageDownsample(_FusedDownsample, _image.HunyuanImageDownsample):
        pass

    class FusedHunyuanImageEncoder2D(_FusedEncoder, _image.HunyuanImageEncoder2D):
        pass

    class FusedHunyuanImageDecoder2D(_FusedDecoder, _image.HunyuanImageDecoder2D):
        pass


# --- fusions ----------------------------------------------------------------------------------------


def _fusion(name: str, fused: type[nn.Module]) -> ClassSwap:
    stock: Any = fused.__bases__[-1]
    sources = (tested(stock, "__init__", "forward"),)
    return ClassSwap(f"hunyuan_image_{name}", stock, fused, sources=sources, check=activation_reason_of)


FUSIONS: tuple[ClassSwap, ...] = ()
if _image is not None:
    FUSIONS = (
        _fusion("resnet_block", FusedHunyuanImageResnetBlock),
        _fusion("attention", FusedHunyuanImageAttentionBlock),
        _fusion("upsample", FusedHunyuanImageUpsample),
        _fusion("downsample", FusedHunyuanImageDownsample),
        _fusion("encoder", FusedHunyuanImageEncoder2D),
        _fusion("decoder", FusedHunyuanImageDecoder2D),
    )
