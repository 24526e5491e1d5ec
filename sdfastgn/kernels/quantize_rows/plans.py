"""The launch of ``quantize_rows``, and the memory for its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import PAIRED
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import vector_width
from sdfastgn.kernels.layer_norm.config import RowsConfig, forward_config
from sdfastgn.kernels.layer_norm.plans import row_numbers, row_strides, rows_constants
from sdfastgn.kernels.quantize_rows import kernels
from sdfastgn.kernels.quantize_rows.op import QuantizeRowsCall


class QuantizeRowsPlan:
    """The launch of ``quantize_rows`` for calls with equal shapes, strides, dtypes and activations."""

    __slots__ = ("launch", "scale_strides", "shape", "strides")

    def __init__(self, call: QuantizeRowsCall) -> None:
        x, second = call.x, call.second
        B, S, K = x.shape
        D = K if second is None or call.multiplies else K + second.shape[-1]
        self.shape, self.strides, self.scale_strides = (B, S, D), (S * D, D, 1), (S, 1)
        strides = {"x": row_strides(x), "second": row_strides(second)}
        vector = vector_width(x.itemsize, K, D, *(s for pair in strides.values() for s in pair))
        config: Any = forward_config(B * S, D, x.itemsize, vector, gpu.num_sms(x.device))
        assert isinstance(config, RowsConfig)
        self.launch = Launch(
            kernels._quantize_rows_kernel, config.programs, config.num_warps,
            pdl=gpu.has_programmatic_launch(x.device),
            rows=B * S, S=S, **row_numbers(strides, vector),
            K=K, D=D, VECTOR=vector, ACTIVATION=call.activation, SECOND_ACTIVATION=call.second_activation,
            MULTIPLIES=call.multiplies, PAIRS=x.itemsize == 2 and vector == PAIRED, **rows_constants(config),
        )  # fmt: skip

    def run(self, call: QuantizeRowsCall) -> tuple[Tensor, Tensor]:
        """Launches the kernel, and returns the rows in E4M3 and their scales."""
        x = call.x
        y = x.new_empty_strided(self.shape, self.strides, dtype=E4M3)
        scales = x.new_empty_strided(self.shape[:2], self.scale_strides, dtype=torch.float32)
        self.launch.run(x, call.second, y, scales)
        return y, scales
