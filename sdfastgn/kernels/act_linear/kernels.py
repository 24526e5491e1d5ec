"""Triton kernel of a linear layer of few rows with the activation before it, and its launcher. Formula and op are in ``act_linear/op.py``.

One launch and one read of the weight; x is small, and read and activated again by each program. From sm_90 on the kernel starts while the
one before it still runs (``PDL``), and waits before it touches memory.

Numerics: fp32 throughout, the activation too, one rounding at the store. Sums are of a fixed order: the same bits at each run. Offsets
that can pass 2^31 are int64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.act_linear.config import tile_config
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import remember
from sdfastgn.kernels.common.sizes import vector_width
from sdfastgn.kernels.common.tiles import triton

if triton is not None:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait

    from sdfastgn.kernels.common.activation_kernels import activate

__all__ = ["find_plan", "launch_act_linear", "make_plan", "plan_key"]

# --- kernel -------------------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit(do_not_specialize=["N"])
    def _act_linear_kernel(
        x_ptr, weight_ptr, bias_ptr, extra_bias_ptr, y_ptr, N,
        C: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
    ):  # fmt: skip
        blocks = tl.cdiv(C, BLOCK_C)
        n = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        c = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        # What is past the last row reads that row once more: loads then need no mask but along K.
        x_row = x_ptr + (tl.minimum(n, N - 1) * K)[:, None, None]
        in_bounds = tl.minimum(c, C - 1)
        weight_row = weight_ptr + (in_bounds * K)[None, :, None]
        k = tl.arange(0, BLOCK_K)[None, None, :]
        sums = tl.zeros((BLOCK_N, BLOCK_C, BLOCK_K), tl.float32)
        offset = tl.zeros((BLOCK_C,), tl.float32)
        if PDL:
            gdc_wait()
        if bias_ptr is not None:
            offset += tl.load(bias_ptr + in_bounds).to(tl.float32)
        if extra_bias_ptr is not None:
            offset += tl.load(extra_bias_ptr + in_bounds).to(tl.float32)
        for start in range(0, K, BLOCK_K * STEPS):
            for step in tl.static_range(STEPS):
                at = start + step * BLOCK_K + k
                mask = None if EVEN else at < K
                # All threads side by side along K in both: else Triton reads several rows of the weight at a time, where x is one row,
                # and each step waits for an exchange through shared memory.
                x_at = tl.max_contiguous(x_row + at, [1, 1, VECTOR])
                weight_at = tl.max_contiguous(weight_row + at, [1, 1, VECTOR])
                x = tl.load(x_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
                w = tl.load(weight_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
                sums += activate(x, ACTIVATION, False) * w
        y = tl.sum(sums, 2) + offset[None, :]
        out = y_ptr + n[:, None] * C + c[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])


# --- launcher -----------------------------------------------------------------------------------------------------------------


class _Plan:
    """The launch for one combination of shapes, strides, dtypes, activation and device."""

    __slots__ = ("copies", "launch", "programs", "shape")

    def __init__(self, x: Tensor, weight: Tensor, biases: tuple[Tensor | None, ...], activation: str) -> None:
        N, K = x.shape
        C = weight.shape[0]
        self.shape = (N, C)
        self.copies = any(t is not None and not t.is_contiguous() for t in (x, weight, *biases))
        self.programs = N * K * C > 0
        if not self.programs:
            return
        config = tile_config(N, C, K, x.itemsize, vector_width(x.itemsize, K), gpu.num_sms(x.device))
        pdl = gpu.has_programmatic_launch(x.device)
        constants = {
            "C": C, "K": K, "ACTIVATION": activation, "EVEN": config.is_even(K), "PDL": pdl,
            "BLOCK_N": config.block_n, "BLOCK_C": config.block_c, "BLOCK_K": config.block_k, "STEPS": config.steps,
            "VECTOR": config.vector,
        }  # fmt: skip
        self.launch = Launch(
            _act_linear_kernel, config.programs(N, C), (N,), constants, config.num_warps, pdl=pdl
        )


# By everything that a launch depends on but the data.
_plans: dict[tuple[Any, ...], _Plan] = {}


def plan_key(
    x: Tensor, weight: Tensor, bias: Tensor | None, extra_bias: Tensor | None, activation: str
) -> tuple[Any, ...]:
    """Hashable summary of the arguments of a call."""
    signatures = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (weight, bias, extra_bias)
    ]
    return x.shape, x.stride(), x.dtype, x.device, activation, *signatures


def find_plan(key: tuple[Any, ...]) -> _Plan | None:
    """The plan of ``make_plan`` with this ``plan_key``: its arguments have been launched before, so that they are valid."""
    return _plans.get(key)


def make_plan(
    key: tuple[Any, ...], x: Tensor, weight: Tensor, biases: tuple[Tensor | None, ...], activation: str
) -> _Plan:
    """How to launch on valid arguments: x fp16, bf16 or fp32 on a GPU, or anywhere under Triton's interpreter."""
    return remember(_plans, key, _Plan(x, weight, biases, activation))


def launch_act_linear(
    plan: _Plan, x: Tensor, weight: Tensor, bias: Tensor | None, extra_bias: Tensor | None
) -> Tensor:
    """y (N, C) of the arguments that ``plan`` was made for, if ``plan.programs``."""
    y = torch.empty(plan.shape, dtype=x.dtype, device=x.device)
    others: tuple[Tensor | None, ...] = (weight, bias, extra_bias)
    if plan.copies:
        x = x.contiguous()
        others = tuple(None if t is None else t.contiguous() for t in others)
    plan.launch.run(x, *others, y)
    return y
