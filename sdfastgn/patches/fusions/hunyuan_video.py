"""diffusers' autoencoder of HunyuanVideo: norm, SiLU, upsampling and borders in one pass per convolution.

Each causal convolution reads its input behind two frames and within a border, both copies of the nearest
element. Stock makes a pass over memory each for the norm, for SiLU, for upsampling, for the concatenation of
the first frame with the upsampled others and for padding. Here one kernel (``pad_frames``) writes all of
that: what the convolution reads. PyTorch pads channels-last videos slowly and returns them channels-first,
so without this kernel the model is faster in stock's layout (``core/left_alone.py``).

Further differences:

- conv1's bias is added by the kernels of norm2, conv2's bias by the sum with the residual. That kernel, and
  the one that adds another convolution's bias, also computes the statistics that the next norm reads.
- A 1x1x1 convolution is a matrix product.

All of this needs inference without gradients, outside of autocast, compilers and traces. Elsewhere, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. It calls convolutions one by one, and
each of them is still fused by itself.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoCausalConv3d,
    HunyuanVideoDecoder3D,
    HunyuanVideoEncoder3D,
    HunyuanVideoResnetBlockCausal3D,
    HunyuanVideoUpsampleCausal3D,
)
from torch import Tensor

from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.pad_frames.op import GroupNorm, pad_frames
from sdfastgn.patches.core.fusion import ClassSwap, activation_reason, is_unhooked
from sdfastgn.patches.core.left_alone import pads_quickly
from sdfastgn.patches.core.statistics import add
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.video import (
    can_fuse,
    convolve_padded,
    in_channels_last,
    is_plain_conv3d,
    is_plain_inference,
    norm_operands,
)

__all__ = ["FUSIONS"]

# ``pad_mode`` of a convolution -> the mode of ``pad_frames``.
_MODES = {"replicate": "replicate", "constant": "zeros"}


# --- what may run fused -----------------------------------------------------------------------------


def _is_plain_conv(conv: Any, x: Tensor, C: int) -> bool:
    """True if a call of ``conv`` on C channels is upstream's padding and PyTorch's convolution, in the dtype
    and on the device of x.
    """
    if type(conv) not in (HunyuanVideoCausalConv3d, FusedHunyuanVideoCausalConv3d) or not is_unhooked(conv):
        return False
    return is_plain_conv3d(conv.conv, x, C) and conv.pad_mode in _MODES


# --- what runs --------------------------------------------------------------------------------------


def _convolve(
    conv: Any,
    x: Tensor,
    *,
    shift: Tensor | None = None,
    norm: GroupNorm | None = None,
    upsample: tuple[int, int, int] = (1, 1, 1),
    has_bias: bool = True,
) -> Tensor:
    """``conv`` of norm(x + shift), upsampled; channels-last.

    Args:
        conv: a causal convolution, for which ``_is_plain_conv`` is true.
        x: (N, C, T, H, W).
        shift, norm, upsample: as in ``pad_frames``.
        has_bias: False if the next kernel adds the bias of ``conv``.
    """
    w, _, h, _, front, _ = conv.time_causal_padding
    frames = in_channels_last(x)
    if norm is not None or shift is not None or upsample != (1, 1, 1) or w or h or front:
        where: Any = {"front": front, "border": (h, w), "mode": _MODES[conv.pad_mode]}
        frames, _ = pad_frames(frames, shift=shift, norm=norm, upsample=upsample, **where)
    return convolve_padded(conv.conv, frames, conv.conv.bias if has_bias else None)


class FusedHunyuanVideoCausalConv3d(HunyuanVideoCausalConv3d):
    """``HunyuanVideoCausalConv3d``. x (N, C, T, H, W). The result has the layout of x."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if not (is_plain_inference(x) and _is_plain_conv(self, x, x.shape[1])):
            return super().forward(x)
        y = _convolve(self, x)
        return y if is_channels_last(x) else y.contiguous()


