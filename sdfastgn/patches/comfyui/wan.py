"""Fusions for ComfyUI's autoencoder of Wan 2.1 and Qwen-Image.

Its blocks compute what diffusers' blocks compute (``fusions/wan.py``), and use the same functions
(``fusions/causal.py``): norm, SiLU, cached frames and padding in one pass before each causal convolution. The
releases of ComfyUI differ in two ways:

- ``feat_cache`` has an entry for each convolution: the last frames of the previous chunk. After a chunk of
  one frame, the entry has this frame. Until ComfyUI 0.16, it also has the frame before the chunk; since 0.22,
  it does not.
- Until ComfyUI 0.8, a causal convolution puts zeros on all sides of its input, which copies the input. In
  later releases it only puts frames before the input, and PyTorch's convolution pads the sides.

Entries of ``feat_cache`` are never written to, because every kernel writes into new memory. 3-D convolutions
call ComfyUI's ``_conv_forward``, which avoids a fault of some releases of cuDNN.

A block runs stock's code if a 3-D convolution in it has hooks or casts its weights (``layers.py``), and where
kernels cannot run.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
from comfy.ldm.modules.diffusionmodules import model as comfy_model
from comfy.ldm.wan import vae
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import is_channels_last, laid_out
from sdfastgn.kernels.pad_frames.op import Norm
from sdfastgn.patches.comfyui import causal
from sdfastgn.patches.comfyui.layers import prepared, reason_to_cast
from sdfastgn.patches.layers.video import NORMS, FusedRMSNorm, add_into, is_plain_inference, norm_of
from sdfastgn.patches.swap.fusion import ClassSwap, drops_nothing, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested

_ops: Any = comfy.ops
# True in releases whose decoder computes the frames of a chunk in pairs. In these releases, an entry of
# ``feat_cache`` has only one frame after a chunk of one frame.
_HAS_PAIRS = hasattr(vae.Decoder3d, "run_up")


def _is_plain_conv(conv: Any, x: Tensor) -> bool:
    """``causal.is_plain_conv`` for ``FusedCausalConv3d``."""
    return causal.is_plain_conv(conv, x, (FusedCausalConv3d,))


def _conv3d(conv: Any, frames: Tensor, bias: Tensor | None) -> Tensor:
    return conv._conv_forward(frames, conv.weight, bias)


class FusedRMS(FusedRMSNorm, vae.RMS_norm):
    pass


class FusedCausalConv3d(vae.CausalConv3d):
    """``CausalConv3d``. x (N, C, T, H, W). The convolution also reads frames before x: the cache, or zeros.

    The result has the layout of x. The cache is ``cache_x``, or entry ``cache_idx`` of ``cache_list``. After
    the entry was used, it is set to None.
    """

    def forward(
        self, x: Tensor, cache_x: Any = None, cache_list: Any = None, cache_idx: Any = None
    ) -> Tensor:
        cache = cache_x if cache_list is None else cache_list[cache_idx]
        if not (is_plain_inference(x) and _is_plain_conv(self, x) and self._fits(x, cache)):
            return super().forward(x, cache_x, cache_list, cache_idx)
        if cache_list is not None:
            cache_list[cache_idx] = None
        front, _, _ = causal.padding_of(self)
        y, _ = causal.convolve(self, x, cache if front else None, conv3d=_conv3d)
        return y if is_channels_last(x) else y.contiguous()

    def _fits(self, x: Tensor, cache: Any) -> bool:
        front, _, _ = causal.padding_of(self)
        if front == 0:
            # For x of one frame, newer releases of ComfyUI use only a part of the weight. Then their code
            # runs.
            return x.shape[2] > 1 or self.kernel_size[0] == 1
        return causal.fits(cache, x, x.shape[1]) and (cache is None or cache.shape[2] <= front)


# The next classes have the fused forwards. Each fused class is derived from one of them and from a stock
# class, so ``super().forward`` calls stock's forward.


class _Chunked(nn.Module):
    # True if, after a chunk of one frame, an entry of ``feat_cache`` also has the frame before the chunk.
    _keeps_earlier = True

    def _step(self, conv: Any, x: Tensor, feat_cache: Any, feat_idx: Any, **options: Any) -> Tensor:
        return causal.step(
            conv, x, feat_cache, feat_idx, keeps_earlier=self._keeps_earlier, conv3d=_conv3d, **options
        )


class ResidualBlockBase(_Chunked):
    """``ResidualBlock``. x (N, C, T, H, W) -> (N, C_out, T, H, W), channels-last."""

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, **options: Any) -> Tensor:
        norms = self._norms(x, feat_cache, feat_idx)
        if norms is None:
            return super().forward(x, feat_cache, *causal.given(feat_idx), **options)
        _ops.run_every_op()  # raises an error if the user has interrupted the run
        _, _, conv1, _, _, _, conv2 = self.residual
        x = laid_out(x, channels_last=True)
        residual = x
        if isinstance(self.shortcut, nn.Conv3d):
            residual, _ = causal.convolve(self.shortcut, x, conv3d=_conv3d)
        y = self._step(conv1, x, feat_cache, feat_idx, norm=norms[0], has_bias=False)
        y = self._step(conv2, y, feat_cache, feat_idx, norm=norms[1], shift=conv1.bias, has_bias=False)
        return add_into(y, residual, conv2.bias)

    def _norms(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> tuple[Norm, Norm] | None:
        """The operands with which ``pad_frames`` computes the two norms, and the activation after each.

        None if stock's forward has to run.
        """
        if not is_plain_inference(x) or len(self.residual) != 7:
            return None
        norm1, act1, conv1, norm2, act2, dropout, conv2 = self.residual
        shortcut = self.shortcut
        if not drops_nothing(dropout):
            return None
        if not (type(shortcut) is nn.Identity and is_unhooked(shortcut)) and not _is_plain_conv(shortcut, x):
            return None
        if not (_is_plain_conv(conv1, x) and _is_plain_conv(conv2, x)):
            return None
        if not causal.next_fit(feat_cache, feat_idx, x, self.in_dim, self.out_dim):
            return None
        first, second = norm_of(norm1, act1, x), norm_of(norm2, act2, x)
        return None if first is None or second is None else (first, second)


class ResampleBase(_Chunked):
    """``Resample`` that upsamples. x (N, C, T, H, W) -> (N, C', T or 2T, 2H, 2W), channels-last."""

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, **options: Any) -> Tensor:
        if not (
            is_plain_inference(x)
            and causal.is_plain_upsampling(self, x, feat_cache, feat_idx, (nn.Upsample,), _is_plain_conv)
        ):
            return super().forward(x, feat_cache, *causal.given(feat_idx), **options)
        x = causal.with_new_frames(self, x, feat_cache, feat_idx)
        return causal.upsample_and_convolve(prepared(self.resample[1], x), x)

    def _twice_the_frames(self: Any, x: Tensor, feat_cache: Any, i: int) -> Tensor:
        """Runs ``time_conv``, and splits its 2 C channels into two frames for each frame of x.

        x (N, C, T, H, W) -> (N, C, 2 T, H, W), channels-last. Entry ``i`` of ``feat_cache`` gets the
        frames that the next chunk reads before its own.
        """
        cache = None if isinstance(feat_cache[i], str) else feat_cache[i]
        keep = causal.CACHE_T if self._keeps_earlier else 0
        y, kept = causal.convolve(self.time_conv, x, cache, keep=keep, has_bias=False, conv3d=_conv3d)
        feat_cache[i] = kept if keep else x[:, :, -causal.CACHE_T :]
        return causal.pairs_as_frames(y, self.time_conv.bias)


