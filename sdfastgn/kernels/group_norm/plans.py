"""Launchers of the kernels of ``group_norm/kernels.py``: which run, in what memory, planned once for each kind of call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activation_kernels import PAIRED
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import dense, dense_is_channels_last, empty_dense_like, is_dense
from sdfastgn.kernels.common.plan_cache import remember
from sdfastgn.kernels.common.sizes import ceil_div, row_factor
from sdfastgn.kernels.group_norm import kernels
from sdfastgn.kernels.group_norm.config import SmallConfig, apply_config, launch_config, merge_config
from sdfastgn.kernels.statistics.kernels import StatisticsLaunch

__all__ = ["ALIGNED", "find_plan", "launch_group_norm", "make_plan", "needs_copies", "plan_key", "row_stride"]

ALIGNED = 64  # fp32 values: every part of the scratch memory starts at a multiple of 256 bytes


class _Plan:
    """The launches for one combination of shapes, strides, dtypes and device. ``scratch``: fp32 values that pass between them."""

    __slots__ = ("apply", "merge", "needs_copies", "programs", "scratch", "small", "statistics", "tokens")

    def __init__(
        self,
        x: Tensor,
        num_groups: int,
        eps: float,
        activation: str,
        params: tuple[Tensor | None, ...],
        statistics: Tensor | None,
        tokens: bool,
    ) -> None:
        N, C = x.shape[:2]
        HW = math.prod(x.shape[2:])
        self.needs_copies = needs_copies(x, params, statistics)
        self.tokens = (N, HW, C) if tokens else None
        self.programs = x.numel() > 0
        self.small: Launch | None = None
        self.statistics: StatisticsLaunch | None = None
        if not self.programs:
            return
        strides = tuple(row_stride(t, C) for t in params[2:])
        channels_last = dense_is_channels_last(x)
        fold = x.dtype != torch.float32
        layout = {
            "CHANNELS_LAST": channels_last,
            "OUT_LAST": channels_last or tokens,
            "ACTIVATION": activation,
        }
        config = launch_config(
            N, C, HW, num_groups, channels_last, gpu.num_sms(x.device), itemsize=x.element_size()
        )
        if isinstance(config, SmallConfig) and statistics is None:
            self._plan_small(
                x, config, HW, (*strides, HW, eps), {**layout, "PAIRS": fold and config.block >= PAIRED}
            )
            return
        if statistics is None:
            self.statistics = StatisticsLaunch(x, channels_last)
            chunks = self.statistics.chunks
        else:
            chunks = statistics.shape[2]
        plane, table_plane = N * chunks * C, ceil_div(N * C, ALIGNED) * ALIGNED
        table = ceil_div(2 * plane, ALIGNED) * ALIGNED if statistics is None else 0
        self.scratch = table + (2 if fold else 3) * table_plane
        pdl = gpu.has_programmatic_launch(x.device)
        numbers = (*strides, HW, ceil_div(HW, chunks), chunks, plane, table, table_plane, eps)
        tile = merge_config(chunks, C, num_groups)
        merge = {
            "C": C, "CHANNELS": tile.channels, "EACH_CHANNEL": tile.each_channel, "FOLD": fold, "LOOP": chunks > tile.block_p,
            "PDL": pdl, "COMPLETE": statistics is None, "BLOCK_P": tile.block_p, "BLOCK_C": tile.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, tile.channels)
        self.merge = Launch(kernels.merge_kernel, programs, numbers, merge, tile.num_warps, pdl=pdl)
        self._plan_apply(x, HW, (HW, table, table_plane), layout, fold)

    def _plan_small(
        self, x: Tensor, config: SmallConfig, HW: int, numbers: tuple[int | float, ...], how: dict[str, Any]
    ) -> None:
        N, C = x.shape[:2]
        pdl = gpu.has_programmatic_launch(x.device)
        tail = {"TAIL": config.tail, "TAIL_LANES": config.tail_lanes, "TAIL_STEPS": config.tail_steps}
        kernel = kernels.small_kernel
        if config.each_channel:  # channels-last
            how, tail, kernel = (
                {name: how[name] for name in ("ACTIVATION", "PAIRS")},
                {},
                kernels.channels_kernel,
            )
        constants = {
            "C": C, "CHANNELS": config.channels, **how, "PDL": pdl,
            "LANES": config.lanes, "WARPS": config.num_warps, "STEPS": config.steps, "BLOCK": config.block, **tail,
        }  # fmt: skip
        programs = N * ceil_div(C, config.channels)
        self.small = Launch(kernel, programs, numbers, constants, config.num_warps, pdl=pdl)

    def _plan_apply(
        self, x: Tensor, HW: int, numbers: tuple[int, ...], layout: dict[str, Any], fold: bool
    ) -> None:
        N, C = x.shape[:2]
        pdl = gpu.has_programmatic_launch(x.device)
        blocks = apply_config(N, C, HW, layout["CHANNELS_LAST"], gpu.num_sms(x.device))
        even = C % blocks.block_c == 0 and HW % blocks.block_hw == 0
        apply = {
            "C": C, **layout, "PAIRS": fold and layout["CHANNELS_LAST"] and blocks.block_c >= PAIRED, "FOLD": fold,
            "EVEN": even, "PDL": pdl, "HW_FACTOR": row_factor(layout["CHANNELS_LAST"] and layout["OUT_LAST"], HW),
            "BLOCK_HW": blocks.block_hw, "BLOCK_C": blocks.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
        self.apply = Launch(kernels.apply_kernel, programs, numbers, apply, blocks.num_warps, pdl=pdl)


def needs_copies(x: Tensor, params: tuple[Tensor | None, ...], statistics: Tensor | None) -> bool:
    gaps = not is_dense(x) or any(t is not None and t.stride(-1) != 1 for t in params)
    return gaps or (statistics is not None and not statistics.is_contiguous())


def row_stride(operand: Tensor | None, C: int) -> int:
    """From one sample's row of shift, ada_scale or ada_shift to the next after a copy, if one is needed; 0 where one serves all."""
    if operand is None or operand.dim() == 1 or operand.shape[0] == 1:
        return 0
    return operand.stride(0) if operand.stride(1) == 1 else C


