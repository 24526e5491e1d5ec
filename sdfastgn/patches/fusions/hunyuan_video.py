"""diffusers' autoencoder of HunyuanVideo: norm, SiLU, upsampling and borders in one pass per convolution.

Each causal convolution pads its input with two frames before the first frame and with a border around each
frame. Both repeat the nearest element. Stock makes one pass over memory for each of these steps: the norm,
SiLU, upsampling, the concatenation of the first frame with the upsampled others, and padding. Here one kernel
(``pad_frames``) does all of them and writes the padded input of the convolution. PyTorch pads channels-last
videos slowly and returns them channels-first. So without this kernel, channels-last would be slower than
stock's layout (``core/left_alone.py``).

Further differences from stock:

- In a residual block, the kernels of norm2 add conv1's bias, and the kernel of the sum adds conv2's bias. The
  kernels that add the bias of conv2 and of other convolutions also compute the next norm's statistics.
- A 1x1x1 convolution in fp16 or bf16 is a matrix product.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The convolutions that it calls are still
fused one by one.
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

from sdfastgn.patches.core.fusion import ClassSwap, drops_nothing
from sdfastgn.patches.core.left_alone import pads_quickly
from sdfastgn.patches.core.statistics import add
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.video import (
    activation_reason_of,
    can_fuse,
    in_channels_last,
    is_plain_inference,
    norm_operands,
)
from sdfastgn.patches.fusions.wrapped_conv import WRAPPERS, FusedWrapper, convolve, is_plain_wrapper

__all__ = ["FUSIONS"]


class FusedHunyuanVideoCausalConv3d(FusedWrapper, HunyuanVideoCausalConv3d):
    pass


class FusedHunyuanVideoUpsampleCausal3D(HunyuanVideoUpsampleCausal3D):
    """``HunyuanVideoUpsampleCausal3D``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last.

    T' is T or 2 T - 1.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, factor = hidden_states, self.upsample_factor
        are_whole = all(type(times) is int and times > 0 for times in factor)
        if not (are_whole and is_plain_inference(x) and is_plain_wrapper(self.conv, x, x.shape[1])):
            return super().forward(x)
        return convolve(self.conv, x, upsample=factor, emits=True)


class FusedHunyuanVideoResnetBlockCausal3D(HunyuanVideoResnetBlockCausal3D):
    """``HunyuanVideoResnetBlockCausal3D``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, act = hidden_states, self.nonlinearity
        if not (is_plain_inference(x) and self._runs_fused(x)):
            return super().forward(x)
        x = in_channels_last(x)
        h = convolve(self.conv1, x, norm=norm_operands(self.norm1, act, x), has_bias=False)
        bias = self.conv1.conv.bias
        norm = norm_operands(self.norm2, act, h, is_shifted=True)
        h = convolve(self.conv2, h, shift=bias, norm=norm, has_bias=False)
        residual = x if self.conv_shortcut is None else convolve(self.conv_shortcut, x)
        return add(h, residual, self.conv2.conv.bias)

    def _runs_fused(self, x: Tensor) -> bool:
        if not drops_nothing(self.dropout):
            return False
        C, shortcut = x.shape[1], self.conv_shortcut
        if not is_plain_wrapper(self.conv1, x, C) or not (
            shortcut is None or is_plain_wrapper(shortcut, x, C)
        ):
            return False
        C_out = self.conv1.conv.out_channels
        return (
            is_plain_wrapper(self.conv2, x, C_out)
            and can_fuse(self.norm1, self.nonlinearity, x, C)
            and can_fuse(self.norm2, self.nonlinearity, x, C_out)
        )


def _runs_fused(half: Any, x: Tensor) -> bool:
    """True if these layers can run fused: the first convolution of ``half``, and its last norm, SiLU and
    convolution.

    ``half``: the encoder or the decoder. x: its input.
    """
    if not (is_plain_inference(x) and is_plain_wrapper(half.conv_in, x, x.shape[1])):
        return False
    C = getattr(half.conv_norm_out, "num_channels", 0)  # other code may have put a wrapper around it
    return can_fuse(half.conv_norm_out, half.conv_act, x, C) and is_plain_wrapper(half.conv_out, x, C)


def _leave(half: Any, x: Tensor) -> Tensor:
    """Runs the last norm, SiLU and convolution of an encoder or decoder.

    The result is channels-first, like stock's.
    """
    return convolve(half.conv_out, x, norm=norm_operands(half.conv_norm_out, half.conv_act, x)).contiguous()


class FusedHunyuanVideoEncoder3D(HunyuanVideoEncoder3D):
    """``HunyuanVideoEncoder3D``. Videos (N, 3, T, H, W) -> (N, C, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _runs_fused(self, hidden_states):
            return super().forward(hidden_states)
        x = convolve(self.conv_in, hidden_states, emits=True)
        for block in self.down_blocks:
            x = block(x)
        return _leave(self, self.mid_block(x))


class FusedHunyuanVideoDecoder3D(HunyuanVideoDecoder3D):
    """``HunyuanVideoDecoder3D``. Latents (N, C, T, H, W) -> videos (N, 3, T', H', W')."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _runs_fused(self, hidden_states):
            return super().forward(hidden_states)
        x = self.mid_block(convolve(self.conv_in, hidden_states, emits=True))
        for block in self.up_blocks:
            x = block(x)
        return _leave(self, x)


# --- fusions ----------------------------------------------------------------------------------------

WRAPPERS.update((HunyuanVideoCausalConv3d, FusedHunyuanVideoCausalConv3d))
_CONV = tested(HunyuanVideoCausalConv3d, "__init__", "forward")


def _fusion(name: str, stock: Any, fused: Any) -> ClassSwap:
    """The fusion of the class ``stock``."""
    own = tested(stock, "__init__", "forward")
    return ClassSwap(
        f"hunyuan_video_{name}",
        stock,
        fused,
        sources=(own,) if own == _CONV else (own, _CONV),
        check=activation_reason_of,
    )


FUSIONS: tuple[ClassSwap, ...] = (
    _fusion("conv", HunyuanVideoCausalConv3d, FusedHunyuanVideoCausalConv3d),
    _fusion("upsample", HunyuanVideoUpsampleCausal3D, FusedHunyuanVideoUpsampleCausal3D),
    _fusion("resnet_block", HunyuanVideoResnetBlockCausal3D, FusedHunyuanVideoResnetBlockCausal3D),
    _fusion("encoder", HunyuanVideoEncoder3D, FusedHunyuanVideoEncoder3D),
    _fusion("decoder", HunyuanVideoDecoder3D, FusedHunyuanVideoDecoder3D),
)
pads_quickly(FUSIONS[0])
