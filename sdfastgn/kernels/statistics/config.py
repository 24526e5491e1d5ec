"""The launch configuration of ``statistics/kernels.py``: pure functions of sizes and the number of SMs.

The constants were chosen on an H200 (docs/adr/0006-group-norm-kernels.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import (
    MAX_OFFSET,
    WARP_LOAD,
    ceil_div,
    next_power_of_2,
    power_of_2_below,
)

# Maximum number of warps of a program. For channels-first tensors it is also limited by the number of
# channels.
_STATISTICS_WARPS = 4
# For each kind of reduction: warps per multiprocessor, and minimum and maximum number of steps of a tile. For
# each step of a tile, a thread has one load in flight. More warps and more steps keep the memory busier. But
# more warps also mean more chunks, whose results must be merged. Kernels of kind "read" only read x, kernels
# of kind "write" also write x, and kernels of kind "backward" read two tensors. The last two kinds have
# enough accesses in flight with fewer steps, and are faster with more warps.
_REDUCTIONS = {"read": (8, 8, 16), "write": (16, 8, 8), "backward": (16, 4, 4)}
# Number of groups of the GroupNorm that ``statistics_pay`` assumes, because it does not know the norm. Stable
# Diffusion's norms have 32 groups.
_USUAL_GROUPS = 32
# If groups have at least this number of elements, GroupNorm is faster if the kernel that writes its input
# also computes the statistics. Elements are counted with channels and positions rounded up to powers of 2. If
# groups are smaller, GroupNorm is faster without given statistics: it then needs a single launch instead of
# two.
_STATISTICS_MIN_ELEMENTS = 16384


@dataclass(frozen=True)
class StatisticsConfig:
    """How the kernel divides x (N, C, HW): the HW positions into chunks, and the chunks among warps.

    There are ``chunks`` chunks of ``rows`` positions. Each warp reduces one chunk by itself, in (lanes,
    steps, block) tiles of ``tile_rows`` positions.

    If x is channels-last, ``block`` is a number of channels, and a program's ``num_warps`` warps reduce
    neighboring chunks of the same channels. If x is channels-first, ``block`` is a number of positions, and
    the warps reduce the same chunk of neighboring channels.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int
    tile_rows: int
    rows: int
    chunks: int

    def programs(self, N: int, C: int, channels_last: bool) -> int:
        """Number of programs for x (N, C, HW)."""
        if channels_last:
            return N * ceil_div(C, self.block) * ceil_div(self.chunks, self.num_warps)
        return N * ceil_div(C, self.num_warps) * self.chunks


def statistics_config(
    N: int, C: int, HW: int, channels_last: bool, num_sms: int, *, kind: str = "read"
) -> StatisticsConfig:
    """The configuration of a kernel that reduces x (N, C, HW) to values for each channel and chunk.

    ``kind``: "read" if the kernel only reads x, "write" if it computes and writes x, "backward" if it reads x
    and a gradient.
    """
    warps_per_sm, steps_min, steps_max = _REDUCTIONS[kind]
    if channels_last:
        # If C is large enough, a block is a whole cache line of 128 bytes: 64 channels of 16 bits.
        block = min(64, next_power_of_2(C))
        lanes, columns, warps = WARP_LOAD // block, ceil_div(C, block), _STATISTICS_WARPS
    else:
        block, lanes, columns = min(WARP_LOAD, next_power_of_2(HW)), 1, C
        warps = min(_STATISTICS_WARPS, next_power_of_2(C))
    step_rows = lanes if channels_last else block
    wanted = ceil_div(N * columns * HW, num_sms * warps_per_sm)  # positions of x that each warp should reduce
    steps = max(steps_min, min(steps_max, power_of_2_below(wanted // step_rows)))
    steps = min(steps, next_power_of_2(ceil_div(HW, step_rows)))
    tile_rows = step_rows * steps
    # ``most`` is the maximum number of tiles of a chunk. If x is channels-last, each warp of a program
    # reduces another chunk, so there should be at least as many chunks as a program has warps.
    most = ceil_div(ceil_div(HW, tile_rows), warps if channels_last else 1)
    chunks = ceil_div(HW, _whole_chunks(HW, tile_rows, min(max(1, wanted // tile_rows), most)))
    if channels_last:
        chunks = max(chunks, ceil_div(HW, max(1, MAX_OFFSET // C)))
    # A chunk has ceil(HW / chunks) rows. Kernels that read the statistics know only the number of chunks, and
    # compute the number of rows of a chunk by this formula.
    return StatisticsConfig(lanes, warps, steps, block, tile_rows, ceil_div(HW, chunks), chunks)


@functools.lru_cache(maxsize=1024)
def statistics_pay(C: int, HW: int) -> bool:
    """True if GroupNorm of x (N, C, HW) is faster if the kernel that writes x also computes statistics."""
    return next_power_of_2(ceil_div(C, _USUAL_GROUPS)) * next_power_of_2(HW) >= _STATISTICS_MIN_ELEMENTS


def _whole_chunks(HW: int, tile_rows: int, tiles: int) -> int:
    """Number of rows of a chunk, which has at most ``tiles`` tiles.

    The chunk has the largest number of tiles, from ``tiles`` down to half of ``tiles``, with which chunks
    divide HW evenly. If no number does, it has ``tiles`` tiles.
    """
    for count in range(tiles, max(1, tiles // 2) - 1, -1):
        if HW % (tile_rows * count) == 0:
            return tile_rows * count
    return tile_rows * tiles
