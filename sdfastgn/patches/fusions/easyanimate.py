"""diffusers' autoencoder of EasyAnimate (``AutoencoderKLMagvit``): one pass before each causal convolution.

The model computes a video in batches of frames. Each causal convolution reads two frames before its input:
the last frames of the previous batch, which it keeps in its attribute ``prev_features``, or copies of the
first frame. (With a stride of 2 along time, it reads only one of the previous batch's frames.) Stock makes
one pass over memory for each of these steps: the norm, SiLU, upsampling, the concatenation with the kept
frames, and the copy of the new ones. Then it convolves frame by frame. Here one kernel (``pad_frames``) does
all of these steps. It writes the padded input of the convolution and the new ``prev_features``, which have
the same frames and values as stock's. Then one convolution computes all frames.

Further differences from stock:

- In a residual block, the kernels of norm2 add conv1's bias, and the kernel of the sum adds conv2's bias. The
  kernels that add other biases or the residual also compute the statistics that the next norm reads.
- The pass that adds the bias of an upsampling convolution also repeats frames.
- A downsampling block writes the padded input of its convolution without further copies.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_magvit import (
    EasyAnimateCausalConv3d,
    EasyAnimateDecoder,
    EasyAnimateDownsampler3D,
    EasyAnimateEncoder,
    EasyAnimateResidualBlock3D,
    EasyAnimateUpsampler3D,
)
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import empty_laid_out, is_channels_last
from sdfastgn.kernels.pad_frames.op import GroupNorm, pad_frames
from sdfastgn.patches.layers.statistics import add, add_bias, as_video
from sdfastgn.patches.layers.video import (
    activation_reason_of,
    can_fuse,
    convolve_padded,
    images_of,
    in_channels_last,
    is_plain_conv3d,
    is_plain_inference,
    norm_operands,
    video_of,
)
from sdfastgn.patches.swap.fusion import ClassSwap, drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

# --- what may run fused -----------------------------------------------------------------------------


def _is_plain(conv: Any, x: Tensor, C: int, image: Sequence[int]) -> bool:
    """True if calling ``conv`` only runs upstream's code and PyTorch's convolution, so that it can run fused.

    Also the frames that ``conv`` has kept of the previous batch must have the right shape, dtype and device.

    Args:
        conv: a causal convolution.
        x: a tensor (N, _, T, _, _) with the batch size, number of frames, dtype and device of the input.
        C: number of channels of the input.
        image: (height, width) of the input.
    """
    return (
        type(conv) in (EasyAnimateCausalConv3d, FusedEasyAnimateCausalConv3d)
        and is_plain_conv3d(conv, x, C, type(conv))
        and conv.temporal_padding == conv.kernel_size[0] - 1 > 1
        and (conv.dilation, conv.t_stride) == ((1, 1, 1), conv.stride[0])
        and _fits(conv, x, (x.shape[0], C, conv.temporal_padding, *image))
    )


def _fits(conv: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    """True if ``conv`` has kept no frames of the previous batch, or if they fit before x.

    They fit if they have the given shape, and the dtype and device of x.
    """
    kept = conv.prev_features
    return kept is None or (
        isinstance(kept, Tensor)
        and (kept.shape, kept.dtype, kept.device) == (shape, x.dtype, x.device)
        and not (conv.t_stride == 2 and x.shape[2] < 2)  # for this stock raises an error
    )


# --- helpers of the fused forwards ------------------------------------------------------------------


def _norm(module: Any, norm: Any, act: nn.Module, x: Tensor, *, is_shifted: bool = False) -> GroupNorm:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(x))``.

    If ``module`` normalizes each frame by itself, so does the kernel.
    """
    operands = norm_operands(norm, act, x, is_shifted=is_shifted)
    T, statistics = x.shape[2], operands.statistics
    if not module.spatial_group_norm or T == 1:
        return operands
    if statistics is not None:
        # ``as_video`` has stored these statistics, so no chunk has positions of two frames.
        statistics = statistics.unflatten(2, (T, -1)).flatten(1, 2)
    return operands._replace(framewise=True, statistics=statistics)


