"""The launch configuration of ``statistics/kernels.py``: pure functions of sizes and multiprocessors.

The constants were chosen on an H200 (docs/adr/0006-group-norm-kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import (
    MAX_OFFSET,
    WARP_LOAD,
    ceil_div,
    next_power_of_2,
    power_of_2_below,
)

# Warps of a program; fewer if a channels-first tensor has fewer channels.
_STATISTICS_WARPS = 4
# Kind of reduction -> (warps per multiprocessor, fewest steps of a tile, most steps of a tile).
# Each step of a tile is a load in flight. More warps and more steps keep memory busier, but more warps
# also mean more chunks, whose results must be merged. "write" also writes what it reads and "backward"
# reads two tensors: both have enough accesses in flight with fewer steps, and are faster with more warps.
_REDUCTIONS = {"read": (8, 8, 16), "write": (16, 8, 8), "backward": (16, 4, 4)}
# Number of groups that ``statistics_pay`` assumes, because it does not know the norm: Stable Diffusion's.
_USUAL_GROUPS = 32
# Elements of a group, each size padded to a power of 2, from which on statistics from the producer make
# the norm faster. A smaller group is normalized by one launch, which is faster than merge and apply.
_STATISTICS_MIN_ELEMENTS = 16384


@dataclass(frozen=True)
class StatisticsConfig:
    """How the HW positions of x (N, C, HW) are divided into chunks, and those among the warps.

    There are ``chunks`` chunks of ``rows`` positions. Each warp reduces one chunk by itself, in (lanes,
    steps, block) tiles of ``tile_rows`` positions.

    Channels-last: ``block`` is a number of channels, and a program's ``num_warps`` warps reduce neighboring
    chunks of the same channels. Channels-first: ``block`` is a number of positions, and the warps reduce
    the same chunk of neighboring channels.
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
    """How to reduce x (N, C, HW) to values for each channel and chunk.

    ``kind``: the kernel only reads x ("read"), computes and writes x ("write"), or reads x and a gradient
    ("backward").
    """
    warps_per_sm, steps_min, steps_max = _REDUCTIONS[kind]
    if channels_last:
        # Whole 128-byte lines of memory, which are 64 channels in 16 bits, if C allows.
        block = min(64, next_power_of_2(C))
        lanes, columns, warps = WARP_LOAD // block, ceil_div(C, block), _STATISTICS_WARPS
    else:
        block, lanes, columns = min(WARP_LOAD, next_power_of_2(HW)), 1, C
        warps = min(_STATISTICS_WARPS, next_power_of_2(C))
    step_rows = lanes if channels_last else block
    wanted = ceil_div(N * columns * HW, num_sms * warps_per_sm)  # rows for each warp
    steps = max(steps_min, min(steps_max, power_of_2_below(wanted // step_rows)))
    steps = min(steps, next_power_of_2(ceil_div(HW, step_rows)))
    tile_rows = step_rows * steps
    # Most tiles of a chunk: channels-last there are at least as many chunks as a program has warps.
    most = ceil_div(ceil_div(HW, tile_rows), warps if channels_last else 1)
    chunks = ceil_div(HW, _whole_chunks(HW, tile_rows, min(max(1, wanted // tile_rows), most)))
    if channels_last:
        chunks = max(chunks, ceil_div(HW, max(1, MAX_OFFSET // C)))
    # ceil(HW / chunks), because readers of the statistics know only the number of chunks.
    return StatisticsConfig(lanes, warps, steps, block, tile_rows, ceil_div(HW, chunks), chunks)


def statistics_pay(C: int, HW: int) -> bool:
    """True if GroupNorm of x (N, C, HW) is faster when the kernel that writes x also gives statistics."""
    return next_power_of_2(ceil_div(C, _USUAL_GROUPS)) * next_power_of_2(HW) >= _STATISTICS_MIN_ELEMENTS


def _whole_chunks(HW: int, tile_rows: int, tiles: int) -> int:
    """Rows of a chunk of at most ``tiles`` tiles.

    The largest number of tiles, from ``tiles`` down to its half, whose chunks divide HW evenly. ``tiles``
    if there is none.
    """
    for count in range(tiles, max(1, tiles // 2) - 1, -1):
        if HW % (tile_rows * count) == 0:
            return tile_rows * count
    return tile_rows * tiles
