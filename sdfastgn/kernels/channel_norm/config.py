"""The launch configurations of the kernels of ``channel_norm``: pure functions of sizes.

The channels of one position are a row. Functions of ``layer_norm/config.py`` choose the tiles of rows.
"""

from __future__ import annotations

from dataclasses import replace

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2
from sdfastgn.kernels.layer_norm.config import RowsConfig, backward_config, forward_config

# Maximum number of elements of each thread if a warp has more rows than it reads with one load instruction.
# This is half of LayerNorm's maximum, because the activation takes registers. LayerNorm has no activation.
_GATHERED_PER_THREAD = 16
# Maximum number of channels, rounded up to a power of 2, that a program of the forward keeps in registers.
_MAX_IN_REGISTERS = 16384
# Maximum number of channels, rounded up to a power of 2, that a program of the backward keeps in registers.
# It is smaller than in the forward, because the backward also keeps sums over rows in registers.
_MAX_WITH_SUMS = 8192


def fits(C: int) -> bool:
    """True if the kernel of the forward can run for ``C`` channels."""
    return next_power_of_2(C) <= _MAX_IN_REGISTERS


def fits_with_sums(C: int) -> bool:
    """True if the kernel of the backward, which also sums over rows, can run for ``C`` channels."""
    return next_power_of_2(C) <= _MAX_WITH_SUMS


def rows_config(rows: int, C: int, itemsize: int, vector: int, num_sms: int) -> RowsConfig:
    """The configuration of the forward for x (rows, C). C must be small enough for registers (``fits``).

    ``itemsize``: bytes of an element. ``vector``: number of elements that a thread loads at once.
    """
    config = forward_config(rows, C, itemsize, vector, num_sms)
    assert isinstance(config, RowsConfig)
    if config.wide:
        return config
    row = config.steps * config.block
    lanes = max(WARP * vector // config.block, _GATHERED_PER_THREAD * WARP // row)
    lanes = min(config.lanes, lanes)
    return replace(config, lanes=lanes, programs=ceil_div(rows, lanes * config.num_warps))


def grad_config(rows: int, C: int, vector: int, num_sms: int, *, column_sums: bool) -> RowsConfig:
    """The configuration of the backward for x (rows, C). C must be small enough for ``fits_with_sums``.

    ``column_sums``: True if the gradient of weight or bias is wanted. Both gradients are sums over rows.
    """
    config = backward_config(rows, C, vector, num_sms, column_sums=column_sums)
    assert isinstance(config, RowsConfig)
    return config