def _frames_before(conv: Any) -> tuple[int, Tensor | None]:
    """Which frames ``conv`` reads before its input: (their number, the frames).

    They are the frames that ``conv`` has kept of the previous batch. With a stride of 2 along time, stock
    leaves out the first of them. In the first batch, ``conv`` reads copies of the first input frame instead,
    and None is returned for the frames.
    """
    front, kept = conv.temporal_padding, conv.prev_features
    if kept is not None and conv.t_stride == 2:
        front -= 1
        kept = kept[:, :, -front:]
    return front, kept


def _convolve(
    conv: Any,
    x: Tensor,
    *,
    shift: Tensor | None = None,
    norm: GroupNorm | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
) -> Tensor:
    """Computes norm(x + shift), upsamples it and applies ``conv`` without its bias. Channels-last.

    Args:
        conv: a causal convolution, for which ``_is_plain`` is true.
        x: (N, C, T, H, W).
        shift, norm, upsample: as in ``pad_frames``.
    """
    front, before = _frames_before(conv)
    where: Any = {"front": front, "mode": "replicate", "keep": conv.temporal_padding}
    frames, conv.prev_features = pad_frames(
        in_channels_last(x), before, shift=shift, norm=norm, upsample=upsample, **where
    )
    return convolve_padded(conv, frames, None, emits=False)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Returns y + bias for y (N, C, T, H, W). It may overwrite y.

    Where that saves time, the same kernel computes the statistics of the sum, which the next norm reads.
    """
    return as_video(add_bias(images_of(y), bias), y.shape[2])


class FusedEasyAnimateCausalConv3d(EasyAnimateCausalConv3d):
    """``EasyAnimateCausalConv3d``. x (N, C, T, H, W). The result has the layout of x."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _is_plain(self, x, x.shape[1], x.shape[3:])):
            return super().forward(x)
        y = _with_bias(_convolve(self, x), self.bias)
        return y if is_channels_last(x) else y.contiguous()


