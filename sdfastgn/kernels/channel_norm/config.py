"""The launch configurations of the kernels of ``channel_norm``: pure functions of sizes.

The channels of one position are a row. Tiles of rows are chosen as for LayerNorm.
"""

from __future__ import annotations

from sdfastgn.kernels.common.sizes import next_power_of_2
from sdfastgn.kernels.layer_norm.config import RowsConfig, backward_config, forward_config

# Maximum number of channels, padded to a power of 2, that a program of the forward keeps in registers.
_MAX_IN_REGISTERS = 16384
# Maximum number of channels, padded to a power of 2, that a program of the backward keeps in registers. It is
# smaller than in the forward, because the backward also keeps sums over rows in registers.
_MAX_WITH_SUMS = 8192


def fits(C: int) -> bool:
    """True if the kernel of the forward can run for ``C`` channels."""
    return next_power_of_2(C) <= _MAX_IN_REGISTERS


def fits_with_sums(C: int) -> bool:
    """True if the kernel of the backward can run for ``C`` channels."""
    return next_power_of_2(C) <= _MAX_WITH_SUMS


def rows_config(rows: int, C: int, itemsize: int, vector: int, num_sms: int) -> RowsConfig:
    """The configuration of the forward for x (rows, C), with ``fits(C)`` True.

    ``itemsize``: bytes of an element. ``vector``: number of elements that a thread loads at once.
    """
    config = forward_config(rows, C, itemsize, vector, num_sms)
    assert isinstance(config, RowsConfig)
    return config


def grad_config(rows: int, C: int, vector: int, num_sms: int, *, column_sums: bool) -> RowsConfig:
    """The configuration of the backward for x (rows, C), with ``fits_with_sums(C)`` True."""
    config = backward_config(rows, C, vector, num_sms, column_sums=column_sums)
    assert isinstance(config, RowsConfig)
    return config
