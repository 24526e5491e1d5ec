"""Arithmetic with sizes for the launch configurations of all kernels."""

from __future__ import annotations

from typing import Any

# Number of lanes (threads) of a warp on NVIDIA's GPUs.
WARP = 32
# Maximum number of bytes that a lane reads with one load instruction.
_LOAD_BYTES = 16
# Maximum offset, in elements, from the start of a tile or a chunk of a tensor to one of its elements. Kernels
# compute such offsets as int32, which takes fewer registers than int64.
MAX_OFFSET = 2**31 - 1
# Number of 16-bit elements that a warp reads with one load of 16 bytes for each lane.
WARP_LOAD = WARP * _LOAD_BYTES // 2


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n; 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_2_below(n: int) -> int:
    """The largest power of 2 that is at most n; 1 for n = 0."""
    return 1 << max(n.bit_length() - 1, 0)


def row_factor(channels_last: bool, *sizes: int) -> int:
    """Returns 16 if the layout is channels-first and all ``sizes`` are multiples of 16, else 1.

    ``sizes``: numbers of spatial positions. The result is passed to kernels as the constant ``HW_FACTOR``, a
    divisor of the sizes. From this constant the compiler knows that channels-first rows are aligned, and
    vectorizes loads. Channels-last loads go along the channels and do not need the factor. With the factor 1,
    one compiled kernel is used for all sizes.
    """
    return 16 if not channels_last and not any(size % 16 for size in sizes) else 1


def vector_width(itemsize: int, *strides: int) -> int:
    """Maximum number of elements that one load instruction can read from a tensor's rows.

    A load reads at most 16 bytes, and starts at a multiple of its size. The tensor starts at a multiple of 16
    bytes.

    Args:
        itemsize: bytes of an element.
        strides: distances between rows, in elements. The result divides all of them.
    """
    width = _LOAD_BYTES // itemsize
    while any(stride % width for stride in strides):
        width //= 2
    return width


def tile_constants(config: Any) -> dict[str, int]:
    """The constants that tell a kernel the sizes of the register tile in ``config`` (``common/tiles.py``)."""
    return {
        "LANES": config.lanes,
        "WARPS": config.num_warps,
        "STEPS": config.steps,
        "BLOCK": config.block,
    }
