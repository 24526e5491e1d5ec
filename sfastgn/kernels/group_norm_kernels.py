"""Triton kernels of GroupNorm + activation and their launchers. The op is in ``group_norm.py``, the launch configuration beside it.

Layout: the kernels read (N, HW, C) or (N, C, HW) without gaps; the output has the input's strides, or is (N, HW, C) tokens.

Two ways, chosen by ``launch_config`` from sizes alone:

- *small*: one program holds a whole group in registers: one read, one write, one launch;
- *split*: the kernel of ``statistics_kernels.py`` leaves a mean and a sum of squared deviations (M2) per channel and chunk of rows,
  ``_merge_kernel`` brings them together per group and writes what each channel is scaled and moved by, ``_apply_kernel`` does that.
  The reduction over HW is spread over the whole GPU. Where a producer gave the statistics, the first of the three falls away.

From sm_90 on (``PDL``) a kernel starts while the one before still runs, and waits before it reads what that one writes (programmatic
dependent launch). ``_apply_kernel`` reads its tile of x before the wait, which is right because none of the two kernels before it lets
a successor start until x is complete.

Numerics: fp32 throughout, one rounding at the store. Sums are of deviations, never of raw squares, and are merged by Chan's formula in
a fixed order without atomics, so that results are the same at each run. Offsets that can pass 2^31 are int64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfastgn.kernels.activation_kernels import PAIRED
from sfastgn.kernels.group_norm_config import (
    SmallConfig,
    apply_config,
    ceil_div,
    launch_config,
    merge_config,
    row_factor,
)
from sfastgn.kernels.launch import Launch, current_stream, has_programmatic_launch, is_current, num_sms, remember
from sfastgn.kernels.layout import dense, dense_is_channels_last, empty_dense_like, is_dense
from sfastgn.kernels.statistics_kernels import StatisticsLaunch
from sfastgn.kernels.tiles import triton

if triton is not None:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from sfastgn.kernels.activation_kernels import activate
    from sfastgn.kernels.statistics_kernels import inverse_deviation
    from sfastgn.kernels.tiles import (
        LANE_AXIS,
        STEP_AXIS,
        along_block,
        along_lanes,
        along_steps,
        along_warps,
        map_tile,
        multiple_of,
    )

__all__ = ["ALIGNED", "find_plan", "launch_group_norm", "make_plan", "needs_copies", "plan_key", "row_stride"]

# --- kernels ------------------------------------------------------------------------------------------------------------------

if triton is not None:
    # Sizes are not specialised on: a new resolution never compiles anything. What matters of them is passed as a constant.
    _STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]

    @triton.jit
    def channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
    ):
        """(scale, offset) of channels ``c`` such that the activation's argument is (u - mean) / deviation * scale + offset."""
        # Called before the sums, so that the loads are under way while they run.
        offset = tl.zeros_like(c).to(tl.float32)
        scale = offset + 1
        if weight_ptr is not None:
            scale *= tl.load(weight_ptr + c, mask=in_range, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            offset += tl.load(bias_ptr + c, mask=in_range, other=0.0).to(tl.float32)
        if ada_scale_ptr is not None:
            ada_scale = 1 + tl.load(ada_scale_ptr + n * ada_scale_stride + c, mask=in_range, other=0.0).to(tl.float32)
            scale *= ada_scale
            offset *= ada_scale
        if ada_shift_ptr is not None:
            offset += tl.load(ada_shift_ptr + n * ada_shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        return scale, offset

    @triton.jit
    def _tile_sum(d, EACH_CHANNEL: tl.constexpr):
        """Over a whole (lanes, warps, steps, block) tile, or over all of it but the block."""
        d = tl.sum(d, STEP_AXIS, keep_dims=True)
        if EACH_CHANNEL:
            d = tl.sum(tl.sum(d, LANE_AXIS, keep_dims=True), 1, keep_dims=True)
        else:
            d = tl.sum(tl.reshape(d, (d.shape[0] * d.shape[1] * d.shape[2] * d.shape[3],)), 0)
        return d

    @triton.jit
    def _save(mean_ptr, rstd_ptr, mean, rstd, group, channels, in_range, EACH_CHANNEL: tl.constexpr):
        """Stores what the backward takes: for one group, or for channels that are groups."""
        if mean_ptr is not None:
            if EACH_CHANNEL:
                tl.store(mean_ptr + channels, mean, mask=in_range)
                tl.store(rstd_ptr + channels, rstd, mask=in_range)
            else:
                tl.store(mean_ptr + group, mean)
                tl.store(rstd_ptr + group, rstd)

    @triton.jit(do_not_specialize=[*_STRIDES, "HW", "eps"])
    def _small_kernel(
        x_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, eps,
        C: tl.constexpr, CHANNELS: tl.constexpr, EACH_CHANNEL: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
        ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
        LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """``CHANNELS`` of a sample a program: a group, or channels that are normalised each by itself (``EACH_CHANNEL``)."""
        PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
        part = tl.program_id(0)
        n = (part // PARTS).to(tl.int64)
        first_c = part % PARTS * CHANNELS
        outer = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
        inner = along_block(BLOCK)
        row = outer if CHANNELS_LAST else inner
        j = inner if CHANNELS_LAST else outer
        c = first_c + j
        in_range = (j < CHANNELS) & (c < C)
        mask = (row < HW) & in_range
        base = n * HW * C
        last = row * C + c
        first = c * HW + row
        if PDL:
            gdc_wait()
        x = tl.load(x_ptr + base + (last if CHANNELS_LAST else first), mask=mask, other=0.0).to(tl.float32)
        # Sums are of differences from the first element: rounded at the size of the deviations, not of the data.
        if EACH_CHANNEL:
            pivot = tl.load(x_ptr + base + c, mask=in_range, other=0.0).to(tl.float32)
        else:
            pivot = tl.load(x_ptr + base + first_c * (1 if CHANNELS_LAST else HW)).to(tl.float32)
        d = x - pivot
        if shift_ptr is not None:
            d += tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        scale, offset = channel_affine(
            n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
        )
        share = 1 / (HW * (1 if EACH_CHANNEL else CHANNELS)).to(tl.float32)
        d = tl.where(mask, d, 0.0)
        total = _tile_sum(d, EACH_CHANNEL)
        # Explicit: ptxas would contract product and difference here, but not where the mean is stored too, and other bits come out.
        d = tl.where(mask, tl.fma(total, -share, d), 0.0)
        rstd = inverse_deviation(_tile_sum(d * d, EACH_CHANNEL) * share, eps)
        _save(mean_ptr, rstd_ptr, tl.fma(total, share, pivot), rstd, part, n * C + c, in_range, EACH_CHANNEL)
        y = activate(d * (scale * rstd) + offset, ACTIVATION, PAIRS)
        tl.store(y_ptr + base + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _partials(base, plane, start, chunks, rows, HW, c, in_range, shift, C: tl.constexpr, BLOCK_P: tl.constexpr):
        """(mean + shift, M2, number of positions) of the channels ``c`` in a block of chunks; no positions outside."""
        p = start + tl.arange(0, BLOCK_P)[:, None]
        count = tl.minimum(rows, HW - p * rows)
        mask = (p < chunks) & (count > 0) & in_range[None, :]
        at = p.to(tl.int64) * C + c[None, :]
        mean = tl.load(base + at, mask=mask, other=0.0) + shift[None, :]
        m2 = tl.load(base + plane + at, mask=mask, other=0.0)
        return mean, m2, tl.where(mask, count, 0).to(tl.float32)

    @triton.jit
    def _merged(partials, EACH_CHANNEL: tl.constexpr):
        # Channels first where they are summed: a scalar a warp then passes through shared memory, not a row of channels.
        return tl.sum(partials, axis=0) if EACH_CHANNEL else tl.sum(tl.sum(partials, axis=1), axis=0)

    @triton.jit(do_not_specialize=[*_STRIDES, "HW", "rows", "chunks", "plane", "table_offset", "table_plane", "eps"])
    def _merge_kernel(
        statistics_ptr, table_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, rows, chunks, plane, table_offset, table_plane, eps,
        C: tl.constexpr, CHANNELS: tl.constexpr, EACH_CHANNEL: tl.constexpr, FOLD: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr,
        COMPLETE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """Chan's formula over the channels and chunks of a group: statistics -> (scale, offset, mean) of each of its channels.

        ``CHANNELS`` and ``EACH_CHANNEL`` as in ``_small_kernel``. ``FOLD`` puts the mean into the offset, which saves the apply pass an
        instruction and costs the last bits where the mean is large beside the deviation: for 16-bit x, whose own last bits are
        larger. ``COMPLETE``: x is, when this kernel starts.
        """
        PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
        part = tl.program_id(0)
        n = (part // PARTS).to(tl.int64)
        j = tl.arange(0, BLOCK_C)
        first_c = part % PARTS * CHANNELS
        c = first_c + j
        in_range = (j < CHANNELS) & (c < C)
        base = statistics_ptr + n * chunks * C
        share = 1 / (HW.to(tl.float32) * (1 if EACH_CHANNEL else CHANNELS))
        if PDL:
            if COMPLETE:
                gdc_launch_dependents()
            gdc_wait()
            if not COMPLETE:
                gdc_launch_dependents()
        # Means are merged as deviations from the first one: their sum is then exact to the last bit of the data.
        pivot = tl.load(base + c, mask=in_range, other=0.0) if EACH_CHANNEL else tl.load(base + first_c)
        shift = tl.zeros((BLOCK_C,), tl.float32)
        if shift_ptr is not None:
            shift += tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        scale, offset = channel_affine(
            n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
        )
        to_pivot = shift - pivot
        d, part_m2, weight = _partials(base, plane, 0, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
        total = d * weight
        if LOOP:
            for start in range(BLOCK_P, chunks, BLOCK_P):
                m, _, w = _partials(base, plane, start, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
                total += m * w
        total = _merged(total, EACH_CHANNEL)
        d = tl.fma(total, -share, d)  # explicit for the same reason as in the small kernel
        m2 = part_m2 + d * d * weight
        if LOOP:
            for start in range(BLOCK_P, chunks, BLOCK_P):
                d, part_m2, w = _partials(base, plane, start, chunks, rows, HW, c, in_range, to_pivot, C, BLOCK_P)
                d = tl.fma(total, -share, d)
                m2 += part_m2 + d * d * w
        mean = total * share
        rstd = inverse_deviation(_merged(m2, EACH_CHANNEL) * share, eps)
        _save(mean_ptr, rstd_ptr, mean + pivot, rstd, part, n * C + c, in_range, EACH_CHANNEL)
        scale *= rstd
        # x comes without the shift: the mean is taken of x + shift, so what is subtracted from x is mean - shift.
        centre = mean - to_pivot
        out = table_ptr + table_offset + n * C + c
        tl.store(out, scale, mask=in_range)
        if FOLD:
            tl.store(out + table_plane, offset - centre * scale, mask=in_range)
        else:
            tl.store(out + table_plane, offset, mask=in_range)
            tl.store(out + 2 * table_plane, centre, mask=in_range)

    @triton.jit(do_not_specialize=["HW", "table_offset", "table_plane"])
    def _apply_kernel(
        x_ptr, y_ptr, table_ptr, HW, table_offset, table_plane,
        C: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
        FOLD: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, HW_FACTOR: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        # Last rows first: they are what the statistics pass left in L2.
        pid = tl.num_programs(0) - 1 - tl.program_id(0)
        if not (CHANNELS_LAST and OUT_LAST):
            HW = multiple_of(HW, HW_FACTOR)
        n, c, position, last, first = map_tile(pid, HW, C, BLOCK_HW, BLOCK_C)
        in_range = None
        mask = None
        if not EVEN:
            in_range = c < C
            mask = (position < HW) & in_range[None, :]
        x = tl.load(x_ptr + (last if CHANNELS_LAST else first), mask=mask)
        if PDL:
            gdc_wait()
        x = x.to(tl.float32)
        table = table_ptr + table_offset + n * C + c
        scale = tl.load(table, mask=in_range)
        offset = tl.load(table + table_plane, mask=in_range)
        if not FOLD:
            x -= tl.load(table + 2 * table_plane, mask=in_range)[None, :]
        y = activate(x * scale[None, :] + offset[None, :], ACTIVATION, PAIRS)
        tl.store(y_ptr + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------------------------

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
        layout = {"CHANNELS_LAST": channels_last, "OUT_LAST": channels_last or tokens, "ACTIVATION": activation}
        config = launch_config(N, C, HW, num_groups, channels_last, num_sms(x.device))
        if isinstance(config, SmallConfig) and statistics is None:
            self._plan_small(x, config, HW, (*strides, HW, eps), {**layout, "PAIRS": fold and config.block >= PAIRED})
            return
        if statistics is None:
            self.statistics = StatisticsLaunch(x, channels_last)
            chunks = self.statistics.chunks
        else:
            chunks = statistics.shape[2]
        plane, table_plane = N * chunks * C, ceil_div(N * C, ALIGNED) * ALIGNED
        table = ceil_div(2 * plane, ALIGNED) * ALIGNED if statistics is None else 0
        self.scratch = table + (2 if fold else 3) * table_plane
        pdl = has_programmatic_launch(x.device)
        numbers = (*strides, HW, ceil_div(HW, chunks), chunks, plane, table, table_plane, eps)
        tile = merge_config(chunks, C, num_groups)
        merge = {
            "C": C, "CHANNELS": tile.channels, "EACH_CHANNEL": tile.each_channel, "FOLD": fold, "LOOP": chunks > tile.block_p,
            "PDL": pdl, "COMPLETE": statistics is None, "BLOCK_P": tile.block_p, "BLOCK_C": tile.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, tile.channels)
        self.merge = Launch(_merge_kernel, programs, numbers, merge, tile.num_warps, pdl=pdl)
        self._plan_apply(x, HW, (HW, table, table_plane), layout, fold)

    def _plan_small(
        self, x: Tensor, config: SmallConfig, HW: int, numbers: tuple[int | float, ...], how: dict[str, Any]
    ) -> None:
        N, C = x.shape[:2]
        pdl = has_programmatic_launch(x.device)
        constants = {
            "C": C, "CHANNELS": config.channels, "EACH_CHANNEL": config.each_channel, **how, "PDL": pdl,
            "LANES": config.lanes, "WARPS": config.num_warps, "STEPS": config.steps, "BLOCK": config.block,
        }  # fmt: skip
        programs = N * ceil_div(C, config.channels)
        self.small = Launch(_small_kernel, programs, numbers, constants, config.num_warps, pdl=pdl)

    def _plan_apply(self, x: Tensor, HW: int, numbers: tuple[int, ...], layout: dict[str, Any], fold: bool) -> None:
        N, C = x.shape[:2]
        pdl = has_programmatic_launch(x.device)
        blocks = apply_config(C, HW, layout["CHANNELS_LAST"])
        even = C % blocks.block_c == 0 and HW % blocks.block_hw == 0
        apply = {
            "C": C, **layout, "PAIRS": fold and layout["CHANNELS_LAST"] and blocks.block_c >= PAIRED, "FOLD": fold,
            "EVEN": even, "PDL": pdl, "HW_FACTOR": row_factor(layout["CHANNELS_LAST"] and layout["OUT_LAST"], HW),
            "BLOCK_HW": blocks.block_hw, "BLOCK_C": blocks.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
        self.apply = Launch(_apply_kernel, programs, numbers, apply, blocks.num_warps, pdl=pdl)


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
    signatures = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (*params, statistics)]
    return (x.shape, x.stride(), x.dtype, x.device, num_groups, eps, activation, tokens, out_dtype, saves, *signatures)


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
        if is_current(x.device):
            _launch(plan, x, y, (*saved, *params), statistics)
        else:
            with torch.cuda.device(x.device):
                _launch(plan, x, y, (*saved, *params), statistics)
    return y


def _launch(plan: _Plan, x: Tensor, y: Tensor, others: tuple[Tensor | None, ...], statistics: Tensor | None) -> None:
    stream = current_stream(x.device)
    if plan.small is not None:
        plan.small(stream, x, y, *others)
        return
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    if plan.statistics is not None:
        statistics = scratch
        plan.statistics.on_stream(stream, x, statistics)
    plan.merge(stream, statistics, scratch, *others)
    plan.apply(stream, x, y, scratch)
