"""The Triton kernel of ``rotate``: rows are normalized, and pairs of their elements are rotated.

A program has some whole rows in registers. Tensors:

- ``x``, ``y``: (A, B, C, D), fp16, bf16 or fp32, with contiguous rows;
- ``cos``, ``sin``: (A, B, C, D) or (A, B, C, D / 2), of any strides. A stride is 0 where one element is
  used along a whole axis. If only ``sin`` is None, ``cos`` has the cosine of the first pair, its sine, the
  cosine of the second pair, and so on. If both are None, rows are not rotated;
- ``weight``, ``bias``: (D,), the parameters of the norm. Each may be None.

Strides of x and y are in units of ``VECTOR`` elements, and strides of the tables cos and sin in units of
``TABLE_VECTOR`` elements. The kernel multiplies strides by these units, so the compiler knows that the
products are multiples, and loads vectors. The kernel loads a value of a table for each element of x. Tables
that are loaded in a smaller shape and broadcast would go through shared memory.

Numerics: all arithmetic is fp32. The result of the norm is rounded to the dtype of x before the rotation, as
in models that compute norm and rotation one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.sums import inverse_deviation


@triton.jit
def _normalized(x, mean, rest, factor, weight_ptr, bias_ptr, at, mask, LAYER: tl.constexpr):
    """Returns (x - mean - rest) * factor * weight + bias, the normalized elements ``x`` of rows.

    Without ``LAYER``, mean and rest are not subtracted, as in an RMS norm. ``at``: the columns of the
    elements. ``rest``: the rounding error of the mean. ``factor``: 1 / deviation, or 1 / root mean square.
    """
    if LAYER:
        x = x - mean - rest
    x = x * factor
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit(
    do_not_specialize=[
        "rows", "B", "C", "eps", "x_a", "x_b", "x_c", "cos_a", "cos_b", "cos_c", "sin_a", "sin_b", "sin_c",
        "y_a", "y_b", "y_c",
    ]
)  # fmt: skip
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, y_ptr,
    rows, B, C, eps, x_a, x_b, x_c, cos_a, cos_b, cos_c, sin_a, sin_b, sin_c, y_a, y_b, y_c,
    D: tl.constexpr, VECTOR: tl.constexpr, TABLE_VECTOR: tl.constexpr, SHARED: tl.constexpr,
    COS_STEP: tl.constexpr, SIN_STEP: tl.constexpr, HALVES: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program computes ``BLOCK_R`` rows of y.

    ``HALVES``: True if a pair is one element from each half of a row, False if a pair is two neighboring
    elements. ``SHARED``: 2 if both elements of a pair use the same number of a table, else 1. ``COS_STEP``,
    ``SIN_STEP``: strides of the last axis of cos and sin. ``KIND``: the kind of norm, "rms", "layer" or
    "none".
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (r < rows) & (d < D)
    c = (r % C).to(tl.int64)
    b = (r // C % B).to(tl.int64)
    a = (r // C // B).to(tl.int64)
    if PDL:
        gdc_wait()
    x_ptr += (a * x_a + b * x_b + c * x_c) * VECTOR
    x = tl.load(x_ptr + d, mask=mask, other=0.0).to(tl.float32)
    # ``other``: for each element the column of the other element of its pair, if pairs have an element of
    # each half. It has the shape of the tile, so that each thread loads the numbers for its own elements.
    other = (d + D // 2) % D + r * 0
    if KIND != "none":
        u, mean, rest = x, 0.0, 0.0
        if KIND == "layer":
            mean = tl.sum(x, 1, keep_dims=True) / D
            rest = tl.sum(tl.where(mask, x - mean, 0.0), 1, keep_dims=True) / D
            u = tl.where(mask, x - mean - rest, 0.0)
        factor = inverse_deviation(tl.sum(u * u, 1, keep_dims=True) / D, eps)
        x = _normalized(x, mean, rest, factor, weight_ptr, bias_ptr, d + r * 0, mask, KIND == "layer")
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if cos_ptr is not None:
        column = d % (D // SHARED) if HALVES else d // SHARED
        at = (a * cos_a + b * cos_b + c * cos_c) * TABLE_VECTOR + column * COS_STEP
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HALVES:
            turned = tl.load(x_ptr + other, mask=mask, other=0.0).to(tl.float32)
            if KIND != "none":
                turned = _normalized(
                    turned, mean, rest, factor, weight_ptr, bias_ptr, other, mask, KIND == "layer"
                )
                turned = turned.to(x_ptr.dtype.element_ty).to(tl.float32)
            turned = tl.where(d < D // 2, -turned, turned)
        else:
            u, v = tl.split(tl.reshape(x, (BLOCK_R, BLOCK_D // 2, 2)))
            turned = tl.reshape(tl.join(-v, u), (BLOCK_R, BLOCK_D))
        if sin_ptr is None:
            cos_of, sin_of = tl.split(tl.reshape(cos, (BLOCK_R, BLOCK_D // 2, 2)))
            x = tl.join(u * cos_of - v * sin_of, v * cos_of + u * sin_of)
            x = tl.reshape(x, (BLOCK_R, BLOCK_D))
        else:
            at = (a * sin_a + b * sin_b + c * sin_c) * TABLE_VECTOR + column * SIN_STEP
            sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
            x = x * cos + turned * sin
    y = y_ptr + ((a * y_a + b * y_b + c * y_c) * VECTOR + d)
    tl.store(y, x.to(y_ptr.dtype.element_ty), mask=mask)
