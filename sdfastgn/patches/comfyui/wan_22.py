"""Fusions for ComfyUI's autoencoder of Wan 2.2.

Its convolutions, norms and attention are those of Wan 2.1 (``wan.py``). The other blocks are copies of Wan
2.1's blocks with the same names. In newer releases ``feat_cache`` has other entries for Wan 2.1 than before
(``_HAS_PAIRS`` in ``wan.py``), but not for Wan 2.2. Around each resampling is a shortcut, which moves
positions to channels and takes means, or repeats channels and moves them to positions. Stock writes the
result of each step to memory, and then adds the shortcut. Here the shortcut is added in place
(``fusions/packing.py``).
"""

from __future__ import annotations

from typing import Any

from comfy.ldm.wan import vae2_2
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.patches.comfyui import causal
from sdfastgn.patches.comfyui.wan import (
    DecoderBase,
    EncoderBase,
    ResampleBase,
    ResidualBlockBase,
    upsamples,
)
from sdfastgn.patches.layers.packing import add_means, add_repeated
from sdfastgn.patches.layers.video import is_plain_inference
from sdfastgn.patches.swap.fusion import ClassSwap, is_unhooked
from sdfastgn.patches.swap.tested_sources import tested


class FusedResidualBlock(ResidualBlockBase, vae2_2.ResidualBlock):
    pass


class FusedResample(ResampleBase, vae2_2.Resample):
    pass


class FusedEncoder3d(EncoderBase, vae2_2.Encoder3d):
    pass


class FusedDecoder3d(DecoderBase, vae2_2.Decoder3d):
    pass


class FusedDownResidualBlock(vae2_2.Down_ResidualBlock):
    """``Down_ResidualBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

    def forward(self, x: Tensor, *cached: Any, **options: Any) -> Tensor:
        shortcut = self.avg_shortcut
        if not (is_plain_inference(x) and _is(shortcut, vae2_2.AvgDown3D) and _owns_result(self.downsamples)):
            return super().forward(x, *cached, **options)
        x = laid_out(x, channels_last=True)
        y = x
        for layer in self.downsamples:
            y = layer(y, *cached, **options)
        return y if add_means(y, x, shortcut) else y + shortcut(x.contiguous())


class FusedUpResidualBlock(vae2_2.Up_ResidualBlock):
    """``Up_ResidualBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

    def forward(
        self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False
    ) -> Tensor:
        cached = feat_cache, *causal.given(feat_idx)
        shortcut = self.avg_shortcut
        if not (
            is_plain_inference(x)
            and (shortcut is None or _is(shortcut, vae2_2.DupUp3D))
            and _owns_result(self.upsamples)
        ):
            return super().forward(x, *cached, first_chunk=first_chunk)
        x = laid_out(x, channels_last=True)
        y = x
        for layer in self.upsamples:
            y = layer(y, *cached)
        if shortcut is None or add_repeated(y, x, shortcut, first_chunk):
            return y
        return y + shortcut(x.contiguous(), first_chunk)


def _is(shortcut: Any, cls: type[nn.Module]) -> bool:
    return type(shortcut) is cls and is_unhooked(shortcut)


def _owns_result(layers: nn.Sequential) -> bool:
    """True if the result of ``layers`` may be overwritten: no hook of a layer could have kept it."""
    return len(layers) > 0 and all(map(is_unhooked, layers))


def _swap(name: str, stock: Any, fused: Any, *more: Any, **options: Any) -> ClassSwap:
    sources = tuple(tested(cls, "__init__", "forward") for cls in (stock, *more))
    return ClassSwap(f"comfyui_wan_22_{name}", stock, fused, sources=sources, **options)


BLOCKS = (
    _swap("residual_block", vae2_2.ResidualBlock, FusedResidualBlock, check=causal.check_cache),
    _swap("resample", vae2_2.Resample, FusedResample, check=causal.check_cache, covers=upsamples),
    _swap("down_block", vae2_2.Down_ResidualBlock, FusedDownResidualBlock, vae2_2.AvgDown3D),
    _swap("up_block", vae2_2.Up_ResidualBlock, FusedUpResidualBlock, vae2_2.DupUp3D),
    _swap("encoder", vae2_2.Encoder3d, FusedEncoder3d, check=causal.check_cache),
    _swap("decoder", vae2_2.Decoder3d, FusedDecoder3d, check=causal.check_cache),
)
