"""The Triton kernel of ``rotate``: rows are normalized, and pairs of their neighboring elements are rotated.

A program has some whole rows in registers. Tensors:

- ``x``, ``y``: (A, B, C, D), fp16, bf16 or fp32, with contiguous rows. Their strides are in units of
  ``VECTOR`` elements. The kernel multiplies them by it, so the compiler knows that products are multiples of
  it;
- ``cos``, ``sin``: (A, B, C, D) or (A, B, C, D / 2), of any strides. A stride is 0 where one element is used
  along a whole axis. None: rows are not rotated;
- ``weight``: (D,). None: rows are not normalized.

Numerics: all arithmetic is fp32. The norm is rounded to the dtype of x before the rotation, as in models that
compute one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.sums import inverse_deviation


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
        "rows", "B", "C", "eps", "x_a", "x_b", "x_c", "cos_a", "cos_b", "cos_c", "cos_d",
        "sin_a", "sin_b", "sin_c", "sin_d", "y_a", "y_b", "y_c",
    ]
)  # fmt: skip
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, weight_ptr, y_ptr,
    rows, B, C, eps, x_a, x_b, x_c, cos_a, cos_b, cos_c, cos_d, sin_a, sin_b, sin_c, sin_d, y_a, y_b, y_c,
    D: tl.constexpr, VECTOR: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes ``BLOCK_R`` rows of y. ``PAIRED``: True if the tables have one number for each pair."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_row = r < rows
    mask = is_row & (d < D)
    c = (r % C).to(tl.int64)
    b = (r // C % B).to(tl.int64)
    a = (r // C // B).to(tl.int64)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + ((a * x_a + b * x_b + c * x_c) * VECTOR + d), mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        # With offsets of the shape of the tile, each thread loads the weights of its own elements.
        weight = tl.load(weight_ptr + (d + r * 0), mask=mask, other=0.0).to(tl.float32)
        x = x * inverse_deviation(tl.sum(x * x, 1, keep_dims=True) / D, eps) * weight
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if cos_ptr is not None:
        i = tl.arange(0, BLOCK_D // 2)[None, :]
        u, v = tl.split(tl.reshape(x, (BLOCK_R, BLOCK_D // 2, 2)))
        cos_u, cos_v = _pairs_of(cos_ptr, a * cos_a + b * cos_b + c * cos_c, i, cos_d, is_row, D, PAIRED)
        sin_u, sin_v = _pairs_of(sin_ptr, a * sin_a + b * sin_b + c * sin_c, i, sin_d, is_row, D, PAIRED)
        x = tl.reshape(tl.join(u * cos_u - v * sin_u, v * cos_v + u * sin_v), (BLOCK_R, BLOCK_D))
    y = y_ptr + ((a * y_a + b * y_b + c * y_c) * VECTOR + d)
    tl.store(y, x.to(y_ptr.dtype.element_ty), mask=mask)