class _Headed(_Chunked):
    """A module whose ``head`` has a norm, SiLU and a convolution."""

    def _head_norm(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any) -> Norm | None:
        """The operands with which ``pad_frames`` computes the norm of ``head``, and SiLU after it.

        None if stock's code has to run, for example because the shape of the next entry of ``feat_cache``
        does not fit x.
        """
        if len(self.head) != 3 or not (is_plain_inference(x) and _is_plain_conv(self.head[2], x)):
            return None
        if not causal.next_fit(feat_cache, feat_idx, x, x.shape[1]):
            return None
        return norm_of(self.head[0], self.head[1], x)

    def _run_head(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any, norm: Norm) -> Tensor:
        """Runs ``head``. The result is channels-first, like stock's."""
        return self._step(self.head[2], x, feat_cache, feat_idx, norm=norm).contiguous()


class _FusedHalf(_Headed):
    """An encoder or decoder, whose first convolution and head run fused.

    x (N, C, T, H, W) -> (N, C', T', H', W'). As in stock, the result is None if a layer has too few frames
    yet and waits for the next chunk.
    """

    def forward(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, **options: Any) -> Any:
        norm = self._head_norm(x, feat_cache, feat_idx)
        if norm is None or not _is_plain_conv(self.conv1, x):
            return super().forward(x, feat_cache, *causal.given(feat_idx), **options)
        x = self._step(self.conv1, x, feat_cache, feat_idx)
        found = self._between(x, feat_cache, feat_idx, options)
        return None if found is None else self._run_head(found, feat_cache, feat_idx, norm)


def _run(layers: Any, x: Tensor, feat_cache: Any, feat_idx: Any, options: dict[str, Any]) -> Any:
    """Runs ``layers`` one after the other.

    Returns None if one of them has too few frames yet, and waits for the next chunk.
    """
    for layer in layers:
        if feat_cache is None or isinstance(layer, vae.AttentionBlock):
            x = layer(x)
        else:
            x = layer(x, feat_cache, feat_idx, **options)
        if x is None:
            return None
    return x


class EncoderBase(_FusedHalf):
    def _between(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any, options: dict[str, Any]) -> Any:
        x = _run(self.downsamples, x, feat_cache, feat_idx, options)
        return None if x is None else _run(self.middle, x, feat_cache, feat_idx, {})


