"""The Triton kernel of ``channel_norm``. Its formula and op are in ``channel_norm/op.py``.

A *row* has the channels of one position. A program loads a tile of rows into registers, normalizes them, and
writes the results. So one launch reads x once and writes y once.

Tensors:

- ``x``, ``y``: (rows, C), contiguous;
- ``weight``, ``bias``: (C,) or None.

With programmatic dependent launch (``PDL``, from sm_90 on) the kernel starts while the previous kernel still
runs. Before it accesses memory, it waits for the end of the previous kernel.

Numerics: all arithmetic is fp32, and the result is rounded once. If the norm of a row is NaN, its results are
NaN. If the sum of squares of a row overflows fp32, the norm is infinite. Then x / norm is 0, or NaN for an
infinite element, as in PyTorch. Offsets that can be 2^31 or more are int64; numbers of rows are int32.
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
    """Returns two values for each row: its norm, sqrt(sum of squares + ``added``), and max(norm, eps).

    ``x``: a tile of rows. Its masked elements must be 0. ``added``: a number; 0 for the Euclidean norm.
    """
    norm = square_root(row_sum(x * x, WIDE) + added)
    return norm, tl.where(norm < eps, eps, norm)


@triton.jit
def per_channel(pointer, c, in_row, default):
    """Loads the values of the channels ``c`` from a weight or bias, in fp32.

    If ``pointer`` is None, returns ``default``. Channels outside of the mask ``in_row`` get 0.
    """
    found = default
    if pointer is not None:
        found = tl.load(pointer + c, mask=in_row, other=0.0).to(tl.float32)
    return found


# Computes y = act(x / max(||x||, eps) * scale * weight + bias). A program processes a tile of whole rows.
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
    # ``own`` has the index of the channel for each element of the tile. So each thread loads weight and bias
    # for exactly its elements. If they were loaded once for each channel and broadcast, the tile would go
    # through shared memory.
    own = c + r * 0
    weight = per_channel(weight_ptr, own, in_row, 1.0)
    bias = per_channel(bias_ptr, own, in_row, 0.0)
    _, n = divisor(x, eps, WIDE)
    y = activate(x * (scale / n) * weight + bias, ACTIVATION, PAIRS)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
