"""The Triton kernel of ``act_linear``: an activation, and a linear layer for few rows.

A program reads a few rows of x and a few rows of the weight. If x has at most four rows, each row of the
weight is read by one program only. The rows of x are read by many programs, and each computes their
activation again. This does not matter, because x is small.

Tensors, all contiguous:

- ``x``: (N, K), fp16, bf16 or fp32; ``weight``: (C, K) in the dtype of x;
- ``bias``, ``extra_bias``: (C,) or None;
- ``y``: (N, C) in the dtype of x.

With programmatic dependent launch (``PDL``, from sm_90 on) the kernel starts while the previous kernel still
runs. Before it accesses memory, it waits for the end of the previous kernel.

Numerics: all arithmetic is fp32, and the result is rounded once. Sums have a fixed order, so every run gives
the same bits. Offsets that can be 2^31 or more are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate


@triton.jit(do_not_specialize=["N"])
def _act_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, extra_bias_ptr, y_ptr,
    N,
    C: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Computes y = act(x) @ weight.T + biases. A program computes ``BLOCK_C`` columns of ``BLOCK_N`` rows.

    ``STEPS``: number of blocks of ``BLOCK_K`` elements that are loaded at the same time. ``VECTOR``: number
    of contiguous elements that a thread loads at once. ``EVEN``: True if no element is masked along K.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    n = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    # An index beyond the last row is replaced by the index of the last row. So loads need a mask only along
    # K.
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
            # ``max_contiguous`` makes Triton place all threads along K, both for x and for the weight.
            # Otherwise Triton spreads the threads that load the weight over several rows, and each step
            # exchanges values through shared memory.
            x_at = tl.max_contiguous(x_row + at, [1, 1, VECTOR])
            weight_at = tl.max_contiguous(weight_row + at, [1, 1, VECTOR])
            x = tl.load(x_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
            w = tl.load(weight_at, mask=mask, other=None if EVEN else 0.0).to(tl.float32)
            sums += activate(x, ACTIVATION, False) * w
    y = tl.sum(sums, 2) + offset[None, :]
    out = y_ptr + n[:, None] * C + c[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])
