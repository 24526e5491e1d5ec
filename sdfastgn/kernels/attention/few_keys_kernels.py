"""The Triton kernel of attention to few keys. ``attention/few_keys.py`` explains its formula and numerics."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import exp2


@triton.jit
def _rows_of(
    ptr, first, ROWS: tl.constexpr, count, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Loads a (ROWS, BLOCK_D) tile that begins at row ``first`` of a (count, D) matrix.

    Elements of the tile that are outside of the matrix are 0.
    """
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (r < count)[:, None]
    if D < BLOCK_D:
        mask = mask & (d < D)[None, :]
    return tl.load(ptr + r.to(tl.int64)[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)


@triton.jit
def _scores(q, k, first, S: tl.constexpr, COLUMNS: tl.constexpr, scale):
    """Computes the (queries, COLUMNS) fp32 scores of a tile of queries with a tile ``k`` of keys.

    ``first``: index of the tile's first key among the ``S`` keys. Columns from key ``S`` on are padding.
    Their scores are -inf.
    """
    scores = tl.dot(q, tl.trans(k)) * scale
    s = first + tl.arange(0, COLUMNS)
    return tl.where((s < S)[None, :], scores, float("-inf"))


@triton.jit(do_not_specialize=["L", "q_n", "k_n", "v_n", "scale"])
def _short_attention_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr,
    L, q_n, k_n, v_n, scale,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, Q_H: tl.constexpr, Q_L: tl.constexpr,
    K_H: tl.constexpr, K_L: tl.constexpr, V_H: tl.constexpr, V_L: tl.constexpr,
    PDL: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Computes y = softmax(q k^T scale) v. A program has ``BLOCK_M`` queries of one head of one sample.

    Pointers: ``q`` (N, H, L, D), ``k`` and ``v`` (N, H, S, D), fp16 or bf16, with contiguous channels;
    ``y`` (N, L, H, D), contiguous.

    Numbers:
        q_n, k_n, v_n: strides of samples, in multiples of ``VECTOR`` elements.
        scale: the factor of the scores, times log2(e) because the kernel computes powers of 2.

    Constants:
        Q_H, Q_L, K_H, K_L, V_H, V_L: strides of heads (H) and of queries or keys (L) in q, k and v.
        HEAD, TAIL: numbers of keys in the first and in the second tile of keys. ``TAIL`` is 0 if there is
            only one tile.
    """
    blocks = tl.cdiv(L, BLOCK_M)
    first = (tl.program_id(0) % blocks) * BLOCK_M
    h = ((tl.program_id(0) // blocks) % H).to(tl.int64)
    n = (tl.program_id(0) // blocks // H).to(tl.int64)
    # The strides of samples are passed as stride / VECTOR, and multiplied by ``VECTOR`` here. So Triton knows
    # that rows start at multiples of 16 bytes, and loads 16 bytes at once.
    q_ptr += n * q_n * VECTOR + h * Q_H
    k_ptr += n * k_n * VECTOR + h * K_H
    v_ptr += n * v_n * VECTOR + h * V_H
    if PDL:
        gdc_wait()
    # All loads are issued before the first product, so that the GPU waits for them only once.
    q = _rows_of(q_ptr, first, BLOCK_M, L, Q_L, D, BLOCK_D)
    key = _rows_of(k_ptr, 0, HEAD, S, K_L, D, BLOCK_D)
    value = _rows_of(v_ptr, 0, HEAD, S, V_L, D, BLOCK_D)
    if TAIL > 0:
        last_key = _rows_of(k_ptr, HEAD, TAIL, S, K_L, D, BLOCK_D)
        last_value = _rows_of(v_ptr, HEAD, TAIL, S, V_L, D, BLOCK_D)
    scores = _scores(q, key, 0, S, HEAD, scale)
    highest = tl.max(scores, 1)
    if TAIL > 0:
        more = _scores(q, last_key, HEAD, S, TAIL, scale)
        highest = tl.maximum(highest, tl.max(more, 1))
    p = exp2(scores - highest[:, None])
    total = tl.sum(p, 1)
    y = tl.dot(p.to(value.dtype), value)
    if TAIL > 0:
        p = exp2(more - highest[:, None])
        total += tl.sum(p, 1)
        y = tl.dot(p.to(last_value.dtype), last_value, y)
    r = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    out = y_ptr + ((n * L + r)[:, None] * H + h) * D + d[None, :]
    tl.store(out, (y / total[:, None]).to(y_ptr.dtype.element_ty), mask=(r < L)[:, None] & (d < D)[None, :])
