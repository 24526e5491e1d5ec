"""The launches of the backward of ``channel_norm``, and the memory that they need."""

from __future__ import annotations

from typing import Any

import torch

from sdfastgn.kernels.channel_norm import backward_kernels as kernels
from sdfastgn.kernels.channel_norm.config import grad_config
from sdfastgn.kernels.channel_norm.plans import norm_constants
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.declaration import Gradients, empty_gradients, gradients_of
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.common.sums import SUM_WARPS, column_sum_block
from sdfastgn.kernels.layer_norm.backward_kernels import _column_sum_kernel


class ChannelNormGradPlan:
    """The launches of the backward for one combination of shapes, dtypes, device and other arguments.

    Attributes:
        grad: the launch that writes dx, and partial sums of the gradients of weight and bias.
        columns: the launch that adds up these partial sums.
        partials: number of fp32 values in the memory for partial sums.
        wanted: names of the operands whose gradients are wanted.
    """

    __slots__ = ("columns", "grad", "partials", "wanted")

    def __init__(self, call: Any) -> None:
        x = call.x
        C = x.shape[1]
        rows = x.numel() // C
        self.wanted = tuple(name for name in gradients_of(type(call)) if getattr(call, f"d{name}"))
        sums = (call.dweight, call.dbias)
        config = grad_config(
            rows, C, vector_width(x.itemsize, C), gpu.num_sms(x.device), column_sums=any(sums)
        )
        pdl = gpu.has_programmatic_launch(x.device)
        count = config.programs
        self.grad = Launch(
            kernels._channel_norm_grad_kernel, count, config.num_warps, pdl=pdl,
            rows=rows, plane=count * C, scale=call.scale, eps=call.eps, C=C,
            WEIGHT_GRAD=call.dweight, BIAS_GRAD=call.dbias, **norm_constants(call, config),
        )  # fmt: skip
        self.partials = 2 * count * C if any(sums) else 0
        block_p, block_d = column_sum_block(count, C)
        self.columns = Launch(
            _column_sum_kernel, 3 * ceil_div(C, block_d), SUM_WARPS, pdl=pdl,
            count=count, D=C, plane=count * C, BLOCK_P=block_p, BLOCK_D=block_d,
        )  # fmt: skip

    def run(self, call: Any) -> Gradients:
        dy, x, weight, bias, *_ = call
        grads = empty_gradients(call, self.wanted)
        partials = None
        if self.partials:
            partials = torch.empty(self.partials, dtype=torch.float32, device=x.device)
        with gpu.on_device(x.device):
            stream = gpu.current_stream(x)
            self.grad(stream, dy, x, weight, bias, grads.get("x"), partials)
            if partials is not None:
                self.columns(stream, partials, grads.get("weight"), grads.get("bias"), None)
        return grads
