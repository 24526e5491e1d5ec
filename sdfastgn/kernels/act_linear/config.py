"""The launch configuration of ``act_linear``: pure functions of sizes and the number of SMs.

x (N, K) has few rows, so nearly all the time goes into reading the weight (C, K) from memory. A program
processes a few rows of the weight. It reads enough columns of these rows at once to keep the memory busy.
Each warp of the program processes some of the columns for all these rows. So the program applies the
activation to each element of x only once, and uses the result for all its rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2

# Maximum number of rows of x for which the kernel is used. With more rows, PyTorch's own ops are faster.
_FEW_ROWS = 16
# Maximum number of rows of x that a program processes.
_BLOCK_N = 4
# Maximum number of rows of the weight that a program processes.
_BLOCK_C = 8
# Maximum number of warps of a program.
_MAX_WARPS = 4
# Maximum number of contiguous elements of a row that a thread reads at once.
_MAX_VECTOR = 4
# Minimum number of contiguous elements of a row that a thread reads at once, if K is large enough.
_MIN_VECTOR = 2
# Maximum number of sums that a thread keeps in registers.
_MAX_SUMS = 64
# Number of bytes of the weight that a thread should load at the same time. ``TileConfig.steps`` is computed
# from this number.
_BYTES_UNDER_WAY = 256


@dataclass(frozen=True)
class TileConfig:
    """Sizes of the tile of a program, which computes ``block_n`` rows and ``block_c`` columns of y (N, C).

    The program sums along K. Each iteration of its loop loads ``steps`` blocks of ``block_k`` elements.
    """

    block_n: int
    block_c: int
    block_k: int
    steps: int
    num_warps: int

    @property
    def vector(self) -> int:
        """Number of contiguous elements that a thread reads at once."""
        return max(1, self.block_k // (WARP * self.num_warps))

    def programs(self, N: int, C: int) -> int:
        """Number of programs for y (N, C)."""
        return ceil_div(N, self.block_n) * ceil_div(C, self.block_c)

    def is_even(self, K: int) -> bool:
        """True if each iteration of the kernel's loop has whole blocks, so that nothing is masked along K."""
        return K % (self.block_k * self.steps) == 0


def has_few_rows(N: int) -> bool:
    """True if ``act_linear`` of ``N`` rows is at least as fast as PyTorch."""
    return 1 <= N <= _FEW_ROWS


def tile_config(N: int, C: int, K: int, itemsize: int, vector: int, num_sms: int) -> TileConfig:
    """The configuration of the kernel for x (N, K) and weight (C, K).

    ``itemsize``: bytes of an element. ``vector``: maximum number of elements that a thread can load at once.
    """
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
    """Size of the largest block, from ``widest`` elements to ``narrowest``, that leaves few lanes idle.

    Lanes are idle if the last block goes beyond the end of a row of ``K`` elements. If a row is not longer
    than ``narrowest``, one block covers it, and may be smaller than ``narrowest``.
    """
    if narrowest >= K:
        return next_power_of_2(K)
    best = ceil_div(K, narrowest) * narrowest
    block = widest
    while 4 * ceil_div(K, block) * block > 5 * best:
        block //= 2
    return block
