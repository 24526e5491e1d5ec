"""Triton kernel of a linear layer of few rows, the activation before it included: ``act_linear``.

One launch and one read of the weight; x is small, and read and activated again by each program.
From sm_90 on the kernel starts while the one before it still runs (``PDL``), and waits before it
touches memory.

Pointers: ``x`` (N, K), ``weight`` (C, K), ``bias`` and ``extra_bias`` (C,) or None, ``y`` (N, C).

Numerics: fp32 throughout, the activation too, one rounding at the store. Sums are of a fixed order:
the same bits at each run. Offsets that can pass 2^31 are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate


# One program: ``BLOCK_C`` columns of ``BLOCK_N`` rows of y.
@triton.jit(do_not_specialize=["N"])
def _act_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, extra_bias_ptr, y_ptr,
    N,
    C: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
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
            # All threads side by side along K in both: else Triton reads several rows of the
            # weight at a time, where x is one row, and each step waits for an exchange through
            # shared memory.
            x_at = tl.max_contiguous(x_row + at, [1, 1, VECTOR])
            weight_at = tl.max_contiguous(weight_row + at, [1, 1, VECTOR])
            x = tl.load(x_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
            w = tl.load(weight_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
            sums += activate(x, ACTIVATION, False) * w
    y = tl.sum(sums, 2) + offset[None, :]
    out = y_ptr + n[:, None] * C + c[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])
