"""How the LayerNorm kernels are launched: pure functions of sizes and the number of multiprocessors.

A row of up to ``_MAX_IN_REGISTERS`` padded elements is held in registers, in a tile of four axes
(lanes, warps, steps, block) as in ``group_norm/config.py``. The block is what one load instruction
of a warp takes of a row, or less where the row is shorter; lanes left over by a short block take
further rows. Longer rows are cut into chunks, so that ten rows of ten million elements fill a GPU
too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2

# Elements of a row, padded, that one program keeps in registers.
_MAX_IN_REGISTERS = 16384
# The same in a backward that keeps column sums there too.
_MAX_WITH_SUMS = 8192
# Warps of a program whose warps share a row, at most.
_MAX_WARPS = 16
# Warps of a program whose warps have rows of their own, at most.
_NARROW_WARPS = 4
# Elements per thread up to which one warp takes a row.
_NARROW_PER_THREAD = 64
# Elements per thread of a row that is spread over warps.
_WIDE_PER_THREAD = 16
# Elements per thread up to which a warp gathers short rows.
_GATHERED_PER_THREAD = 32
# Elements per thread up to which one warp takes a row in the backward: two tensors, three column sums.
_BACKWARD_PER_THREAD = 16
# Elements per thread up to which a warp gathers short rows in the backward.
_BACKWARD_GATHERED = 8
# Bytes of a block below which a row's part is no whole line of memory.
_LINE_BYTES = 128
# Warps per multiprocessor below which a row is spread over warps.
_FEW_WARPS_PER_SM = 4
# Warps per multiprocessor above which each warp takes more rows.
_MANY_WARPS_PER_SM = 16
# Elements per multiprocessor, counted for one lane of each warp, that a backward with column sums
# keeps in flight.
_BACKWARD_PER_SM = 256
# Tiles that its programs should have at least, because each leaves partial sums in memory.
_BACKWARD_TILES = 4
# Elements of a block of a long row, and the warps that walk it.
_CHUNK_BLOCK = 2048
_CHUNK_WARPS = 4
# Programs per multiprocessor that keep memory busy.
_CHUNK_PROGRAMS_PER_SM = 8
# Chunks of a row that one program can merge.
_MAX_CHUNKS = 2048


@dataclass(frozen=True)
class RowsConfig:
    """Whole rows in registers. ``wide``: a program's warps share one row; else each has ``lanes`` rows.

    ``programs`` take turns over all tiles of ``rows`` rows, one tile each in a forward.
    """

    lanes: int
    num_warps: int
    steps: int
    block: int
    wide: bool
    programs: int

    @property
    def rows(self) -> int:
        """Rows of one tile."""
        return self.lanes * (1 if self.wide else self.num_warps)


@dataclass(frozen=True)
class ChunksConfig:
    """Each row in ``chunks`` parts of ``length`` elements, walked in blocks of ``block``."""

    block: int
    num_warps: int
    length: int
    chunks: int


def forward_config(rows: int, D: int, itemsize: int, vector: int, num_sms: int) -> RowsConfig | ChunksConfig:
    """How to normalize (rows, D); ``vector`` elements of ``itemsize`` bytes are one load of a thread."""
    if next_power_of_2(D) > _MAX_IN_REGISTERS:
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
    """How to take gradients of (rows, D); with ``column_sums`` each program adds up its rows."""
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
    parts = next_power_of_2(ceil_div(D, load))
    num_warps = min(_MAX_WARPS, parts, max(1, parts * vector // _WIDE_PER_THREAD))
    return RowsConfig(1, num_warps, parts // num_warps, load, True, programs)


def _backward_programs(config: RowsConfig, tiles: int, num_sms: int, column_sums: bool) -> int:
    """As many as a GPU runs at a time; fewer where there would be more partial sums than rows to add."""
    if not column_sums:
        return tiles
    per_thread = max(_BACKWARD_GATHERED, config.lanes * config.steps * config.block // WARP)
    at_a_time = num_sms * max(1, _BACKWARD_PER_SM // (config.num_warps * per_thread))
    return max(1, min(at_a_time, ceil_div(tiles, _BACKWARD_TILES)))


def _fitting_block(D: int, load: int, line: int) -> int:
    """The largest power of 2 up to ``load`` that leaves few lanes idle in a row of ``D`` and fills lines."""
    if load >= D:
        return next_power_of_2(D)
    sizes = [load]
    while sizes[-1] // 2 >= line:
        sizes.append(sizes[-1] // 2)
    best = min(ceil_div(D, size) * size for size in sizes)
    return next(size for size in sizes if 8 * ceil_div(D, size) * size <= 9 * best)


def _chunks_config(rows: int, D: int, num_sms: int) -> ChunksConfig:
    blocks = ceil_div(D, _CHUNK_BLOCK)
    wanted = min(blocks, _MAX_CHUNKS, ceil_div(num_sms * _CHUNK_PROGRAMS_PER_SM, rows))
    length = ceil_div(blocks, wanted) * _CHUNK_BLOCK
    return ChunksConfig(_CHUNK_BLOCK, _CHUNK_WARPS, length, ceil_div(D, length))


def column_groups(rows: int, D: int, block: int, num_sms: int) -> int:
    """Groups of rows over which long rows are added up, one a program and block of columns."""
    return max(
        1, min(ceil_div(rows, _BACKWARD_TILES), num_sms * _CHUNK_PROGRAMS_PER_SM // ceil_div(D, block))
    )
