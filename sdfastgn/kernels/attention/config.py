"""The configuration of attention with wide heads, in chunks of queries: pure functions of sizes.

Attention takes two matrix products: scores = queries x keys, and weights x values. The weights are the
softmax of the scores. All scores of a chunk (queries x keys, fp32) are in memory at once.

A matrix product runs in tiles of 128 x 128 results. A chunk should have at least as many tiles as the GPU has
multiprocessors, because with fewer tiles some multiprocessors are idle. Larger chunks are not faster, but
take more memory.

The second product, weights x values, has only as many columns as a head has channels, and thus few tiles. If
there are fewer tiles than multiprocessors, the keys are divided into parts. Each part of the keys gives a
partial product. A later kernel adds up the partial products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Number of 16-bit elements of a 16-byte load. Rows of scores and of weights are padded to a multiple of this
# number.
VECTOR = 8
# Maximum number of bytes of a chunk's scores: enough to keep a GPU busy, and small compared with a model. But
# a chunk has at least ``_TILE`` queries, even if their scores take more bytes.
_MAX_SCORE_BYTES = 64 * 2**20
# Rows and columns of a tile of cuBLAS's matrix products.
_TILE = 128
# Minimum number of keys of a part, if the keys are divided into parts for the product weights x values. With
# smaller parts, adding up the partial products takes too long.
_MIN_KEYS_OF_A_PART = 512
# Maximum length of a row of scores, in elements, that a program of the softmax keeps in registers.
_MAX_IN_REGISTERS = 16384
# Number of elements that a program of the softmax processes at once, if a row is longer than
# ``_MAX_IN_REGISTERS``.
_LONG_ROW_BLOCK = 8192
# Maximum number of warps of a program of the softmax.
_MAX_WARPS = 16
# Minimum number of scores for each warp of the softmax.
_PER_WARP = 512
# Maximum number of elements of y for each program of ``_divide_kernel``. This kernel divides the products
# weights x values by the sums of the weights.
_DIVIDE_BLOCK = 1024
# Number of elements of y for each warp of ``_divide_kernel``.
_DIVIDE_PER_WARP = 256
# PyTorch has flash-attention kernels for heads of at most this number of channels.
_MAX_FLASH_CHANNELS = 256
# Attention in chunks of queries runs only if there are at least this many queries and this many keys. With
# fewer it is not faster than PyTorch's attention, because each chunk takes four launches.
_MIN_TOKENS = 1024

# A chunk is a set of queries whose attention is computed at once. The chunk (b0, b1, r0, r1) has the queries
# r0 to r1 - 1 of the heads b0 to b1 - 1. The heads of all samples are numbered consecutively.
Chunk = tuple[int, int, int, int]


@dataclass(frozen=True)
class ChunksConfig:
    """The sizes of chunks. A chunk is a set of queries whose attention is computed at once.

    Attributes:
        matrices: number of heads in a chunk.
        rows: number of queries of each head in a chunk. If ``matrices`` > 1, a chunk has all queries of its
            heads.
        pitch: elements between the starts of neighboring rows of scores: the number of keys, and padding.
        splits: number of parts into which the keys are divided for the product weights x values.
    """

    matrices: int
    rows: int
    pitch: int
    splits: int

    def chunks(self, count: int, L: int) -> Iterator[Chunk]:
        """Yields chunks (``Chunk``) that together have all ``L`` queries of each of ``count`` heads."""
        for b in range(0, count, self.matrices):
            for r in range(0, L, self.rows):
                yield b, min(b + self.matrices, count), r, min(r + self.rows, L)

    def scratch(self, D: int) -> int:
        """Number of fp32 values in the scratch memory of a chunk.

        It first holds the chunk's scores. Then the second product, weights x values, overwrites the scores.
        ``D``: channels of a head.
        """
        return self.matrices * self.rows * max(self.pitch, self.splits * D)


def chunks_config(count: int, L: int, keys: int, D: int, num_sms: int) -> ChunksConfig:
    """The sizes of chunks for ``count`` heads of ``L`` queries, ``keys`` keys and ``D`` channels.

    ``count``: number of heads of all samples together.
    """
    pitch = ceil_div(keys, VECTOR) * VECTOR
    most = max(_TILE, _MAX_SCORE_BYTES // (4 * pitch) // _TILE * _TILE)
    if most < L:
        # One head has more queries than fit into a chunk. They are divided evenly, into whole tiles.
        rows = ceil_div(ceil_div(L, ceil_div(L, most)), _TILE) * _TILE
        return ChunksConfig(1, rows, pitch, _splits(rows, keys, D, num_sms))
    matrices = max(1, min(count, most // L))
    matrices = ceil_div(count, ceil_div(count, matrices))
    return ChunksConfig(matrices, L, pitch, _splits(L, keys, D, num_sms) if matrices == 1 else 1)


def _splits(rows: int, keys: int, D: int, num_sms: int) -> int:
    """Number of parts into which the keys are divided for the product weights x values: a power of 2.

    The number is doubled as long as all parts together have at most one tile per multiprocessor, and each
    part has at least ``_MIN_KEYS_OF_A_PART`` keys and a multiple of ``VECTOR`` keys.
    """
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
    """Returns (elements of a block, warps, True if a block is a whole row) for the softmax kernel.

    ``keys``: number of keys, which is the number of scores in a row. A program processes one row, block by
    block.
    """
    whole = next_power_of_2(keys) <= _MAX_IN_REGISTERS
    block = next_power_of_2(keys) if whole else _LONG_ROW_BLOCK
    return block, max(1, min(_MAX_WARPS, block // _PER_WARP)), whole


def divide_config(D: int) -> tuple[int, int]:
    """Returns (elements of a block, warps) for ``_divide_kernel``.

    This kernel divides the products weights x values by the sums of the weights.

    A program processes one block of a row. ``D``: elements of a row, which are the channels of a head.
    """
    block = min(next_power_of_2(D), _DIVIDE_BLOCK)
    return block, max(1, block // _DIVIDE_PER_WARP)


def pays(L: int, keys: int, D: int) -> bool:
    """True if attention in chunks of queries is faster than PyTorch's, for heads of ``D`` channels.

    It is faster for more than 256 channels, because PyTorch has no fast kernel for such heads. But D must be
    a multiple of 8, because otherwise matrix products are slow. And there must be at least ``_MIN_TOKENS``
    queries, and as many keys.
    """
    return D > _MAX_FLASH_CHANNELS and D % VECTOR == 0 and min(L, keys) >= _MIN_TOKENS
