"""The Triton kernel of ``rotate``: pairs of neighboring elements of rows are rotated.

A program has some whole rows in registers. Tensors:

- ``x``: (A, B, C, D), fp16, bf16 or fp32, with contiguous rows. Its strides are in units of ``VECTOR``
  elements. The kernel multiplies them by it, so the compiler knows that products are multiples of it;
- ``cos``, ``sin``: (A, B, C, D) or (A, B, C, D / 2), of any strides. A stride is 0 where one element is used
  along a whole axis;
- ``y``: (A, B, C, D), contiguous, in the dtype of x.

Numerics: all arithmetic is fp32, and y is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _pairs_of(table_ptr, row, i, stride, is_row, D: tl.constexpr, PAIRED: tl.constexpr):
    """The numbers of a table for the first and for the second elements of the pairs ``i``, fp32."""
    mask = is_row & (i < D // 2)
    if PAIRED:
        first = tl.load(table_ptr + (row + i * stride), mask=mask, other=0.0).to(tl.float32)
        second = first
    else:
        first = tl.load(table_ptr + (row + 2 * i * stride), mask=mask, other=0.0).to(tl.float32)
        second = tl.load(table_ptr + (row + (2 * i + 1) * stride), mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit(
    do_not_specialize=[
        "rows", "B", "C", "x_a", "x_b", "x_c", "cos_a", "cos_b", "cos_c", "cos_d", "sin_a", "sin_b", "sin_c",
        "sin_d",
    ]
)  # fmt: skip
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    rows, B, C, x_a, x_b, x_c, cos_a, cos_b, cos_c, cos_d, sin_a, sin_b, sin_c, sin_d,
    D: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes ``BLOCK_R`` rows of y. ``PAIRED``: True if the tables have one number for each pair."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    i = tl.arange(0, BLOCK_D // 2)[None, :]
    is_row = r < rows
    mask = is_row & (d < D)
    c = (r % C).to(tl.int64)
    b = (r // C % B).to(tl.int64)
    a = (r // C // B).to(tl.int64)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + ((a * x_a + b * x_b + c * x_c) * VECTOR + d), mask=mask, other=0.0).to(tl.float32)
    u, v = tl.split(tl.reshape(x, (BLOCK_R, BLOCK_D // 2, 2)))
    cos_u, cos_v = _pairs_of(cos_ptr, a * cos_a + b * cos_b + c * cos_c, i, cos_d, is_row, D, PAIRED)
    sin_u, sin_v = _pairs_of(sin_ptr, a * sin_a + b * sin_b + c * sin_c, i, sin_d, is_row, D, PAIRED)
    y = tl.join(u * cos_u - v * sin_u, v * cos_v + u * sin_v)
    y = tl.reshape(y, (BLOCK_R, BLOCK_D))
    tl.store(y_ptr + (r.to(tl.int64) * D + d), y.to(y_ptr.dtype.element_ty), mask=mask)
