"""Triton kernel of ``channel_norm``. Op: ``channel_norm/op.py``.

A program has a tile of rows, which are the channels of one position each. It holds them in registers:
one read, one write, one launch.

Pointers; each but x and y may be None:

- ``x``, ``y``: (rows, C), contiguous;
- ``weight``, ``bias``: (C,).

From sm_90 on the kernel starts while the one before it still runs (``PDL``), and waits before it
touches memory.

Numerics: fp32 throughout, one rounding at the store. A norm that is NaN stays NaN. A sum of squares that
exceeds fp32 makes a row 0, and an infinite element makes itself NaN, as in PyTorch. Offsets that can pass
2^31 are int64; numbers of rows are int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.common.sums import square_root
from sdfastgn.kernels.layer_norm.kernels import row_sum, tile_column, tile_row


@triton.jit
def divisor(x, eps, WIDE: tl.constexpr, added=0.0):
    """(norm of each row, what it is divided by); x is 0 outside of the row.

    ``added``: a number that the sum of squares has besides.
    """
    norm = square_root(row_sum(x * x, WIDE) + added)
    return norm, tl.where(norm < eps, eps, norm)


@triton.jit
def per_channel(pointer, c, in_row, default):
    """The parameters of channels ``c``, or ``default`` where there are none."""
    found = default
    if pointer is not None:
        found = tl.load(pointer + c, mask=in_row, other=0.0).to(tl.float32)
    return found


# One program: a tile of whole rows.
@triton.jit(do_not_specialize=["rows", "scale", "eps"])
def _channel_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    rows, scale, eps,
    C: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    in_row = c < C
    mask = (r < tl.minimum(rows - first, ROWS).to(tl.int32)) & in_row
    at = first * C + (r * C + c)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # The tile's full shape: each thread then loads the parameters of its own elements. Parameters that are
    # broadcast to the tile would send it through shared memory.
    own = c + r * 0
    weight = per_channel(weight_ptr, own, in_row, 1.0)
    bias = per_channel(bias_ptr, own, in_row, 0.0)
    _, n = divisor(x, eps, WIDE)
    y = activate(x * (scale / n) * weight + bias, ACTIVATION, PAIRS)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
