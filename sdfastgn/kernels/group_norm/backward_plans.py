"""Launchers of the kernels of ``group_norm/backward_kernels.py``: which run, in what memory, planned once for each kind of call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activation_kernels import PAIRED
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import (
    dense,
    dense_is_channels_last,
    empty_dense_like,
    is_channels_last,
    is_dense,
)
from sdfastgn.kernels.common.plan_cache import remember
from sdfastgn.kernels.common.sizes import ceil_div, row_factor
from sdfastgn.kernels.group_norm import backward_kernels as kernels
from sdfastgn.kernels.group_norm import walk_kernels as group_norm_walk_kernels
from sdfastgn.kernels.group_norm.config import (
    ApplyConfig,
    SmallConfig,
    WalkConfig,
    apply_config,
    launch_config,
    merge_config,
    parameter_config,
    walk_config,
)
from sdfastgn.kernels.group_norm.plans import ALIGNED, row_stride
from sdfastgn.kernels.statistics.config import StatisticsConfig
from sdfastgn.kernels.statistics.kernels import is_even

__all__ = ["launch_group_norm_grads"]

# Values for each sample and channel that ``merge_sums_kernel`` leaves to ``apply_grad_kernel``.
_TABLE_ROWS = 5


def _aligned(values: int) -> int:
    return ceil_div(values, ALIGNED) * ALIGNED


class _GradPlan:
    """The launches for one combination of shapes, strides, dtypes, device and wanted gradients.

    ``scratch``: fp32 values that pass between them: sums of chunks, then ``totals`` of samples, then the table for dx.
    """

    __slots__ = (
        "apply", "copies_dy", "copies_params", "copies_x", "merge", "parameters", "plane", "scratch", "single", "sums", "totals",
    )  # fmt: skip

    def __init__(
        self,
        x: Tensor,
        dy: Tensor,
        num_groups: int,
        activation: str,
        params: tuple[Tensor | None, ...],
        tokens: bool,
        wanted: tuple[bool, ...],
    ) -> None:
        N, C = x.shape[:2]
        HW = math.prod(x.shape[2:])
        shape = (N, C, HW)
        channels_last = dense_is_channels_last(x)
        self.copies_x = not is_dense(x)
        self.copies_dy = not (dy.is_contiguous() if tokens else is_dense(dy))
        self.copies_params = any(t is not None and t.stride(-1) != 1 for t in params)
        dy_last = tokens or (channels_last if self.copies_dy else is_channels_last(dy))
        pdl = gpu.has_programmatic_launch(x.device)
        strides = tuple(row_stride(t, C) for t in params[2:])
        self.plane = _aligned(N * C)
        self.single: Launch | None = None
        self.apply: Launch | None = None
        self.parameters: Launch | None = None
        sms = gpu.num_sms(x.device)
        config = launch_config(N, C, HW, num_groups, channels_last, sms, backward=True)
        walk = None
        if not isinstance(config, SmallConfig) and wanted[0] and dy_last == channels_last:
            walk = walk_config(
                N, C, HW, num_groups, channels_last, sms, x.element_size(), activation, wanted[3]
            )
        how = {
            "C": C, "CG": C // num_groups, "ACTIVATION": activation, "SHIFT_GRAD": wanted[3], "CHANNELS_LAST": channels_last,
            "DY_LAST": dy_last, "PDL": pdl,
        }  # fmt: skip
        self.totals, self.scratch = 0, (2 + wanted[3]) * self.plane
        if isinstance(config, SmallConfig):
            self._plan_small(shape, config, strides, how, x.dtype)
        elif walk is not None:
            self._plan_walk(shape, walk, strides, how, x.dtype)
        else:
            self._plan_sums(shape, config.statistics, strides, how, x.dtype)
            self._plan_merge(shape, num_groups, config.statistics.chunks, strides, how)
        rows = {
            name: t is not None and t.dim() == 2 and t.shape[0] == N
            for name, t in zip(("SHIFT_ROWS", "SCALE_ROWS", "OFFSET_ROWS"), params[2:], strict=True)
        }
        block_n, block_c = parameter_config(N, C)
        programs = ceil_div(C, block_c) if any(wanted[1:]) else 0
        parameters = {"C": C, **rows, "PDL": pdl, "BLOCK_N": block_n}
        numbers = (strides[1], N, self.totals, self.plane)
        if self.single is None and wanted[0]:
            parameters |= {"BLOCK_PARAMETERS": block_c, "PARAMETER_PROGRAMS": programs}
            blocks = apply_config(N, C, HW, channels_last, sms, backward=True)
            self._plan_apply(shape, blocks, numbers, {**parameters, **how}, x.dtype)
        elif programs:
            parameters["BLOCK_C"] = block_c
            self.parameters = Launch(kernels.parameter_grad_kernel, programs, numbers, parameters, 4, pdl=pdl)

    def _plan_small(
        self, shape: tuple[int, int, int], config: SmallConfig, strides: tuple[int, ...], how: dict[str, Any], dtype: torch.dtype
    ) -> None:  # fmt: skip
        N, C, HW = shape
        constants = {
            **how, "PAIRS": _pairs(dtype, config.block), "CHANNELS": config.channels, "EACH_CHANNEL": config.each_channel,
            "LANES": config.lanes, "WARPS": config.num_warps, "STEPS": config.steps, "BLOCK": config.block,
        }  # fmt: skip
        programs = N * ceil_div(C, config.channels)
        numbers = (*strides, HW, self.plane)
        self.single = Launch(
            kernels.small_grad_kernel, programs, numbers, constants, config.num_warps, pdl=how["PDL"]
        )

    def _plan_walk(
        self, shape: tuple[int, int, int], config: WalkConfig, strides: tuple[int, ...], how: dict[str, Any], dtype: torch.dtype
    ) -> None:  # fmt: skip
        N, C, HW = shape
        constants = {name: how[name] for name in ("C", "CG", "ACTIVATION", "SHIFT_GRAD", "CHANNELS_LAST", "PDL")} | {
            "PAIRS": how["CHANNELS_LAST"] and _pairs(dtype, config.block_c),
            "HW_FACTOR": row_factor(how["CHANNELS_LAST"], HW), "BLOCK_HW": config.block_hw, "KEPT_HW": config.kept_hw,
            "BLOCK_C": config.block_c,
        }  # fmt: skip
        programs, numbers = N * C // how["CG"], (*strides, HW, self.plane)
        self.single = Launch(
            group_norm_walk_kernels.walk_grad_kernel,
            programs,
            numbers,
            constants,
            config.num_warps,
            pdl=how["PDL"],
        )

    def _plan_sums(
        self, shape: tuple[int, int, int], config: StatisticsConfig, strides: tuple[int, ...], how: dict[str, Any], dtype: torch.dtype
    ) -> None:  # fmt: skip
        N, C, HW = shape
        channels_last = how["CHANNELS_LAST"]
        constants = {
            **how, "PAIRS": _pairs(dtype, config.block), "EVEN": is_even(config, C, HW, channels_last),
            "LOOP": config.rows > config.tile_rows, "HW_FACTOR": row_factor(channels_last, HW, config.rows),
            "LANES": config.lanes, "WARPS": config.num_warps, "STEPS": config.steps, "BLOCK": config.block,
        }  # fmt: skip
        if channels_last:
            programs = N * ceil_div(C, config.block) * ceil_div(config.chunks, config.num_warps)
        else:
            programs = N * ceil_div(C, config.num_warps) * config.chunks
        numbers = (*strides, HW, config.rows, config.chunks, N * config.chunks * C)
        self.sums = Launch(
            kernels.sums_kernel, programs, numbers, constants, config.num_warps, pdl=how["PDL"]
        )

    def _plan_merge(
        self, shape: tuple[int, int, int], num_groups: int, chunks: int, strides: tuple[int, ...], how: dict[str, Any]
    ) -> None:  # fmt: skip
        N, C, HW = shape
        shift_grad = how["SHIFT_GRAD"]
        sums = 2 + shift_grad
        self.totals = _aligned(sums * N * chunks * C)
        table = self.totals + sums * self.plane
        self.scratch = table + _TABLE_ROWS * self.plane
        tile = merge_config(chunks, C, num_groups, backward=True)
        constants = {
            "C": C, "CG": C // num_groups, "CHANNELS": tile.channels, "EACH_CHANNEL": tile.each_channel, "SHIFT_GRAD": shift_grad,
            "LOOP": chunks > tile.block_p, "PDL": how["PDL"], "BLOCK_P": tile.block_p, "BLOCK_C": tile.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, tile.channels)
        numbers = (*strides, HW, chunks, N * chunks * C, self.totals, table, self.plane)
        self.merge = Launch(
            kernels.merge_sums_kernel, programs, numbers, constants, tile.num_warps, pdl=how["PDL"]
        )

    def _plan_apply(
        self, shape: tuple[int, int, int], blocks: ApplyConfig, numbers: tuple[int, ...], how: dict[str, Any], dtype: torch.dtype
    ) -> None:  # fmt: skip
        N, C, HW = shape
        names = "C SHIFT_ROWS SCALE_ROWS OFFSET_ROWS PDL BLOCK_N BLOCK_PARAMETERS PARAMETER_PROGRAMS CHANNELS_LAST DY_LAST ACTIVATION"
        constants = {name: how[name] for name in names.split()} | {
            "PAIRS": how["CHANNELS_LAST"] and _pairs(dtype, blocks.block_c),
            "EVEN": C % blocks.block_c == 0 and HW % blocks.block_hw == 0,
            "HW_FACTOR": row_factor(how["CHANNELS_LAST"] and how["DY_LAST"], HW), "BLOCK_HW": blocks.block_hw, "BLOCK_C": blocks.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw) + how["PARAMETER_PROGRAMS"]
        table = self.scratch - _TABLE_ROWS * self.plane
        numbers = (*numbers, HW, table)
        self.apply = Launch(
            kernels.apply_grad_kernel, programs, numbers, constants, blocks.num_warps, pdl=how["PDL"]
        )  # fmt: skip


def _pairs(dtype: torch.dtype, block: int) -> bool:
    return dtype != torch.float32 and block >= PAIRED


# By everything that a launch depends on but the data.
_plans: dict[tuple[Any, ...], _GradPlan] = {}


def launch_group_norm_grads(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    params: tuple[Tensor | None, ...],
    num_groups: int,
    activation: str,
    tokens: bool,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, shift, ada_scale and ada_shift by Triton kernels, None where not ``wanted``.

    Shapes: dy (N, C, *spatial), or (N, HW, C) if ``tokens``; mean and rstd (N, G) fp32 of the forward; ``params`` weight, bias (C,),
    shift, ada_scale, ada_shift (N, C), (1, C) or (C,), each or None. Arguments are valid, and not empty.
    """
    key = (
        x.shape, x.stride(), x.dtype, x.device, dy.stride(), dy.dtype, num_groups, activation, tokens, wanted,
        *(None if t is None else (t.shape, t.stride(), t.dtype) for t in params),
    )  # fmt: skip
    plan = _plans.get(key) or remember(
        _plans, key, _GradPlan(x, dy, num_groups, activation, params, tokens, wanted)
    )
    dx = None
    if wanted[0]:
        dx = empty_dense_like(x, x.dtype) if plan.copies_x else torch.empty_like(x)
    grads = [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and want else None
        for t, want in zip(params, wanted[1:], strict=True)
    ]
    if plan.copies_x:
        x = dense(x)
    if plan.copies_dy:
        # An expanded gradient, or one with gaps: everything else is read where it lies.
        dy = dy.contiguous() if tokens else empty_dense_like(x, dy.dtype).copy_(dy)
    if plan.copies_params:
        params = tuple(t if t is None or t.stride(-1) == 1 else t.contiguous() for t in params)
    with gpu.on_device(x.device):
        _launch(plan, x, dy, dx, (mean, rstd, *params), grads)
    return dx, *grads


def _launch(
    plan: _GradPlan,
    x: Tensor,
    dy: Tensor,
    dx: Tensor | None,
    others: tuple[Tensor | None, ...],
    grads: list[Tensor | None],
) -> None:
    """``others``: mean, rstd, weight, bias, shift, ada_scale, ada_shift."""
    stream = gpu.current_stream(x.device)
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    of_parameters = (others[2], others[3], others[5], *grads)
    if plan.single is not None:
        plan.single(stream, x, dy, dx, scratch if plan.parameters else None, *others)
    else:
        plan.sums(stream, x, dy, scratch, *others)
        plan.merge(stream, scratch, *others)
    if plan.apply is not None:
        plan.apply(stream, x, dy, dx, scratch, *of_parameters)
    elif plan.parameters is not None:
        plan.parameters(stream, scratch, *of_parameters)
