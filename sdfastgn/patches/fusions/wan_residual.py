"""The residual blocks of Wan 2.2's autoencoder: their shortcuts around resampling, without copies.

The shortcut of a down block moves positions to channels and takes means of channels (``AvgDown3D``). The
shortcut of an up block repeats channels and moves them to positions (``DupUp3D``). Stock writes the result of
each step to memory, channels-first, and then adds the shortcut. Here all steps are views of channels-last
memory, so only means are written, and the shortcut is added to the block's result in place. ``wan.py`` fuses
the layers of these blocks.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from torch import Tensor, nn

from sdfastgn.kernels.common.layout import laid_out
from sdfastgn.patches.core.fusion import ClassSwap, is_unhooked
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions import causal
from sdfastgn.patches.fusions.packing import add_means, add_repeated
from sdfastgn.patches.fusions.video import is_plain_inference

__all__ = ["FUSIONS"]


def _is_shortcut(shortcut: Any, cls: type[nn.Module]) -> bool:
    return type(shortcut) is cls and is_unhooked(shortcut)


def _owns_result(block: Any, sampler: Any) -> bool:
    """True if the result of the last layer of ``block`` may be overwritten, because no other code has it.

    A hook of a layer could have kept the result. A block without layers would overwrite its input.
    """
    return len(block.resnets) > 0 and all(map(is_unhooked, (*block.resnets, *([sampler] if sampler else ()))))


if hasattr(wan, "WanResidualUpBlock"):  # not in a diffusers before Wan 2.2

    class FusedWanResidualDownBlock(wan.WanResidualDownBlock):
        """``WanResidualDownBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

        def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
            if not (
                is_plain_inference(x)
                and _is_shortcut(self.avg_shortcut, wan.AvgDown3D)
                and _owns_result(self, self.downsampler)
            ):
                return super().forward(x, feat_cache, *causal.given(feat_idx))
            cached = {"feat_cache": feat_cache, "feat_idx": [0] if feat_idx is None else feat_idx}
            x = laid_out(x, channels_last=True)
            y = x
            for layer in (*self.resnets, *([] if self.downsampler is None else [self.downsampler])):
                y = layer(y, **cached)
            return y if add_means(y, x, self.avg_shortcut) else y + self.avg_shortcut(x.contiguous())

    class FusedWanResidualUpBlock(wan.WanResidualUpBlock):
        """``WanResidualUpBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

        def forward(
            self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False
        ) -> Tensor:
            shortcut = self.avg_shortcut
            if not (
                is_plain_inference(x)
                and (shortcut is None or _is_shortcut(shortcut, wan.DupUp3D))
                and _owns_result(self, self.upsampler)
            ):
                return super().forward(x, feat_cache, *causal.given(feat_idx), first_chunk=first_chunk)
            cached: dict[str, Any] = {}
            if feat_cache is not None:
                cached = {"feat_cache": feat_cache, "feat_idx": [0] if feat_idx is None else feat_idx}
            x = laid_out(x, channels_last=True)
            y = x
            for layer in (*self.resnets, *([] if self.upsampler is None else [self.upsampler])):
                y = layer(y, **cached)
            if shortcut is None or add_repeated(y, x, shortcut, first_chunk):
                return y
            return y + shortcut(x.contiguous(), first_chunk=first_chunk)


def _fusion(name: str, stock: Any, fused: Any, shortcut: Any) -> ClassSwap:
    sources = (tested(stock, "__init__", "forward"), tested(shortcut, "__init__", "forward"))
    return ClassSwap(f"wan_residual_{name}", stock, fused, sources=sources)


FUSIONS: tuple[ClassSwap, ...] = ()
if hasattr(wan, "WanResidualUpBlock"):
    FUSIONS = (
        _fusion("down_block", wan.WanResidualDownBlock, FusedWanResidualDownBlock, wan.AvgDown3D),
        _fusion("up_block", wan.WanResidualUpBlock, FusedWanResidualUpBlock, wan.DupUp3D),
    )
