"""The Triton kernel of ``quantize_rows``: rows in E4M3, a float dtype of 8 bits, and one scale for each row.

A program has a tile of whole rows in registers, like the kernel of LayerNorm for short rows. It reads each
row once, and writes the row and the row's scale. Tensors:

- ``x``: (B, S, K), fp16, bf16 or fp32, with contiguous rows;
- ``second``: (B, S, D - K), in the dtype of x, with contiguous rows; or None. With ``MULTIPLIES``, ``second``
  is (B, S, D);
- ``y``: (B, S, D), contiguous, in E4M3. A row of y is a row of x followed by a row of ``second``. With
  ``MULTIPLIES`` it is the product of both rows;
- ``scales``: (B, S), contiguous, fp32.

Strides of x and ``second`` are in units of ``VECTOR`` elements. The kernel multiplies strides by ``VECTOR``,
so the compiler knows that the products are multiples of ``VECTOR``, and loads vectors.

Numerics: all arithmetic is fp32, and y is rounded once. NaN and infinities become NaN, and do not change the
scale of their row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.common.e4m3_kernels import start_of_e4m3
from sdfastgn.kernels.common.tiles import STEP_AXIS
from sdfastgn.kernels.layer_norm.kernels import tile_column, tile_row


@triton.jit
def row_max(x, WIDE: tl.constexpr):
    """Returns the maximum of each row of a (lanes, warps, steps, block) tile. Reduced axes keep size 1."""
    most = tl.max(tl.max(x, STEP_AXIS, keep_dims=True), 3, keep_dims=True)
    if WIDE:
        most = tl.max(most, 1, keep_dims=True)
    return most


@triton.jit
def in_rows_of_e4m3(y, WIDE: tl.constexpr):
    """Returns y / scale in fp32, limited to the range of E4M3, and the scale, for a tile of whole rows.

    The scale of a row is the largest finite magnitude in the row divided by 448, the largest number of E4M3.
    ``y``: fp32, and 0 outside of the rows.
    """
    size = tl.abs(y)
    is_finite = size < float("inf")  # False for inf and NaN in y
    scale = tl.maximum(row_max(tl.where(is_finite, size, 0.0), WIDE) * (1 / 448.0), 1.1754943508222875e-38)
    u = tl.minimum(tl.maximum(y * (1.0 / scale), -448.0), 448.0)  # rounding can exceed 448, E4M3's maximum
    return tl.where(is_finite, u, float("nan")), scale


@triton.jit(do_not_specialize=["rows", "S", "x_sample", "x_row", "second_sample", "second_row"])
def _quantize_rows_kernel(
    x_ptr, second_ptr, y_ptr, scales_ptr,
    rows, S, x_sample, x_row, second_sample, second_row,
    K: tl.constexpr, D: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr,
    SECOND_ACTIVATION: tl.constexpr, MULTIPLIES: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes a tile of rows in E4M3 and their scales. ``S``: number of rows of a sample."""
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    r = tl.program_id(0) * ROWS + tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    is_row = r < rows
    sample = (r // S).to(tl.int64)
    row = (r % S).to(tl.int64)
    if PDL:
        gdc_wait()
    at = (sample * x_sample + row * x_row) * VECTOR + c
    u = tl.load(x_ptr + at, mask=is_row & (c < K), other=0.0).to(tl.float32)
    u = activate(u, ACTIVATION, PAIRS)  # every activation of 0 is 0, so masked elements stay 0
    if second_ptr is not None:
        FIRST: tl.constexpr = 0 if MULTIPLIES else K
        at = (sample * second_sample + row * second_row) * VECTOR + (c - FIRST)
        v = tl.load(second_ptr + at, mask=is_row & (c >= FIRST) & (c < D), other=0.0).to(tl.float32)
        v = activate(v, SECOND_ACTIVATION, PAIRS)
        u = u * v if MULTIPLIES else tl.where(c < K, u, v)
    u, scale = in_rows_of_e4m3(u, WIDE)
    out = r.to(tl.int64) * D + c + start_of_e4m3()
    tl.store(y_ptr + out, u.to(y_ptr.dtype.element_ty), mask=is_row & (c < D))
    tl.store(scales_ptr + r, scale, mask=is_row)
