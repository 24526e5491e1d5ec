"""Triton kernels of GEGLU and of its backward, and their launchers. Formulas and ops are in ``geglu/op.py``.

Forward: one launch, one read of x and one write of y. Backward: one read of dy and x and one write of dx; where the bias wants a gradient,
each program adds up its rows in registers and leaves one fp32 partial sum a column, which a second launch adds up in a fixed order: no
atomics, the same bits at each run.

From sm_90 on each kernel starts while the one before it still runs (``PDL``), and waits before it touches memory.

Numerics: fp32 throughout, one rounding at each store; the normal distribution of a 16-bit x as ``normal_cdf`` says. Offsets that can
pass 2^31 are int64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.column_sums import column_sum_block
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import row_stride
from sdfastgn.kernels.common.plan_cache import remember
from sdfastgn.kernels.common.sizes import ceil_div, vector_width
from sdfastgn.kernels.common.tiles import triton
from sdfastgn.kernels.geglu.config import TileConfig, backward_config, forward_config

if triton is not None:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait

    from sdfastgn.kernels.common.activation_kernels import normal_cdf
    from sdfastgn.kernels.common.column_sums import sum_columns

__all__ = ["find_plan", "launch_geglu", "launch_geglu_grads", "make_plan", "plan_key"]

# --- kernels ------------------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _read_bias(bias_ptr, D: tl.constexpr, c, in_row):
        """Bias of the values and of the gates in columns ``c``, to be added to a tile."""
        bias = 0.0
        gate_bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c, mask=in_row).to(tl.float32)[None, :]
            gate_bias = tl.load(bias_ptr + D + c, mask=in_row).to(tl.float32)[None, :]
        return bias, gate_bias

    @triton.jit(do_not_specialize=["rows"])
    def _geglu_kernel(
        x_ptr, bias_ptr, y_ptr, rows,
        D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        columns = tl.cdiv(D, BLOCK_D)
        first = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_R
        start = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_D
        # A row alone may be longer than an int32 can say; Triton 3.6 refuses that even times 0.
        ROW: tl.constexpr = X_STRIDE if BLOCK_R > 1 else 0
        r = tl.arange(0, BLOCK_R)[:, None]
        i = tl.arange(0, BLOCK_D)
        in_row = None
        mask = None
        if not EVEN:
            in_row = start + i < D
            mask = (first + r < rows) & in_row[None, :]
        if PDL:
            gdc_wait()
        x = x_ptr + (first * X_STRIDE + start) + (r * ROW + i[None, :])
        value = tl.load(x, mask=mask).to(tl.float32)
        gate = tl.load(x + D, mask=mask).to(tl.float32)
        bias, gate_bias = _read_bias(bias_ptr, D, start + i, in_row)
        gate += gate_bias
        y = (value + bias) * (gate * normal_cdf(gate, x_ptr.dtype.element_ty != tl.float32)[0])
        tl.store(y_ptr + (first * D + start) + (r * D + i[None, :]), y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["rows", "tiles"])
    def _geglu_grad_kernel(
        dy_ptr, x_ptr, bias_ptr, dx_ptr, partials_ptr, rows, tiles,
        D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    ):  # fmt: skip
        """dx of a block of columns in a group of tiles, and the group's column sums."""
        columns = tl.cdiv(D, BLOCK_D)
        group = tl.program_id(0) // columns
        start = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_D
        ROW: tl.constexpr = X_STRIDE if BLOCK_R > 1 else 0
        r = tl.arange(0, BLOCK_R)[:, None]
        i = tl.arange(0, BLOCK_D)
        in_row = start + i < D
        values = tl.zeros((BLOCK_D,), tl.float32)
        gates = values
        if PDL:
            gdc_wait()
        bias, gate_bias = _read_bias(bias_ptr, D, start + i, None if EVEN else in_row)
        for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(rows, BLOCK_R))):
            first = tl.cast(tile, tl.int64) * BLOCK_R
            mask = None if EVEN else (first + r < rows) & in_row[None, :]
            dy = tl.load(dy_ptr + (first * D + start) + (r * D + i[None, :]), mask=mask).to(tl.float32)
            x = x_ptr + (first * X_STRIDE + start) + (r * ROW + i[None, :])
            value = tl.load(x, mask=mask).to(tl.float32) + bias
            gate = tl.load(x + D, mask=mask).to(tl.float32) + gate_bias
            cdf, density = normal_cdf(gate, x_ptr.dtype.element_ty != tl.float32)
            dvalue = dy * (gate * cdf)
            dgate = dy * value * (cdf + gate * 0.3989422804014327 * density)
            if dx_ptr is not None:
                dx = dx_ptr + (first * 2 * D + start) + (r * 2 * D + i[None, :])
                tl.store(dx, dvalue.to(dx_ptr.dtype.element_ty), mask=mask)
                tl.store(dx + D, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
            if partials_ptr is not None:
                if not EVEN:  # what lies outside the mask is undefined
                    dvalue = tl.where(mask, dvalue, 0.0)
                    dgate = tl.where(mask, dgate, 0.0)
                values += tl.sum(dvalue, 0)
                gates += tl.sum(dgate, 0)
        if partials_ptr is not None:
            out = partials_ptr + group.to(tl.int64) * 2 * D + start + i
            tl.store(out, values, mask=None if EVEN else in_row)
            tl.store(out + D, gates, mask=None if EVEN else in_row)

    @triton.jit(do_not_specialize=["count", "columns"])
    def _bias_sum_kernel(
        partials_ptr,
        dbias_ptr,
        count,
        columns,
        PDL: tl.constexpr,
        BLOCK_P: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        c = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        if PDL:
            gdc_wait()
        sum_columns(partials_ptr, dbias_ptr, count, columns, c, BLOCK_P)


# --- launchers ----------------------------------------------------------------------------------------------------------------

_SUM_WARPS = 8


def _constants(config: TileConfig, rows: int, D: int, x_stride: int, *, pdl: bool) -> dict[str, Any]:
    return {
        "D": D, "X_STRIDE": x_stride, "EVEN": config.is_even(rows, D), "PDL": pdl, "BLOCK_R": config.block_r, "BLOCK_D": config.block_d,
    }  # fmt: skip


class _Plan:
    """The launch for one combination of shapes, strides, dtypes and device."""

    __slots__ = ("copies_bias", "copies_x", "launch", "programs", "shape")

    def __init__(self, x: Tensor, bias: Tensor | None) -> None:
        D = x.shape[-1] // 2
        self.shape = (*x.shape[:-1], D)
        self.programs = x.numel() > 0
        self.copies_x = row_stride(x) is None
        self.copies_bias = bias is not None and not bias.is_contiguous()
        if not self.programs:
            return
        rows = x.numel() // (2 * D)
        x_stride = row_stride(x) or 2 * D
        config = forward_config(rows, D, vector_width(x.itemsize, D, x_stride), x_stride)
        pdl = gpu.has_programmatic_launch(x.device)
        constants = _constants(config, rows, D, x_stride, pdl=pdl)
        self.launch = Launch(_geglu_kernel, config.programs(D), (rows,), constants, config.num_warps, pdl=pdl)


# By everything that a launch depends on but the data.
_plans: dict[tuple[Any, ...], _Plan] = {}


def plan_key(x: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Hashable summary of the arguments of a call."""
    signature = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    return x.shape, x.stride(), x.dtype, x.device, signature


def find_plan(key: tuple[Any, ...]) -> _Plan | None:
    """The plan of ``make_plan`` with this ``plan_key``: its arguments have been launched before, so that they are valid."""
    return _plans.get(key)


def make_plan(key: tuple[Any, ...], x: Tensor, bias: Tensor | None) -> _Plan:
    """How to launch on valid arguments: x fp16, bf16 or fp32 on a GPU, or anywhere under Triton's interpreter."""
    return remember(_plans, key, _Plan(x, bias))


def launch_geglu(plan: _Plan, x: Tensor, bias: Tensor | None) -> Tensor:
    """y (..., D) of x (..., 2D) and bias (2D,), for which ``plan`` was made."""
    y = torch.empty(plan.shape, dtype=x.dtype, device=x.device)
    if not plan.programs:
        return y
    if plan.copies_x:
        x = x.contiguous()
    if plan.copies_bias and bias is not None:
        bias = bias.contiguous()
    plan.launch.run(x, bias, y)
    return y


class _GradPlan:
    """The launches for one combination of shapes, strides, dtypes, device and wanted gradients."""

    __slots__ = ("columns", "copies_x", "grad", "partials")

    def __init__(self, x: Tensor, *, bias_grad: bool) -> None:
        D = x.shape[-1] // 2
        rows = x.numel() // (2 * D)
        self.copies_x = row_stride(x) is None
        x_stride = row_stride(x) or 2 * D
        vector = vector_width(x.itemsize, D, x_stride)
        sms = gpu.num_sms(x.device)
        config = backward_config(rows, D, vector, max(x_stride, 2 * D), sms, column_sums=bias_grad)
        pdl = gpu.has_programmatic_launch(x.device)
        constants = _constants(config, rows, D, x_stride, pdl=pdl)
        self.grad = Launch(
            _geglu_grad_kernel, config.programs(D), (rows, config.tiles), constants, config.num_warps, pdl=pdl
        )
        self.partials = config.groups * 2 * D if bias_grad else 0
        block_p, block_d = column_sum_block(config.groups, 2 * D)
        constants = {"PDL": pdl, "BLOCK_P": block_p, "BLOCK_D": block_d}
        numbers = (config.groups, 2 * D)
        self.columns = Launch(
            _bias_sum_kernel, ceil_div(2 * D, block_d), numbers, constants, _SUM_WARPS, pdl=pdl
        )


_grad_plans: dict[tuple[Any, ...], _GradPlan] = {}


def launch_geglu_grads(
    dy: Tensor, x: Tensor, bias: Tensor | None, dtypes: tuple[torch.dtype | None, torch.dtype | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (..., 2D) and bias (2D,) in ``dtypes``; None where those are None.

    x is not empty, and fp16, bf16 or fp32 on a GPU, or anywhere under Triton's interpreter. dy: (..., D).
    """
    dy = dy.contiguous()
    bias = None if bias is None else bias.contiguous()
    key = (x.shape, x.stride(), x.dtype, x.device, dy.dtype, None if bias is None else bias.dtype, *dtypes)
    plan = _grad_plans.get(key)
    if plan is None:
        plan = remember(_grad_plans, key, _GradPlan(x, bias_grad=dtypes[1] is not None))
    if plan.copies_x:
        x = x.contiguous()
    shapes = (x.shape, x.shape[-1:])
    dx, dbias = (
        None if dtype is None else torch.empty(shape, dtype=dtype, device=x.device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    partials = torch.empty(plan.partials, dtype=torch.float32, device=x.device) if plan.partials else None
    with gpu.on_device(x.device):
        stream = gpu.current_stream(x.device)
        plan.grad(stream, dy, x, bias, dx, partials)
        if partials is not None:
            plan.columns(stream, partials, dbias)
    return dx, dbias
