"""The launch configurations of GEGLU's kernels: pure functions of sizes and the number of SMs.

A tile has some rows and columns of the output. The warps of a program divide the columns of a tile among
them. So each thread has the same columns in all rows: it reads the bias once for all rows, and can sum over
the rows in its registers.

In a backward that computes the bias's gradient, a program processes several tiles, called a *group*. The
tiles of a group have the same columns, and consecutive rows. For each column the program writes one partial
sum of the bias's gradient. So larger groups give fewer partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdfastgn.kernels.common.sizes import MAX_OFFSET, WARP, ceil_div, next_power_of_2

# Number of rows of a tile, if a row is at least as long as one load of a warp. With shorter rows a tile has
# more rows. For each row, a thread makes two loads in the forward (value and gate), and in the backward a
# third load (dy).
_ROWS = 2
# Maximum number of warps of a program.
_MAX_WARPS = 4
# Number of warps that run at once on a multiprocessor, in a backward that also sums over rows. More warps
# would not have enough registers.
_WARPS_PER_SM = 16
# Minimum number of tiles of a program that also sums over rows. With fewer tiles, there would be too many
# partial sums to add up.
_MIN_TILES = 4


@dataclass(frozen=True)
class TileConfig:
    """The sizes of tiles and groups of tiles. Each tile has ``block_r`` rows and ``block_d`` columns.

    The rows are divided into ``groups`` groups, and each group into ``tiles`` tiles. There is one program for
    each group and each block of ``block_d`` columns. ``tiles`` is 1 unless the bias's gradient is computed.
    """

    block_r: int
    block_d: int
    num_warps: int
    tiles: int
    groups: int

    def programs(self, D: int) -> int:
        """Number of programs for rows of ``D`` columns."""
        return self.groups * ceil_div(D, self.block_d)

    def is_even(self, rows: int, D: int) -> bool:
        """True if all groups and all blocks of columns are full, so that no element is masked."""
        return rows % (self.block_r * self.tiles) == 0 and D % self.block_d == 0


def forward_config(rows: int, D: int, vector: int, stride: int) -> TileConfig:
    """The configuration of the forward, which computes y (rows, D).

    ``vector``: elements that a thread loads at once. ``stride``: elements between the starts of rows of x.
    """
    return _config(rows, D, vector, stride)


def backward_config(
    rows: int, D: int, vector: int, stride: int, num_sms: int, *, column_sums: bool
) -> TileConfig:
    """The configuration of the backward, which gets dy (rows, D).

    ``vector``: elements that a thread loads at once. ``stride``: elements between the starts of rows of x.
    ``column_sums``: True if the gradient of the bias is wanted, which is a sum over rows.
    """
    config = _config(rows, D, vector, stride)
    if not column_sums:
        return config
    at_a_time = num_sms * _WARPS_PER_SM // (config.num_warps * ceil_div(D, config.block_d))
    tiles = max(_MIN_TILES, ceil_div(config.groups, max(1, at_a_time)))
    return replace(config, tiles=tiles, groups=ceil_div(config.groups, tiles))


def _config(rows: int, D: int, vector: int, stride: int) -> TileConfig:
    """The configuration with one tile for each program.

    It is for a forward, or for a backward without the bias's gradient.
    """
    load = WARP * vector
    widths = [min(load, next_power_of_2(D))]
    while load * 2 ** len(widths) <= min(load * _MAX_WARPS, next_power_of_2(D)):
        widths.append(2 * widths[-1])
    # A row is padded to a multiple of the width of a block. Wide blocks can pad it more. So the width is the
    # largest of ``widths`` that makes a padded row at most 9/8 as long as the smallest of ``widths`` does.
    best = ceil_div(D, widths[0]) * widths[0]
    block_d = next(width for width in reversed(widths) if 8 * ceil_div(D, width) * width <= 9 * best)
    block_r = min(next_power_of_2(rows), max(1, _ROWS * load // block_d) if block_d < load else _ROWS)
    while block_r > 1 and block_r * stride > MAX_OFFSET:
        block_r //= 2
    return TileConfig(block_r, block_d, max(1, block_d // load), 1, ceil_div(rows, block_r))