class FusedEasyAnimateResidualBlock3D(EasyAnimateResidualBlock3D):
    """``EasyAnimateResidualBlock3D``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, act = hidden_states, self.nonlinearity
        if not (is_plain_inference(x) and self._runs_fused(x)):
            return super().forward(x)
        x = in_channels_last(x)
        h = _convolve(self.conv1, x, norm=_norm(self, self.norm1, act, x))
        norm = _norm(self, self.norm2, act, h, is_shifted=True)
        h = _convolve(self.conv2, h, shift=self.conv1.bias, norm=norm)
        if isinstance(self.shortcut, nn.Conv3d):
            x = convolve_padded(self.shortcut, x, self.shortcut.bias, emits=False)
        y = add(images_of(h), images_of(x), self.conv2.bias, self.output_scale_factor)
        return as_video(y, x.shape[2])

    def _runs_fused(self, x: Tensor) -> bool:
        if not drops_nothing(self.dropout):
            return False
        C, shortcut, image = x.shape[1], self.shortcut, x.shape[3:]
        is_identity = type(shortcut) is nn.Identity and is_unhooked(shortcut)
        if not (is_identity or is_plain_conv3d(shortcut, x, C)) or not _is_plain(self.conv1, x, C, image):
            return False
        C_out = self.conv1.out_channels
        return (
            _is_plain(self.conv2, x, C_out, image)
            and can_fuse(self.norm1, self.nonlinearity, x, C)
            and can_fuse(self.norm2, self.nonlinearity, x, C_out)
        )


class FusedEasyAnimateUpsampler3D(EasyAnimateUpsampler3D):
    """``EasyAnimateUpsampler3D``. x (N, C, T, H, W) -> (N, C_out, T', 2H, 2W), channels-last.

    T' is T, or 2 T in later batches of frames if ``temporal_upsample``.
    """

    prev_features: Tensor | None

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, conv = hidden_states, self.conv
        image = (2 * x.shape[-2], 2 * x.shape[-1])
        if not (is_plain_inference(x) and _is_plain(conv, x, x.shape[1], image)):
            return super().forward(x)
        y = _convolve(conv, x, upsample=(1, 2, 2))
        is_later = self.prev_features is not None
        if self.temporal_upsample and is_later and self.spatial_group_norm:
            # With ``upsample``, ``pad_frames`` repeats all frames except the first. ``front=1`` adds the copy
            # of the first frame.
            return pad_frames(y, shift=conv.bias, front=1, mode="replicate", upsample=(2, 1, 1))[0]
        y = _with_bias(y, conv.bias)
        if self.temporal_upsample and is_later:
            return F.interpolate(y, scale_factor=(2, 1, 1), mode="trilinear")
        if self.temporal_upsample:
            self.prev_features = y
        return y


class FusedEasyAnimateDownsampler3D(EasyAnimateDownsampler3D):
    """``EasyAnimateDownsampler3D``. x (N, C, T, H, W) -> (N, C_out, T', H // 2, W // 2), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, conv = hidden_states, self.conv
        if not is_plain_inference(x):
            return super().forward(x)
        N, C, T, H, W = x.shape
        if not _is_plain(conv, x, C, (H + 1, W + 1)):
            return super().forward(x)
        front, before = _frames_before(conv)
        frames = empty_laid_out(x, (N, C, front + T, H + 1, W + 1), channels_last=True)
        frames[..., H:, :] = frames[..., W:] = 0
        frames[:, :, front:, :H, :W] = x
        frames[:, :, :front] = frames[:, :, front : front + 1] if before is None else before
        conv.prev_features = frames[:, :, -conv.temporal_padding :].clone()
        return _with_bias(convolve_padded(conv, frames, None, emits=False), conv.bias)


def _leave(half: Any, x: Tensor) -> Tensor:
    """Runs the last norm, SiLU and convolution of an encoder or decoder. Channels-first, like stock."""
    norm, act, conv, C = half.conv_norm_out, half.conv_act, half.conv_out, x.shape[1]
    if can_fuse(norm, act, x, C) and _is_plain(conv, x, C, x.shape[3:]):
        return _with_bias(_convolve(conv, x, norm=_norm(half, norm, act, x)), conv.bias).contiguous()
    x = video_of(norm(images_of(x)), len(x)) if half.spatial_group_norm else norm(x)
    return conv(act(x)).contiguous()


class FusedEasyAnimateEncoder(EasyAnimateEncoder):
    """``EasyAnimateEncoder``. Videos (N, 3, T, H, W) -> (N, C, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not is_plain_inference(hidden_states):
            return super().forward(hidden_states)
        x = self.conv_in(in_channels_last(hidden_states))
        for block in (*self.down_blocks, self.mid_block):
            x = block(x)
        return _leave(self, x)


class FusedEasyAnimateDecoder(EasyAnimateDecoder):
    """``EasyAnimateDecoder``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not is_plain_inference(hidden_states):
            return super().forward(hidden_states)
        x = self.conv_in(in_channels_last(hidden_states))
        for block in (self.mid_block, *self.up_blocks):
            x = block(x)
        return _leave(self, x)


# --- fusions ----------------------------------------------------------------------------------------

_CONV = tested(EasyAnimateCausalConv3d, "__init__", "forward", "_clear_conv_cache")


def _fusion(name: str, fused: Any) -> ClassSwap:
    """The fusion of a fused class, whose base is the stock class."""
    stock = fused.__bases__[0]
    methods = ("__init__", "forward", *(["_clear_conv_cache"] if stock is EasyAnimateUpsampler3D else []))
    return ClassSwap(
        f"easyanimate_{name}",
        stock,
        fused,
        sources=(_CONV,) if stock is EasyAnimateCausalConv3d else (tested(stock, *methods), _CONV),
        check=activation_reason_of,
    )


FUSIONS: tuple[ClassSwap, ...] = (
    _fusion("conv", FusedEasyAnimateCausalConv3d),
    _fusion("upsample", FusedEasyAnimateUpsampler3D),
    _fusion("downsample", FusedEasyAnimateDownsampler3D),
    _fusion("resnet_block", FusedEasyAnimateResidualBlock3D),
    _fusion("encoder", FusedEasyAnimateEncoder),
    _fusion("decoder", FusedEasyAnimateDecoder),
)
