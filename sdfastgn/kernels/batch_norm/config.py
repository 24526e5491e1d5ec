"""How the kernels of BatchNorm are launched: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sdfastgn.kernels.common.sizes import WARP_LOAD, ceil_div, next_power_of_2

__all__ = ["MERGED_CHANNELS", "Rows", "SmallConfig", "as_rows", "merge_config", "small_config"]

# Columns up to which neighboring positions of few channels are put side by side: what one warp's tile
# of the statistics has.
_SIDE_BY_SIDE = 64

# --- small: all positions of a few channels in one program's registers
# Elements of a program, padded to powers of 2, above which three launches are faster.
_SMALL_MAX_ELEMENTS = 16384
# The same in the backward, which holds x and dy.
_SMALL_BACKWARD_MAX_ELEMENTS = 8192
# Channels of a program, channels-last: a whole 32-byte sector of memory in 16 bits.
_SMALL_CHANNELS_LAST = 16
# The same channels-first, where a warp's lanes then have neighboring positions.
_SMALL_CHANNELS_FIRST = 8
# Elements of a warp: 32 of a lane.
_SMALL_PER_WARP = 1024

# --- merge
# Channels of a program: a whole 32-byte sector of fp32.
MERGED_CHANNELS = 8
# Partial results of one channel in a tile.
_MERGE_ROWS = 512
# Partial results of a warp.
_MERGE_PER_WARP = 256
_MERGE_MAX_WARPS = 8


class Rows(NamedTuple):
    """x as reductions see it: ``samples`` times ``rows`` positions of ``width`` columns.

    Channels-last, the positions of all samples follow each other, so there is one sample. Of few
    channels ``width // C`` positions count as one, so that rows are long enough to be read well.
    """

    samples: int
    rows: int
    width: int
    channels_last: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the statistics of a tensor (N, C, HW) are launched with."""
        return self.samples, self.width, self.rows


def as_rows(N: int, C: int, HW: int, channels_last: bool) -> Rows:
    """(N, C, HW) without gaps as rows."""
    if not channels_last and HW > 1:
        return Rows(N, HW, C, False)
    positions, together = N * HW, 1
    while 2 * together * C <= _SIDE_BY_SIDE and positions % (2 * together) == 0:
        together *= 2
    return Rows(1, positions // together, together * C, True)


@dataclass(frozen=True)
class SmallConfig:
    """One launch: a program has ``block`` channels at all positions, (lanes, num_warps, steps) of them."""

    lanes: int
    num_warps: int
    steps: int
    block: int


def small_config(
    positions: int, C: int, channels_last: bool, *, backward: bool = False
) -> SmallConfig | None:
    """How to normalize ``positions`` of each of C channels in one launch; None where three are faster."""
    block = min(next_power_of_2(C), _SMALL_CHANNELS_LAST if channels_last else _SMALL_CHANNELS_FIRST)
    outer = next_power_of_2(positions)
    most = _SMALL_BACKWARD_MAX_ELEMENTS if backward else _SMALL_MAX_ELEMENTS
    if outer * block > most or positions * C >= 2**31:  # offsets are 32-bit
        return None
    lanes = min(outer, WARP_LOAD // block)
    num_warps = min(next_power_of_2(ceil_div(outer * block, _SMALL_PER_WARP)), outer // lanes)
    return SmallConfig(lanes, num_warps, outer // (lanes * num_warps), block)


def merge_config(partials: int) -> tuple[int, int]:
    """(partials of a channel in a tile, warps) of the program that merges them."""
    block = min(next_power_of_2(partials), _MERGE_ROWS)
    return block, max(1, min(_MERGE_MAX_WARPS, block * MERGED_CHANNELS // _MERGE_PER_WARP))
