"""The launch of ``channel_norm``: its grid, its constants, and the memory for its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.channel_norm import kernels
from sdfastgn.kernels.channel_norm.config import rows_config
from sdfastgn.kernels.channel_norm.op import ChannelNormCall
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import PAIRED
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import empty_laid_out
from sdfastgn.kernels.common.sizes import tile_constants, vector_width
from sdfastgn.kernels.layer_norm.config import RowsConfig


class ChannelNormPlan:
    """The launch of ``channel_norm`` for one combination of shapes, dtypes, device and other arguments."""

    __slots__ = ("launch",)

    def __init__(self, call: ChannelNormCall) -> None:
        x = call.x
        C = x.shape[1]
        rows = x.numel() // C
        config = rows_config(rows, C, x.itemsize, vector_width(x.itemsize, C), gpu.num_sms(x.device))
        self.launch = Launch(
            kernels._channel_norm_kernel, config.programs, config.num_warps,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=rows, scale=call.scale, eps=call.eps, C=C, **norm_constants(call, config),
        )  # fmt: skip

    def run(self, call: ChannelNormCall) -> Tensor:
        x = call.x
        y = empty_laid_out(x, x.shape, channels_last=True)
        self.launch.run(x, call.weight, call.bias, y)
        return y

    run_and_save = run


def norm_constants(call: Any, config: RowsConfig) -> dict[str, Any]:
    """The kernel constants of activation and tile, which forward and backward of ``channel_norm`` share."""
    x = call.x
    return {
        "ACTIVATION": call.activation,
        "PAIRS": x.dtype != torch.float32 and config.block >= PAIRED,
        "WIDE": config.wide,
        **tile_constants(config),
    }
