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

__all__ = [
    "ChunksConfig",
    "RowsConfig",
    "backward_config",
    "column_groups",
    "forward_config",
]

# Elements of a row, padded, that one program keeps in registers; in a backward that also keeps
# column sums there, half as many.
_MAX_IN_REGISTERS, _MAX_WITH_SUMS = 16384, 8192
_MAX_WARPS, _NARROW_WARPS = 16, 4
# Elements a thread: one warp takes a row of up to the first, a row spread over warps gets the
# second, short rows are gathered up to the third. The backward holds two tensors and up to three
# column sums: a warp takes rows of the first size, and gathers up to the second.
_NARROW_PER_THREAD, _WIDE_PER_THREAD, _GATHERED_PER_THREAD = 64, 16, 32
_BACKWARD_PER_THREAD, _BACKWARD_GATHERED = 16, 8
# Bytes of a block below which a row's part is no whole line of memory.
_LINE_BYTES = 128
# Warps a multiprocessor: below the first a row is spread over warps, above the second each warp
# takes more rows.
_FEW_WARPS_PER_SM, _MANY_WARPS_PER_SM = 4, 16
# Elements a multiprocessor, in those of one lane of each warp, that a backward with column sums
# keeps under way; and tiles that a program should have at least, because each leaves its partial
# sums in memory.
_BACKWARD_PER_SM, _BACKWARD_TILES = 256, 4
_CHUNK_BLOCK, _CHUNK_WARPS, _CHUNK_PROGRAMS_PER_SM, _MAX_CHUNKS = 2048, 4, 8, 2048


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
        return _wide_config(rows, D, load, vector, rows)
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
        wide = _wide_config(rows, D, load, vector, rows)
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


def _wide_config(rows: int, D: int, load: int, vector: int, programs: int) -> RowsConfig:
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
