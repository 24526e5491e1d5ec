"""The Triton kernels that run before and after the convolution of ``upsample/conv.py``, and their launches.

A 3 x 3 convolution of an image that is upsampled by two is computed as four 2 x 2 convolutions of the
original image. These are called phases. Phase (a, b) computes the pixels (2h + a, 2w + b) of the result.

1. ``_phase_weights_kernel`` computes the weights of the four phases.
2. cuDNN's convolution with these weights computes t, which has the results of all phases.
3. ``_interleave_kernel`` computes y from t: pixel (i, j) of y is pixel ((i + 1) // 2, (j + 1) // 2) of phase
   (i % 2, j % 2), plus the bias. ``_interleave_statistics_kernel`` also computes the statistics of y
   (``statistics/kernels.py``).

Memory layouts of the tensors, all without gaps, fp16, bf16 or fp32:

- ``weight``: (C_out, 3, 3, C_in) or (C_out, C_in, 3, 3);
- ``out``, the weights of the phases: (4 C_out, 2, 2, C_in);
- ``t``: (N, H + 1, W + 1, 4 C_out);
- ``bias``: (C_out,) or None;
- ``y``: (N, 2H, 2W, C_out), in the dtype of t;
- ``statistics``: (2, N, P, C_out), always fp32.

Numerics: sums are fp32 and have a fixed order, and each result is rounded once. Offsets that can be 2^31 or
more are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.plan_cache import PlanCache
from sdfastgn.kernels.common.sizes import tile_constants, vector_width
from sdfastgn.kernels.common.tiles import LANE_AXIS, STEP_AXIS, multiple_of
from sdfastgn.kernels.statistics.config import statistics_config
from sdfastgn.kernels.statistics.kernels import is_even, rows_of_channels, tile_mean
from sdfastgn.kernels.upsample.config import tile_config, weights_config
from sdfastgn.kernels.upsample.nearest_kernels import tile_of_pixels


@triton.jit
def _two_phases(w0, w1, w2):
    """Computes along one axis the weights with which two 2-tap convolutions replace one 3-tap convolution.

    w0, w1 and w2 are the weights of a convolution of the upsampled x, in which pixel h of x has become the
    pixels 2h and 2h + 1. Returns 4 values: the weights of the pixels h - 1 and h of x for the result's pixel
    2h, then the weights of the pixels h and h + 1 of x for the result's pixel 2h + 1.
    """
    return w0, w1 + w2, w0 + w1, w2


@triton.jit
def _store_phases(out, plane, w0, w1, w2, mask, B: tl.constexpr, S: tl.constexpr, C):
    """Stores column ``S`` of the 2 x 2 weights of the phases (0, ``B``) and (1, ``B``).

    Phase (a, b) is the convolution that computes the rows 2h + a and the columns 2w + b of the result.
    ``w0``, ``w1``, ``w2``: what ``_row_of_weights`` has computed for column ``S`` from the first, second and
    third row of the 3 x 3 weights. ``plane``: elements between the starts of neighboring phases in ``out``.
    """
    first0, first1, second0, second1 = _two_phases(w0, w1, w2)
    tl.store(out + B * plane + S * C, first0.to(out.dtype.element_ty), mask=mask)
    tl.store(out + B * plane + (2 + S) * C, first1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + (2 + B) * plane + S * C, second0.to(out.dtype.element_ty), mask=mask)
    tl.store(out + (2 + B) * plane + (2 + S) * C, second1.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_of_weights(weight, mask, TAP):
    """Loads one row of the 3 x 3 weights, and returns the four weights that ``_two_phases`` computes from it.

    ``TAP``: elements between neighboring weights of the row.
    """
    w0 = tl.load(weight, mask=mask).to(tl.float32)
    w1 = tl.load(weight + TAP, mask=mask).to(tl.float32)
    w2 = tl.load(weight + 2 * TAP, mask=mask).to(tl.float32)
    return _two_phases(w0, w1, w2)


@triton.jit(do_not_specialize=["C_out", "C"])
def _phase_weights_kernel(
    weight_ptr, out_ptr,
    C_out, C,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, C_FACTOR: tl.constexpr, PDL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes the weights of the four 2 x 2 convolutions (phases) from the 3 x 3 weights.

    A program has ``BLOCK_O`` output channels and ``BLOCK_C`` input channels. ``C``: number of input channels.
    ``C_FACTOR``: a divisor of C that the compiler knows, so that it can load vectors. ``CHANNELS_LAST``: True
    if ``weight`` is channels-last. ``EVEN``: True if no element is masked.
    """
    C = multiple_of(C, C_FACTOR)
    TAP = C if CHANNELS_LAST else 1
    first, i, c = tile_of_pixels(C, BLOCK_O, BLOCK_C)
    mask = None
    if not EVEN:
        mask = (i < C_out - first) & (c < C)
    weight = weight_ptr + (first + i) * (9 * C) + c * (1 if CHANNELS_LAST else 9)
    out = out_ptr + (first + i) * (4 * C) + c
    plane = C_out.to(tl.int64) * (4 * C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    a0, a1, a2, a3 = _row_of_weights(weight, mask, TAP)
    b0, b1, b2, b3 = _row_of_weights(weight + 3 * TAP, mask, TAP)
    c0, c1, c2, c3 = _row_of_weights(weight + 6 * TAP, mask, TAP)
    _store_phases(out, plane, a0, b0, c0, mask, 0, 0, C)
    _store_phases(out, plane, a1, b1, c1, mask, 0, 1, C)
    _store_phases(out, plane, a2, b2, c2, mask, 1, 0, C)
    _store_phases(out, plane, a3, b3, c3, mask, 1, 1, C)


@triton.jit
def _phase_offset(n, i, j, H, W, C):
    """Returns the offset of an element in t, which has the results of the four 2 x 2 convolutions.

    The element is the first channel of pixel (i, j) of the interleaved image y, in sample n.
    """
    return ((n * (H + 1) + (i + 1) // 2) * (W + 1) + (j + 1) // 2) * (4 * C) + (i % 2 * 2 + j % 2) * C


@triton.jit(do_not_specialize=["pixels", "H", "W"])
def _interleave_kernel(
    t_ptr, bias_ptr, y_ptr,
    pixels, H, W,
    C: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Interleaves the results of the four 2 x 2 convolutions (phases) in t to the image y, and adds the bias.

    A program computes ``BLOCK_C`` channels of ``BLOCK_HW`` pixels of y.

    ``pixels``: number of pixels of y in all samples. ``H``, ``W``: numbers of rows and columns of x.
    """
    first, i, c = tile_of_pixels(C, BLOCK_HW, BLOCK_C)
    mask = None
    if not EVEN:
        mask = (i < pixels - first) & (c < C)
    # ``first``, the index of the tile's first pixel in the whole batch, may need int64. ``row`` counts
    # from the start of that pixel's image, ``column`` from the start of its row. Both fit into int32.
    first_row = first // (2 * W)
    column = (first % (2 * W)).to(tl.int32) + i
    row = (first_row % (2 * H)).to(tl.int32) + column // (2 * W)
    n = first_row // (2 * H) + row // (2 * H)
    offsets = _phase_offset(n, row % (2 * H), column % (2 * W), H, W, C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(t_ptr + offsets + c, mask=mask).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + (first + i) * C + c, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_of_y(t_ptr, y_ptr, bias, n, pixel, y_offsets, c, mask, H, W, C):
    """Computes a tile of y from t, the results of the four convolutions, and the bias, and stores the tile.

    ``pixel``: the index of each pixel of the tile within sample ``n``. Returns the stored values, which are
    rounded to the dtype of y, as fp32. Values outside of ``mask`` are 0.
    """
    t = t_ptr + _phase_offset(n, pixel // (2 * W), pixel % (2 * W), H, W, C) + c
    y = (tl.load(t, mask=mask).to(tl.float32) + bias).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_offsets, y, mask=mask)
    y = y.to(tl.float32)
    return y if mask is None else tl.where(mask, y, 0.0)


@triton.jit
def _deviations(y, mean, mask):
    """Returns y - mean where ``mask`` is True, else 0. A ``mask`` of None is True everywhere."""
    d = y - mean
    return d if mask is None else tl.where(mask, d, 0.0)


@triton.jit(do_not_specialize=["C", "HW", "rows", "chunks", "plane", "H", "W"])
def _interleave_statistics_kernel(
    t_ptr, bias_ptr, y_ptr, statistics_ptr,
    C, HW, rows, chunks, plane, H, W,
    EVEN: tl.constexpr, LOOP: tl.constexpr, C_FACTOR: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y from t, the results of the four convolutions, and the bias. Also computes statistics of y.

    The statistics are the mean and the sum of squared deviations (M2) of each channel in each chunk of
    pixels. Each warp has one block of channels in one chunk.

    Numbers:
        HW: number of pixels of y in a sample.
        H, W: numbers of rows and columns of x.
        rows: number of pixels of a chunk.
        chunks: number of chunks of a sample.
        plane: elements of each half of ``statistics``: the means, then the sums of squared deviations (M2).

    Constants:
        EVEN: True if no element of a tile is masked.
        LOOP: True if a chunk has more than one tile.
        C_FACTOR: a divisor of C. It tells the compiler how loads are aligned.
    """
    C = multiple_of(C, C_FACTOR)
    TILE: tl.constexpr = LANES * STEPS
    n, chunk, c, position, first = rows_of_channels(HW, rows, chunks, C, LANES, WARPS, STEPS, BLOCK)
    y_offsets = first * C + (position * C + c)
    count = tl.maximum(tl.minimum(rows, HW - chunk * rows), 0)
    pixel = chunk * rows + position
    bias = 0.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    mask = None
    if not EVEN:
        mask = (position < count) & (c < C)
    y = _tile_of_y(t_ptr, y_ptr, bias, n, pixel, y_offsets, c, mask, H, W, C)
    total = tl.sum(tl.sum(y, STEP_AXIS, keep_dims=True), LANE_AXIS, keep_dims=True)
    mean = tile_mean(total, count, TILE, EVEN)
    d = _deviations(y, mean, mask)
    s1 = tl.sum(d, STEP_AXIS, keep_dims=True)
    s2 = tl.sum(d * d, STEP_AXIS, keep_dims=True)
    if LOOP:
        for start in range(TILE, rows, TILE):
            if not EVEN:
                mask = (start + position < count) & (c < C)
            y = _tile_of_y(t_ptr, y_ptr, bias, n, pixel + start, y_offsets + start * C, c, mask, H, W, C)
            d = _deviations(y, mean, mask)
            s1 += tl.sum(d, STEP_AXIS, keep_dims=True)
            s2 += tl.sum(d * d, STEP_AXIS, keep_dims=True)
    m2 = tl.sum(s2, LANE_AXIS, keep_dims=True)
    # ``mean`` is the rounded mean of the chunk's first tile. ``s1`` sums the deviations of the whole chunk
    # from ``mean``. So the mean of the chunk is mean + s1 / count.
    total = tl.maximum(count, 1).to(tl.float32)
    delta = tl.sum(s1, LANE_AXIS, keep_dims=True) / total
    out = statistics_ptr + (n * chunks + chunk) * C + c
    mask = (chunk < chunks) & (c < C)
    tl.store(out, mean + delta, mask=mask)
    tl.store(out + plane, tl.maximum(m2 - delta * delta * total, 0.0), mask=mask)


# --- launchers ------------------------------------------------------------------------------------

# Cache of the launches of all kernels of this file. The key has a call's shape, dtype, device and options.
_launches: PlanCache[Launch] = PlanCache()


def launch_phase_weights(weight: Tensor, phases: Tensor) -> None:
    """Computes ``phases``, the 2 x 2 weights of the four convolutions, from the 3 x 3 weights ``weight``.

    ``phases`` is (4 C_out, C_in, 2, 2), channels-last. ``weight`` is (C_out, C_in, 3, 3), without gaps in
    memory.
    """
    channels_last = is_channels_last(weight)
    key = (weight.shape, channels_last, weight.dtype, weight.device)
    found = _launches.get(key)
    if found is None:
        C_out, C = weight.shape[:2]
        config = weights_config(C_out, C)
        pdl = gpu.has_programmatic_launch(weight.device)
        found = _launches[key] = Launch(
            _phase_weights_kernel, config.programs, config.num_warps, pdl=pdl,
            C_out=C_out, C=C, CHANNELS_LAST=channels_last, EVEN=config.even,
            C_FACTOR=vector_width(weight.itemsize, C), BLOCK_O=config.block_rows, BLOCK_C=config.block_c,
        )  # fmt: skip
    found.run(weight, phases)


def statistics_chunks(y: Tensor) -> int:
    """The number of chunks P of the statistics (2, N, P, C_out) that ``launch_interleave`` computes.

    ``y``: the convolution's result, (N, C_out, 2H, 2W).
    """
    N, C, H, W = map(int, y.shape)
    return statistics_config(N, C, H * W, True, gpu.num_sms(y.device), kind="write").chunks


def launch_interleave(t: Tensor, bias: Tensor | None, y: Tensor, statistics: Tensor | None = None) -> None:
    """Computes ``y`` from ``t``, the results of the four 2 x 2 convolutions.

    y is (N, C_out, 2H, 2W), t is (N, 4 C_out, H + 1, W + 1), and both are channels-last. ``statistics``, fp32
    (2, N, P, C_out), gets the statistics of y, unless it is None.
    """
    key = (y.shape, y.dtype, y.device, None if bias is None else bias.dtype, statistics is None)
    found = _launches.get(key)
    if found is None:
        found = _interleave(y) if statistics is None else _interleave_with_statistics(y)
        _launches[key] = found
    if statistics is None:
        found.run(t, bias, y)
    else:
        found.run(t, bias, y, statistics)


def _interleave(y: Tensor) -> Launch:
    """Makes the launch of ``_interleave_kernel``: one program for each tile of pixels and channels of y."""
    N, C, H, W = y.shape
    config = tile_config(N * H * W, C, gpu.num_sms(y.device))
    pdl = gpu.has_programmatic_launch(y.device)
    return Launch(
        _interleave_kernel, config.programs, config.num_warps, pdl=pdl,
        pixels=N * H * W, H=H // 2, W=W // 2, C=C,
        EVEN=config.even, BLOCK_HW=config.block_rows, BLOCK_C=config.block_c,
    )  # fmt: skip


def _interleave_with_statistics(y: Tensor) -> Launch:
    """Makes the launch of ``_interleave_statistics_kernel``.

    The launch has one warp for each combination of a chunk of pixels and a block of channels of y.
    """
    N, C, H, W = y.shape
    config = statistics_config(N, C, H * W, True, gpu.num_sms(y.device), kind="write")
    pdl = gpu.has_programmatic_launch(y.device)
    return Launch(
        _interleave_statistics_kernel, config.programs(N, C, True), config.num_warps, pdl=pdl,
        C=C, HW=H * W, rows=config.rows, chunks=config.chunks, plane=N * config.chunks * C,
        H=H // 2, W=W // 2, EVEN=is_even(config, C, H * W, True), LOOP=config.rows > config.tile_rows,
        C_FACTOR=vector_width(y.itemsize, C), **tile_constants(config),
    )  # fmt: skip
