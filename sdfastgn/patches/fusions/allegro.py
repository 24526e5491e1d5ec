"""diffusers' autoencoder of Allegro: its convolutions over time.

The other blocks of this autoencoder are blocks of image models, with fusions of their own (``resnet_block``,
``attention``, ``upsample_2d``, ``conv_norm_out``).

A layer over time has four steps. Each step repeats the first and the last frame of its input, and then runs a
GroupNorm, SiLU and a convolution. (If the layer changes the number of frames, its first step repeats
nothing.) The repeated frames count in the norm's mean and variance. Stock makes at least one pass over memory
for each of these operations. Here one kernel (``pad_frames``) writes the padded input of the convolution. The
norm's statistics are computed for each frame. When they are merged, the first and the last frame count twice.

Further differences from stock:

- The kernels of the next norm add a convolution's bias. The kernel of the sum with the residual adds the
  bias of the last convolution, and also computes the statistics that the next norm reads.
- In a layer that doubles the number of frames, the first convolution writes two frames as 2 C channels. The
  pass that adds its bias also moves these channels to separate frames.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. A norm and its SiLU are then still one
pass (``sequential``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_allegro import AllegroTemporalConvLayer
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import empty_laid_out
from sdfastgn.kernels.pad_frames.op import pad_frames
from sdfastgn.kernels.statistics.op import channel_statistics
from sdfastgn.patches.fusions.sequential import FusedSequential
from sdfastgn.patches.layers.packing import unpack_sum
from sdfastgn.patches.layers.statistics import add, as_video, take_statistics
from sdfastgn.patches.layers.video import (
    can_fuse,
    convolve_padded,
    images_of,
    in_channels_last,
    is_plain_conv3d,
    is_plain_inference,
    norm_operands,
)
from sdfastgn.patches.swap.fusion import ClassSwap, activation_reason, drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

__all__ = ["FUSIONS"]


def _is_sequential(step: Any) -> bool:
    return type(step) in (nn.Sequential, FusedSequential)


def _is_plain(step: Any, x: Tensor, C: int, C_out: int) -> bool:
    """True if a call of ``step`` only runs a GroupNorm, an activation and PyTorch's convolution.

    Their parameters must have the dtype of x. C, C_out: the numbers of input and output channels.
    """
    if not _is_sequential(step) or not is_unhooked(step) or len(step) < 3:
        return False
    norm, act, *dropouts, conv = step
    return (
        can_fuse(norm, act, x, C)
        and all(map(drops_nothing, dropouts))
        and is_plain_conv3d(conv, x, C)
        and (conv.out_channels, conv.bias is None) == (C_out, False)
    )


def _convolve(step: Any, x: Tensor, shift: Tensor | None) -> Tensor:
    """Runs ``step`` on x + shift with the first and last frame repeated. The convolution's bias is not added.

    The result is channels-last.

    Args:
        step: norm, activation and convolution.
        x: (N, C, T, H, W), channels-last.
        shift: (C,) or None.
    """
    norm, act, conv = step[0], step[1], step[-1]
    around: Any = {"front": 1, "back": 1, "mode": "replicate"}
    statistics = _frame_statistics(x)
    if math.prod(x.shape[3:]) % statistics.shape[3] == 0:
        padded = torch.cat((statistics[:, :, :1], statistics, statistics[:, :, -1:]), 2).flatten(2, 3)
        operands = norm_operands(norm, act, x, is_shifted=True)
        operands = operands._replace(statistics=padded, pads_first=True)
        frames, _ = pad_frames(x, shift=shift, norm=operands, **around)
    else:
        # The statistics of a frame were computed in chunks. The kernel needs chunks of equal size, and here
        # the last chunk is smaller. So the first call only repeats frames, and the second one computes the
        # statistics of all frames, the norm and the activation.
        frames, _ = pad_frames(x, shift=shift, **around)
        frames, _ = pad_frames(frames, norm=norm_operands(norm, act, frames))
    return convolve_padded(conv, frames, None, emits=False)


def _frame_statistics(x: Tensor) -> Tensor:
    """Mean and sum of squared deviations of each channel of x (N, C, T, H, W), for P chunks of each frame.

    Returns (2, N, T, P, C).
    """
    T, statistics = x.shape[2], take_statistics(x)
    if statistics is not None:
        # ``as_video`` has stored these statistics: each chunk has positions of one frame only, and all frames
        # have the same number of chunks. So the chunks can be divided among the frames.
        return statistics.unflatten(2, (T, -1))
    return channel_statistics(images_of(x)).unflatten(1, (-1, T))


class FusedAllegroTemporalConvLayer(AllegroTemporalConvLayer):
    """``AllegroTemporalConvLayer``. hidden_states (N * T, C, H, W) -> (N * T', C, H, W), channels-last.

    T' is T, 2 T if ``up_sample``, or T / 2 if ``down_sample``.
    """

    def forward(self, hidden_states: Tensor, batch_size: int) -> Tensor:
        if not (is_plain_inference(hidden_states, dim=4) and self._runs_fused(hidden_states, batch_size)):
            return super().forward(hidden_states, batch_size)
        images = in_channels_last(hidden_states)
        x = as_video(images, len(images) // batch_size)
        if self.up_sample or self.down_sample:
            h, identity, bias = self._resample(x)
        else:
            h, identity, bias = _convolve(self.conv1, x, None), x, self.conv1[-1].bias
        for step in (self.conv2, self.conv3, self.conv4):
            h, bias = _convolve(step, h, bias), step[-1].bias
        return add(images_of(h), images_of(identity), bias)

    def _runs_fused(self, x: Tensor, N: int) -> bool:
        C, T = x.shape[1], len(x) // N
        return (
            len(x) == N * T
            and not (self.down_sample and T % 2)
            and _is_plain(self.conv1, x, C, 2 * C if self.up_sample else C)
            and all(_is_plain(step, x, C, C) for step in (self.conv2, self.conv3, self.conv4))
        )

    def _resample(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Runs conv1, which halves or doubles the number of frames. x (N, C, T, H, W).

        Returns (h, identity, bias). h + bias is conv1's result. bias is None if h includes it. ``identity``
        is x with the new number of frames, which the block adds at its end. All are channels-last.
        """
        norm, act, conv = self.conv1
        frames, _ = pad_frames(x, norm=norm_operands(norm, act, x))
        h = convolve_padded(conv, frames, None, emits=False)
        if self.down_sample:
            return h, in_channels_last(x[:, :, ::2]), conv.bias
        N, C, T, H, W = x.shape
        y = empty_laid_out(x, (N, C, 2 * T, H, W), channels_last=True)
        unpack_sum(y, h, conv.bias.view(1, -1, 1, 1, 1), (2, 1, 1))
        # With ``upsample``, ``pad_frames`` repeats all frames except the first. ``front=1`` adds the copy of
        # the first frame.
        identity, _ = pad_frames(x, front=1, mode="replicate", upsample=(2, 1, 1))
        return y, identity, None


def _check(layer: Any) -> str | None:
    if not _is_sequential(layer.conv1):
        return f"its first convolution is in a {type(layer.conv1).__name__}"
    return activation_reason(layer.conv1[1])


FUSIONS: tuple[ClassSwap, ...] = (
    ClassSwap(
        "allegro_temporal_conv",
        AllegroTemporalConvLayer,
        FusedAllegroTemporalConvLayer,
        sources=(tested(AllegroTemporalConvLayer, "__init__", "forward", "_pad_temporal_dim"),),
        check=_check,
    ),
)
