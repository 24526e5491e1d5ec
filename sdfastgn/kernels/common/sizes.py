"""Arithmetic of sizes that the launch configurations of all kernels share."""

from __future__ import annotations

from typing import Any

# Lanes of a warp.
WARP = 32
# Bytes that one load instruction of a lane takes at most.
_LOAD_BYTES = 16
# Offsets within a tile or a chunk are int32, for fewer registers than int64 takes.
MAX_OFFSET = 2**31 - 1
# Elements that one warp reads with one 16-byte load a lane, in 16 bits.
WARP_LOAD = WARP * _LOAD_BYTES // 2


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def power_of_2_below(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)


def row_factor(channels_last: bool, *sizes: int) -> int:
    """A known divisor of numbers of positions, so that loads along channels-first rows are whole vectors.

    Nothing in channels-last, where loads run along the channels: one compiled kernel serves every
    number of positions.
    """
    return 16 if not channels_last and not any(size % 16 for size in sizes) else 1


def vector_width(itemsize: int, *strides: int) -> int:
    """Elements of one load from rows that start at multiples of ``strides``, in memory aligned to 16."""
    width = _LOAD_BYTES // itemsize
    while any(stride % width for stride in strides):
        width //= 2
    return width


def tile_constants(config: Any) -> dict[str, int]:
    """The constants of a register tile of four axes, (lanes, warps, steps, block)."""
    return {
        "LANES": config.lanes,
        "WARPS": config.num_warps,
        "STEPS": config.steps,
        "BLOCK": config.block,
    }
