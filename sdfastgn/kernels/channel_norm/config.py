"""How the kernels of ``channel_norm`` are launched: pure functions of sizes.

A position's channels are a row, and rows are cut into tiles as those of LayerNorm are.
"""

from __future__ import annotations

from dataclasses import replace

from sdfastgn.kernels.common.sizes import WARP, ceil_div, next_power_of_2
from sdfastgn.kernels.layer_norm.config import RowsConfig, backward_config, forward_config

# Maximum number of elements of each thread if a warp has more rows than one load holds. LayerNorm has twice
# as many: it has no activation, which takes registers.
_GATHERED_PER_THREAD = 16
# Channels, padded, that one program keeps in registers.
_MAX_IN_REGISTERS = 16384
# The same in a backward that keeps sums of columns there too.
_MAX_WITH_SUMS = 8192


def fits(C: int) -> bool:
    """True if the forward of ``C`` channels has a kernel."""
    return next_power_of_2(C) <= _MAX_IN_REGISTERS


def fits_with_sums(C: int) -> bool:
    """True if the backward of ``C`` channels has a kernel."""
    return next_power_of_2(C) <= _MAX_WITH_SUMS


def rows_config(rows: int, C: int, itemsize: int, vector: int, num_sms: int) -> RowsConfig:
    """How to normalize (rows, C), where ``fits(C)``. ``vector``: elements of one load of a thread."""
    config = forward_config(rows, C, itemsize, vector, num_sms)
    assert isinstance(config, RowsConfig)
    if config.wide:
        return config
    row = config.steps * config.block
    lanes = max(WARP * vector // config.block, _GATHERED_PER_THREAD * WARP // row)
    lanes = min(config.lanes, lanes)
    return replace(config, lanes=lanes, programs=ceil_div(rows, lanes * config.num_warps))


def grad_config(rows: int, C: int, vector: int, num_sms: int, *, column_sums: bool) -> RowsConfig:
    """How to take gradients of (rows, C), where ``fits_with_sums(C)``."""
    config = backward_config(rows, C, vector, num_sms, column_sums=column_sums)
    assert isinstance(config, RowsConfig)
    return config
