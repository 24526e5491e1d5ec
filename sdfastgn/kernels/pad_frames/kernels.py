"""The Triton kernel of ``pad_frames``. Op: ``pad_frames/op.py``, launch: ``pad_frames/plans.py``.

A *row* has the channels of one position (frame, line, column) of the padded video. A program computes a tile
of rows of one sample in registers. Then it stores each row in y. With a ``WINDOW`` of more than 1, several
windows of y contain the row's frame, and the row is stored in each of them.

Pointers (all but x and y may be None):

- ``x``: (N, T, H, W, C), fp16, bf16 or fp32;
- ``y``: (N, front + frames + back - WINDOW + 1, height + 2 pad_h, width + 2 pad_w, WINDOW, C) in the dtype of
  x. ``frames``, ``height`` and ``width`` are the sizes of x after upsampling;
- ``shift``: (C,), added to x first. With a GroupNorm it is None, because ``table`` includes the shift;
- ``weight``, ``bias``: (C,), the parameters of the norm of each position's channels. None with a GroupNorm;
- ``table``: fp32, only with a GroupNorm. ``merge_kernel`` of ``group_norm/kernels.py`` has written it. From
  ``table_offset`` on it has planes of ``table_plane`` values: the scales, the offsets and, for fp32 x, the
  means. For 16-bit x the offsets include the means (constant ``FOLD``). A plane has a value for each channel
  of each sample, or of each frame if ``FRAMEWISE``;
- ``modulation``: (N, t, h, w, 2 C), only with a GroupNorm. The first C channels multiply the norm's result.
  The last C channels are then added. If t, h or w is smaller than the size of x, several positions of x share
  a position of the modulation;
- ``cache``: (N, cached, height, width, C), the frames before x;
- ``kept``: (N, keep, height, width, C), to which the kernel writes the last frames without borders.

With programmatic dependent launch (``PDL``, from sm_90 on) the kernel starts while the previous kernel still
runs. Before it accesses memory, it waits for the end of the previous kernel.

Numerics: all arithmetic is fp32, and the result is rounded once. Norms are computed as in the kernels of
``channel_norm`` and ``group_norm``. Offsets that can be 2^31 or more are int64; numbers of rows are int32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sdfastgn.kernels.channel_norm.kernels import divisor, per_channel
from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.layer_norm.kernels import tile_column, tile_row


@triton.jit
def _places(row, front, height, width, pad_h, pad_w, BORDER: tl.constexpr, MODE: tl.constexpr):
    """Computes the position in the upsampled x for each row of a padded sample.

    A row has the channels of one position. ``row``: indices of rows in the padded sample. Returns (t, at, h,
    w, is_centre) for each row. t, h and w are frame, line and column, and 0, 0, 0 is the first position of x.
    In the frames before x, t is negative. at is h * width + w. is_centre is False for rows in a border. If
    ``MODE`` is not "zeros", a row in a border gets h and w of the position that it repeats or mirrors.
    """
    if BORDER:
        w = row % (width + 2 * pad_w) - pad_w
        line = row // (width + 2 * pad_w)
        h = line % (height + 2 * pad_h) - pad_h
        t = line // (height + 2 * pad_h) - front
        is_centre = (w >= 0) & (w < width) & (h >= 0) & (h < height)
        if MODE == "replicate":
            w = tl.minimum(tl.maximum(w, 0), width - 1)
            h = tl.minimum(tl.maximum(h, 0), height - 1)
        if MODE == "reflect":
            w = width - 1 - tl.abs(width - 1 - tl.abs(w))
            h = height - 1 - tl.abs(height - 1 - tl.abs(h))
        at = h * width + w
    else:
        t = row // (height * width) - front
        at = row % (height * width)
        h = at // width
        w = at % width
        is_centre = row >= 0
    return t, at, h, w, is_centre


@triton.jit
def _row_before(
    n, t, h, w, frames, height, width,
    APART: tl.constexpr, TIMES_T: tl.constexpr, TIMES_H: tl.constexpr, TIMES_W: tl.constexpr,
):  # fmt: skip
    """Computes which row upsampling copies to sample ``n``, frame ``t``, line ``h`` and column ``w``.

    A row has the channels of one position. Without a modulation, x is upsampled, and the result is the index
    of a row of x. With a modulation, only the modulation is upsampled, and the result is the index of a row
    of the modulation.

    Numbers:
        frames, height, width: sizes after upsampling.

    Constants:
        APART: True if the first frame is not repeated. All other frames are repeated ``TIMES_T`` times.
        TIMES_T, TIMES_H, TIMES_W: number of copies of each element along T, H and W.
    """
    before: tl.constexpr = TIMES_T - 1 if APART else 0
    line = n * ((frames + before) // TIMES_T) + (t + before) // TIMES_T
    return (line * (height // TIMES_H) + h // TIMES_H) * (width // TIMES_W) + w // TIMES_W


@triton.jit
def _group_norm(y, table, table_plane, in_row, FOLD: tl.constexpr):
    """Computes GroupNorm(y) = (y - mean) * scale + offset, without its activation.

    ``table`` points to the scales for ``y``. The offsets are ``table_plane`` elements later, and the means
    2 * ``table_plane`` elements later. With ``FOLD`` there are no means, because the offsets include them.
    """
    if not FOLD:
        y -= tl.load(table + 2 * table_plane, mask=in_row, other=0.0)
    scale = tl.load(table, mask=in_row, other=0.0)
    offset = tl.load(table + table_plane, mask=in_row, other=0.0)
    return y * scale + offset


@triton.jit
def _modulated(y, modulation, mask, C: tl.constexpr):
    """Computes y * factor + offset. ``modulation`` points to the factors, C elements before the offsets."""
    factor = tl.load(modulation, mask=mask, other=0.0).to(tl.float32)
    return y * factor + tl.load(modulation + C, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_windows(y_ptr, y, n, row, is_row, in_row, rows, frame_rows, C: tl.constexpr, WINDOW: tl.constexpr):
    """Stores the values ``y`` of the rows ``row`` of sample ``n`` at ``y_ptr``.

    A row has the channels of one position. Frame t of the result has the channels of ``WINDOW`` padded frames
    side by side: of the frames t, t + 1, and so on. So a row of the padded frame f is stored up to ``WINDOW``
    times: first in frame f of the result, second in frame f - 1, and so on. ``rows``: number of rows of a
    padded sample. ``frame_rows``: number of rows of a frame.
    """
    y_rows = rows - (WINDOW - 1) * frame_rows
    for k in tl.static_range(WINDOW):
        y_row = row - k * frame_rows
        is_in_y = is_row & (y_row >= 0) & (y_row < y_rows)
        at_y = (n * y_rows + y_row).to(tl.int64) * WINDOW + k
        tl.store(y_ptr + at_y * C, y, mask=is_in_y & in_row)


# Computes padded frames. A program computes a tile of rows of y. A row has the channels of one position.
@triton.jit(
    do_not_specialize=[
        "rows",
        "frames",
        "height",
        "width",
        "front",
        "back",
        "cached",
        "keep",
        "pad_h",
        "pad_w",
        "table_offset",
        "table_plane",
        "scale",
        "eps",
        "added",
    ]
)
def _frames_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, table_ptr, modulation_ptr, cache_ptr, y_ptr, kept_ptr,
    rows, frames, height, width, front, back, cached, keep, pad_h, pad_w, table_offset, table_plane,
    scale, eps, added,
    C: tl.constexpr, NORM: tl.constexpr, FRAMEWISE: tl.constexpr, FOLD: tl.constexpr,
    BORDER: tl.constexpr, MODE: tl.constexpr,
    APART: tl.constexpr, TIMES_T: tl.constexpr, TIMES_H: tl.constexpr, TIMES_W: tl.constexpr,
    WINDOW: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y, the padded frames, and kept, the last frames without borders.

    ``pad_frames/op.py`` has the formula. Frames are numbered from the first frame of x, so frames of the
    cache have negative numbers.

    Numbers:
        rows: number of rows of a padded sample: frames before x, x and frames after x, each with borders.
        frames, height, width: sizes of x after upsampling.
        front, cached, keep: number of frames before x, number of frames of the cache, number of frames of
            kept.
        pad_h, pad_w: width of the borders along H and W.

    Constants:
        NORM: "channel" for a norm of each position's channels, "group" for a GroupNorm, or "" for no norm.
        FRAMEWISE: True if the table has values for each frame, not for each sample.
        FOLD: True if the table has no means, because its offsets include them.
        BORDER: True if ``pad_h`` or ``pad_w`` is not 0.
        MODE: the values of padding. "zeros"; "replicate" for the nearest element of cache and x; or
            "reflect". "reflect" repeats the nearest frame along T, and mirrors each frame along H and W.
        TIMES_T, TIMES_H, TIMES_W: number of copies of each element of x along T, H and W. If there is a
            modulation, number of copies of each element of the modulation instead.
        APART: True if the first frame is not repeated.
        WINDOW: number of frames that lie side by side, as channels, in each frame of y.
    """
    ROWS: tl.constexpr = LANES if WIDE else LANES * WARPS
    tiles = tl.cdiv(rows, ROWS)
    n = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    r = tile_row(WIDE, LANES, WARPS)
    c = tile_column(WIDE, WARPS, STEPS, BLOCK)
    in_row = c < C
    is_row = r < rows - first
    image = height * width
    t, at, h, w, is_centre = _places(first + r, front, height, width, pad_h, pad_w, BORDER, MODE)
    unkept = frames + back - keep
    is_kept = is_row & is_centre & (t >= unkept)
    kept_row = (n * keep + t - unkept) * image + at
    is_there = is_row
    if MODE != "zeros":
        t = tl.minimum(tl.maximum(t, -cached), frames - 1)
    else:
        is_there = is_row & is_centre & (t >= -cached) & (t < frames)
    is_new = is_there & (t >= 0)
    row_before = _row_before(n, t, h, w, frames, height, width, APART, TIMES_T, TIMES_H, TIMES_W)
    x_row = row_before if modulation_ptr is None else (n * frames + t) * image + at
    if PDL:
        gdc_wait()
    y = tl.load(x_ptr + x_row.to(tl.int64) * C + c, mask=is_new & in_row, other=0.0).to(tl.float32)
    # ``own`` has the index of the channel for each element of the tile. So each thread loads shift, weight
    # and bias for exactly its elements. If they were loaded once for each channel and broadcast, the tile
    # would go through shared memory.
    own = c + r * 0
    if shift_ptr is not None:
        y += per_channel(shift_ptr, own, in_row, 0.0)
    if NORM == "channel":
        weight = per_channel(weight_ptr, own, in_row, 1.0)
        bias = per_channel(bias_ptr, own, in_row, 0.0)
        _, divided_by = divisor(y, eps, WIDE, added)
        y = activate(y * (scale / divided_by) * weight + bias, ACTIVATION, PAIRS)
    if NORM == "group":
        of = n * frames + t if FRAMEWISE else n
        is_known = is_new & in_row if FRAMEWISE else in_row
        table = table_ptr + table_offset + of.to(tl.int64) * C + own
        y = _group_norm(y, table, table_plane, is_known, FOLD)
        if modulation_ptr is not None:
            modulation = modulation_ptr + row_before.to(tl.int64) * (2 * C) + c
            y = _modulated(y, modulation, is_new & in_row, C)
        y = activate(y, ACTIVATION, PAIRS)
    y = tl.where(is_new, y, 0.0)
    if cache_ptr is not None:
        is_old = is_there & (t < 0)
        cache_row = ((n * cached + cached + t) * image + at).to(tl.int64) * C
        old = tl.load(cache_ptr + cache_row + c, mask=is_old & in_row, other=0.0).to(tl.float32)
        y = tl.where(is_old, old, y)
    y = y.to(y_ptr.dtype.element_ty)
    frame_rows = (height + 2 * pad_h) * (width + 2 * pad_w)
    _store_windows(y_ptr + c, y, n, first + r, is_row, in_row, rows, frame_rows, C, WINDOW)
    if kept_ptr is not None:
        tl.store(kept_ptr + kept_row.to(tl.int64) * C + c, y, mask=is_kept & in_row)
