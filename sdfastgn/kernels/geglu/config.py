"""How the GEGLU kernels are launched: pure functions of sizes and the number of multiprocessors.

A tile is (rows, columns of the output). Its warps lie side by side, each with one load a lane in
every row: a thread then has the same columns of all rows, so that the bias is read once and column
sums are additions in registers. The backward takes tiles in groups, one below the other, and leaves
one partial sum of the bias's gradient for each group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP, ceil_div, next_power_of_2

# Rows of a tile: a thread has two loads a row in flight in the forward, three in the backward.
_ROWS = 2
# Warps of a tile, at most.
_MAX_WARPS = 4
# Warps per multiprocessor that add up columns: as many as their registers allow.
_WARPS_PER_SM = 16
# Tiles of a program that leaves a partial sum, at least.
_MIN_TILES = 4


@dataclass(frozen=True)
class TileConfig:
    """Tiles of (block_r, block_d); each of ``groups`` x (blocks of columns) programs takes ``tiles``."""

    block_r: int
    block_d: int
    num_warps: int
    tiles: int
    groups: int

    def programs(self, D: int) -> int:
        """Programs for rows of ``D`` columns."""
        return self.groups * ceil_div(D, self.block_d)

    def is_even(self, rows: int, D: int) -> bool:
        """True if no tile reaches past (rows, D)."""
        return rows % (self.block_r * self.tiles) == 0 and D % self.block_d == 0


def forward_config(rows: int, D: int, vector: int, stride: int) -> TileConfig:
    """How to compute (rows, D); ``vector`` elements are a thread's load, rows of x are ``stride`` apart."""
    return _config(rows, D, vector, stride)


def backward_config(
    rows: int, D: int, vector: int, stride: int, num_sms: int, *, column_sums: bool
) -> TileConfig:
    """How to take gradients of (rows, D); with ``column_sums`` each program adds up its tiles."""
    config = _config(rows, D, vector, stride)
    if not column_sums:
        return config
    at_a_time = num_sms * _WARPS_PER_SM // (config.num_warps * ceil_div(D, config.block_d))
    tiles = max(_MIN_TILES, ceil_div(config.groups, max(1, at_a_time)))
    return replace(config, tiles=tiles, groups=ceil_div(config.groups, tiles))


def _config(rows: int, D: int, vector: int, stride: int) -> TileConfig:
    load = WARP * vector
    widths = [min(load, next_power_of_2(D))]
    while load * 2 ** len(widths) <= min(load * _MAX_WARPS, next_power_of_2(D)):
        widths.append(2 * widths[-1])
    # The widest that leaves (nearly) as few lanes idle at the end of a row as one warp would.
    best = ceil_div(D, widths[0]) * widths[0]
    block_d = next(width for width in reversed(widths) if 8 * ceil_div(D, width) * width <= 9 * best)
    block_r = min(next_power_of_2(rows), max(1, _ROWS * load // block_d) if block_d < load else _ROWS)
    while block_r > 1 and block_r * stride > MAX_OFFSET:
        block_r //= 2
    return TileConfig(block_r, block_d, max(1, block_d // load), 1, ceil_div(rows, block_r))
