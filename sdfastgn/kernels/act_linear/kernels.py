"""The Triton kernels of ``act_linear``: an activation, and a linear layer for few rows.

``_act_linear_kernel`` computes one linear layer. ``_shared_kernel`` computes several layers of one x, whose
operands it finds in a table (``shared.py``).

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
    if PDL:
        gdc_wait()
    # An index beyond the last row is replaced by the index of the last row. So loads need a mask only along
    # K.
    y = _tile(
        x_ptr, weight_ptr, bias_ptr, extra_bias_ptr, tl.minimum(n, N - 1), tl.minimum(c, C - 1),
        K, ACTIVATION, EVEN, BLOCK_N, BLOCK_C, BLOCK_K, STEPS, VECTOR,
    )  # fmt: skip
    out = y_ptr + n[:, None] * C + c[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["N"])
def _shared_kernel(
    x_ptr, table_ptr, y_ptr,
    N,
    ENTRY: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Computes act(x) @ weight.T + bias + extra_bias for each entry of a table, ``BLOCK_C`` columns each.

    ``table``: int64. Its first element is the number of entries. Each entry has ``ENTRY`` elements: the
    addresses of ``BLOCK_C`` rows of a weight and of their elements in both biases, the offset in ``y`` of the
    first result, and the number of columns of that weight's result. All addresses are multiples of 16.
    """
    if PDL:
        gdc_wait()
    blocks = tl.cdiv(N, BLOCK_N)
    tiles = tl.load(table_ptr).to(tl.int32) * blocks
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table_ptr + 1 + (tile // blocks) * ENTRY
        n = (tile % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        y = _tile(
            x_ptr, _pointer(entry, x_ptr), _pointer(entry + 1, x_ptr), _pointer(entry + 2, x_ptr),
            tl.minimum(n, N - 1), c,
            K, ACTIVATION, EVEN, BLOCK_N, BLOCK_C, BLOCK_K, STEPS, VECTOR,
        )  # fmt: skip
        out = y_ptr + tl.load(entry + 3) + n[:, None] * tl.load(entry + 4) + c[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None])


@triton.jit
def _pointer(address_ptr, like_ptr):
    """The address that is stored at ``address_ptr``, as a pointer of the type of ``like_ptr``."""
    return tl.multiple_of(tl.load(address_ptr).to(like_ptr.dtype), 16)


@triton.jit
def _tile(
    x_ptr, weight_ptr, bias_ptr, extra_bias_ptr, n, c,
    K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Computes y (BLOCK_N, BLOCK_C) in fp32, for the rows ``n`` of x and the rows ``c`` of the weight."""
    x_row = x_ptr + (n * K)[:, None, None]
    weight_row = weight_ptr + (c * K)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_C, BLOCK_K), tl.float32)
    offset = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        offset += tl.load(bias_ptr + c).to(tl.float32)
    if extra_bias_ptr is not None:
        offset += tl.load(extra_bias_ptr + c).to(tl.float32)
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
    return tl.sum(sums, 2) + offset[None, :]
