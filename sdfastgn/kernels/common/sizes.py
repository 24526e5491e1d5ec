"""Arithmetic with sizes for the launch configurations of all kernels."""

from __future__ import annotations

from typing import Any

# Lanes (threads) of a warp on NVIDIA's GPUs.
WARP = 32
# Maximum number of bytes that one load instruction reads for a lane.
_LOAD_BYTES = 16
# Largest offset within a tile or chunk. These offsets are int32, which takes fewer registers than int64.
MAX_OFFSET = 2**31 - 1
# 16-bit elements that a warp reads if each lane loads 16 bytes.
WARP_LOAD = WARP * _LOAD_BYTES // 2


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n; 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_2_below(n: int) -> int:
    """The largest power of 2 that is at most n; 1 for n = 0."""
    return 1 << max(n.bit_length() - 1, 0)


def row_factor(channels_last: bool, *sizes: int) -> int:
    """16 if channels-first and all ``sizes`` are multiples of 16, else 1.

    ``sizes`` are numbers of positions. The result is a kernel's constant ``HW_FACTOR``, a divisor of the
    sizes. It tells the compiler that channels-first rows are aligned, so that it vectorizes loads.
    Channels-last loads run along the channels. There the factor is always 1, so one compiled kernel serves
    all sizes.
    """
    return 16 if not channels_last and not any(size % 16 for size in sizes) else 1


def vector_width(itemsize: int, *strides: int) -> int:
    """Maximum number of elements of one load from rows that start at multiples of ``strides`` elements.

    A load has at most 16 bytes. ``itemsize``: bytes of an element. The memory is aligned to 16 bytes.
    """
    width = _LOAD_BYTES // itemsize
    while any(stride % width for stride in strides):
        width //= 2
    return width


def tile_constants(config: Any) -> dict[str, int]:
    """The kernel constants of ``config``'s register tile, whose axes are (lanes, warps, steps, block)."""
    return {
        "LANES": config.lanes,
        "WARPS": config.num_warps,
        "STEPS": config.steps,
        "BLOCK": config.block,
    }
