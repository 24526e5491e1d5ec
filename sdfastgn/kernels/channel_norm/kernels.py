"""Triton kernels of ``channel_norm`` and of ``pad_frames``. Ops: ``channel_norm/op.py`` and ``frames.py``.

A program has a tile of rows, which are the channels of one position each. It holds them in registers:
one read, one write, one launch.

Pointers; each but x and y may be None:

- ``x``, ``y``: (rows, C), contiguous. In ``_frames_kernel`` x is (N, T, H, W, C) and y is
  (N, front + T, H + 2 pad_h, W + 2 pad_w, C);
- ``shift``, ``weight``, ``bias``: (C,), before and after the norm;
- ``cache``: (N, cached, H, W, C), the frames before x; ``kept``: (N, keep, H, W, C), the last frames of y
  without its borders.

From sm_90 on each kernel starts while the one before it still runs (``PDL``), and waits before it
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
def divisor(x, eps, WIDE: tl.constexpr):
    """(norm of each row, what it is divided by); x is 0 outside of the row."""
    norm = square_root(row_sum(x * x, WIDE))
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
    C: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, ONE_ROW: tl.constexpr, PDL: tl.constexpr,
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
    # Where a thread has one row, it reads its own channels: a broadcast would send the whole tile through
    # shared memory.
    own = c + r * 0 if ONE_ROW else c
    weight = per_channel(weight_ptr, own, in_row, 1.0)
    bias = per_channel(bias_ptr, own, in_row, 0.0)
    _, n = divisor(x, eps, WIDE)
    y = activate(x * (scale / n) * weight + bias, ACTIVATION, PAIRS)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# One program: a tile of whole rows of y.
@triton.jit(
    do_not_specialize=[
        "rows",
        "frames",
        "height",
        "width",
        "front",
        "cached",
        "keep",
        "pad_h",
        "pad_w",
        "scale",
        "eps",
    ]
)
def _frames_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, cache_ptr, y_ptr, kept_ptr,
    rows, frames, height, width, front, cached, keep, pad_h, pad_w, scale, eps,
    C: tl.constexpr, NORM: tl.constexpr, BORDER: tl.constexpr, REPLICATE: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, ONE_ROW: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, or act(norm(x + shift)), behind the frames of ``cache`` and within borders of ``pad_h`` and
    ``pad_w``. ``BORDER``: one of the two is not 0.

    Positions of y are counted from the first element of x, so that those of the cache have negative
    frames. What x and cache do not have is 0, or if ``REPLICATE`` the nearest element that they have.
    """
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    first = tl.program_id(0) * ROWS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    in_row = c < C
    is_row = r < rows - first
    if BORDER:
        w = (first + r) % (width + 2 * pad_w) - pad_w
        line = (first + r) // (width + 2 * pad_w)
        h = line % (height + 2 * pad_h) - pad_h
        frame = line // (height + 2 * pad_h)
        is_centre = (w >= 0) & (w < width) & (h >= 0) & (h < height)
        if REPLICATE:
            w = tl.minimum(tl.maximum(w, 0), width - 1)
            h = tl.minimum(tl.maximum(h, 0), height - 1)
        at = h * width + w
    else:
        at = (first + r) % (height * width)
        frame = (first + r) // (height * width)
        is_centre = is_row
    n = frame // (front + frames)
    t = frame % (front + frames) - front
    image = height * width
    is_kept = is_row & is_centre & (t >= frames - keep)
    kept_row = (n * keep + t - (frames - keep)) * image + at
    is_there = is_row
    if REPLICATE:
        t = tl.maximum(t, -cached)
    else:
        is_there = is_row & is_centre & (t >= -cached)
    is_new = is_there & (t >= 0)
    if PDL:
        gdc_wait()
    x_row = ((n * frames + t) * image + at).to(tl.int64) * C
    y = tl.load(x_ptr + x_row + c, mask=is_new & in_row, other=0.0).to(tl.float32)
    own = c + r * 0 if ONE_ROW else c
    if shift_ptr is not None:
        y += per_channel(shift_ptr, own, in_row, 0.0)
    if NORM:
        weight = per_channel(weight_ptr, own, in_row, 1.0)
        bias = per_channel(bias_ptr, own, in_row, 0.0)
        _, divided_by = divisor(y, eps, WIDE)
        y = activate(y * (scale / divided_by) * weight + bias, ACTIVATION, PAIRS)
    y = tl.where(is_new, y, 0.0)
    if cache_ptr is not None:
        is_old = is_there & (t < 0)
        cache_row = ((n * cached + cached + t) * image + at).to(tl.int64) * C
        old = tl.load(cache_ptr + cache_row + c, mask=is_old & in_row, other=0.0).to(tl.float32)
        y = tl.where(is_old, old, y)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (first + r).to(tl.int64) * C + c, y, mask=is_row & in_row)
    if kept_ptr is not None:
        tl.store(kept_ptr + kept_row.to(tl.int64) * C + c, y, mask=is_kept & in_row)
