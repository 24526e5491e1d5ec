"""The launch configurations of the upsampling kernels, and the decision between two ways to convolve.

``phases_pay`` decides whether an upsampled image is convolved at low resolution (``upsample/conv.py``). All
functions here are pure functions of sizes and of the number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Maximum number of elements of a tile of an image in an elementwise kernel.
_TILE_MAX = 2048
# Minimum number of elements of a tile of an image in an elementwise kernel.
_TILE_MIN = 512
# Number of elements of a tile of an image for each warp. In fp16 these are two 16-byte loads of each lane.
_PER_WARP = 512
# Number of elements of a tile of convolution weights. In fp16 these are one 16-byte load of each lane of one
# warp. The tile is small, because a program reads nine tiles (3 x 3 weights) and writes sixteen tiles (2 x 2
# weights of four convolutions).
_WEIGHTS_TILE = 256
# Tiles of images are made smaller until there are this many programs for each multiprocessor.
_PROGRAMS_PER_SM = 4
# Multiplications and additions per second of a convolution on an H200, for elements of 2 bytes and of 4
# bytes. fp32 is computed as TF32.
_FLOPS = {2: 600e12, 4: 300e12}
# Speed of an H200's memory, in bytes per second.
_BYTES = 3.5e12
# Seconds that one more kernel adds to the GPU time of a call.
_LAUNCH = 1.5e-6


@dataclass(frozen=True)
class TileConfig:
    """The sizes of tiles. A program processes a tile of ``block_rows`` rows and ``block_c`` channels.

    For images, each pixel is a row; the pixels of all samples are numbered consecutively. For weights, each
    output channel is a row. ``even``: True if no element of any tile is masked.
    """

    block_rows: int
    block_c: int
    num_warps: int
    programs: int
    even: bool


def tile_config(pixels: int, C: int, num_sms: int) -> TileConfig:
    """The configuration of an elementwise kernel for a channels-last image of shape (pixels, C)."""
    tile = _TILE_MAX
    while tile > _TILE_MIN and pixels * C < tile * num_sms * _PROGRAMS_PER_SM:
        tile //= 2
    return _tiles(pixels, C, tile, max(1, tile // _PER_WARP))


def weights_config(C_out: int, C_in: int) -> TileConfig:
    """The configuration of the kernel that computes 2 x 2 weights from 3 x 3 weights (``conv.py``)."""
    return _tiles(C_out, C_in, _WEIGHTS_TILE, 1)


def _tiles(rows: int, C: int, tile: int, num_warps: int) -> TileConfig:
    """The configuration for a (rows, C) tensor with tiles of about ``tile`` elements."""
    # With at least 64 channels, a tile of 16-bit values reads whole cache lines of 128 bytes.
    block_c = 128 if C % 128 == 0 else 64 if C > 32 else next_power_of_2(C)
    block_rows = min(next_power_of_2(rows), tile // block_c)
    programs = ceil_div(rows, block_rows) * ceil_div(C, block_c)
    even = rows % block_rows == 0 and C % block_c == 0
    return TileConfig(block_rows, block_c, num_warps, programs, even)


def phases_pay(N: int, C_in: int, C_out: int, H: int, W: int, itemsize: int) -> bool:
    """True if ``upsample_conv2d`` of x (N, C_in, H, W) is faster as four 2 x 2 convolutions (``conv.py``).

    The alternative is one 3 x 3 convolution of the upsampled x. The four convolutions together need only 4/9
    of the alternative's multiplications, and no upsampled image is written and read. But each call must
    compute the weights of the four convolutions, and each convolution computes one more row and one more
    column of pixels. A last pass interleaves the four results. This pass takes no extra time, because it
    replaces the pass that adds the bias.

    ``itemsize``: bytes of an element, 2 or 4.
    """
    if N * 4 * C_out * (H + 1) * (W + 1) >= 2**31:
        return False  # the result of the four convolutions is too large for cuDNN's 32-bit offsets
    saved_flops = 2 * C_in * C_out * N * (9 * 4 * H * W - 4 * 4 * (H + 1) * (W + 1))
    saved_bytes = (5 * N * H * W * C_in - (9 + 16) * C_in * C_out) * itemsize
    return saved_flops / _FLOPS[itemsize] + saved_bytes / _BYTES > _LAUNCH
