"""The Triton kernels of GEGLU, of its backward, and of ``gated``.

Formulas are in ``geglu/op.py`` and ``geglu/gated.py``. ``_gated_tile`` computes a tile of y for both GEGLU
and ``gated``.

The forward of GEGLU is one launch, which reads x and writes y. The backward is one launch, which reads dy and
x and writes dx. If the gradient of the bias is wanted, each program of the backward also sums over its rows,
and stores one partial sum for each column. Then a second launch adds up the partial sums.

Tensors:

- ``x``: (rows, 2D), fp16, bf16 or fp32. A row has D values and then D gates. Rows are contiguous, and
  ``X_STRIDE`` elements apart;
- ``dx``: (rows, 2D), contiguous, the gradient of x, or None;
- ``bias``, ``dbias``: (2D,) or None;
- ``y``, ``dy``: (rows, D), contiguous. With a quantizer y is in E4M3;
- ``value``, ``gate``: (rows, D). The kernel of ``gated`` reads these two instead of x. Rows are contiguous,
  and ``VALUE_STRIDE`` or ``GATE_STRIDE`` elements apart;
- ``quantizer``: None, or (8,) fp32 with the scale of the output in E4M3 (``common/e4m3.py``). With a
  quantizer the forward has a second launch, called the retry. It writes y again with a larger scale, if
  values were beyond the range of E4M3;
- ``partials``: fp32 (groups, 2D), partial sums of the gradient of the bias, or None if it is not wanted.

With programmatic dependent launch (``PDL``, from sm_90 on) a kernel starts while the previous kernel still
runs. Before it accesses memory, it waits for the end of the previous kernel.

Numerics: all arithmetic is fp32, and each result is rounded once. The normal distribution is approximated for
16-bit x (``normal_cdf``). Sums have a fixed order and no atomics, so every run gives the same bits. Only the
count of values beyond the range of E4M3 is a sum with atomics. Offsets that can be 2^31 or more are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate, normal_cdf
from sdfastgn.kernels.common.e4m3_kernels import (
    begin_retry,
    end_retry,
    in_e4m3_range,
    start_of_e4m3,
    wait_before_retry,
)
from sdfastgn.kernels.common.sums import sum_columns


@triton.jit
def _read_bias(bias_ptr, D: tl.constexpr, c, in_row):
    """Loads the bias of the values and the bias of the gates in columns ``c``, in fp32.

    If there is no bias, both are 0.
    """
    bias = 0.0
    gate_bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=in_row).to(tl.float32)[None, :]
        gate_bias = tl.load(bias_ptr + D + c, mask=in_row).to(tl.float32)[None, :]
    return bias, gate_bias


@triton.jit
def _gated_tile(
    value_ptr, gate_ptr, bias_ptr, quantizer_ptr, y_ptr,
    rows, tile,
    D: tl.constexpr, VALUE_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, RETRY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes ``BLOCK_D`` columns of ``BLOCK_R`` rows of y = value * activation(gate).

    Constants:
        VALUE_STRIDE, GATE_STRIDE: elements between the starts of rows of value and of gate.
        PAIRS: True if ``activate`` computes the sigmoids of two neighbors with one division.
        EVEN: True if no element is masked.
        RETRY: True if y is written again, because values were beyond the range of E4M3.
    """
    columns = tl.cdiv(D, BLOCK_D)
    first = (tile // columns).to(tl.int64) * BLOCK_R
    start = (tile % columns).to(tl.int64) * BLOCK_D
    # If the tile has one row, the stride between rows is multiplied by r = 0. But Triton 3.6 refuses a stride
    # that is too large for int32 even then. So the stride is replaced by 0.
    VALUE_ROW: tl.constexpr = VALUE_STRIDE if BLOCK_R > 1 else 0
    GATE_ROW: tl.constexpr = GATE_STRIDE if BLOCK_R > 1 else 0
    r = tl.arange(0, BLOCK_R)[:, None]
    i = tl.arange(0, BLOCK_D)
    in_row = None
    mask = None
    if not EVEN:
        in_row = start + i < D
        mask = (first + r < rows) & in_row[None, :]
    if PDL:
        wait_before_retry(quantizer_ptr)
    values = value_ptr + (first * VALUE_STRIDE + start) + (r * VALUE_ROW + i[None, :])
    gates = gate_ptr + (first * GATE_STRIDE + start) + (r * GATE_ROW + i[None, :])
    value = tl.load(values, mask=mask).to(tl.float32)
    gate = tl.load(gates, mask=mask).to(tl.float32)
    bias, gate_bias = _read_bias(bias_ptr, D, start + i, in_row)
    gate += gate_bias
    if ACTIVATION == "gelu":
        gate *= normal_cdf(gate, gate_ptr.dtype.element_ty != tl.float32)[0]
    else:
        gate = activate(gate, ACTIVATION, PAIRS)
    y = (value + bias) * gate
    out = first * D + start
    if quantizer_ptr is not None:
        y = in_e4m3_range(y, mask, quantizer_ptr, RETRY)
        out += start_of_e4m3()
    tl.store(y_ptr + out + (r * D + i[None, :]), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _geglu_kernel(
    x_ptr, bias_ptr, quantizer_ptr, y_ptr,
    rows,
    D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, RETRY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes y = value * gelu(gate). A program has one tile: ``BLOCK_D`` columns of ``BLOCK_R`` rows.

    ``EVEN``: True if no element is masked. ``RETRY``: True in the second launch of a call whose y is in E4M3.
    The second launch computes all tiles again with a larger scale if values were beyond the range of E4M3.
    Each of its programs computes several tiles.
    """
    if RETRY:
        if PDL:
            gdc_wait()
        if begin_retry(quantizer_ptr):
            tiles = tl.cdiv(rows, BLOCK_R) * tl.cdiv(D, BLOCK_D)
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                _gated_tile(
                    x_ptr, x_ptr + D, bias_ptr, quantizer_ptr, y_ptr, rows, tile,
                    D, X_STRIDE, X_STRIDE, "gelu", False, EVEN, False, True, BLOCK_R, BLOCK_D,
                )  # fmt: skip
            end_retry(quantizer_ptr)
    else:
        _gated_tile(
            x_ptr, x_ptr + D, bias_ptr, quantizer_ptr, y_ptr, rows, tl.program_id(0),
            D, X_STRIDE, X_STRIDE, "gelu", False, EVEN, PDL, False, BLOCK_R, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    value_ptr, gate_ptr, y_ptr,
    rows,
    D: tl.constexpr, VALUE_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes y = value * activation(gate). A program has one tile: ``BLOCK_D`` columns of ``BLOCK_R`` rows.

    ``PAIRS``: True if the sigmoids of two neighbors are computed with one division. ``EVEN``: True if no
    element is masked.
    """
    _gated_tile(
        value_ptr, gate_ptr, None, None, y_ptr, rows, tl.program_id(0),
        D, VALUE_STRIDE, GATE_STRIDE, ACTIVATION, PAIRS, EVEN, PDL, False, BLOCK_R, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles"])
def _geglu_grad_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partials_ptr,
    rows, tiles,
    D: tl.constexpr, X_STRIDE: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes dx, the gradient of x, and partial sums of dbias, the gradient of the bias.

    A program processes a group of ``tiles`` tiles. The tiles have the same ``BLOCK_D`` columns, and each has
    ``BLOCK_R`` rows.
    """
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
            if not EVEN:  # loads outside of the mask give undefined values, which must not be added
                dvalue = tl.where(mask, dvalue, 0.0)
                dgate = tl.where(mask, dgate, 0.0)
            values += tl.sum(dvalue, 0)
            gates += tl.sum(dgate, 0)
    if partials_ptr is not None:
        out = partials_ptr + group.to(tl.int64) * 2 * D + start + i
        tl.store(out, values, mask=None if EVEN else in_row)
        tl.store(out + D, gates, mask=None if EVEN else in_row)


@triton.jit(do_not_specialize=["count", "columns"])
def _bias_sum_kernel(
    partials_ptr, dbias_ptr,
    count, columns,
    PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the bias: a program adds up ``count`` partial sums for ``BLOCK_D`` columns.

    ``columns``: number of elements of dbias, 2D.
    """
    c = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PDL:
        gdc_wait()
    sum_columns(partials_ptr, dbias_ptr, count, columns, c, BLOCK_P)
