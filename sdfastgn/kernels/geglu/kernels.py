"""Triton kernels of GEGLU and of its backward. Ops: ``geglu/op.py``, launches: ``geglu/plans.py``.

Forward: one launch, one read of x and one write of y. Backward: one read of dy and x and one write
of dx. Where the bias wants a gradient, each program adds up its rows in registers and leaves one
fp32 partial sum a column, which a second launch adds up in a fixed order: no atomics, the same bits
at each run.

Pointers: ``x``, ``dx`` (rows, 2D), values then gates; ``bias``, ``dbias`` (2D,) or None; ``y``, ``dy``
(rows, D); ``partials`` fp32 (groups, 2D), or None where the bias wants no gradient.

From sm_90 on each kernel starts while the one before it still runs (``PDL``), and waits before it
touches memory.

Numerics: fp32 throughout, one rounding at each store; the normal distribution of a 16-bit x as
``normal_cdf`` says. Offsets that can pass 2^31 are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import normal_cdf
from sdfastgn.kernels.common.sums import sum_columns


@triton.jit
def _read_bias(bias_ptr, D: tl.constexpr, c, in_row):
    """Bias of the values and of the gates in columns ``c``, to be added to a tile."""
    bias = 0.0
    gate_bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=in_row).to(tl.float32)[None, :]
        gate_bias = tl.load(bias_ptr + D + c, mask=in_row).to(tl.float32)[None, :]
    return bias, gate_bias


# One program: ``BLOCK_D`` columns of ``BLOCK_R`` rows of y.
@triton.jit(do_not_specialize=["rows"])
def _geglu_kernel(
    x_ptr, bias_ptr, y_ptr,
    rows,
    D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(D, BLOCK_D)
    first = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_R
    start = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_D
    # A row alone may be longer than an int32 can say; Triton 3.6 refuses that even times 0.
    ROW: tl.constexpr = X_STRIDE if BLOCK_R > 1 else 0
    r = tl.arange(0, BLOCK_R)[:, None]
    i = tl.arange(0, BLOCK_D)
    in_row = None
    mask = None
    if not EVEN:
        in_row = start + i < D
        mask = (first + r < rows) & in_row[None, :]
    if PDL:
        gdc_wait()
    x = x_ptr + (first * X_STRIDE + start) + (r * ROW + i[None, :])
    value = tl.load(x, mask=mask).to(tl.float32)
    gate = tl.load(x + D, mask=mask).to(tl.float32)
    bias, gate_bias = _read_bias(bias_ptr, D, start + i, in_row)
    gate += gate_bias
    y = (value + bias) * (gate * normal_cdf(gate, x_ptr.dtype.element_ty != tl.float32)[0])
    tl.store(y_ptr + (first * D + start) + (r * D + i[None, :]), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _geglu_grad_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partials_ptr,
    rows, tiles,
    D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of a block of columns in a group of tiles, and the group's column sums."""
    columns = tl.cdiv(D, BLOCK_D)
    group = tl.program_id(0) // columns
    start = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_D
    ROW: tl.constexpr = X_STRIDE if BLOCK_R > 1 else 0
    r = tl.arange(0, BLOCK_R)[:, None]
    i = tl.arange(0, BLOCK_D)
    in_row = start + i < D
    values = tl.zeros((BLOCK_D,), tl.float32)
    gates = values
    if PDL:
        gdc_wait()
    bias, gate_bias = _read_bias(bias_ptr, D, start + i, None if EVEN else in_row)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(rows, BLOCK_R))):
        first = tl.cast(tile, tl.int64) * BLOCK_R
        mask = None if EVEN else (first + r < rows) & in_row[None, :]
        dy = tl.load(dy_ptr + (first * D + start) + (r * D + i[None, :]), mask=mask).to(tl.float32)
        x = x_ptr + (first * X_STRIDE + start) + (r * ROW + i[None, :])
        value = tl.load(x, mask=mask).to(tl.float32) + bias
        gate = tl.load(x + D, mask=mask).to(tl.float32) + gate_bias
        cdf, density = normal_cdf(gate, x_ptr.dtype.element_ty != tl.float32)
        dvalue = dy * (gate * cdf)
        dgate = dy * value * (cdf + gate * 0.3989422804014327 * density)
        if dx_ptr is not None:
            dx = dx_ptr + (first * 2 * D + start) + (r * 2 * D + i[None, :])
            tl.store(dx, dvalue.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.store(dx + D, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
        if partials_ptr is not None:
            if not EVEN:  # what lies outside the mask is undefined
                dvalue = tl.where(mask, dvalue, 0.0)
                dgate = tl.where(mask, dgate, 0.0)
            values += tl.sum(dvalue, 0)
            gates += tl.sum(dgate, 0)
    if partials_ptr is not None:
        out = partials_ptr + group.to(tl.int64) * 2 * D + start + i
        tl.store(out, values, mask=None if EVEN else in_row)
        tl.store(out + D, gates, mask=None if EVEN else in_row)


# One program: ``BLOCK_D`` columns.
@triton.jit(do_not_specialize=["count", "columns"])
def _bias_sum_kernel(
    partials_ptr, dbias_ptr,
    count, columns,
    PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PDL:
        gdc_wait()
    sum_columns(partials_ptr, dbias_ptr, count, columns, c, BLOCK_P)