class DecoderBase(_FusedHalf):
    def _between(self: Any, x: Tensor, feat_cache: Any, feat_idx: Any, options: dict[str, Any]) -> Any:
        x = _run(self.middle, x, feat_cache, feat_idx, {})
        return _run(self.upsamples, x, feat_cache, feat_idx, options)


class _DecoderOfPairs(_Headed):
    """The decoder of releases in which ``_HAS_PAIRS`` is True. Here its head runs fused.

    Stock's ``run_up`` runs one layer, and calls itself for the layers behind it. If the layer has doubled the
    number of frames to more than two, ``run_up`` calls itself once for each pair of frames. After the last
    layer it runs the head; only this step is replaced here.
    """

    def forward(self: Any, x: Tensor, *cached: Any, **options: Any) -> Any:
        # Each layer returns the layout of its input. So after this line all layers run channels-last.
        x = laid_out(x, channels_last=True) if is_plain_inference(x) else x
        return super().forward(x, *cached, **options)

    def run_up(
        self: Any, layer_idx: int, x_ref: list[Any], feat_cache: Any, feat_idx: Any, out_chunks: list[Tensor]
    ) -> None:
        norm = None
        if layer_idx >= len(self.upsamples):
            norm = self._head_norm(x_ref[0], feat_cache, feat_idx)
        if norm is None:
            stock: Any = super()
            stock.run_up(layer_idx, x_ref, feat_cache, feat_idx, out_chunks)
        else:
            out_chunks.append(self._run_head(x_ref[0], feat_cache, feat_idx, norm))
            x_ref[0] = None


class FusedAttentionBlock(vae.AttentionBlock):
    """``AttentionBlock``. x (N, C, T, H, W) -> the same; each frame attends to itself."""

    def forward(self, x: Tensor, *carried: Any, **options: Any) -> Tensor:
        # If ComfyUI has chosen xformers or sliced attention, stock's forward runs.
        is_plain = self.optimized_attention is comfy_model.pytorch_attention
        if not (is_plain and is_plain_inference(x)):
            return super().forward(x, *carried, **options)
        return causal.attend_in_frames(x, self.norm, prepared(self.to_qkv, x), prepared(self.proj, x))


class FusedResidualBlock(ResidualBlockBase, vae.ResidualBlock):
    _keeps_earlier = not _HAS_PAIRS


class FusedResample(ResampleBase, vae.Resample):
    _keeps_earlier = not _HAS_PAIRS


class FusedEncoder3d(EncoderBase, vae.Encoder3d):
    _keeps_earlier = not _HAS_PAIRS


_DecoderOfRelease: Any = _DecoderOfPairs if _HAS_PAIRS else DecoderBase


class FusedDecoder3d(_DecoderOfRelease, vae.Decoder3d):
    _keeps_earlier = not _HAS_PAIRS


# --- fusions ----------------------------------------------------------------------------------------

NORMS.add(FusedRMS)


def upsamples(block: Any) -> bool:
    """True if ``block``, a ``Resample``, is one that upsamples. Others run as stock."""
    return block.mode in ("upsample2d", "upsample3d")


BLOCKS = (
    ClassSwap(
        "comfyui_wan_norm", vae.RMS_norm, FusedRMS, sources=(tested(vae.RMS_norm, "__init__", "forward"),)
    ),
    ClassSwap(
        "comfyui_wan_conv",
        vae.CausalConv3d,
        FusedCausalConv3d,
        sources=(
            tested(vae.CausalConv3d, "__init__", "forward"),
            tested(_ops.disable_weight_init.Conv3d, "forward", "_conv_forward"),
        ),
        check=reason_to_cast,
    ),
    ClassSwap(
        "comfyui_wan_residual_block",
        vae.ResidualBlock,
        FusedResidualBlock,
        sources=(tested(vae.ResidualBlock, "__init__", "forward"),),
        check=causal.check_cache,
    ),
    ClassSwap(
        "comfyui_wan_resample",
        vae.Resample,
        FusedResample,
        sources=(tested(vae.Resample, "__init__", "forward"),),
        check=causal.check_cache,
        covers=upsamples,
    ),
    ClassSwap(
        "comfyui_wan_attention",
        vae.AttentionBlock,
        FusedAttentionBlock,
        sources=(tested(vae.AttentionBlock, "__init__", "forward"), tested(comfy_model, "pytorch_attention")),
    ),
    ClassSwap(
        "comfyui_wan_encoder",
        vae.Encoder3d,
        FusedEncoder3d,
        sources=(tested(vae.Encoder3d, "__init__", "forward"),),
        check=causal.check_cache,
    ),
    ClassSwap(
        "comfyui_wan_decoder",
        vae.Decoder3d,
        FusedDecoder3d,
        sources=(tested(vae.Decoder3d, "__init__", "forward", *(["run_up"] if _HAS_PAIRS else [])),),
        check=causal.check_cache,
    ),
)
