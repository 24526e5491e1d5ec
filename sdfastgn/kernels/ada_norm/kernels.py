"""The Triton kernel of ``ada_norm``: gated sum, norm and modulation of rows.

``ada_norm/op.py`` has the formula. A program has a tile of whole rows in registers. It reads x and the branch
once, and writes the sum and y once. The branch is the tensor that is added to x. Gate, factor and offset are
read for each row again. They are small, so they come from the L2 cache.

Tensors. All except x may be None:

- ``x``, ``branch``: (B, S, D), fp16, bf16 or fp32, with contiguous rows;
- ``gate``, ``factor``, ``offset``: (B, S, D), with contiguous rows. If all samples share the same elements,
  the stride between samples is 0. If all rows share them, the stride between rows is 0;
- ``branch_weight``, ``branch_bias``, ``weight``, ``bias``: (D,);
- ``total``, ``y``: (B, S, D), contiguous, in the dtype of x;
- ``scales``: (B, S), contiguous, fp32. If the kernel gets them, it writes y in E4M3, with one scale for each
  row (``kernels/quantize_rows``).

Strides are passed in units of ``VECTOR`` elements, and the kernel multiplies them by ``VECTOR``. So the
compiler knows that the products are multiples of ``VECTOR``, and loads vectors.

Numerics: all arithmetic is fp32. The sum is rounded before its norm, and y is rounded once. Sums have a fixed
order and no atomics. A LayerNorm subtracts the mean before it squares. If x is fp32 or fp16, the mean of the
differences is then subtracted too. It is the rounding error of the first mean, which does not matter in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.e4m3_kernels import start_of_e4m3
from sdfastgn.kernels.common.sums import inverse_deviation
from sdfastgn.kernels.layer_norm.kernels import row_sum, tile_column, tile_row
from sdfastgn.kernels.quantize_rows.kernels import in_rows_of_e4m3


@triton.jit
def _at(sample, row, sample_stride, row_stride, c, VECTOR: tl.constexpr):
    """Returns the int64 offsets of the columns ``c`` of a row, from strides in units of ``VECTOR``."""
    return (sample * sample_stride + row * row_stride) * VECTOR + c


@triton.jit
def _centred(u, in_row, D: tl.constexpr, WIDE: tl.constexpr):
    """Subtracts from each row of ``u`` its mean. The padding behind the end of a row becomes 0."""
    return tl.where(in_row, u - row_sum(u, WIDE) / D, 0.0)


@triton.jit
def _over_root_mean_square(u, eps, D: tl.constexpr, WIDE: tl.constexpr):
    return u * inverse_deviation(row_sum(u * u, WIDE) / D, eps)


@triton.jit
def _tanh(v):
    """Returns tanh(v), without overflow for large v."""
    e = tl.exp(-2.0 * tl.abs(v))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(v < 0, -t, t)


@triton.jit(
    do_not_specialize=[
        "rows", "S", "branch_eps", "eps", "x_sample", "x_row", "branch_sample", "branch_row", "gate_sample",
        "gate_row", "factor_sample", "factor_row", "offset_sample", "offset_row",
    ]
)  # fmt: skip
def _ada_norm_kernel(
    x_ptr, branch_ptr, gate_ptr, branch_weight_ptr, branch_bias_ptr, weight_ptr, bias_ptr, factor_ptr,
    offset_ptr, total_ptr, y_ptr, scales_ptr,
    rows, S, branch_eps, eps, x_sample, x_row, branch_sample, branch_row, gate_sample, gate_row,
    factor_sample, factor_row, offset_sample, offset_row,
    D: tl.constexpr, VECTOR: tl.constexpr, BRANCH_NORM: tl.constexpr, KIND: tl.constexpr,
    TANH: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr, ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the gated sum ``total`` of a tile of rows, and ``y``, its norm with factor and offset.

    ``S``: number of rows of a sample. ``KIND``: the kind of the norm: "layer", "rms", or "none" for no y.
    """
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    r = tl.program_id(0) * ROWS + tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    is_row = r < rows
    in_row = c < D
    mask = is_row & in_row
    sample = (r // S).to(tl.int64)
    row = (r % S).to(tl.int64)
    out = r.to(tl.int64) * D + c
    # The offsets with which weights and biases are loaded. If a thread has elements of only one row, the
    # offsets have the shape of the tile, and each thread loads values for its own elements. Otherwise each
    # column is loaded once, and the values are broadcast to all rows.
    columns = c + r * 0 if ONE_ROW else c
    if PDL:
        gdc_wait()
    u = tl.load(x_ptr + _at(sample, row, x_sample, x_row, c, VECTOR), mask=mask, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        at = _at(sample, row, branch_sample, branch_row, c, VECTOR)
        b = tl.load(branch_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if BRANCH_NORM:
            b = _over_root_mean_square(b, branch_eps, D, WIDE)
        if branch_weight_ptr is not None:
            b *= tl.load(branch_weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        if branch_bias_ptr is not None:
            b += tl.load(branch_bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            at = _at(sample, row, gate_sample, gate_row, c, VECTOR)
            g = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if TANH:
                g = _tanh(g)
            b *= g
        total = (u + b).to(x_ptr.dtype.element_ty)
        if total_ptr is not None:
            tl.store(total_ptr + out, total, mask=mask)
        u = total.to(tl.float32)
    if y_ptr is not None:
        if KIND == "layer":
            u = _centred(u, in_row, D, WIDE)
            if x_ptr.dtype.element_ty != tl.bfloat16:
                u = _centred(u, in_row, D, WIDE)
        y = _over_root_mean_square(u, eps, D, WIDE)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            at = _at(sample, row, factor_sample, factor_row, c, VECTOR)
            f = tl.load(factor_ptr + at, mask=mask, other=0.0).to(tl.float32)
            y *= 1.0 + f if PLUS_ONE else f
        if offset_ptr is not None:
            at = _at(sample, row, offset_sample, offset_row, c, VECTOR)
            y += tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if scales_ptr is not None:
            y, scale = in_rows_of_e4m3(y, WIDE)
            tl.store(scales_ptr + r, scale, mask=is_row)
            out += start_of_e4m3()
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)
