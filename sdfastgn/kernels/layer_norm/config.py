"""The launch configurations of LayerNorm's kernels: pure functions of sizes and the number of SMs.

A program loads whole rows into registers if a row, rounded up to a power of 2, has at most
``_MAX_IN_REGISTERS`` elements, or ``_MAX_WITH_SUMS`` in a backward with column sums. Its tile has four axes:
lanes (the threads of a warp), warps, steps (elements in registers of the same thread) and block (contiguous
elements). A block is the part of a row that a warp loads by one instruction. If a block needs only some lanes
of the warp, the other lanes load blocks of other rows by the same instruction. For example, in 16 bits a row
of 320 columns has five blocks of 64 columns, and a load of a warp reads blocks of four rows.

Longer rows are divided into chunks, so that even ten rows of ten million elements keep a whole GPU busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2

# Maximum length of a row, rounded up to a power of 2, that a program keeps in registers.
_MAX_IN_REGISTERS = 16384
# Maximum length of a row, rounded up to a power of 2, that a program of a backward with column sums keeps in
# registers. Column sums are sums over rows, for the gradients of weight and biases. They take registers too.
_MAX_WITH_SUMS = 8192
# Maximum number of warps of a program whose warps divide each row among them.
_MAX_WARPS = 16
# Maximum number of warps of a program whose warps each have whole rows.
_NARROW_WARPS = 4
# Maximum number of elements of each thread if one warp has a whole row. Several warps divide longer rows.
_NARROW_PER_THREAD = 64
# Number of elements of each thread if several warps divide a row among them.
_WIDE_PER_THREAD = 16
# Maximum number of elements of each thread if a warp has more rows than it reads with one load instruction.
_GATHERED_PER_THREAD = 32
# Maximum number of elements of each thread in the backward if one warp has a whole row. It is smaller than in
# the forward, because for each element two tensors and three column sums are in registers.
_BACKWARD_PER_THREAD = 16
# Maximum number of elements of each thread in the backward if a warp has more rows than it reads with one
# load instruction.
_BACKWARD_GATHERED = 8
# Minimum number of bytes that a warp reads of a row with one load instruction, unless the row is shorter. It
# is the size of a cache line.
_LINE_BYTES = 128
# If one warp for each row gives fewer warps per multiprocessor than this number, several warps divide each
# row among them. Otherwise a part of the GPU would be idle.
_FEW_WARPS_PER_SM = 4
# A warp gets more rows than it reads with one load instruction only if there are still at least this many
# warps for each multiprocessor.
_MANY_WARPS_PER_SM = 16
# Maximum of (warps on a multiprocessor) x (elements that each thread keeps in registers), in a backward that
# sums over rows. The number of programs is computed from this maximum, so that all programs run at once.
_BACKWARD_PER_SM = 256
# In a backward that sums over rows, each program gets about this many tiles at least. Each program writes
# partial sums to memory, so a few programs with many rows are better than many programs with few rows.
_BACKWARD_TILES = 4
# Number of elements of a long row that a program processes at once.
_CHUNK_BLOCK = 2048
# Number of warps of a program that processes long rows.
_CHUNK_WARPS = 4
# Long rows are divided into enough chunks to have this number of programs for each multiprocessor, which
# keeps the memory busy.
_CHUNK_PROGRAMS_PER_SM = 8
# Maximum number of chunks of a row. It is limited because a single program merges all chunks of a row.
_MAX_CHUNKS = 2048


@dataclass(frozen=True)
class RowsConfig:
    """The configuration of kernels that load whole rows. A tile has the axes lanes, warps, steps and block.

    ``wide``: True if a tile has one row, which the warps divide among them. False if each warp has ``lanes``
    whole rows. ``programs``: number of programs. In a forward each program has one tile. In a backward a
    program may have several tiles.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int
    wide: bool
    programs: int

    @property
    def rows(self) -> int:
        """Number of rows of a tile."""
        return self.lanes * (1 if self.wide else self.num_warps)


@dataclass(frozen=True)
class ChunksConfig:
    """The configuration for long rows: each row is divided into ``chunks`` chunks of ``length`` elements.

    A program processes one chunk, ``block`` elements at a time.
    """

    block: int
    num_warps: int
    length: int
    chunks: int


def fits_registers(D: int) -> bool:
    """True if the forward keeps rows of ``D`` elements in registers."""
    return next_power_of_2(D) <= _MAX_IN_REGISTERS


