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

from sfastgn.kernels.group_norm_config import (
    SmallConfig,
    apply_config,
    ceil_div,
    launch_config,
    merge_config,
)
from sfastgn.kernels.launch import Launch, current_stream, has_programmatic_launch, is_current, num_sms, remember
from sfastgn.kernels.layout import dense, dense_is_channels_last, empty_dense_like, is_dense
from sfastgn.kernels.statistics_kernels import StatisticsLaunch
from sfastgn.kernels.tiles import triton

if triton is not None:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from sfastgn.kernels.tiles import STEP_AXIS, along_block, along_lanes, along_steps, along_warps

__all__ = ["find_plan", "launch_group_norm", "make_plan", "plan_key"]

# --- kernels ------------------------------------------------------------------------------------------------------------------

if triton is not None:
    # Sizes are not specialised on: a new resolution never compiles anything. What matters of them is passed as a constant.
    _STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]
    _COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

    @triton.jit
    def _exp2(x):
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _reciprocal(x):
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _sigmoid(z, PAIRS: tl.constexpr):
        """In special-function instructions, whose rate bounds this kernel where x is in L2: two an element, or three a pair.

        ``PAIRS``: two neighbours share a reciprocal, 1/a = b/(ab). The exponential is cut at 2^60, so that ab stays finite: below
        z = -41 the result is 2^-60 instead of less, which 16-bit results of usual size do not show.
        """
        if not _COMPILED:
            s = 1 / (1 + tl.exp(-z))
        elif PAIRS:
            e = 1 + _exp2(tl.minimum(z * -1.4426950408889634, 60.0))
            if len(e.shape) == 2:
                a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
            else:
                a, b = tl.split(tl.reshape(e, (e.shape[0], e.shape[1], e.shape[2], e.shape[3] // 2, 2)))
            r = _reciprocal(a * b)
            s = tl.reshape(tl.join(r * b, r * a), e.shape)
        else:
            s = _reciprocal(1 + _exp2(z * -1.4426950408889634))
        return s

    @triton.jit
    def _activate(z, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr):
        if ACTIVATION == "relu":
            z = tl.where(z < 0, 0.0, z)  # keeps NaN
        elif ACTIVATION == "silu":
            z = z * _sigmoid(z, PAIRS)
        elif ACTIVATION == "gelu":
            z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
        elif ACTIVATION == "gelu_tanh":
            # tanh(a) = 2 sigmoid(2a) - 1 turns 0.5 z (1 + tanh(a)) into z sigmoid(2a)
            z = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PAIRS)
        return z

    @triton.jit
    def _channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
    ):
        """(scale, offset) of channels ``c`` such that the activation's argument is (x - mean) / deviation * scale + offset."""
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

    @triton.jit(do_not_specialize=[*_STRIDES, "HW", "eps"])
    def _small_kernel(
        x_ptr, y_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, eps,
        C: tl.constexpr, G: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
        PAIRS: tl.constexpr, PDL: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        CG: tl.constexpr = C // G
        n = (tl.program_id(0) // G).to(tl.int64)
        g = tl.program_id(0) % G
        outer = (along_steps(STEPS) * WARPS + along_warps(WARPS)) * LANES + along_lanes(LANES)
        inner = along_block(BLOCK)
        row = outer if CHANNELS_LAST else inner
        j = inner if CHANNELS_LAST else outer
        c = g * CG + j
        mask = (row < HW) & (j < CG)
        base = n * HW * C
        last = row * C + c
        first = c * HW + row
        if PDL:
            gdc_wait()
        x = tl.load(x_ptr + base + (last if CHANNELS_LAST else first), mask=mask, other=0.0).to(tl.float32)
        # Sums are of differences from the group's first element: rounded at the size of the deviations, not of the data.
        d = x - tl.load(x_ptr + base + g * (CG if CHANNELS_LAST else CG * HW)).to(tl.float32)
        if shift_ptr is not None:
            d += tl.load(shift_ptr + n * shift_stride + c, mask=j < CG, other=0.0).to(tl.float32)
        scale, offset = _channel_affine(
            n, c, j < CG, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
        )
        count = (HW * CG).to(tl.float32)
        d = tl.where(mask, d, 0.0)
        d -= tl.sum(tl.reshape(tl.sum(d, STEP_AXIS), (LANES * WARPS * BLOCK,)), 0) / count
        d = tl.where(mask, d, 0.0)
        var = tl.sum(tl.reshape(tl.sum(d * d, STEP_AXIS), (LANES * WARPS * BLOCK,)), 0) / count
        y = _activate(d * (scale / tl.sqrt(var + eps)) + offset, ACTIVATION, PAIRS)
        tl.store(y_ptr + base + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _partials(base, plane, start, chunks, rows, HW, c, in_group, shift, C: tl.constexpr, BLOCK_P: tl.constexpr):
        """(mean + shift, M2, number of positions) of the channels ``c`` in a block of chunks; no positions outside."""
        p = start + tl.arange(0, BLOCK_P)[:, None]
        count = tl.minimum(rows, HW - p * rows)
        mask = (p < chunks) & (count > 0) & in_group[None, :]
        at = p.to(tl.int64) * C + c[None, :]
        mean = tl.load(base + at, mask=mask, other=0.0) + shift[None, :]
        m2 = tl.load(base + plane + at, mask=mask, other=0.0)
        return mean, m2, tl.where(mask, count, 0).to(tl.float32)

    @triton.jit(do_not_specialize=[*_STRIDES, "HW", "rows", "chunks", "plane", "table_offset", "table_plane", "eps"])
    def _merge_kernel(
        statistics_ptr, table_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, rows, chunks, plane, table_offset, table_plane, eps,
        C: tl.constexpr, G: tl.constexpr, FOLD: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr, COMPLETE: tl.constexpr,
        BLOCK_P: tl.constexpr, BLOCK_CG: tl.constexpr,
    ):  # fmt: skip
        """Chan's formula over the channels and chunks of a group: statistics -> (scale, offset, mean) of each of its channels.

        ``FOLD`` puts the mean into the offset, which saves the apply pass an instruction and costs the last bits where the mean
        is large beside the deviation: for 16-bit x, whose own last bits are larger. ``COMPLETE``: x is, when this kernel starts.
        """
        CG: tl.constexpr = C // G
        n = (tl.program_id(0) // G).to(tl.int64)
        g = tl.program_id(0) % G
        j = tl.arange(0, BLOCK_CG)
        c = g * CG + j
        in_group = j < CG
        base = statistics_ptr + n * chunks * C
        elements = HW.to(tl.float32) * CG
        if PDL:
            if COMPLETE:
                gdc_launch_dependents()
            gdc_wait()
            if not COMPLETE:
                gdc_launch_dependents()
        # Means are merged as deviations from the group's first one: their sum is then exact to the last bit of the data.
        shift = tl.zeros((BLOCK_CG,), tl.float32) - tl.load(base + g * CG)
        if shift_ptr is not None:
            shift += tl.load(shift_ptr + n * shift_stride + c, mask=in_group, other=0.0).to(tl.float32)
        scale, offset = _channel_affine(
            n, c, in_group, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr, ada_scale_stride, ada_shift_stride
        )
        d, part, weight = _partials(base, plane, 0, chunks, rows, HW, c, in_group, shift, C, BLOCK_P)
        total = d * weight
        if LOOP:
            for start in range(BLOCK_P, chunks, BLOCK_P):
                m, _, w = _partials(base, plane, start, chunks, rows, HW, c, in_group, shift, C, BLOCK_P)
                total += m * w
        mean = tl.sum(tl.sum(total, axis=1), axis=0) / elements
        d -= mean
        m2 = part + d * d * weight
        if LOOP:
            for start in range(BLOCK_P, chunks, BLOCK_P):
                d, part, w = _partials(base, plane, start, chunks, rows, HW, c, in_group, shift, C, BLOCK_P)
                d -= mean
                m2 += part + d * d * w
        var = tl.sum(tl.sum(m2, axis=1), axis=0) / elements
        scale /= tl.sqrt(var + eps)
        # x comes without the shift: the mean is taken of x + shift, so what is subtracted from x is mean - shift.
        centre = mean - shift
        out = table_ptr + table_offset + n * C + c
        tl.store(out, scale, mask=in_group)
        if FOLD:
            tl.store(out + table_plane, offset - centre * scale, mask=in_group)
        else:
            tl.store(out + table_plane, offset, mask=in_group)
            tl.store(out + 2 * table_plane, centre, mask=in_group)

    @triton.jit(do_not_specialize=["HW", "table_offset", "table_plane"])
    def _apply_kernel(
        x_ptr, y_ptr, table_ptr, HW, table_offset, table_plane,
        C: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUT_LAST: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
        FOLD: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, HW_FACTOR: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        COLUMNS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
        # Last rows first: they are what the statistics pass left in L2.
        pid = tl.num_programs(0) - 1 - tl.program_id(0)
        tiles = tl.cdiv(HW, BLOCK_HW)
        first_row = pid // COLUMNS % tiles * BLOCK_HW
        n = (pid // COLUMNS // tiles).to(tl.int64)
        c = pid % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
        row = tl.arange(0, BLOCK_HW)[:, None]
        last = (n * HW + first_row) * C + (row * C + c[None, :])
        HW = tl.multiple_of(HW, HW_FACTOR)
        first = n * C * HW + first_row + (row + c[None, :].to(tl.int64) * HW)
        mask = None
        in_range = None
        if not EVEN:
            in_range = c < C
            mask = (first_row + row < HW) & in_range[None, :]
        x = tl.load(x_ptr + (last if CHANNELS_LAST else first), mask=mask)
        if PDL:
            gdc_wait()
        x = x.to(tl.float32)
        table = table_ptr + table_offset + n * C + c
        scale = tl.load(table, mask=in_range)
        offset = tl.load(table + table_plane, mask=in_range)
        if not FOLD:
            x -= tl.load(table + 2 * table_plane, mask=in_range)[None, :]
        y = _activate(x * scale[None, :] + offset[None, :], ACTIVATION, PAIRS)
        tl.store(y_ptr + (last if OUT_LAST else first), y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------------------------

_PAIRED = 8  # neighbours in memory that one thread holds: pairs of them need no exchange
_ALIGNED = 64  # fp32 values: every part of the scratch memory starts at a multiple of 256 bytes


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
        self.needs_copies = _needs_copies(x, params, statistics)
        self.tokens = (N, HW, C) if tokens else None
        self.programs = x.numel() > 0
        if not self.programs:
            return
        strides = tuple(_row_stride(t, C) for t in params[2:])
        channels_last = dense_is_channels_last(x)
        config = launch_config(N, C, HW, num_groups, channels_last, num_sms(x.device))
        pdl = has_programmatic_launch(x.device)
        fold = x.dtype != torch.float32
        layout = {"CHANNELS_LAST": channels_last, "OUT_LAST": channels_last or tokens, "ACTIVATION": activation}
        self.small: Launch | None = None
        self.statistics: StatisticsLaunch | None = None
        if isinstance(config, SmallConfig) and statistics is None:
            constants = {
                "C": C, "G": num_groups, **layout, "PAIRS": fold and config.block >= _PAIRED, "PDL": pdl,
                "LANES": config.lanes, "WARPS": config.num_warps,
                "STEPS": config.steps, "BLOCK": config.block,
            }  # fmt: skip
            numbers = (*strides, HW, eps)
            self.small = Launch(_small_kernel, N * num_groups, numbers, constants, config.num_warps, pdl=pdl)
            return
        if statistics is None:
            self.statistics = StatisticsLaunch(x, channels_last)
            chunks = self.statistics.chunks
        else:
            chunks = statistics.shape[2]
        plane, table_plane = N * chunks * C, ceil_div(N * C, _ALIGNED) * _ALIGNED
        table = ceil_div(2 * plane, _ALIGNED) * _ALIGNED if statistics is None else 0
        self.scratch = table + (2 if fold else 3) * table_plane
        numbers = (*strides, HW, ceil_div(HW, chunks), chunks, plane, table, table_plane, eps)
        tile = merge_config(chunks, C // num_groups)
        merge = {
            "C": C, "G": num_groups, "FOLD": fold, "LOOP": chunks > tile.block_p, "PDL": pdl, "COMPLETE": statistics is None,
            "BLOCK_P": tile.block_p, "BLOCK_CG": tile.block_cg,
        }  # fmt: skip
        self.merge = Launch(_merge_kernel, N * num_groups, numbers, merge, tile.num_warps, pdl=pdl)
        blocks = apply_config(C, HW, channels_last)
        even = C % blocks.block_c == 0 and HW % blocks.block_hw == 0
        apply = {
            "C": C, **layout, "PAIRS": fold and channels_last and blocks.block_c >= _PAIRED, "FOLD": fold,
            "EVEN": even, "PDL": pdl, "HW_FACTOR": 16 if HW % 16 == 0 else 1,
            "BLOCK_HW": blocks.block_hw, "BLOCK_C": blocks.block_c,
        }  # fmt: skip
        programs = N * ceil_div(C, blocks.block_c) * ceil_div(HW, blocks.block_hw)
        self.apply = Launch(_apply_kernel, programs, (HW, table, table_plane), apply, blocks.num_warps, pdl=pdl)


def _needs_copies(x: Tensor, params: tuple[Tensor | None, ...], statistics: Tensor | None) -> bool:
    gaps = not is_dense(x) or any(t is not None and t.stride(-1) != 1 for t in params)
    return gaps or (statistics is not None and not statistics.is_contiguous())


def _row_stride(operand: Tensor | None, C: int) -> int:
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
) -> tuple[Any, ...]:
    """Hashable summary of the arguments of a call; ``params`` as in ``make_plan``."""
    signatures = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (*params, statistics)]
    return (x.shape, x.stride(), x.dtype, x.device, num_groups, eps, activation, tokens, out_dtype, *signatures)


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
) -> Tensor:
    """The Triton kernels on the arguments that ``plan`` was made for; see there."""
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
            _launch(plan, x, y, params, statistics)
        else:
            with torch.cuda.device(x.device):
                _launch(plan, x, y, params, statistics)
    return y


def _launch(plan: _Plan, x: Tensor, y: Tensor, params: tuple[Tensor | None, ...], statistics: Tensor | None) -> None:
    stream = current_stream(x.device)
    if plan.small is not None:
        plan.small(stream, x, y, *params)
        return
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    if plan.statistics is not None:
        statistics = scratch
        plan.statistics.on_stream(stream, x, statistics)
    plan.merge(stream, statistics, scratch, *params)
    plan.apply(stream, x, y, scratch)
