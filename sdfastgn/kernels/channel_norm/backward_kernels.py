"""The Triton kernel of the backward of ``channel_norm``. Its formula is in ``channel_norm/backward.py``.

A *row* has the channels of one position. A program goes through one or several tiles of rows. For each tile
it loads dy and x into registers and writes dx. In registers it also sums the wanted gradients of weight and
bias over all rows of its tiles. At its end it writes these sums to memory as fp32 partial sums. LayerNorm's
``_column_sum_kernel`` adds up the partial sums of all programs in a fixed order, without atomics, so each run
gives the same bits.

Tensors, in addition to the ones in ``channel_norm/kernels.py``: ``dy`` and ``dx`` (rows, C), contiguous;
``partials`` fp32 (2, programs, C). dx and partials may be None.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.channel_norm.kernels import divisor, per_channel
from sdfastgn.kernels.common.activation_kernels import activation_grad
from sdfastgn.kernels.layer_norm.backward_kernels import store_column_sum
from sdfastgn.kernels.layer_norm.kernels import row_sum, tile_column, tile_row


# Computes dx and partial sums of the gradients of weight and bias. A program processes every
# ``num_programs``-th tile of whole rows.
@triton.jit(do_not_specialize=["rows", "plane", "scale", "eps"])
def _channel_norm_grad_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, dx_ptr, partials_ptr,
    rows, plane, scale, eps,
    C: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    in_row = c < C
    dweight = tl.zeros((r + c).shape, tl.float32)
    dbias = dweight
    if PDL:
        gdc_wait()
    own = c + r * 0
    weight = per_channel(weight_ptr, own, in_row, 1.0)
    bias = per_channel(bias_ptr, own, in_row, 0.0)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (r < tl.minimum(rows - first, ROWS).to(tl.int32)) & in_row
        at = first * C + (r * C + c)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        norm, n = divisor(x, eps, WIDE)
        # In rows beyond the last one, x and dy are 0. If eps is 0, such a row is divided by its norm 0, which
        # gives NaN. So xhat (the normalized x) and dz (the gradient) are set to 0 there. Otherwise the NaN
        # would get into the sums over rows.
        xhat = tl.where(mask, x / n, 0.0)
        dz = tl.where(mask, activation_grad(dy, xhat * scale * weight + bias, ACTIVATION, PAIRS), 0.0)
        if WEIGHT_GRAD:
            dweight += dz * xhat * scale
        if BIAS_GRAD:
            dbias += dz
        if dx_ptr is not None:
            g = dz * weight * scale
            along = tl.where(norm < eps, 0.0, row_sum(g * xhat, WIDE))
            tl.store(dx_ptr + at, ((g - xhat * along) / n).to(dx_ptr.dtype.element_ty), mask=mask)
    out = tl.program_id(0).to(tl.int64) * C + c
    if WEIGHT_GRAD:
        store_column_sum(partials_ptr, out, dweight, in_row, WIDE)
    if BIAS_GRAD:
        store_column_sum(partials_ptr + plane, out, dbias, in_row, WIDE)
