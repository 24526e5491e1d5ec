"""How ``geglu`` and its gradients are launched: which kernels of ``geglu/kernels.py``, in what memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.column_sums import SUM_WARPS, column_sum_block
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.geglu import kernels
from sdfastgn.kernels.geglu.config import TileConfig, backward_config, forward_config

__all__ = ["GegluCall", "GegluGradCall", "GegluGrads", "GegluPlan", "launch_geglu_grads"]


class GegluCall(NamedTuple):
    """The arguments of the op ``sdfastgn::geglu``. Shapes: x (..., 2D), bias (2D,)."""

    x: Tensor
    bias: Tensor | None


class GegluGradCall(NamedTuple):
    """The arguments of ``sdfastgn::geglu_backward``. Shapes: dy (..., D), the others as in ``GegluCall``.

    dx and dbias are the dtypes of the gradients; None for each that is not wanted.
    """

    dy: Tensor
    x: Tensor
    bias: Tensor | None
    dx: torch.dtype | None
    dbias: torch.dtype | None

    def wanted(self) -> tuple[torch.dtype | None, ...]:
        return self.dx, self.dbias


class GegluGrads(NamedTuple):
    """Gradients; None where not wanted."""

    x: Tensor | None
    bias: Tensor | None


class GegluPlan:
    """The launch for one combination of shapes, strides, dtypes and device."""

    __slots__ = ("copies_bias", "copies_x", "launch", "shape")

    def __init__(self, call: GegluCall) -> None:
        x, bias = call
        D = x.shape[-1] // 2
        self.shape = (*x.shape[:-1], D)
        self.copies_x = row_stride(x) is None
        self.copies_bias = bias is not None and not bias.is_contiguous()
        rows = x.numel() // (2 * D)
        x_stride = row_stride(x) or 2 * D
        config = forward_config(rows, D, vector_width(x.itemsize, D, x_stride), x_stride)
        pdl = gpu.has_programmatic_launch(x.device)
        constants = _constants(config, rows, D, x_stride, pdl)
        kernel, programs = kernels._geglu_kernel, config.programs(D)
        self.launch = Launch(kernel, programs, (rows,), constants, config.num_warps, pdl=pdl)

    def run(self, call: GegluCall) -> Tensor:
        x, bias = call
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        if self.copies_x:
            x = x.contiguous()
        if self.copies_bias and bias is not None:
            bias = bias.contiguous()
        self.launch.run(x, bias, y)
        return y

    run_and_save = run


class _GradPlan:
    """The launches for one combination of shapes, strides, dtypes, device and wanted gradients.

    ``partials``: fp32 values that ``grad`` leaves of the bias's gradient, and ``columns`` adds up.
    """

    __slots__ = ("columns", "copies_x", "grad", "partials")

    def __init__(self, call: GegluGradCall) -> None:
        x = call.x
        D = x.shape[-1] // 2
        rows = x.numel() // (2 * D)
        self.copies_x = row_stride(x) is None
        x_stride = row_stride(x) or 2 * D
        vector, sms = vector_width(x.itemsize, D, x_stride), gpu.num_sms(x.device)
        bias_grad = call.dbias is not None
        config = backward_config(rows, D, vector, max(x_stride, 2 * D), sms, column_sums=bias_grad)
        pdl = gpu.has_programmatic_launch(x.device)
        constants = _constants(config, rows, D, x_stride, pdl)
        kernel, numbers = kernels._geglu_grad_kernel, (rows, config.tiles)
        self.grad = Launch(kernel, config.programs(D), numbers, constants, config.num_warps, pdl=pdl)
        self.partials = config.groups * 2 * D if bias_grad else 0
        block_p, block_d = column_sum_block(config.groups, 2 * D)
        constants = {"PDL": pdl, "BLOCK_P": block_p, "BLOCK_D": block_d}
        programs, numbers = ceil_div(2 * D, block_d), (config.groups, 2 * D)
        self.columns = Launch(kernels._bias_sum_kernel, programs, numbers, constants, SUM_WARPS, pdl=pdl)


def _constants(config: TileConfig, rows: int, D: int, x_stride: int, pdl: bool) -> dict[str, Any]:
    return {
        "D": D,
        "X_STRIDE": x_stride,
        "EVEN": config.is_even(rows, D),
        "PDL": pdl,
        "BLOCK_R": config.block_r,
        "BLOCK_D": config.block_d,
    }


_plans: PlanCache[_GradPlan] = PlanCache()


def launch_geglu_grads(call: GegluGradCall) -> GegluGrads:
    """Gradients by Triton kernels. Arguments are valid, and x is not empty."""
    dy, x, bias = call.dy.contiguous(), call.x, None if call.bias is None else call.bias.contiguous()
    key = plan_key(call._replace(dy=dy, bias=bias))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _GradPlan(call)
    dx = None if call.dx is None else torch.empty(x.shape, dtype=call.dx, device=x.device)
    dbias = None if call.dbias is None else torch.empty(x.shape[-1:], dtype=call.dbias, device=x.device)
    partials = torch.empty(plan.partials, dtype=torch.float32, device=x.device) if plan.partials else None
    if plan.copies_x:
        x = x.contiguous()
    with gpu.on_device(x.device):
        stream = gpu.current_stream(x.device)
        plan.grad(stream, dy, x, bias, dx, partials)
        if partials is not None:
            plan.columns(stream, partials, dbias)
    return GegluGrads(dx, dbias)