def forward_config(rows: int, D: int, itemsize: int, vector: int, num_sms: int) -> RowsConfig | ChunksConfig:
    """The configuration of the kernels that normalize x (rows, D).

    ``itemsize``: bytes of an element of x. ``vector``: elements that a thread loads at once.
    """
    if not fits_registers(D):
        return _chunks_config(rows, D, num_sms)
    load = WARP * vector
    block = _fitting_block(D, load, max(1, _LINE_BYTES // itemsize))
    steps = next_power_of_2(ceil_div(D, block))
    lanes = load // block
    per_thread = ceil_div(D, block) * vector
    if load < D and (per_thread > _NARROW_PER_THREAD or ceil_div(rows, lanes) < num_sms * _FEW_WARPS_PER_SM):
        return _wide_config(D, load, vector, rows)
    while (
        steps * vector * lanes * block // load * 2 <= _GATHERED_PER_THREAD
        and ceil_div(rows, 2 * lanes) >= num_sms * _MANY_WARPS_PER_SM
    ):
        lanes *= 2
    num_warps = min(_NARROW_WARPS, next_power_of_2(ceil_div(rows, lanes)))
    return RowsConfig(lanes, num_warps, steps, block, False, ceil_div(rows, lanes * num_warps))


def backward_config(
    rows: int, D: int, vector: int, num_sms: int, *, column_sums: bool
) -> RowsConfig | ChunksConfig:
    """The configuration of the kernels that compute the gradients for x (rows, D).

    ``vector``: elements that a thread loads at once. ``column_sums``: True if a gradient of weight, bias or
    add_bias is wanted. Then each program also sums over its rows.
    """
    if next_power_of_2(D) > (_MAX_WITH_SUMS if column_sums else _MAX_IN_REGISTERS):
        return _chunks_config(rows, D, num_sms)
    load = WARP * vector
    block = min(load, next_power_of_2(D))
    steps = next_power_of_2(ceil_div(D, block))
    if steps * vector > _BACKWARD_PER_THREAD:
        wide = _wide_config(D, load, vector, rows)
        return replace(wide, programs=_backward_programs(wide, rows, num_sms, column_sums))
    lanes = load // block
    while steps * vector * lanes * block // load * 2 <= _BACKWARD_GATHERED and ceil_div(rows, 2 * lanes) >= (
        num_sms * _MANY_WARPS_PER_SM
    ):
        lanes *= 2
    num_warps = min(_NARROW_WARPS, next_power_of_2(ceil_div(rows, lanes)))
    narrow = RowsConfig(lanes, num_warps, steps, block, False, 1)
    tiles = ceil_div(rows, narrow.rows)
    return replace(narrow, programs=_backward_programs(narrow, tiles, num_sms, column_sums))


def _wide_config(D: int, load: int, vector: int, programs: int) -> RowsConfig:
    """The configuration with tiles of one row, which the warps of a program divide among them.

    ``load``: number of elements that a warp loads by one instruction. ``vector``: number of elements that a
    thread loads by one instruction. ``programs``: number of programs.
    """
    parts = next_power_of_2(ceil_div(D, load))
    num_warps = min(_MAX_WARPS, parts, max(1, parts * vector // _WIDE_PER_THREAD))
    return RowsConfig(1, num_warps, parts // num_warps, load, True, programs)


def _backward_programs(config: RowsConfig, tiles: int, num_sms: int, column_sums: bool) -> int:
    """Number of programs of a backward: one for each of the ``tiles`` tiles.

    If the backward sums over rows (``column_sums``), there are fewer programs, at most as many as run at
    once, because each program writes partial sums. Then a program processes several tiles.
    """
    if not column_sums:
        return tiles
    per_thread = max(_BACKWARD_GATHERED, config.lanes * config.steps * config.block // WARP)
    at_a_time = num_sms * max(1, _BACKWARD_PER_SM // (config.num_warps * per_thread))
    return max(1, min(at_a_time, ceil_div(tiles, _BACKWARD_TILES)))


def _fitting_block(D: int, load: int, line: int) -> int:
    """Number of elements of a block of a row of ``D`` elements.

    ``load``: number of elements that a warp loads by one instruction. ``line``: number of elements of a cache
    line. If the row is not longer than ``load``, the block is the row, rounded up to a power of 2. Otherwise
    the block is the largest power of 2 from ``line`` to ``load`` that leaves few lanes idle at the end of the
    row.
    """
    if load >= D:
        return next_power_of_2(D)
    sizes = [load]
    while sizes[-1] // 2 >= line:
        sizes.append(sizes[-1] // 2)
    best = min(ceil_div(D, size) * size for size in sizes)
    return next(size for size in sizes if 8 * ceil_div(D, size) * size <= 9 * best)


def _chunks_config(rows: int, D: int, num_sms: int) -> ChunksConfig:
    """The configuration for rows that do not fit into registers, with enough chunks to keep the GPU busy."""
    blocks = ceil_div(D, _CHUNK_BLOCK)
    wanted = min(blocks, _MAX_CHUNKS, ceil_div(num_sms * _CHUNK_PROGRAMS_PER_SM, rows))
    length = ceil_div(blocks, wanted) * _CHUNK_BLOCK
    return ChunksConfig(_CHUNK_BLOCK, _CHUNK_WARPS, length, ceil_div(D, length))


def column_groups(rows: int, D: int, block: int, num_sms: int) -> int:
    """Number of groups into which ``_chunk_grad_kernel`` divides the rows of x (rows, D).

    A program of this kernel sums ``block`` columns over all rows of one group.
    """
    return max(
        1, min(ceil_div(rows, _BACKWARD_TILES), num_sms * _CHUNK_PROGRAMS_PER_SM // ceil_div(D, block))
    )
