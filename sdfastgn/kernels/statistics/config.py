"""How the kernels of statistics are launched: pure functions of sizes and the GPU's number of
multiprocessors.
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

# Warps of a program.
_STATISTICS_WARPS = 4
# (warps per multiprocessor, fewest steps, most steps) of a reduction. Steps of a tile are loads in
# flight: enough to keep memory busy, few enough chunks to merge. A kernel that also writes, or reads
# two tensors, has more in flight with more and smaller tiles.
_REDUCTIONS = {"read": (8, 8, 16), "write": (16, 8, 8), "backward": (16, 4, 4)}
# Groups that a norm is taken to have where that is not known yet.
_USUAL_GROUPS = 32
# Padded elements of a group below which its one launch is shorter than two that read statistics.
_STATISTICS_MIN_ELEMENTS = 16384


@dataclass(frozen=True)
class StatisticsConfig:
    """Mean and M2 of every channel over ``chunks`` of ``rows`` positions each, one chunk a warp.

    Each warp walks its chunk by itself, in (lanes, steps, block) tiles of ``tile_rows`` positions.
    Channels-last: ``block`` channels of each position, and the warps of a program have neighbouring
    chunks. Channels-first: ``block`` positions of one channel, and the warps have neighbouring
    channels.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int
    tile_rows: int
    rows: int
    chunks: int

    def programs(self, N: int, C: int, channels_last: bool) -> int:
        """Programs for (N, C, HW)."""
        if channels_last:
            return N * ceil_div(C, self.block) * ceil_div(self.chunks, self.num_warps)
        return N * ceil_div(C, self.num_warps) * self.chunks


def statistics_config(
    N: int, C: int, HW: int, channels_last: bool, num_sms: int, *, kind: str = "read"
) -> StatisticsConfig:
    """How to reduce (N, C, HW) to values per channel and chunk.

    ``kind``: the kernel reads x (``read``), makes x and writes it (``write``), or reads x and a
    gradient (``backward``).
    """
    warps_per_sm, steps_min, steps_max = _REDUCTIONS[kind]
    if channels_last:
        # Whole 128-byte lines of each row where C allows.
        block = min(64, next_power_of_2(C))
        lanes, columns, warps = WARP_LOAD // block, ceil_div(C, block), _STATISTICS_WARPS
    else:
        block, lanes, columns = min(WARP_LOAD, next_power_of_2(HW)), 1, C
        warps = min(_STATISTICS_WARPS, next_power_of_2(C))
    step_rows = lanes if channels_last else block
    wanted = ceil_div(N * columns * HW, num_sms * warps_per_sm)  # rows a warp
    steps = max(steps_min, min(steps_max, power_of_2_below(wanted // step_rows)))
    steps = min(steps, next_power_of_2(ceil_div(HW, step_rows)))
    tile_rows = step_rows * steps
    # Each warp of a program wants a chunk, also where the samples are so many that one warp could
    # take a whole one.
    most = ceil_div(ceil_div(HW, tile_rows), warps if channels_last else 1)
    chunks = ceil_div(HW, _whole_chunks(HW, tile_rows, min(max(1, wanted // tile_rows), most)))
    if channels_last:
        chunks = max(chunks, ceil_div(HW, max(1, MAX_OFFSET // C)))
    # Chunks as equal as can be: their number alone then says how many rows each has.
    return StatisticsConfig(lanes, warps, steps, block, tile_rows, ceil_div(HW, chunks), chunks)


def statistics_pay(C: int, HW: int) -> bool:
    """True if the GroupNorm of a tensor of C channels and HW positions is quicker with statistics from
    whatever writes the tensor.
    """
    return next_power_of_2(ceil_div(C, _USUAL_GROUPS)) * next_power_of_2(HW) >= _STATISTICS_MIN_ELEMENTS


def _whole_chunks(HW: int, tile_rows: int, tiles: int) -> int:
    """Rows of a chunk of about ``tiles`` tiles; such that chunks fill HW without a rest if one up to
    half as long does.
    """
    for count in range(tiles, max(1, tiles // 2) - 1, -1):
        if HW % (tile_rows * count) == 0:
            return tile_rows * count
    return tile_rows * tiles
