"""The Triton kernel of attention over frames. ``attention/over_frames.py`` explains formula and numerics."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import exp2


@triton.jit(do_not_specialize=["P", "T", "q_n", "k_n", "v_n", "scale"])
def _frames_attention_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr,
    P, T, q_n, k_n, v_n, scale,
    H: tl.constexpr, D: tl.constexpr, Q_H: tl.constexpr, Q_L: tl.constexpr, K_H: tl.constexpr,
    K_L: tl.constexpr, V_H: tl.constexpr, V_L: tl.constexpr, PDL: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr, FRAMES: tl.constexpr, BLOCK_D: tl.constexpr, PIXELS_FIRST: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes y, in which each pixel has attended to the same pixel in all frames.

    A program processes all frames of ``ROWS // FRAMES`` pixels, for one head of one sample. It holds
    ``BLOCK_D`` channels of a head at once.

    A tile has ``FRAMES`` rows for each pixel: T frames and padding. One matrix product computes the scores of
    all rows of the tile with each other. The scores of rows of different pixels are dropped.

    Tensors: ``q``, ``k``, ``v`` (N, H, T * P, D), fp16 or bf16, with contiguous channels; ``y``
    (N, T * P, H, D), contiguous.

    Numbers:
        P: number of pixels of a frame.
        T: number of frames.
        q_n, k_n, v_n: strides of samples, in multiples of ``VECTOR`` elements.
        scale: the factor of the scores, times log2(e) because the kernel computes powers of 2.

    Constants:
        Q_H, Q_L, K_H, K_L, V_H, V_L: strides of heads (H) and of tokens (L) in q, k and v.
        PIXELS_FIRST: True if tokens are ordered by pixel, then by frame. False if they are ordered by frame,
            then by pixel.
        CAUSAL: True if a frame attends to itself and to earlier frames only.
    """
    PIXELS: tl.constexpr = ROWS // FRAMES
    # Programs with neighboring numbers have different heads of the same pixels. These heads are neighbors in
    # memory, so programs that run at the same time read the same lines of memory.
    blocks = tl.cdiv(P, PIXELS)
    h = (tl.program_id(0) % H).to(tl.int64)
    first = tl.program_id(0) // H % blocks * PIXELS
    n = (tl.program_id(0) // H // blocks).to(tl.int64)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)[None, :]
    pixel = r // FRAMES
    frame = r % FRAMES
    if PIXELS_FIRST:
        row = ((first + pixel) * T + frame).to(tl.int64)[:, None]
    else:
        row = (frame * P + first + pixel).to(tl.int64)[:, None]
    is_token = ((frame < T) & (first + pixel < P))[:, None]
    # The strides of samples are passed as stride / VECTOR, and multiplied by ``VECTOR`` here. So Triton knows
    # that rows start at multiples of 16 bytes, and loads 16 bytes at once.
    q_row = q_ptr + n * q_n * VECTOR + h * Q_H + row * Q_L
    k_row = k_ptr + n * k_n * VECTOR + h * K_H + row * K_L
    v_row = v_ptr + n * v_n * VECTOR + h * V_H + row * V_L
    if PDL:
        gdc_wait()
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    for c in tl.static_range(0, D, BLOCK_D):
        mask = is_token & (c + d < D)
        q = tl.load(q_row + (c + d), mask=mask, other=0.0)
        k = tl.load(k_row + (c + d), mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), scores)
    # Only the scores of a query and a key of the same pixel are kept. Each row keeps at least one score, the
    # one with the pixel's first frame. So the maximum of a row is never -inf, and the softmax is not NaN.
    kept = (pixel[:, None] == pixel[None, :]) & (frame < T)[None, :]
    if CAUSAL:
        kept = kept & (frame[None, :] <= frame[:, None])
    scores = tl.where(kept, scores * scale, float("-inf"))
    p = exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(p, 1)[:, None]
    out = y_ptr + ((n * T * P + row) * H + h) * D
    for c in tl.static_range(0, D, BLOCK_D):
        mask = is_token & (c + d < D)
        v = tl.load(v_row + (c + d), mask=mask, other=0.0)
        y = tl.dot(p.to(v.dtype), v) / total
        tl.store(out + (c + d), y.to(y_ptr.dtype.element_ty), mask=mask)
