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
from sdfastgn.patches.fusions.packing import cells_of
from sdfastgn.patches.fusions.video import is_plain_inference

__all__ = ["FUSIONS"]


def _leading(factors: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Keeps leading ``factors`` until their product is ``count``, and replaces the others by 1.

    None if no such product is ``count``. Example: (2, 2, 2) and 4 -> (2, 2, 1).
    """
    found = []
    for factor in factors:
        if count == 1:
            found.append(1)
        elif count % factor == 0:
            found.append(factor)
            count //= factor
        else:
            return None
    return tuple(found) if count == 1 else None


def _is_shortcut(shortcut: Any, cls: type[nn.Module]) -> bool:
    return type(shortcut) is cls and is_unhooked(shortcut)


def _owns_result(block: Any, sampler: Any) -> bool:
    """True if only ``block`` has the result of its last layer, so that this result may be overwritten.

    A hook of a layer could have kept the result.
    """
    return len(block.resnets) > 0 and all(map(is_unhooked, (*block.resnets, *([sampler] if sampler else ()))))


def _add_repeated(y: Tensor, x: Tensor, shortcut: Any, first_chunk: bool) -> bool:
    """Adds ``shortcut(x, first_chunk)`` to y and returns True. If the sizes do not fit, returns False."""
    N, C, T, H, W = x.shape
    factors = shortcut.factor_t, shortcut.factor_s, shortcut.factor_s
    skipped = factors[0] - 1 if first_chunk else 0
    frames, C_out, repeats = T * factors[0] - skipped, shortcut.out_channels, shortcut.repeats
    size = (N, C_out, frames, H * factors[1], W * factors[2])
    # In a first chunk, stock drops the first factor_t - 1 frames. Here that is supported for chunks of one
    # frame: of its copies only the last one remains.
    if tuple(y.shape) != size or shortcut.in_channels != C or (skipped and T != 1):
        return False
    # A channel of x is repeated over ``repeats`` places, numbered by (C_out, frame, row, column of a cell).
    # If there are fewer repeats than positions in a cell, the channel fills the innermost positions, and
    # ``steps`` are the sizes of the outer positions, which other channels fill. Otherwise it fills whole
    # cells of ``alike`` channels.
    alike = max(1, repeats // shortcut.factor)
    steps = _leading(factors, alike * shortcut.factor // repeats)
    if steps is None or alike * shortcut.factor % repeats:
        return False
    read = x.movedim(1, -1).unflatten(-1, (-1, *steps)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    if skipped:
        read, factors = read[:, :, -1:], (1, *factors[1:])
    cells_of(y, factors).unflatten(-1, (-1, alike)).add_(read[..., None])
    return True


def _add_means(y: Tensor, x: Tensor, shortcut: Any) -> bool:
    """Adds ``shortcut(x)`` to y and returns True. If the sizes do not fit, returns False."""
    N, C, T, H, W = x.shape
    factors = t, h, w = shortcut.factor_t, shortcut.factor_s, shortcut.factor_s
    size = (N, shortcut.out_channels, T // t, H // h, W // w)
    if T % t or H % h or W % w or tuple(y.shape) != size or shortcut.in_channels != C:
        return False
    # A mean is over ``group_size`` places of x, numbered by (C, frame, row, column of a cell). If these are
    # fewer than the positions in a cell, the mean is over the innermost positions, and ``steps`` are the
    # sizes of the outer ones. Otherwise it is over whole cells of ``alike`` channels.
    alike = max(1, shortcut.group_size // shortcut.factor)
    kept = alike * shortcut.factor // shortcut.group_size
    steps = _leading(factors, kept)
    if steps is None or alike * shortcut.factor % shortcut.group_size or C % alike:
        return False
    cells = cells_of(x, factors)
    over = [axis for axis, step, factor in zip((2, 4, 6), steps, factors, strict=True) if step != factor]
    if alike > 1:
        cells = cells.unflatten(-1, (-1, alike))
        over.append(8)
    if over:
        cells = cells.mean(dim=over, keepdim=True)
    if alike > 1:
        cells = cells.squeeze(8)
    # (N, T, H, W, C, steps)
    cells = cells.permute(0, 1, 3, 5, 7, 2, 4, 6)
    y.movedim(1, -1).unflatten(-1, (-1, *steps)).add_(cells)
    return True


if hasattr(wan, "WanResidualUpBlock"):  # not in a diffusers before Wan 2.2

    class FusedWanResidualDownBlock(wan.WanResidualDownBlock):
        """``WanResidualDownBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

        def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
            given = (feat_cache,) if feat_idx is None else (feat_cache, feat_idx)
            if not (
                is_plain_inference(x)
                and _is_shortcut(self.avg_shortcut, wan.AvgDown3D)
                and _owns_result(self, self.downsampler)
            ):
                return super().forward(x, *given)
            x = laid_out(x, channels_last=True)
            y = x
            for layer in (*self.resnets, *([] if self.downsampler is None else [self.downsampler])):
                y = layer(y, *given)
            return y if _add_means(y, x, self.avg_shortcut) else y + self.avg_shortcut(x.contiguous())

    class FusedWanResidualUpBlock(wan.WanResidualUpBlock):
        """``WanResidualUpBlock``. x (N, C, T, H, W) -> (N, C_out, T', H', W'), channels-last."""

        def forward(
            self, x: Tensor, feat_cache: Any = None, feat_idx: Any = None, first_chunk: bool = False
        ) -> Tensor:
            given = (feat_cache,) if feat_idx is None else (feat_cache, feat_idx)
            shortcut = self.avg_shortcut
            if not (
                is_plain_inference(x)
                and (shortcut is None or _is_shortcut(shortcut, wan.DupUp3D))
                and _owns_result(self, self.upsampler)
            ):
                return super().forward(x, *given, first_chunk=first_chunk)
            x = laid_out(x, channels_last=True)
            y = x
            for layer in (*self.resnets, *([] if self.upsampler is None else [self.upsampler])):
                y = layer(y, *given)
            if shortcut is None or _add_repeated(y, x, shortcut, first_chunk):
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
