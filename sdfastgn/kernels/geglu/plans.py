"""The launches of ``geglu``, of its backward, and of ``gated``: which kernels run, and their grids.

The kernels are in ``geglu/kernels.py``, their configurations in ``geglu/config.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import PAIRED
from sdfastgn.kernels.common.declaration import Gradients, empty_row_gradients, gradients_of
from sdfastgn.kernels.common.e4m3 import E4M3, launches_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.common.sums import SUM_WARPS, column_sum_block
from sdfastgn.kernels.geglu import kernels
from sdfastgn.kernels.geglu.config import TileConfig, backward_config, forward_config
from sdfastgn.kernels.geglu.gated import GatedCall
from sdfastgn.kernels.geglu.op import GegluCall


class GegluPlan:
    """The launches of ``geglu`` for calls with equal shapes, strides, dtypes and device.

    ``launch`` has one program for each tile of y. If y is wanted in E4M3, ``retry`` follows. It writes y
    again with a larger scale if values were beyond the range of E4M3.
    """

    __slots__ = ("launch", "retry", "shape", "strides")

    def __init__(self, call: GegluCall) -> None:
        x = call.x
        D = x.shape[-1] // 2
        self.shape = (*x.shape[:-1], D)
        self.strides = torch.empty(self.shape, device="meta").stride()
        rows = x.numel() // (2 * D)
        x_stride = row_stride(x) or 2 * D
        config = forward_config(rows, D, vector_width(x.itemsize, D, x_stride), x_stride)
        pdl = gpu.has_programmatic_launch(x.device)
        tile = {"X_STRIDE": x_stride, **_tile(config, rows, D)}
        self.launch, self.retry = (
            Launch(kernels._geglu_kernel, count, config.num_warps, pdl=pdl, RETRY=retries, rows=rows, **tile)
            for count, retries in launches_of(config.programs(D))
        )

    def run(self, call: GegluCall) -> Tensor:
        """Launch the kernels, and return y (..., D)."""
        x, bias, quantizer = call
        # ``Tensor.new_empty_strided`` takes less CPU time than ``torch.empty``.
        if quantizer is None:
            y = x.new_empty_strided(self.shape, self.strides)
        else:
            y = x.new_empty_strided(self.shape, self.strides, dtype=E4M3)
        self.launch.run(x, bias, quantizer, y)
        if quantizer is not None:
            self.retry.run(x, bias, quantizer, y)
        return y

    run_and_save = run


class GegluGradPlan:
    """The launches of the backward of ``geglu`` for calls with equal shapes, strides, dtypes and device.

    The calls must also want the same gradients. dbias is the gradient of the bias.

    Attributes:
        grad: the launch that writes dx. If dbias is wanted, it also writes partial sums of dbias.
        columns: the launch that adds up the partial sums to dbias, if dbias is wanted.
        partials: number of fp32 partial sums.
        wanted: names of the operands whose gradients are wanted.
    """

    __slots__ = ("columns", "grad", "partials", "wanted")

    def __init__(self, call: Any) -> None:
        x = call.x
        D = x.shape[-1] // 2
        rows = x.numel() // (2 * D)
        self.wanted = tuple(name for name in gradients_of(type(call)) if getattr(call, f"d{name}"))
        x_stride = row_stride(x) or 2 * D
        vector, sms = vector_width(x.itemsize, D, x_stride), gpu.num_sms(x.device)
        bias_grad = call.dbias is not None
        config = backward_config(rows, D, vector, max(x_stride, 2 * D), sms, column_sums=bias_grad)
        pdl = gpu.has_programmatic_launch(x.device)
        self.grad = Launch(
            kernels._geglu_grad_kernel, config.programs(D), config.num_warps, pdl=pdl,
            rows=rows, tiles=config.tiles, X_STRIDE=x_stride, **_tile(config, rows, D),
        )  # fmt: skip
        self.partials = config.groups * 2 * D if bias_grad else 0
        block_p, block_d = column_sum_block(config.groups, 2 * D)
        self.columns = Launch(
            kernels._bias_sum_kernel, ceil_div(2 * D, block_d), SUM_WARPS, pdl=pdl,
            count=config.groups, columns=2 * D, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip

    def run(self, call: Any) -> Gradients:
        """Launch the kernels, and return the wanted gradients."""
        dy, x, bias, *_ = call
        grads = empty_row_gradients(call, self.wanted)
        partials = None
        if self.partials:
            partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
        with gpu.on_device(x.device):
            stream = gpu.current_stream(x)
            self.grad(stream, dy, x, bias, grads.get("x"), partials)
            if partials is not None:
                self.columns(stream, partials, grads["bias"])
        return grads


class GatedPlan:
    """The launch of ``gated`` for calls with equal shapes, strides, dtypes, device and activation."""

    __slots__ = ("launch", "shape", "strides")

    def __init__(self, call: GatedCall) -> None:
        value, gate, activation = call
        D = value.shape[-1]
        self.shape = tuple(value.shape)
        self.strides = torch.empty(self.shape, device="meta").stride()
        rows = value.numel() // D
        strides = row_stride(value) or D, row_stride(gate) or D
        config = forward_config(rows, D, vector_width(value.itemsize, D, *strides), max(strides))
        self.launch = Launch(
            kernels._gated_kernel, config.programs(D), config.num_warps,
            pdl=gpu.has_programmatic_launch(value.device), rows=rows,
            VALUE_STRIDE=strides[0], GATE_STRIDE=strides[1], ACTIVATION=activation,
            PAIRS=value.itemsize == 2 and config.block_d >= PAIRED, **_tile(config, rows, D),
        )  # fmt: skip

    def run(self, call: GatedCall) -> Tensor:
        """Launch the kernel, and return y (..., D)."""
        y = call.value.new_empty_strided(self.shape, self.strides)
        self.launch.run(call.value, call.gate, y)
        return y


def _tile(config: TileConfig, rows: int, D: int) -> dict[str, Any]:
    """The constants D, EVEN, BLOCK_R and BLOCK_D, which the kernels of GEGLU and ``gated`` share."""
    return {
        "D": D,
        "EVEN": config.is_even(rows, D),
        "BLOCK_R": config.block_r,
        "BLOCK_D": config.block_d,
    }
