"""How the kernels of BatchNorm are launched: pure functions of sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP_LOAD, ceil_div, next_power_of_2
from sdfastgn.kernels.group_norm.config import MergeConfig, SmallConfig
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config

# Columns of a row that are whole 16-byte loads in 16 bits.
_LOADED = 8
# Columns up to which neighboring positions are put side by side for that: what a warp's tile of the
# statistics has. Each column leaves partial results of its own, so there are no more than needed.
_SIDE_BY_SIDE = 64

# --- small: all positions of a few channels in one program's registers
# Elements of a program, padded to powers of 2, above which three launches are faster.
_SMALL_MAX_ELEMENTS = 16384
# The same where a program of each multiprocessor, for which it leaves no room for a second, is all.
# The 64 registers that a thread then has are too few, by less than a second pass over x costs.
_SMALL_MAX_ALONE = 32768
# The part of the multiprocessors that have a program then, at least: 1 of 3.
_SMALL_ALONE_PART = 3
# The same in the backward, which holds x and dy.
_SMALL_BACKWARD_MAX_ELEMENTS = 8192
# Channels of a program, channels-last: a whole 32-byte sector of memory in 16 bits. Channels-first
# it is one, whose positions follow each other in memory.
_SMALL_CHANNELS_LAST = 16
# Elements of a warp: 32 of a lane.
_SMALL_PER_WARP = 1024

# --- merge
# Channels of a program at most: a whole 32-byte sector of fp32.
_MERGE_CHANNELS = 8
# And at least, where there are many partial results.
_MERGE_MIN_CHANNELS = 2
# Partial results of a tile at most: one after the other, tiles wait for memory.
_MERGE_TILE = 8192
# Partial results of a warp: 16 of a lane.
_MERGE_PER_WARP = 512
# Partial results of a channel that a merge reads as one tile of whole sectors, at most.
MERGED_AT_ONCE = _MERGE_TILE // _MERGE_CHANNELS


class Rows(NamedTuple):
    """x as reductions see it: ``samples`` times ``rows`` positions of ``width`` columns.

    Channels-last, the positions of all samples follow each other, so there is one sample. Where a
    position is no whole number of 16-byte loads, ``width // C`` neighbors count as one.
    """

    samples: int
    rows: int
    width: int
    channels_last: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the statistics of a tensor (N, C, HW) are launched with."""
        return self.samples, self.width, self.rows

    @property
    def image(self) -> int | None:
        """Positions of an image, channels-first."""
        return None if self.channels_last else self.rows


def as_rows(N: int, C: int, HW: int, channels_last: bool) -> Rows:
    """(N, C, HW) without gaps as rows."""
    if not channels_last and HW > 1:
        return Rows(N, HW, C, False)
    positions, together = N * HW, 1
    # Offsets are 32-bit in chunks that must be of equal size, and so may be as long as x.
    while (
        together * C % _LOADED
        and 2 * together * C <= _SIDE_BY_SIDE
        and positions % (2 * together) == 0
        and positions * C <= MAX_OFFSET
    ):
        together *= 2
    return Rows(1, positions // together, together * C, True)


def moments_config(rows: Rows, C: int, num_sms: int) -> StatisticsConfig:
    """How to take statistics that ``merge_kernel`` brings together for each of C channels.

    It takes the chunks of a channel for those of one sample, where only the last one may be shorter. So those
    of several samples, or of several columns, are of equal size.
    """
    config = statistics_config(*rows.shape, rows.channels_last, num_sms)
    if rows.samples == 1 and rows.width == C:
        return config
    chunks = next(n for n in range(config.chunks, 0, -1) if rows.rows % n == 0)
    return replace(config, rows=rows.rows // chunks, chunks=chunks)


def small_config(rows: Rows, C: int, num_sms: int, *, backward: bool = False) -> SmallConfig | None:
    """How to normalize each of C channels in one launch; None where three are faster.

    A program has ``block`` channels at all positions.
    """
    positions = rows.samples * rows.rows * rows.width // C
    block = min(next_power_of_2(C), _SMALL_CHANNELS_LAST) if rows.channels_last else 1
    outer, most = next_power_of_2(positions), _SMALL_MAX_ELEMENTS
    # Of images of few pixels channels-first, three launches would take a warp for each short row.
    has_short_rows = not rows.channels_last and rows.rows < WARP_LOAD
    if backward and not has_short_rows:
        most = _SMALL_BACKWARD_MAX_ELEMENTS
    elif not backward and num_sms / _SMALL_ALONE_PART <= ceil_div(C, block) <= num_sms:
        most = _SMALL_MAX_ALONE
    if outer * block > most or positions * C >= 2**31:  # offsets are 32-bit
        return None
    lanes = min(outer, WARP_LOAD // block)
    num_warps = min(next_power_of_2(ceil_div(outer * block, _SMALL_PER_WARP)), outer // lanes)
    return SmallConfig(block, True, lanes, num_warps, outer // (lanes * num_warps), block)


def merge_config(partials: int, C: int) -> MergeConfig:
    """How to bring together so many partial results of each of C channels."""
    channels = min(_MERGE_CHANNELS, next_power_of_2(C))
    # A second tile waits for memory again. Half sectors, which several programs read, take less time.
    while channels > _MERGE_MIN_CHANNELS and partials * channels > _MERGE_TILE:
        channels //= 2
    block = min(next_power_of_2(partials), _MERGE_TILE // channels)
    return MergeConfig(channels, True, block, channels, max(1, block * channels // _MERGE_PER_WARP))
