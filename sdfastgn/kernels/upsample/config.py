"""How the upsampling kernels are launched, and when the convolution behind them is cheaper at low
resolution: pure functions of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Elements of a tile, at most and at least.
_TILE_MAX = 2048
_TILE_MIN = 512
# Elements of a warp: two 16-byte loads a lane in fp16.
_PER_WARP = 512
# Weights of a tile: one warp and one load a lane, because each is read nine and written sixteen times.
_WEIGHTS_TILE = 256
# Programs per multiprocessor below which tiles shrink.
_PROGRAMS_PER_SM = 4
# Multiplications and additions a second of an H200's convolutions, by bytes of an element (fp32 in TF32).
_FLOPS = {2: 600e12, 4: 300e12}
# Bytes a second of its memory.
_BYTES = 3.5e12
# Seconds from the start of a kernel to the next.
_LAUNCH = 1.5e-6


@dataclass(frozen=True)
class TileConfig:
    """One tile of (block_rows, block_c) elements a program: rows are pixels of all samples one after
    the other, or output channels.
    """

    block_rows: int
    block_c: int
    num_warps: int
    programs: int
    even: bool


def tile_config(pixels: int, C: int, num_sms: int) -> TileConfig:
    """How to map (pixels, C) elementwise in channels-last; ``even``: no element of any tile is masked."""
    tile = _TILE_MAX
    while tile > _TILE_MIN and pixels * C < tile * num_sms * _PROGRAMS_PER_SM:
        tile //= 2
    return _tiles(pixels, C, tile, max(1, tile // _PER_WARP))


def weights_config(C_out: int, C_in: int) -> TileConfig:
    """How to map (C_out, C_in), of which a program reads nine and writes sixteen times its tile: one
    warp and one load a lane each.
    """
    return _tiles(C_out, C_in, _WEIGHTS_TILE, 1)


def _tiles(rows: int, C: int, tile: int, num_warps: int) -> TileConfig:
    # Whole 128-byte lines of each row where C allows.
    block_c = 128 if C % 128 == 0 else 64 if C > 32 else next_power_of_2(C)
    block_rows = min(next_power_of_2(rows), tile // block_c)
    programs = ceil_div(rows, block_rows) * ceil_div(C, block_c)
    even = rows % block_rows == 0 and C % block_c == 0
    return TileConfig(block_rows, block_c, num_warps, programs, even)


def phases_pay(N: int, C_in: int, C_out: int, H: int, W: int, itemsize: int) -> bool:
    """Whether four 2 x 2 convolutions of (N, C_in, H, W) are cheaper than a 3 x 3 one of the upsampled image.

    They save 5/9 of the multiplications, and writing and reading the upsampled image. They cost
    weights that are made at each call, and one more row and column of pixels. The pass that
    interleaves them stands for the one that adds the bias.
    """
    if N * 4 * C_out * (H + 1) * (W + 1) >= 2**31:
        return False  # beyond what cuDNN indexes
    saved_flops = 2 * C_in * C_out * N * (9 * 4 * H * W - 4 * 4 * (H + 1) * (W + 1))
    saved_bytes = (5 * N * H * W * C_in - (9 + 16) * C_in * C_out) * itemsize
    return saved_flops / _FLOPS[itemsize] + saved_bytes / _BYTES > _LAUNCH
