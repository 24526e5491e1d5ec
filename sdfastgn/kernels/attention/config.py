"""How attention with wide heads is cut into chunks of queries and launched: pure functions of sizes.

A chunk's scores (queries x keys, in fp32) are in memory at once. Fewer queries leave
multiprocessors idle, more take memory for nothing: a product runs in tiles of 128 x 128, of which a
GPU wants as many as it has multiprocessors. The second product, weights times values, has as few
columns as a head has channels, and so is cut along the keys as well where that fills a wave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Elements of 16 bit in a load of 16 bytes: rows of scores and weights start at multiples of it.
VECTOR = 8
# Bytes of a chunk's scores: few beside a model's memory, enough to fill a GPU.
_MAX_SCORE_BYTES = 64 * 2**20
# Rows and columns of a tile of cuBLAS's products.
_TILE = 128
# Keys below which a part of the second product is not worth its partial result.
_MIN_KEYS_OF_A_PART = 512
# Scores of a row that one program keeps in registers.
_MAX_IN_REGISTERS = 16384
# Scores of a block of a longer row.
_LONG_ROW_BLOCK = 8192
# Warps of a program of the softmax, at most, and the scores that each has at least.
_MAX_WARPS = 16
_PER_WARP = 512
# Sums of a block that is divided, at most, and those of a warp.
_DIVIDE_BLOCK = 1024
_DIVIDE_PER_WARP = 256
# Channels of a head up to which there are flash kernels.
_MAX_FLASH_CHANNELS = 256
# Tokens from which on four launches a chunk pay.
_MIN_TOKENS = 1024

# Of the matrices (all samples' heads one after the other) from the first up to the second, the
# queries from the third up to the fourth.
Chunk = tuple[int, int, int, int]


@dataclass(frozen=True)
class ChunksConfig:
    """``rows`` queries of ``matrices`` heads are a chunk: all their queries, or there is one head only.

    ``pitch``: elements from one row of scores to the next. ``splits``: parts of the keys, each of
    which has a partial result.
    """

    matrices: int
    rows: int
    pitch: int
    splits: int

    def chunks(self, count: int, L: int) -> Iterator[Chunk]:
        """All chunks of ``count`` matrices with ``L`` queries each."""
        for b in range(0, count, self.matrices):
            for r in range(0, L, self.rows):
                yield b, min(b + self.matrices, count), r, min(r + self.rows, L)

    def scratch(self, D: int) -> int:
        """fp32 values for a chunk's scores, and later in the same place for the sums of ``D`` channels."""
        return self.matrices * self.rows * max(self.pitch, self.splits * D)


def chunks_config(count: int, L: int, keys: int, D: int, num_sms: int) -> ChunksConfig:
    """How to attend with ``count`` heads of ``L`` queries to ``keys`` keys, ``D`` channels each."""
    pitch = ceil_div(keys, VECTOR) * VECTOR
    most = max(_TILE, _MAX_SCORE_BYTES // (4 * pitch) // _TILE * _TILE)
    if most < L:
        # Chunks of equal size, in whole tiles.
        rows = ceil_div(ceil_div(L, ceil_div(L, most)), _TILE) * _TILE
        return ChunksConfig(1, rows, pitch, _splits(rows, keys, D, num_sms))
    matrices = max(1, min(count, most // L))
    matrices = ceil_div(count, ceil_div(count, matrices))
    return ChunksConfig(matrices, L, pitch, _splits(L, keys, D, num_sms) if matrices == 1 else 1)


def _splits(rows: int, keys: int, D: int, num_sms: int) -> int:
    """As many parts of equal size as make one wave of tiles, a power of 2."""
    tiles = ceil_div(rows, _TILE) * ceil_div(D, _TILE)
    splits = 1
    while (
        2 * splits * tiles <= num_sms
        and keys % (2 * splits * VECTOR) == 0
        and keys // (2 * splits) >= _MIN_KEYS_OF_A_PART
    ):
        splits *= 2
    return splits


def softmax_config(keys: int) -> tuple[int, int, bool]:
    """(block, warps, whether the block is a whole row) of the kernel that makes weights of scores."""
    whole = next_power_of_2(keys) <= _MAX_IN_REGISTERS
    block = next_power_of_2(keys) if whole else _LONG_ROW_BLOCK
    return block, max(1, min(_MAX_WARPS, block // _PER_WARP)), whole


def divide_config(D: int) -> tuple[int, int]:
    """(block, warps) of the kernel that divides a row of sums."""
    block = min(next_power_of_2(D), _DIVIDE_BLOCK)
    return block, max(1, block // _DIVIDE_PER_WARP)


def pays(L: int, keys: int, D: int) -> bool:
    """True if two large products and a softmax between them beat PyTorch's kernel for such wide heads.

    An H200 runs attention of 512 channels at 130 TFLOP/s, the products alone at four times that.
    Other widths than multiples of 8 have slow products, and few tokens leave nothing to gain.
    """
    return D > _MAX_FLASH_CHANNELS and D % VECTOR == 0 and min(L, keys) >= _MIN_TOKENS
