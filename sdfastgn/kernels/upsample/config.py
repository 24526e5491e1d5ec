"""The launch configurations of the upsampling kernels, and when a convolution is faster at low resolution.

Pure functions of sizes and multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Maximum number of elements of an elementwise tile.
_TILE_MAX = 2048
# Minimum number of elements of an elementwise tile.
_TILE_MIN = 512
# Elements of a tile for each warp: two 16-byte loads of each lane in fp16.
_PER_WARP = 512
# Elements of a tile of weights: one load of each lane of one warp. Tiles are small, because a program reads
# nine of them and writes sixteen.
_WEIGHTS_TILE = 256
# Minimum number of programs for each multiprocessor. If there are fewer, tiles are made smaller.
_PROGRAMS_PER_SM = 4
# Bytes of an element -> speed of convolutions on an H200, in multiplications and additions per second. fp32
# runs as TF32.
_FLOPS = {2: 600e12, 4: 300e12}
# Bytes that an H200's memory delivers in a second.
_BYTES = 3.5e12
# Seconds by which one more kernel lengthens a call.
_LAUNCH = 1.5e-6


@dataclass(frozen=True)
class TileConfig:
    """A program has a tile of ``block_rows`` rows and ``block_c`` channels.

    Rows are the pixels of all samples, numbered consecutively. For weights, rows are the output channels.
    ``even``: True if no element of any tile is masked.
    """

    block_rows: int
    block_c: int
    num_warps: int
    programs: int
    even: bool


def tile_config(pixels: int, C: int, num_sms: int) -> TileConfig:
    """The configuration of an elementwise kernel on channels-last (pixels, C)."""
    tile = _TILE_MAX
    while tile > _TILE_MIN and pixels * C < tile * num_sms * _PROGRAMS_PER_SM:
        tile //= 2
    return _tiles(pixels, C, tile, max(1, tile // _PER_WARP))


def weights_config(C_out: int, C_in: int) -> TileConfig:
    """The configuration of the kernel that computes the phases' weights, on (C_out, C_in)."""
    return _tiles(C_out, C_in, _WEIGHTS_TILE, 1)


def _tiles(rows: int, C: int, tile: int, num_warps: int) -> TileConfig:
    """The configuration with tiles of about ``tile`` elements of (rows, C)."""
    # Read whole 128-byte lines of memory, if C is large enough. In 16 bits a line is 64 channels.
    block_c = 128 if C % 128 == 0 else 64 if C > 32 else next_power_of_2(C)
    block_rows = min(next_power_of_2(rows), tile // block_c)
    programs = ceil_div(rows, block_rows) * ceil_div(C, block_c)
    even = rows % block_rows == 0 and C % block_c == 0
    return TileConfig(block_rows, block_c, num_warps, programs, even)


def phases_pay(N: int, C_in: int, C_out: int, H: int, W: int, itemsize: int) -> bool:
    """True if four 2 x 2 convolutions of x (N, C_in, H, W) are faster than a 3 x 3 one of the upsampled x.

    The four convolutions save 5/9 of the multiplications, and writing and reading the upsampled image. They
    cost the computation of the phases' weights at each call, and one more row and column of pixels. The pass
    that interleaves the phases costs nothing extra: it replaces the pass that adds the bias.

    ``itemsize``: bytes of an element, 2 or 4.
    """
    if N * 4 * C_out * (H + 1) * (W + 1) >= 2**31:
        return False  # cuDNN has 32-bit offsets
    saved_flops = 2 * C_in * C_out * N * (9 * 4 * H * W - 4 * 4 * (H + 1) * (W + 1))
    saved_bytes = (5 * N * H * W * C_in - (9 + 16) * C_in * C_out) * itemsize
    return saved_flops / _FLOPS[itemsize] + saved_bytes / _BYTES > _LAUNCH
