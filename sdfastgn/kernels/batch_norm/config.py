"""The launch configurations of BatchNorm's kernels: pure functions of sizes.

There are two ways to launch the kernels: one launch for small x, or several launches.
``batch_norm/kernels.py`` explains both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP_LOAD, ceil_div, next_power_of_2
from sdfastgn.kernels.group_norm.config import MergeConfig, SmallConfig
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config

# Number of 16-bit elements in a load of 16 bytes.
_LOADED = 8
# Maximum number of columns of a row that has several positions of a channels-last x (``Rows``). It is the
# number of columns of a warp's tile in the statistics kernel. Each column gives a partial result of its
# channel, so more columns would mean more results to merge.
_SIDE_BY_SIDE = 64

# --- small: a program holds all positions of a few channels in registers

# Maximum number of elements of a program, with sizes rounded up to powers of 2, if one launch does everything
# (``small_config``). With more elements, several launches are faster.
_SMALL_MAX_ELEMENTS = 16384
# Maximum number of elements of a program if one launch does everything, for a forward with few programs: at
# most one for each multiprocessor, and at least one for every ``_SMALL_ALONE_PART`` multiprocessors. A
# program with this number of elements fills its multiprocessor. Each thread has only 64 registers and spills
# some of them. This costs less time than several launches, which read x twice.
_SMALL_MAX_ALONE = 32768
_SMALL_ALONE_PART = 3
# Maximum number of elements of x in a program of a backward that is a single launch (``small_config``). It is
# smaller than in the forward, because registers hold both x and dy. Small channels-first images have the
# forward's maximum, ``_SMALL_MAX_ELEMENTS``.
_SMALL_BACKWARD_MAX_ELEMENTS = 8192
# Channels of a channels-last program if one launch does everything (``small_config``). With 16 bits each,
# these channels are a whole 32-byte sector of memory. A channels-first program has one channel, whose
# positions are contiguous.
_SMALL_CHANNELS_LAST = 16
# Number of elements for each warp if one launch does everything (``small_config``): 32 for each lane.
_SMALL_PER_WARP = 1024

# --- merge

# Maximum number of channels of a program of a merge kernel, which combines all partial results of a channel.
# In fp32 these channels are a whole 32-byte sector of memory.
_MERGE_CHANNELS = 8
# Minimum number of channels of a merge kernel's program. Programs have so few channels only if each channel
# has many partial results.
_MERGE_MIN_CHANNELS = 2
# Maximum number of elements of a tile of (partial results, channels) of a kernel that merges partial results.
# A program that needs several tiles waits for memory at each tile.
_MERGE_TILE = 8192
# Number of elements for each warp of a tile of a kernel that merges partial results: 16 for each lane.
_MERGE_PER_WARP = 512
# Maximum number of partial results of a channel that one tile of a merging kernel holds, with
# ``_MERGE_CHANNELS`` channels in the tile. If a channels-last backward has more, each program that makes
# partial results first adds up the sums of its warps.
MERGED_AT_ONCE = _MERGE_TILE // _MERGE_CHANNELS


class Rows(NamedTuple):
    """The sizes with which the kernels index x: ``samples`` samples of ``rows`` rows of ``width`` columns.

    If x is channels-last, the positions of all samples are contiguous, so the whole batch is one sample. If
    the channels of a position are not a whole number of 16-byte loads, a row has ``width // C`` neighboring
    positions, so that longer loads fit.

    If x is channels-first, a row is a position, and a column is a channel.
    """

    samples: int
    rows: int
    width: int
    channels_last: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, C and HW for functions of GroupNorm and statistics: numbers of samples, columns and rows."""
        return self.samples, self.width, self.rows

    @property
    def image(self) -> int | None:
        """Number of positions of a channels-first image; None if x is channels-last."""
        return None if self.channels_last else self.rows


def as_rows(N: int, C: int, HW: int, channels_last: bool) -> Rows:
    """Computes the numbers of samples, rows and columns for a tensor (N, C, HW) without gaps (``Rows``)."""
    if not channels_last and HW > 1:
        return Rows(N, HW, C, False)
    positions, together = N * HW, 1
    # If rows have several positions, all chunks must have the same size (``moments_config``). In the worst
    # case there is a single chunk, all of x. Offsets in a chunk are int32, so x must not be larger than
    # ``MAX_OFFSET``.
    while (
        together * C % _LOADED
        and 2 * together * C <= _SIDE_BY_SIDE
        and positions % (2 * together) == 0
        and positions * C <= MAX_OFFSET
    ):
        together *= 2
    return Rows(1, positions // together, together * C, True)


def moments_config(rows: Rows, C: int, num_sms: int) -> StatisticsConfig:
    """The configuration of the kernel that computes statistics, which ``merge_kernel`` then merges.

    ``merge_kernel`` treats all chunks of a channel as chunks of one sample, in which only the last chunks may
    be shorter. So if a channel has several samples or several columns, all its chunks must have the same
    size.
    """
    config = statistics_config(*rows.shape, rows.channels_last, num_sms)
    if rows.samples == 1 and rows.width == C:
        return config
    chunks = next(n for n in range(config.chunks, 0, -1) if rows.rows % n == 0)
    return replace(config, rows=rows.rows // chunks, chunks=chunks)


def small_config(rows: Rows, C: int, num_sms: int, *, backward: bool = False) -> SmallConfig | None:
    """The configuration of a single launch, in which a program has all positions of some channels.

    The result's ``block`` is the number of these channels. None if several launches are faster, or if x is
    too large for int32 offsets.
    """
    positions = rows.samples * rows.rows * rows.width // C
    block = min(next_power_of_2(C), _SMALL_CHANNELS_LAST) if rows.channels_last else 1
    outer, most = next_power_of_2(positions), _SMALL_MAX_ELEMENTS
    # The alternative is several launches, which are slow for small channels-first images: their statistics
    # kernel uses a warp for each channel of each image. So for these images a single launch is faster up to a
    # larger number of elements.
    has_short_rows = not rows.channels_last and rows.rows < WARP_LOAD
    if backward and not has_short_rows:
        most = _SMALL_BACKWARD_MAX_ELEMENTS
    elif not backward and num_sms / _SMALL_ALONE_PART <= ceil_div(C, block) <= num_sms:
        most = _SMALL_MAX_ALONE
    if outer * block > most or positions * C >= 2**31:  # the kernel has int32 offsets
        return None
    lanes = min(outer, WARP_LOAD // block)
    num_warps = min(next_power_of_2(ceil_div(outer * block, _SMALL_PER_WARP)), outer // lanes)
    return SmallConfig(block, True, lanes, num_warps, outer // (lanes * num_warps), block)


def merge_config(partials: int, C: int) -> MergeConfig:
    """The configuration of a kernel that merges ``partials`` partial results of each of C channels."""
    channels = min(_MERGE_CHANNELS, next_power_of_2(C))
    # With fewer than ``_MERGE_CHANNELS`` channels, several programs read the same sector of memory. But this
    # takes less time than a second tile in each program.
    while channels > _MERGE_MIN_CHANNELS and partials * channels > _MERGE_TILE:
        channels //= 2
    block = min(next_power_of_2(partials), _MERGE_TILE // channels)
    return MergeConfig(channels, True, block, channels, max(1, block * channels // _MERGE_PER_WARP))
