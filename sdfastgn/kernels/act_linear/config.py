"""How a linear layer of few rows is launched: pure functions of sizes and the number of multiprocessors.

What takes time is reading the weight once, from memory far away. A program takes few rows of it,
all of K at once where K fits into registers, and its warps share each row: then x, which every
program activates for itself, is activated once for all its rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2

# Rows of x up to which this is no slower than a matrix product and the kernels around it.
_FEW_ROWS = 16
# Rows of x of a tile, at most.
_BLOCK_N = 4
# Rows of the weight of a tile, at most.
_BLOCK_C = 8
# Warps of a program, at most: they share each row.
_MAX_WARPS = 4
# Elements of a row of the weight that a thread reads at a time, at most.
_MAX_VECTOR = 4
# And at least, where K allows.
_MIN_VECTOR = 2
# Sums that a thread keeps, at most.
_MAX_SUMS = 64
# Bytes of the weight that a thread reads before it turns to the next columns.
_BYTES_UNDER_WAY = 256


@dataclass(frozen=True)
class TileConfig:
    """(block_n, block_c) results a program, in ``steps`` blocks of ``block_k`` columns at a time."""

    block_n: int
    block_c: int
    block_k: int
    steps: int
    num_warps: int

    @property
    def vector(self) -> int:
        """Neighbours that a thread reads at a time."""
        return max(1, self.block_k // (WARP * self.num_warps))

    def programs(self, N: int, C: int) -> int:
        """Programs for (N, C) results."""
        return ceil_div(N, self.block_n) * ceil_div(C, self.block_c)

    def is_even(self, K: int) -> bool:
        """True if no step reaches past ``K``."""
        return K % (self.block_k * self.steps) == 0


def has_few_rows(N: int) -> bool:
    """True if a linear layer of ``N`` rows belongs here."""
    return 1 <= N <= _FEW_ROWS


def tile_config(N: int, C: int, K: int, itemsize: int, vector: int, num_sms: int) -> TileConfig:
    """How to multiply (N, K) by (C, K); ``vector`` elements of ``itemsize`` bytes are a thread's load."""
    block_n = min(_BLOCK_N, next_power_of_2(N))
    block_c = min(_BLOCK_C, next_power_of_2(C))
    while block_c > 1 and ceil_div(N, block_n) * ceil_div(C, block_c) < num_sms:
        block_c //= 2
    vector = min(vector, _MAX_VECTOR, _MAX_SUMS // (block_n * block_c))
    num_warps = min(_MAX_WARPS, next_power_of_2(ceil_div(K, WARP * vector)))
    block_k = _fitting_block(K, WARP * num_warps * vector, WARP * num_warps * min(vector, _MIN_VECTOR))
    per_step = block_c * ceil_div(block_k, WARP * num_warps) * itemsize
    blocks = ceil_div(K, block_k)
    turns = ceil_div(blocks, max(1, _BYTES_UNDER_WAY // per_step))
    return TileConfig(block_n, block_c, block_k, ceil_div(blocks, turns), num_warps)


def _fitting_block(K: int, widest: int, narrowest: int) -> int:
    """The widest block, and so the fewest loads, that leaves few lanes idle at the end of a row."""
    if narrowest >= K:
        return next_power_of_2(K)
    best = ceil_div(K, narrowest) * narrowest
    block = widest
    while 4 * ceil_div(K, block) * block > 5 * best:
        block //= 2
    return block
