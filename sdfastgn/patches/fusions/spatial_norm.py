"""diffusers' ``SpatialNorm`` of Kandinsky's MoVQ: norm, factor, offset and activation in one kernel.

A spatial norm multiplies the result of a GroupNorm with a factor and adds an offset. Both are 1x1
convolutions of the latents, which stock first upsamples to the size of the norm's input. A 1x1 convolution
computes each pixel by itself. So here it runs on the small latents, and the kernel of the norm upsamples its
result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import SpatialNorm
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.pad_frames.op import pad_frames
from sdfastgn.patches.layers.convolution import is_plain_conv
from sdfastgn.patches.layers.video import (
    can_fuse,
    in_channels_last,
    is_plain_inference,
    is_upsampled_exactly,
    norm_operands,
)
from sdfastgn.patches.swap.fusion import IDENTITY, ClassSwap, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested


def spatial_norm_act(
    norm: Any, act: nn.Module, x: Tensor, latents: Any, shift: Tensor | None = None
) -> Tensor | None:
    """Computes ``act(norm(x + shift, latents))``, channels-last. None if stock's code has to run.

    Args:
        norm: a ``SpatialNorm``.
        act: the activation after it.
        x: (N, C, H, W).
        latents: (N, C_latents, h, w).
        shift: (C,), the bias of the convolution before the norm. None if there is nothing to add.
    """
    if not (is_plain_inference(x, 4) and _can_fuse(norm, act, x, latents)):
        return None
    weight = torch.cat([norm.conv_y.weight, norm.conv_b.weight])
    bias = torch.cat([norm.conv_y.bias, norm.conv_b.bias])
    modulation = in_channels_last(F.conv2d(latents, weight, bias))[:, :, None]
    operands = norm_operands(norm.norm_layer, act, x, is_shifted=shift is not None)
    # The kernel is for videos. An image is a video of one frame.
    frames = in_channels_last(x)[:, :, None]
    y, _ = pad_frames(frames, shift=shift, norm=operands._replace(modulation=modulation))
    return y[:, :, 0]


def _can_fuse(norm: Any, act: nn.Module, x: Tensor, latents: Any) -> bool:
    """True if a kernel can compute ``act(norm(u, latents))``, for u in the size and dtype of x."""
    if type(norm) not in (SpatialNorm, FusedSpatialNorm) or not is_unhooked(norm):
        return False
    if not isinstance(latents, Tensor) or latents.dim() != 4:
        return False
    if (len(latents), latents.dtype, latents.device) != (len(x), x.dtype, x.device):
        return False
    C = x.shape[1]
    return (
        is_upsampled_exactly(latents[:, :, None].shape, x[:, :, None].shape)
        and can_fuse(norm.norm_layer, act, x, C)
        and all(_is_plain(conv, latents, C) for conv in (norm.conv_y, norm.conv_b))
    )


def _is_plain(conv: Any, latents: Tensor, C: int) -> bool:
    """True if ``conv`` is a plain 1x1 convolution of ``latents`` to C channels, without hooks."""
    return (
        is_plain_conv(conv)
        and (conv.in_channels, conv.out_channels) == (latents.shape[1], C)
        and (conv.kernel_size, conv.stride, conv.padding, conv.groups) == ((1, 1), (1, 1), (0, 0), 1)
        and conv.bias is not None
        and (conv.weight.dtype, conv.weight.device) == (latents.dtype, latents.device)
    )


class FusedSpatialNorm(SpatialNorm):
    """``SpatialNorm``. f (N, C, H, W), zq (N, C_latents, h, w) -> (N, C, H, W), in the layout of f."""

    def forward(self, f: Tensor, zq: Tensor) -> Tensor:
        y = spatial_norm_act(self, IDENTITY, f, zq)
        if y is None:
            return super().forward(f, zq)
        return y if is_channels_last(f) else y.contiguous()


SOURCE = tested(SpatialNorm, "__init__", "forward")
FUSION = ClassSwap("spatial_norm", SpatialNorm, FusedSpatialNorm, sources=(SOURCE,))
