"""diffusers' autoencoder of Mochi: norm, SiLU and repeated borders in one pass before each convolution.

The model uses the convolution classes of CogVideoX's autoencoder (``cogvideox.py``). In Mochi they pad by
repeating the border and the first frame of their input. The norms normalize each frame by itself. Here one
kernel (``pad_frames``) writes the padded input of each convolution. Without this kernel, channels-last would
be slower than stock's layout (``core/left_alone.py``).

Further differences from stock:

- In a residual block, the kernels of norm2 add conv1's bias, and the kernel of the sum adds conv2's bias.
- An upsampling block has a linear layer that computes, at each position, the channels of several output
  positions. Stock then rearranges single channels. Here the rows of the weight are sorted first, so that the
  channels of each output position are contiguous and are copied together.

All of this runs only for inference without gradients, autocast, compilers and traces. Otherwise, and if a
layer has hooks, an adapter or another dtype, stock's forward runs. The norms and convolutions that it calls
are still fused one by one.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_mochi import (
    MochiChunkedGroupNorm3D,
    MochiEncoder3D,
    MochiResnetBlock3D,
    MochiUpBlock3D,
)
from torch import Tensor, nn

from sdfastgn.kernels.pad_frames.op import GroupNorm, pad_frames
from sdfastgn.kernels.product.op import linear
from sdfastgn.patches.core.fusion import IDENTITY, ClassSwap, activation_reason, is_unhooked
from sdfastgn.patches.core.left_alone import pads_quickly
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.cogvideox import CONV, convolve, is_plain
from sdfastgn.patches.fusions.cogvideox import FUSIONS as OF_COGVIDEOX
from sdfastgn.patches.fusions.video import (
    add_into,
    can_fuse,
    in_channels_last,
    is_plain_inference,
    norm_operands,
)

__all__ = ["FUSIONS"]


def _has_plain_norm(norm: Any, act: nn.Module, x: Tensor, C: int) -> bool:
    """True if a kernel can compute ``act(norm(u))``, for u of C channels in the dtype of x."""
    kinds = (MochiChunkedGroupNorm3D, FusedMochiChunkedGroupNorm3D)
    return type(norm) in kinds and is_unhooked(norm) and can_fuse(norm.norm_layer, act, x, C)


def _norm(norm: Any, act: nn.Module, x: Tensor) -> GroupNorm:
    """Returns the operands with which ``pad_frames`` computes ``act(norm(x))``.

    The kernel computes the mean and variance of each frame itself.
    """
    return norm_operands(norm.norm_layer, act, x, is_shifted=True)._replace(framewise=True)


class FusedMochiChunkedGroupNorm3D(MochiChunkedGroupNorm3D):
    """``MochiChunkedGroupNorm3D``. x (N, C, T, H, W) -> the same, channels-last."""

    def forward(self, x: Any = None) -> Tensor:
        if not (
            isinstance(x, Tensor) and is_plain_inference(x) and _has_plain_norm(self, IDENTITY, x, x.shape[1])
        ):
            return super().forward(x)
        return pad_frames(in_channels_last(x), norm=_norm(self, IDENTITY, x))[0]


class FusedMochiResnetBlock3D(MochiResnetBlock3D):
    """``MochiResnetBlock3D``. inputs (N, C, T, H, W) -> the same, channels-last."""

    def forward(self, inputs: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, Any]]:
        act = self.nonlinearity
        if not (is_plain_inference(inputs) and self._runs_fused(inputs)):
            return super().forward(inputs, conv_cache)
        x = in_channels_last(inputs)
        h, first = convolve(self.conv1, x, None, norm=_norm(self.norm1, act, x), has_bias=False)
        norm, shift = _norm(self.norm2, act, h), self.conv1.conv.bias
        h, second = convolve(self.conv2, h, None, shift=shift, norm=norm, has_bias=False)
        return add_into(h, x, self.conv2.conv.bias), {"conv1": first, "conv2": second}

    def _runs_fused(self, x: Tensor) -> bool:
        C, act = x.shape[1], self.nonlinearity
        return (
            all(is_plain(conv, x, C) and conv.pad_mode == "replicate" for conv in (self.conv1, self.conv2))
            and self.conv1.conv.out_channels == C
            and all(_has_plain_norm(norm, act, x, C) for norm in (self.norm1, self.norm2))
        )


def _channels_last(rows: Tensor, times: tuple[int, int, int]) -> Tensor:
    """Returns a copy of ``rows``, the weight or bias of ``proj``, with its first axis reordered from
    (C_out, st, sh, sw) to (st, sh, sw, C_out).
    """
    return rows.unflatten(0, (-1, *times)).movedim(0, 3).flatten(0, 3)


class FusedMochiUpBlock3D(MochiUpBlock3D):
    """``MochiUpBlock3D``. hidden_states (N, C, T, H, W) -> (N, C_out, st T, sh H, sh W), channels-last.

    st is ``temporal_expansion``, sh ``spatial_expansion``.
    """

    def forward(self, hidden_states: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, Any]]:
        if not (is_plain_inference(hidden_states) and self._projects_plainly(hidden_states)):
            return super().forward(hidden_states, conv_cache)
        cache, new, x = conv_cache or {}, {}, in_channels_last(hidden_states)
        for i, resnet in enumerate(self.resnets):
            x, new[f"resnet_{i}"] = resnet(x, conv_cache=cache.get(f"resnet_{i}"))
        times = self.temporal_expansion, self.spatial_expansion, self.spatial_expansion
        weight, bias = _channels_last(self.proj.weight, times), self.proj.bias
        bias = None if bias is None else _channels_last(bias, times)
        y = linear(x.movedim(1, -1), weight, bias).unflatten(-1, (*times, -1))
        y = y.permute(0, 1, 4, 2, 5, 3, 6, 7).contiguous()  # (N, T, st, H, sh, W, sw, C_out)
        return y.flatten(5, 6).flatten(3, 4).flatten(1, 2).movedim(-1, 1), new

    def _projects_plainly(self, x: Tensor) -> bool:
        proj = self.proj
        return (
            type(proj) is nn.Linear
            and is_unhooked(proj)
            and (proj.weight.dtype, proj.weight.device, proj.in_features) == (x.dtype, x.device, x.shape[1])
        )


class FusedMochiEncoder3D(MochiEncoder3D):
    """``MochiEncoder3D``. Videos (N, C, T', H', W') -> (N, 2 C_out, T, H, W), channels-last."""

    def forward(self, hidden_states: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, Any]]:
        x, norm, act = hidden_states, self.norm_out, self.nonlinearity
        C = getattr(self.proj_out, "in_features", 0)  # other code may have put a wrapper around it
        if not (is_plain_inference(x) and _has_plain_norm(norm, act, x, C)):
            return super().forward(x, conv_cache)
        cache, new = conv_cache or {}, {}
        x = self.proj_in(self.fourier_features(x).movedim(1, -1)).movedim(-1, 1)
        down = {f"down_block_{i}": block for i, block in enumerate(self.down_blocks)}
        for name, block in {"block_in": self.block_in, **down, "block_out": self.block_out}.items():
            x, new[name] = block(x, conv_cache=cache.get(name))
        x, _ = pad_frames(in_channels_last(x), norm=_norm(norm, act, x))
        return self.proj_out(x.movedim(1, -1)).movedim(-1, 1), new


