"""Triton kernels of GroupNorm's backward that compute the gradients of all operands but x.

The kernels that read x and dy store sums for each sample and channel (``totals``). ``parameter_grads``
computes the gradients of weight, bias, shift, ada_scale and ada_shift from these sums. It runs in the first
programs of ``apply_grad_kernel`` or, if that kernel is not launched, in ``parameter_grad_kernel``. If there
are many samples, each program of ``parameter_grad_kernel`` sums only a part of the samples, and
``parameter_sum_kernel`` adds up the parts.

``group_norm/backward_kernels.py`` explains pointers and numerics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.sums import sum_columns


@triton.jit
def _add_samples(
    grad_ptr,
    at, mask, values, total,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """Stores ``values``, the gradients of an operand that has a row for each sample (``STRIDED``).

    If all samples share the operand, this function instead adds ``values`` to ``total``. It returns
    ``total``.
    """
    if grad_ptr is not None:
        if STRIDED:
            tl.store(grad_ptr + at, values.to(grad_ptr.dtype.element_ty), mask=mask)
        else:
            total += values
    return total


@triton.jit
def _store_total(grad_ptr, c, in_range, total, STRIDED: tl.constexpr):
    """Stores the gradient of an operand that all samples share: the sum of the rows of ``total``.

    Does nothing for an operand with a row for each sample (``STRIDED``).
    """
    if grad_ptr is not None and not STRIDED:
        tl.store(grad_ptr + c, tl.sum(total, 0).to(grad_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def parameter_grads(
    program, part, rows,
    totals_ptr, weight_ptr, bias_ptr, ada_scale_ptr, dweight_ptr, dbias_ptr, dshift_ptr, dada_scale_ptr,
    dada_shift_ptr,
    ada_scale_stride, N, plane,
    C: tl.constexpr, SHIFT_ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, OFFSET_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of ``BLOCK_C`` channels from ``rows`` samples, called a part of the samples.

    The part begins at sample ``part`` * ``rows``.

    ``totals_ptr``: three fp32 planes (N, C): the sum of dz (the gradient of the activation's argument), the
    sum of dz * xhat (xhat: the normalized x), and the shift's gradient.

    Constants:
        SHIFT_ROWS, SCALE_ROWS, OFFSET_ROWS: True if shift, ada_scale or ada_shift has a row for each sample.
            The operand's gradient is then stored for each sample, in (N, C). Gradients of operands that all
            samples share are summed over the samples of the part, and stored in row ``part`` of (parts, C).
    """
    c = program * BLOCK_C + tl.arange(0, BLOCK_C)
    in_range = c < C
    weight = tl.full((BLOCK_C,), 1.0, tl.float32)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=in_range, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    dbias, dshift, dscale, doffset = dweight, dweight, dweight, dweight
    last = tl.minimum((part + 1) * rows, N)
    for start in range(part * rows, last, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        mask = (n < last) & in_range[None, :]
        at = n * C + c[None, :]
        sum_dz = tl.load(totals_ptr + at, mask=mask, other=0.0)
        sum_dz_xhat = tl.load(totals_ptr + plane + at, mask=mask, other=0.0)
        dscale = _add_samples(
            dada_scale_ptr, at, mask, sum_dz_xhat * weight + sum_dz * bias, dscale, SCALE_ROWS
        )
        doffset = _add_samples(dada_shift_ptr, at, mask, sum_dz, doffset, OFFSET_ROWS)
        if dshift_ptr is not None:
            shift_grad = tl.load(totals_ptr + 2 * plane + at, mask=mask, other=0.0)
            dshift = _add_samples(dshift_ptr, at, mask, shift_grad, dshift, SHIFT_ROWS)
        if ada_scale_ptr is not None:
            factor = 1 + tl.load(ada_scale_ptr + n * ada_scale_stride + c[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            sum_dz *= factor
            sum_dz_xhat *= factor
        dweight += sum_dz_xhat
        dbias += sum_dz
    out = part * C + c
    _store_total(dweight_ptr, out, in_range, dweight, False)
    _store_total(dbias_ptr, out, in_range, dbias, False)
    _store_total(dshift_ptr, out, in_range, dshift, SHIFT_ROWS)
    _store_total(dada_scale_ptr, out, in_range, dscale, SCALE_ROWS)
    _store_total(dada_shift_ptr, out, in_range, doffset, OFFSET_ROWS)


@triton.jit(do_not_specialize=["ada_scale_stride", "N", "totals_offset", "plane", "rows"])
def parameter_grad_kernel(
    scratch_ptr, weight_ptr, bias_ptr, ada_scale_ptr, dweight_ptr, dbias_ptr, dshift_ptr, dada_scale_ptr,
    dada_shift_ptr,
    ada_scale_stride, N, totals_offset, plane, rows,
    C: tl.constexpr, SHIFT_ROWS: tl.constexpr, SCALE_ROWS: tl.constexpr, OFFSET_ROWS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program runs ``parameter_grads`` for ``BLOCK_C`` channels and one part of ``rows`` samples.

    ``scratch``: fp32 memory. The sums from which the gradients are computed begin at ``totals_offset``.
    """
    columns = tl.cdiv(C, BLOCK_C)
    if PDL:
        gdc_wait()
    parameter_grads(
        tl.program_id(0) % columns, tl.program_id(0) // columns, rows, scratch_ptr + totals_offset,
        weight_ptr, bias_ptr, ada_scale_ptr, dweight_ptr, dbias_ptr, dshift_ptr, dada_scale_ptr,
        dada_shift_ptr, ada_scale_stride, N, plane, C, SHIFT_ROWS, SCALE_ROWS, OFFSET_ROWS, BLOCK_N,
        BLOCK_C,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "plane"])
def parameter_sum_kernel(
    partials_ptr, dweight_ptr, dbias_ptr, dshift_ptr, dada_scale_ptr, dada_shift_ptr,
    parts, plane,
    C: tl.constexpr, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program adds up the parts' sums for one gradient and one block of channels.

    Each part is a part of the samples. ``partials``: fp32, one plane of (parts, C) for each of the five
    gradients. Planes are ``plane`` elements apart. A gradient whose pointer is None is not computed.
    """
    which = tl.program_id(0) % 5
    c = tl.program_id(0) // 5 * BLOCK_C + tl.arange(0, BLOCK_C)
    if PDL:
        gdc_wait()
    if which == 0:
        sum_columns(partials_ptr, dweight_ptr, parts, C, c, BLOCK_P)
    elif which == 1:
        sum_columns(partials_ptr + plane, dbias_ptr, parts, C, c, BLOCK_P)
    elif which == 2:
        sum_columns(partials_ptr + 2 * plane, dshift_ptr, parts, C, c, BLOCK_P)
    elif which == 3:
        sum_columns(partials_ptr + 3 * plane, dada_scale_ptr, parts, C, c, BLOCK_P)
    else:
        sum_columns(partials_ptr + 4 * plane, dada_shift_ptr, parts, C, c, BLOCK_P)
