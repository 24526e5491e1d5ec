"""Triton kernels of GroupNorm + activation and their launchers. The op is in ``group_norm.py``, the launch configuration beside it.

Layout: the kernels read (N, HW, C) or (N, C, HW) without gaps; the output has the input's strides.

Two ways, chosen by ``launch_config`` from sizes alone:

- *small*: one program holds one or more whole groups in registers: one read, one write, one launch;
- *split*: ``_stats_kernel`` leaves a mean and a sum of squared deviations (M2) per channel and chunk of rows, ``_finalize_kernel``
  merges them per group, ``_apply_kernel`` normalises. The reduction over HW is spread over the whole GPU.

Numerics: fp32 throughout, one rounding at the store. Sums are of deviations (from the group's first element, or from the mean of the
chunk's first rows), never of raw squares, and are merged by Chan's formula in a fixed order without atomics, so that results are the
same at each run. Offsets that can pass 2^31 are int64.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfastgn.kernels.group_norm_config import SmallConfig, Tiling, ceil_div, launch_config, next_power_of_2
from sfastgn.kernels.launch import Launch, current_stream, device_guard
from sfastgn.kernels.layout import dense, empty_dense_like, is_channels_last

try:
    import triton
    import triton.language as tl
except ImportError:  # every call then runs in plain PyTorch
    triton = None

__all__ = ["KERNEL_DTYPES", "is_planned", "launch_group_norm", "plan_key", "triton"]

# --- kernels ------------------------------------------------------------------------------------------------------------------

if triton is not None:
    # Sizes are not specialised on: a new resolution never compiles anything. What matters of them is passed as a constant.
    _STRIDES = ["shift_stride", "ada_scale_stride", "ada_shift_stride"]

    @triton.jit
    def _activate(z, ACTIVATION: tl.constexpr):
        if ACTIVATION == "relu":
            z = tl.where(z < 0, 0.0, z)  # keeps NaN
        elif ACTIVATION == "silu":
            z = z / (1 + tl.exp(-z))
        elif ACTIVATION == "gelu":
            z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
        elif ACTIVATION == "gelu_tanh":
            # tanh(a) = 2 sigmoid(2a) - 1 turns 0.5 z (1 + tanh(a)) into z sigmoid(2a)
            z = z / (1 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
        return z

    @triton.jit
    def _channel_affine(
        n, c, in_range, mean, rstd,
        weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, shift_stride, ada_scale_stride, ada_shift_stride,
    ):  # fmt: skip
        """(centre, scale, offset) of channels ``c`` such that the activation's argument is (x - centre) * scale + offset."""
        centre = mean
        scale = rstd
        offset = tl.zeros_like(rstd)
        if shift_ptr is not None:
            centre -= tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            scale *= tl.load(weight_ptr + c, mask=in_range, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            offset = tl.load(bias_ptr + c, mask=in_range, other=0.0).to(tl.float32)
        if ada_scale_ptr is not None:
            ada_scale = 1 + tl.load(ada_scale_ptr + n * ada_scale_stride + c, mask=in_range, other=0.0).to(tl.float32)
            scale *= ada_scale
            offset *= ada_scale
        if ada_shift_ptr is not None:
            offset += tl.load(ada_shift_ptr + n * ada_shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
        return centre, scale, offset

    @triton.jit(do_not_specialize=[*_STRIDES, "HW"])
    def _small_kernel(
        x_ptr, y_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, eps,
        C: tl.constexpr, G: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
        BLOCK_HW: tl.constexpr, GROUPS: tl.constexpr, BLOCK_CG: tl.constexpr,
    ):  # fmt: skip
        CG: tl.constexpr = C // G
        n = (tl.program_id(0) // (G // GROUPS)).to(tl.int64)
        first_group = tl.program_id(0) % (G // GROUPS) * GROUPS
        row = tl.arange(0, BLOCK_HW)[:, None, None]
        j = tl.arange(0, BLOCK_CG)[None, None, :]
        c = first_group * CG + tl.arange(0, GROUPS)[None, :, None] * CG + j
        mask = (row < HW) & (j < CG)
        base = n * HW * C
        offsets = row * C + c if CHANNELS_LAST else c * HW + row
        x = tl.load(x_ptr + base + offsets, mask=mask, other=0.0).to(tl.float32)
        # Sums are of differences from the group's first element: rounded at the size of the deviations, not of the data.
        first = first_group * CG + tl.arange(0, GROUPS)[None, :, None] * CG
        pivot = tl.load(x_ptr + base + (first if CHANNELS_LAST else first * HW)).to(tl.float32)
        d = x - pivot
        if shift_ptr is not None:
            d += tl.load(shift_ptr + n * shift_stride + c, mask=j < CG, other=0.0).to(tl.float32)
        count = (HW * CG).to(tl.float32)
        d = tl.where(mask, d, 0.0)
        mean = tl.sum(tl.sum(d, axis=2, keep_dims=True), axis=0, keep_dims=True) / count
        d = tl.where(mask, d - mean, 0.0)
        var = tl.sum(tl.sum(d * d, axis=2, keep_dims=True), axis=0, keep_dims=True) / count
        rstd = tl.broadcast_to(1 / tl.sqrt(var + eps), (1, GROUPS, BLOCK_CG))
        _, scale, offset = _channel_affine(
            n, c, j < CG, rstd, rstd, weight_ptr, bias_ptr, None, ada_scale_ptr, ada_shift_ptr, 0, ada_scale_stride, ada_shift_stride
        )  # fmt: skip
        y = _activate(d * scale + offset, ACTIVATION)
        tl.store(y_ptr + base + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["HW", "rows", "chunks", "partials"])
    def _stats_kernel(
        x_ptr, scratch_ptr, HW, rows, chunks, partials,
        C: tl.constexpr, CHANNELS_LAST: tl.constexpr, HW_FACTOR: tl.constexpr,
        BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """Mean and M2 of each channel over ``rows`` positions: x (N, HW, C) or (N, C, HW) -> two of (N, chunks, C) in scratch."""
        COLUMNS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
        pid = tl.program_id(0)
        column = pid % COLUMNS
        chunk = pid // COLUMNS % chunks
        n = (pid // COLUMNS // chunks).to(tl.int64)
        c = column * BLOCK_C + tl.arange(0, BLOCK_C)
        first_row = chunk * rows
        count = tl.minimum(rows, HW - first_row)
        row = tl.arange(0, BLOCK_HW)
        if CHANNELS_LAST:
            offsets = row[:, None] * C + c[None, :]
        else:
            HW = tl.multiple_of(HW, HW_FACTOR)
            rows = tl.multiple_of(rows, HW_FACTOR)
            offsets = row[:, None] + c[None, :].to(tl.int64) * HW
        first = n * HW + first_row if CHANNELS_LAST else n * C * HW + first_row
        mask = (row[:, None] < count) & (c[None, :] < C)
        x = tl.load(x_ptr + (first * C if CHANNELS_LAST else first) + offsets, mask=mask, other=0.0).to(tl.float32)
        centre = tl.sum(x, axis=0) / tl.minimum(count, BLOCK_HW).to(tl.float32)
        d = tl.where(mask, x - centre[None, :], 0.0)
        s1 = d
        s2 = d * d
        for start in range(BLOCK_HW, count, BLOCK_HW):
            mask = (start + row[:, None] < count) & (c[None, :] < C)
            tile = first + start
            x = tl.load(x_ptr + (tile * C if CHANNELS_LAST else tile) + offsets, mask=mask, other=0.0).to(tl.float32)
            d = tl.where(mask, x - centre[None, :], 0.0)
            s1 += d
            s2 += d * d
        s1_c = tl.sum(s1, axis=0)
        m2 = tl.sum(s2, axis=0) - s1_c * s1_c / count.to(tl.float32)
        out = (n * chunks + chunk) * C + c
        tl.store(scratch_ptr + out, centre + s1_c / count.to(tl.float32), mask=c < C)
        tl.store(scratch_ptr + partials + out, tl.where(m2 < 0, 0.0, m2), mask=c < C)

    @triton.jit(do_not_specialize=["shift_stride", "HW", "rows", "chunks", "partials"])
    def _finalize_kernel(
        scratch_ptr, shift_ptr, shift_stride, HW, rows, chunks, partials, eps,
        C: tl.constexpr, G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_CG: tl.constexpr,
    ):  # fmt: skip
        """Chan's formula over the channels and chunks of a group: partial means and M2 -> (N, G) pairs (mean, rstd) behind them."""
        CG: tl.constexpr = C // G
        n = (tl.program_id(0) // G).to(tl.int64)
        g = tl.program_id(0) % G
        j = tl.arange(0, BLOCK_CG)
        c = g * CG + j
        base = n * chunks * C + c
        # Means are merged as deviations from the group's first one: their sum is then exact to the last bit of the data.
        pivot = tl.load(scratch_ptr + n * chunks * C + g * CG)
        shift = tl.zeros((BLOCK_CG,), tl.float32) - pivot
        if shift_ptr is not None:
            shift += tl.load(shift_ptr + n * shift_stride + c, mask=j < CG, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_P, BLOCK_CG), tl.float32)
        for start in range(0, chunks, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            mask = (p[:, None] < chunks) & (j[None, :] < CG)
            count = tl.minimum(rows, HW - p * rows).to(tl.float32)
            m = tl.load(scratch_ptr + base[None, :] + p[:, None].to(tl.int64) * C, mask=mask, other=0.0)
            total += tl.where(mask, (m + shift[None, :]) * count[:, None], 0.0)
        elements = HW.to(tl.float32) * CG
        mean = tl.sum(tl.sum(total, axis=1), axis=0) / elements
        m2 = tl.zeros((BLOCK_P, BLOCK_CG), tl.float32)
        for start in range(0, chunks, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            mask = (p[:, None] < chunks) & (j[None, :] < CG)
            count = tl.minimum(rows, HW - p * rows).to(tl.float32)
            offsets = base[None, :] + p[:, None].to(tl.int64) * C
            d = tl.load(scratch_ptr + offsets, mask=mask, other=0.0) + shift[None, :] - mean
            part_m2 = tl.load(scratch_ptr + partials + offsets, mask=mask, other=0.0)
            m2 += tl.where(mask, part_m2 + d * d * count[:, None], 0.0)
        var = tl.sum(tl.sum(m2, axis=1), axis=0) / elements
        out_ptr = scratch_ptr + 2 * partials + (n * G + g) * 2
        tl.store(out_ptr, pivot + mean)
        tl.store(out_ptr + 1, 1 / tl.sqrt(var + eps))

    @triton.jit(do_not_specialize=[*_STRIDES, "HW", "rows", "chunks", "partials"])
    def _apply_kernel(
        x_ptr, y_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr, scratch_ptr,
        shift_stride, ada_scale_stride, ada_shift_stride, HW, rows, chunks, partials,
        C: tl.constexpr, G: tl.constexpr, CHANNELS_LAST: tl.constexpr, ACTIVATION: tl.constexpr,
        HW_FACTOR: tl.constexpr, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        COLUMNS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
        # Last rows first: they are what the statistics pass left in L2.
        pid = tl.num_programs(0) - 1 - tl.program_id(0)
        column = pid % COLUMNS
        chunk = pid // COLUMNS % chunks
        n = (pid // COLUMNS // chunks).to(tl.int64)
        c = column * BLOCK_C + tl.arange(0, BLOCK_C)
        in_range = c < C
        stats_ptr = scratch_ptr + 2 * partials + (n * G + c // (C // G)) * 2
        mean = tl.load(stats_ptr, mask=in_range, other=0.0)
        rstd = tl.load(stats_ptr + 1, mask=in_range, other=0.0)
        centre, scale, offset = _channel_affine(
            n, c, in_range, mean, rstd, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr, ada_shift_ptr,
            shift_stride, ada_scale_stride, ada_shift_stride,
        )  # fmt: skip
        first_row = chunk * rows
        count = tl.minimum(rows, HW - first_row)
        row = tl.arange(0, BLOCK_HW)
        if CHANNELS_LAST:
            offsets = row[:, None] * C + c[None, :]
        else:
            HW = tl.multiple_of(HW, HW_FACTOR)
            rows = tl.multiple_of(rows, HW_FACTOR)
            offsets = row[:, None] + c[None, :].to(tl.int64) * HW
        first = n * HW + first_row if CHANNELS_LAST else n * C * HW + first_row
        for start in range(0, count, BLOCK_HW):
            mask = (start + row[:, None] < count) & in_range[None, :]
            tile = (first + start) * C if CHANNELS_LAST else first + start
            x = tl.load(x_ptr + tile + offsets, mask=mask, other=0.0).to(tl.float32)
            y = _activate((x - centre[None, :]) * scale[None, :] + offset[None, :], ACTIVATION)
            tl.store(y_ptr + tile + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------------------------

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _Plan:
    """The launches for one combination of shapes, strides, dtypes and device. ``scratch``: fp32 values that pass between them."""

    __slots__ = (
        "apply", "finalize", "needs_copies", "partials", "programs", "scratch", "sizes", "small", "stats", "strides",
    )  # fmt: skip

    def __init__(self, x: Tensor, num_groups: int, activation: str, params: tuple[Tensor | None, ...]) -> None:
        N, C = x.shape[:2]
        HW = math.prod(x.shape[2:])
        self.needs_copies = dense(x) is not x or any(t is not None and t.stride(-1) != 1 for t in params)
        # Row strides of shift, ada_scale and ada_shift after a copy, if one is needed; 0 where one row serves every sample.
        self.strides = tuple(
            0 if t is None or t.dim() == 1 or t.shape[0] == 1 else (t.stride(0) if t.stride(1) == 1 else C)
            for t in params[2:]
        )
        self.programs = x.numel() > 0
        if not self.programs:
            return
        channels_last = is_channels_last(dense(x))
        config = launch_config(N, C, HW, num_groups, channels_last, _num_sms(x.device))
        self.small: Launch | None = None
        layout = {"C": C, "G": num_groups, "CHANNELS_LAST": channels_last, "ACTIVATION": activation}
        if isinstance(config, SmallConfig):
            blocks = {"BLOCK_HW": config.block_hw, "GROUPS": config.groups, "BLOCK_CG": config.block_cg}
            self.sizes: tuple[int, ...] = (HW,)
            self.small = Launch(_small_kernel, N * num_groups // config.groups, {**layout, **blocks}, config.num_warps)
            return
        self.partials = N * config.stats.chunks * C
        self.scratch = 2 * self.partials + 2 * N * num_groups
        self.sizes = (HW, config.stats.rows, config.stats.chunks, config.apply.rows, config.apply.chunks)
        self.stats = Launch(
            _stats_kernel,
            N * ceil_div(C, config.stats.block_c) * config.stats.chunks,
            {"C": C, "CHANNELS_LAST": channels_last, **_blocks(config.stats, HW)},
            config.stats.num_warps,
        )
        block_cg = next_power_of_2(C // num_groups)
        block_p = max(1, min(next_power_of_2(config.stats.chunks), 4096 // block_cg))
        merge = {"C": C, "G": num_groups, "BLOCK_P": block_p, "BLOCK_CG": block_cg}
        self.finalize = Launch(_finalize_kernel, N * num_groups, merge, 4)
        self.apply = Launch(
            _apply_kernel,
            N * ceil_div(C, config.apply.block_c) * config.apply.chunks,
            {**layout, **_blocks(config.apply, HW)},
            config.apply.num_warps,
        )


def _blocks(tiling: Tiling, HW: int) -> dict[str, int]:
    factor = 16 if HW % 16 == 0 and tiling.rows % 16 == 0 else 1
    return {"HW_FACTOR": factor, "BLOCK_HW": tiling.block_hw, "BLOCK_C": tiling.block_c}


# By everything that a launch depends on but the data. Bounded: a server that sees ever new shapes must not leak.
_plans: dict[tuple[Any, ...], _Plan] = {}
_PLANS_MAX = 4096


def _num_sms(device: torch.device) -> int:
    # A nominal count in the interpreter, so that tests on the CPU take the same ways as a GPU does.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def plan_key(
    x: Tensor, num_groups: int, activation: str, params: tuple[Tensor | None, ...], out_dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """Hashable summary of the arguments of ``launch_group_norm``; ``params`` as there."""
    signatures = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in params]
    return (x.shape, x.stride(), x.dtype, x.device, num_groups, activation, out_dtype, *signatures)


def is_planned(key: tuple[Any, ...]) -> bool:
    """True if arguments with this ``plan_key`` have been launched before, so that they are valid."""
    return key in _plans


def launch_group_norm(
    key: tuple[Any, ...],
    x: Tensor,
    num_groups: int,
    eps: float,
    activation: str,
    params: tuple[Tensor | None, ...],
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The Triton kernels on valid arguments: x fp16, bf16 or fp32 on a GPU, or anywhere under Triton's interpreter.

    Args:
        key: ``plan_key`` of the other arguments.
        params: weight, bias (C,), shift, ada_scale, ada_shift (N, C), (1, C) or (C,), each or None.
    """
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_MAX:
            _plans.clear()
        plan = _plans[key] = _Plan(x, num_groups, activation, params)
    if plan.needs_copies:
        y = empty_dense_like(x, out_dtype or x.dtype)
        x = dense(x)
        params = tuple(t if t is None or t.stride(-1) == 1 else t.contiguous() for t in params)
    else:
        y = torch.empty_like(x, dtype=out_dtype)
    if plan.programs:
        with device_guard(x.device):
            _launch(plan, x, y, eps, params)
    return y


def _launch(plan: _Plan, x: Tensor, y: Tensor, eps: float, params: tuple[Tensor | None, ...]) -> None:
    tensors = (x, y, *params)
    strides = plan.strides
    stream = current_stream(x.device)
    if plan.small is not None:
        plan.small(stream, tensors, (*strides, *plan.sizes, eps))
        return
    HW, rows, chunks, apply_rows, apply_chunks = plan.sizes
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=x.device)
    plan.stats(stream, (x, scratch), (HW, rows, chunks, plan.partials))
    plan.finalize(stream, (scratch, params[2]), (strides[0], HW, rows, chunks, plan.partials, eps))
    plan.apply(stream, (*tensors, scratch), (*strides, HW, apply_rows, apply_chunks, plan.partials))