# --- fusions ----------------------------------------------------------------------------------------

_NORM = tested(MochiChunkedGroupNorm3D, "__init__", "forward")

FUSIONS: tuple[ClassSwap, ...] = (
    ClassSwap(
        "mochi_norm",
        MochiChunkedGroupNorm3D,
        FusedMochiChunkedGroupNorm3D,
        sources=(_NORM,),
    ),
    ClassSwap(
        "mochi_resnet_block",
        MochiResnetBlock3D,
        FusedMochiResnetBlock3D,
        sources=(tested(MochiResnetBlock3D, "__init__", "forward"), _NORM, *CONV),
        check=lambda module: activation_reason(module.nonlinearity),
    ),
    ClassSwap(
        "mochi_up_block",
        MochiUpBlock3D,
        FusedMochiUpBlock3D,
        sources=(tested(MochiUpBlock3D, "__init__", "forward"),),
    ),
    ClassSwap(
        "mochi_encoder",
        MochiEncoder3D,
        FusedMochiEncoder3D,
        sources=(tested(MochiEncoder3D, "__init__", "forward"), _NORM),
        check=lambda module: activation_reason(module.nonlinearity),
    ),
)
# Mochi's convolutions have the class of CogVideoX's, so the fusion of that class fuses them. It is registered
# here because otherwise ``optimize`` would leave Mochi's autoencoder as it is.
pads_quickly(OF_COGVIDEOX[0])
