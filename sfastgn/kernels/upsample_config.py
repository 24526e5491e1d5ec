"""How the upsampling kernels are launched, and when the convolution behind them is cheaper at low resolution: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from sfastgn.kernels.group_norm_config import ceil_div, next_power_of_2

__all__ = ["TileConfig", "tile_config"]

# Elements of a tile, the most and the least, and those of one warp: two 16-byte loads a lane in fp16.
_TILE_MAX, _TILE_MIN, _PER_WARP = 2048, 512, 512
# Programs a multiprocessor below which tiles shrink.
_PROGRAMS_PER_SM = 4


@dataclass(frozen=True)
class TileConfig:
    """One tile of (block_hw, block_c) elements a program: pixels of all samples one after the other, and their channels."""

    block_hw: int
    block_c: int
    num_warps: int
    programs: int
    even: bool


def tile_config(pixels: int, C: int, num_sms: int) -> TileConfig:
    """How to map (pixels, C) elementwise in channels-last; ``even``: no element of any tile is masked."""
    # Whole 128-byte lines of each pixel where C allows.
    block_c = 128 if C % 128 == 0 else 64 if C > 32 else next_power_of_2(C)
    tile = _TILE_MAX
    while tile > _TILE_MIN and pixels * C < tile * num_sms * _PROGRAMS_PER_SM:
        tile //= 2
    block_hw = min(next_power_of_2(pixels), tile // block_c)
    programs = ceil_div(pixels, block_hw) * ceil_div(C, block_c)
    even = pixels % block_hw == 0 and C % block_c == 0
    return TileConfig(block_hw, block_c, max(1, tile // _PER_WARP), programs, even)