# By everything that a launch depends on but the data.
_plans: dict[tuple[Any, ...], _Plan] = {}


def plan_key(
    x: Tensor,
    num_groups: int,
    eps: float,
    activation: str,
    params: tuple[Tensor | None, ...],
    statistics: Tensor | None,
    tokens: bool,
    out_dtype: torch.dtype | None,
    saves: bool = False,
) -> tuple[Any, ...]:
    """Hashable summary of the arguments of a call; ``params`` as in ``make_plan``. ``saves``: mean and rstd are wanted."""
    signatures = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (*params, statistics)
    ]
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        num_groups,
        eps,
        activation,
        tokens,
        out_dtype,
        saves,
        *signatures,
    )


def find_plan(key: tuple[Any, ...]) -> _Plan | None:
    """The plan of ``make_plan`` with this ``plan_key``: its arguments have been launched before, so that they are valid."""
    return _plans.get(key)


def make_plan(
    key: tuple[Any, ...],
    x: Tensor,
    num_groups: int,
    eps: float,
    activation: str,
    params: tuple[Tensor | None, ...],
    statistics: Tensor | None = None,
    tokens: bool = False,
) -> _Plan:
    """How to launch on valid arguments: x fp16, bf16 or fp32 on a GPU, or anywhere under Triton's interpreter.

    Args:
        key: ``plan_key`` of the other arguments.
        params: weight, bias (C,), shift, ada_scale, ada_shift (N, C), (1, C) or (C,), each or None.
        statistics: (2, N, P, C) fp32 of x, without the shift, or None.
        tokens: return (N, HW, C) instead of the shape of x.
    """
    return remember(_plans, key, _Plan(x, num_groups, eps, activation, params, statistics, tokens))


def launch_group_norm(
    plan: _Plan,
    x: Tensor,
    params: tuple[Tensor | None, ...],
    statistics: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    saved: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """The Triton kernels on the arguments that ``plan`` was made for; see there.

    ``saved``: fp32 (N, G) each, where mean and rstd of the groups go; both, or none if the plan's key says so.
    """
    if plan.tokens is not None:
        y = torch.empty(plan.tokens, dtype=out_dtype or x.dtype, device=x.device)
    elif plan.needs_copies:
        y = empty_dense_like(x, out_dtype or x.dtype)
    else:
        y = torch.empty_like(x, dtype=out_dtype)
    if plan.needs_copies:
        x = dense(x)
        params = tuple(t if t is None or t.stride(-1) == 1 else t.contiguous() for t in params)
        statistics = None if statistics is None else statistics.contiguous()
    if plan.programs:
        if gpu.is_current(x.device):
            _launch(plan, x, y, (*saved, *params), statistics)
        else:
            with torch.cuda.device(x.device):
                _launch(plan, x, y, (*saved, *params), statistics)
    return y


def _launch(
    plan: _Plan, x: Tensor, y: Tensor, others: tuple[Tensor | None, ...], statistics: Tensor | None
) -> None:
    stream = gpu.current_stream(x.device)
    if plan.small is not None:
        plan.small(stream, x, y, *others)
        return
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    if plan.statistics is not None:
        statistics = scratch
        plan.statistics.on_stream(stream, x, statistics)
    plan.merge(stream, statistics, scratch, *others)
    plan.apply(stream, x, y, scratch)