class FusedHunyuanVideoUpsampleCausal3D(HunyuanVideoUpsampleCausal3D):
    """``HunyuanVideoUpsampleCausal3D``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last.

    T' is T or 2 T - 1.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, factor = hidden_states, self.upsample_factor
        are_whole = all(type(times) is int and times > 0 for times in factor)
        if not (are_whole and is_plain_inference(x) and _is_plain_conv(self.conv, x, x.shape[1])):
            return super().forward(x)
        return _convolve(self.conv, x, upsample=factor)


class FusedHunyuanVideoResnetBlockCausal3D(HunyuanVideoResnetBlockCausal3D):
    """``HunyuanVideoResnetBlockCausal3D``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, act = hidden_states, self.nonlinearity
        if not (is_plain_inference(x) and self._runs_fused(x)):
            return super().forward(x)
        x = in_channels_last(x)
        h = _convolve(self.conv1, x, norm=norm_operands(self.norm1, act, x), has_bias=False)
        bias = self.conv1.conv.bias
        norm = norm_operands(self.norm2, act, h, is_shifted=True)
        h = _convolve(self.conv2, h, shift=bias, norm=norm, has_bias=False)
        residual = x if self.conv_shortcut is None else _convolve(self.conv_shortcut, x)
        return add(h, residual, self.conv2.conv.bias)

    def _runs_fused(self, x: Tensor) -> bool:
        if (self.dropout.training and self.dropout.p) or not is_unhooked(self.dropout):
            return False
        C, shortcut = x.shape[1], self.conv_shortcut
        if not _is_plain_conv(self.conv1, x, C) or not (shortcut is None or _is_plain_conv(shortcut, x, C)):
            return False
        C_out = self.conv1.conv.out_channels
        return (
            _is_plain_conv(self.conv2, x, C_out)
            and can_fuse(self.norm1, self.nonlinearity, x, C)
            and can_fuse(self.norm2, self.nonlinearity, x, C_out)
        )


def _runs_fused(half: Any, x: Tensor) -> bool:
    """True if the first convolution of the encoder or decoder ``half`` can run fused, and also its last norm,
    SiLU and convolution.
    """
    if not (is_plain_inference(x) and _is_plain_conv(half.conv_in, x, x.shape[1])):
        return False
    C = half.conv_norm_out.num_channels
    return can_fuse(half.conv_norm_out, half.conv_act, x, C) and _is_plain_conv(half.conv_out, x, C)


def _leave(half: Any, x: Tensor) -> Tensor:
    """The last norm, SiLU and convolution of an encoder or decoder. Channels-first, as stock's result."""
    return _convolve(half.conv_out, x, norm=norm_operands(half.conv_norm_out, half.conv_act, x)).contiguous()


class FusedHunyuanVideoEncoder3D(HunyuanVideoEncoder3D):
    """``HunyuanVideoEncoder3D``. Videos (N, 3, T, H, W) -> (N, C, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _runs_fused(self, hidden_states):
            return super().forward(hidden_states)
        x = _convolve(self.conv_in, hidden_states)
        for block in self.down_blocks:
            x = block(x)
        return _leave(self, self.mid_block(x))


class FusedHunyuanVideoDecoder3D(HunyuanVideoDecoder3D):
    """``HunyuanVideoDecoder3D``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _runs_fused(self, hidden_states):
            return super().forward(hidden_states)
        x = self.mid_block(_convolve(self.conv_in, hidden_states))
        for block in self.up_blocks:
            x = block(x)
        return _leave(self, x)


# --- fusions ----------------------------------------------------------------------------------------

_CONV = tested(HunyuanVideoCausalConv3d, "__init__", "forward")


def _fusion(name: str, stock: Any, fused: Any, *layers: str, activation: str = "") -> ClassSwap:
    """``activation``: the attribute of the activation that the fused class runs, if it has one."""
    own = tested(stock, "__init__", "forward")
    return ClassSwap(
        f"hunyuan_video_{name}",
        stock,
        fused,
        sources=(own,) if own == _CONV else (own, _CONV),
        check=lambda module: activation_reason(getattr(module, activation)) if activation else None,
        layers=layers,
    )


FUSIONS: tuple[ClassSwap, ...] = (
    _fusion("conv", HunyuanVideoCausalConv3d, FusedHunyuanVideoCausalConv3d, "conv"),
    _fusion("upsample", HunyuanVideoUpsampleCausal3D, FusedHunyuanVideoUpsampleCausal3D),
    _fusion(
        "resnet_block",
        HunyuanVideoResnetBlockCausal3D,
        FusedHunyuanVideoResnetBlockCausal3D,
        *("norm1", "norm2"),
        activation="nonlinearity",
    ),
    _fusion(
        "encoder",
        HunyuanVideoEncoder3D,
        FusedHunyuanVideoEncoder3D,
        "conv_norm_out",
        activation="conv_act",
    ),
    _fusion(
        "decoder",
        HunyuanVideoDecoder3D,
        FusedHunyuanVideoDecoder3D,
        "conv_norm_out",
        activation="conv_act",
    ),
)
pads_quickly(FUSIONS[0])
