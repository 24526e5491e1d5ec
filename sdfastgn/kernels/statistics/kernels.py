"""The Triton kernel of per-channel statistics, and its launch. The ops are in ``statistics/op.py``.

The positions of x (N, C, HW) are divided into P chunks of ``ceil(HW / P)``. The statistics are the mean and
the sum of squared deviations (M2) of each sample, chunk and channel: fp32 (2, N, P, C). ``merge_kernel`` in
``group_norm/kernels.py`` combines these to the statistics of groups.

The kernel reads a tensor, or adds two tensors, or concatenates two tensors along the channels. It stores the
sum, or the concatenation, with or without an activation. It computes the statistics of the rounded values
that it stores.

Pointers:

- ``x``: (N, HW, C) or (N, C, HW), fp16, bf16 or fp32; in a concatenation the first tensor, (N, HW, HEAD);
- ``residual``: the second tensor of a sum, with the shape, layout and dtype of x, or None;
- ``bias``: (C,) or (N, C), added to the sum, or None;
- ``factors``: (2, N) fp32, two factors for each sample, or None. With factors the sum is
  ``factors[0] * residual + factors[1] * (x + bias)``;
- ``tail``: the second tensor of a concatenation, (N, HW, C - HEAD) in the dtype of x, or None;
- ``y``: the sum or the concatenation that the kernel stores, in the layout and dtype of x, or None;
- ``statistics``: (2, N, P, C) fp32, or None if they are not wanted.

Numerics: all arithmetic is fp32. The kernel squares differences from the mean of the chunk's first tile,
never the values themselves. Sums have a fixed order and no atomics.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activation_kernels import activate
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import row_factor, tile_constants, vector_width
from sdfastgn.kernels.common.tiles import (
    LANE_AXIS,
    STEP_AXIS,
    along_block,
    along_lanes,
    along_steps,
    along_warps,
    multiple_of,
)
from sdfastgn.kernels.statistics.config import StatisticsConfig, statistics_config


@triton.jit
def _load(pointers, mask):
    """Loads a tile, with 0 for masked elements. If ``mask`` is None, nothing is masked."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _masked(x, mask):
    """Returns ``x`` with 0 for masked elements. If ``mask`` is None, nothing is masked."""
    return x if mask is None else tl.where(mask, x, 0.0)


@triton.jit
def _bias(bias_ptr, at, mask):
    """Loads the bias of a tile's channels in fp32. Returns 0 for masked channels, or if there is no bias."""
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _factors(factors_ptr, n, N, scale):
    """Returns the factor of the residual and the factor of x + bias in sample ``n``.

    Without ``factors`` it returns 1, which is not used, and ``scale``, the factor of the whole sum.
    """
    kept = 1.0
    if factors_ptr is not None:
        kept = tl.load(factors_ptr + n)
        scale = tl.load(factors_ptr + N + n)
    return kept, scale


@triton.jit
def _tile(
    x_ptr, residual_ptr, bias_ptr, factors_ptr, tail_ptr, y_ptr,
    bias, scale, kept, x_offsets, tail_offsets, y_offsets, c, HEAD, mask, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of x, of activation((x + residual + bias) * scale), or of cat(x, tail), in fp32.

    If there are ``factors``, the sum is residual * kept + (x + bias) * scale, where ``kept`` and ``scale``
    are the two factors of this sample. If ``y_ptr`` is not None, the tile is stored in y, and the rounded
    values are returned.
    """
    if tail_ptr is not None:
        x = tl.load(x_ptr + x_offsets, mask=mask & (c < HEAD), other=0.0).to(tl.float32)
        x += tl.load(tail_ptr + tail_offsets, mask=mask & (c >= HEAD), other=0.0).to(tl.float32)
    else:
        x = _load(x_ptr + x_offsets, mask).to(tl.float32)
    if factors_ptr is not None:
        residual = _load(residual_ptr + x_offsets, mask).to(tl.float32)
        x = _masked(tl.fma(residual, kept, (x + bias) * scale), mask)
    elif residual_ptr is not None:
        x += _load(residual_ptr + x_offsets, mask).to(tl.float32)
    if (factors_ptr is None) and ((residual_ptr is not None) or (bias_ptr is not None)):
        x = _masked((x + bias) * scale, mask)  # masked elements, changed by the bias, become 0 again
    x = activate(x, ACTIVATION, False)  # every activation of 0 is 0, so masked elements stay 0
    if y_ptr is not None:
        y = x.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_offsets, y, mask=mask)
        x = y.to(tl.float32)
    return x


@triton.jit
def rows_of_channels(
    HW, rows, chunks, C,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes which elements of channels-last x are in the first tile of each warp of this program.

    Returns (n, chunk, c, position, first), tensors that broadcast to (lanes, warps, steps, block): the
    sample, the chunk, the channel, the position within the chunk, and the first position of the chunk. For
    the last number, the positions of all samples are numbered consecutively. n and first are int64, the
    others int32.
    """
    columns = tl.cdiv(C, BLOCK)
    programs = tl.cdiv(chunks, WARPS)
    n = (tl.program_id(0) // columns // programs).to(tl.int64)
    chunk = tl.program_id(0) // columns % programs * WARPS + along_warps(WARPS)
    c = tl.program_id(0) % columns * BLOCK + along_block(BLOCK)
    position = along_steps(STEPS) * LANES + along_lanes(LANES)
    return n, chunk, c, position, n * HW + chunk.to(tl.int64) * rows


@triton.jit
def positions_of_channels(
    HW, rows, chunks,
    C, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes which elements of channels-first x are in the first tile of each warp of this program.

    Returns (n, chunk, c, position, first), tensors that broadcast to (lanes, warps, steps, block): the
    sample, the chunk, the channel, the position within the chunk, and the offset of the chunk's first element
    of this channel. n and first are int64, the others int32.
    """
    columns = tl.cdiv(C, WARPS)
    n = (tl.program_id(0) // columns // chunks).to(tl.int64)
    chunk = tl.program_id(0) // columns % chunks + tl.zeros((1, 1, 1, 1), tl.int32)
    c = tl.program_id(0) % columns * WARPS + along_warps(WARPS)
    position = along_steps(STEPS) * BLOCK + along_block(BLOCK)
    return n, chunk, c, position, (n * C + c) * HW + chunk.to(tl.int64) * rows


@triton.jit
def _offsets(position, c, C, HEAD, CHANNELS_LAST: tl.constexpr):
    """Returns the int32 offsets of elements from the start of their chunk: in x, in the tail, and in y."""
    if CHANNELS_LAST:
        x, tail, y = position * HEAD + c, position * (C - HEAD) + (c - HEAD), position * C + c
    else:
        x, tail, y = position, position, position
    return x, tail, y


@triton.jit
def tile_mean(total, count, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Returns the mean of each channel in a chunk's first tile. ``total``: the sum of the channel's values.

    The tile has ``TILE`` positions, or ``count``, the number of positions of the chunk, if that is smaller.
    If all values are equal and have 16 bits, the mean must be exactly that value. Their sum is exact in fp32.
    The quotient is exact too:

    - if ``WHOLE``, the tile is full. The number of its positions is a power of 2, so the division is exact;
    - otherwise, a division in Triton is wrong by up to two units in the last place, so the quotient is
      corrected by the remainder. In full tiles the correction would cost registers, and large tensors would
      take 5 % longer.
    """
    if WHOLE:
        mean = total * (1 / TILE)
    else:
        in_tile = tl.maximum(tl.minimum(count, TILE), 1).to(tl.float32)
        share = 1 / in_tile
        mean = total * share
        mean = tl.fma(tl.fma(mean, -in_tile, total), share, mean)
    return mean


@triton.jit
def _deviations(x, mean, mask):
    """Returns the sums of x - mean and of (x - mean)^2 over the steps of a tile (``STEP_AXIS``)."""
    d = _masked(x - mean, mask)
    return tl.sum(d, STEP_AXIS, keep_dims=True), tl.sum(d * d, STEP_AXIS, keep_dims=True)


@triton.jit
def _corrected(mean, m2, s1, count):
    """Corrects an approximate ``mean`` of ``count`` values, and their sum of squared deviations ``m2``.

    ``s1`` is the sum of the values' differences from ``mean``, ``m2`` the sum of the squared differences.
    Returns the corrected mean, and the sum of squared deviations from the corrected mean.
    """
    total = tl.maximum(count, 1).to(tl.float32)
    delta = s1 / total
    return mean + delta, tl.maximum(m2 - delta * delta * total, 0.0)


@triton.jit(do_not_specialize=["N", "C", "HEAD", "biased", "HW", "rows", "chunks", "plane", "scale"])
def _statistics_kernel(
    x_ptr, residual_ptr, bias_ptr, factors_ptr, tail_ptr, y_ptr, statistics_ptr,
    N, C, HEAD, biased, HW, rows, chunks, plane, scale,
    CHANNELS_LAST: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr, LOOP: tl.constexpr,
    C_FACTOR: tl.constexpr, HW_FACTOR: tl.constexpr, SAMPLE_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y and the statistics of y. Each warp of a program processes one chunk of positions.

    If x is channels-last, a program has a block of ``BLOCK`` channels, and its warps have neighboring chunks.
    If x is channels-first, a program has one chunk, and each of its warps has a different channel.

    Numbers:
        N: number of samples.
        C, HEAD: channels of y and of x. They differ only in a concatenation.
        biased: 1 if ``bias_ptr`` points to a bias, 0 if it is a placeholder that is not read.
        HW, rows, chunks: positions of a sample, positions of a chunk, chunks of a sample.
        plane: elements of each half of ``statistics``.
        scale: factor by which a sum is multiplied, unless ``factors`` are given.

    Constants:
        EXACT: True for fp32 x. Mean and sum of squared deviations are then corrected for the rounding of the
            mean of the first tile (``_corrected``), even if a chunk has only one tile.
        EVEN: True if no element of a tile is masked.
        LOOP: True if a chunk has more than one tile.
        C_FACTOR: a divisor of C and HEAD. HW_FACTOR: a divisor of HW and rows. They tell the compiler how
            loads are aligned.
        SAMPLE_BIAS: True if ``bias`` is (N, C). This is a constant, because an offset that depends on the
            sample makes registers spill on Blackwell GPUs. A bias (C,) does not need that offset.
        ACTIVATION: name of the activation that is applied to a sum.
    """
    TILE: tl.constexpr = (LANES if CHANNELS_LAST else BLOCK) * STEPS
    REDUCED: tl.constexpr = LANE_AXIS if CHANNELS_LAST else 3
    C = multiple_of(C, C_FACTOR)
    # Without a second tensor, HEAD equals C. So the compiler knows that x and y have the same offsets.
    HEAD = C if tail_ptr is None else multiple_of(HEAD, C_FACTOR)
    x_step = HEAD if CHANNELS_LAST else 1
    y_step = C if CHANNELS_LAST else 1
    if CHANNELS_LAST:
        n, chunk, c, position, first = rows_of_channels(HW, rows, chunks, C, LANES, WARPS, STEPS, BLOCK)
    else:
        HW, rows = multiple_of(HW, HW_FACTOR), multiple_of(rows, HW_FACTOR)
        n, chunk, c, position, first = positions_of_channels(HW, rows, chunks, C, WARPS, STEPS, BLOCK)
    # Pointers move to the chunk's start by int64 offsets. Offsets from there are int32, to save registers.
    x_offsets, tail_offsets, y_offsets = _offsets(position, c, C, HEAD, CHANNELS_LAST)
    x_ptr += first * x_step
    if residual_ptr is not None:
        residual_ptr += first * x_step
    if tail_ptr is not None:
        tail_ptr += first * (C - HEAD)
    if y_ptr is not None:
        y_ptr += first * y_step
    count = tl.maximum(tl.minimum(rows, HW - chunk.to(tl.int64) * rows), 0).to(tl.int32)
    if PDL:
        # This kernel waits for x before it lets the next kernel start. So the next kernel may read x at once.
        gdc_wait()
        gdc_launch_dependents()
    bias = _bias(bias_ptr, n * C + c if SAMPLE_BIAS else c, c < C * biased)
    kept, scale = _factors(factors_ptr, n, N, scale)
    mask = None
    if not EVEN:
        mask = (position < count) & (c < C)
    x = _tile(
        x_ptr, residual_ptr, bias_ptr, factors_ptr, tail_ptr, y_ptr, bias, scale, kept, x_offsets,
        tail_offsets, y_offsets, c, HEAD, mask, ACTIVATION,
    )  # fmt: skip
    if statistics_ptr is not None:
        total = tl.sum(tl.sum(x, STEP_AXIS, keep_dims=True), REDUCED, keep_dims=True)
        mean = tile_mean(total, count, TILE, EVEN)
        s1, s2 = _deviations(x, mean, mask)
    if LOOP:
        for start in range(TILE, rows, TILE):
            if not EVEN:
                mask = (start + position < count) & (c < C)
            x = _tile(
                x_ptr, residual_ptr, bias_ptr, factors_ptr, tail_ptr, y_ptr, bias, scale, kept,
                x_offsets + start * x_step, tail_offsets + start * (C - HEAD), y_offsets + start * y_step,
                c, HEAD, mask, ACTIVATION,
            )  # fmt: skip
            if statistics_ptr is not None:
                d1, d2 = _deviations(x, mean, mask)
                s1, s2 = s1 + d1, s2 + d2
    if statistics_ptr is not None:
        m2 = tl.sum(s2, REDUCED, keep_dims=True)
        if LOOP or EXACT:
            # Until here ``mean`` is the rounded mean of the chunk's first tile only.
            mean, m2 = _corrected(mean, m2, tl.sum(s1, REDUCED, keep_dims=True), count)
        # Each warp stores its own results. Summing over warps would cost more than merging more chunks does.
        out = statistics_ptr + (n * chunks + chunk) * C + c
        tl.store(out, mean, mask=(chunk < chunks) & (c < C))
        tl.store(out + plane, m2, mask=(chunk < chunks) & (c < C))


class StatisticsLaunch:
    """The launch of ``_statistics_kernel`` for one combination of shapes, strides, dtypes and device.

    Args:
        x: dense (N, C, *spatial) tensor, or the first tensor of a concatenation.
        channels_last: True if x is channels-last. It must be True if there is a ``tail``.
        tail: channels of the second tensor of a concatenation, or 0.
        producer: True if the kernel also writes a sum or a concatenation, ``y``.
        scale: factor by which a sum is multiplied.
        bias_dim: rank of the bias that calls pass: 1 for (C,), 2 for (N, C), 0 for no bias.
        activation: name of the activation that is applied to a sum.
        config: how x is divided into chunks. By default ``statistics_config`` chooses this.

    Attributes:
        shape, strides: shape and strides of the statistics, which are (2, N, P, C) and contiguous.
        chunks: P, the number of chunks of positions of a sample.
    """

    __slots__ = ("_launch", "chunks", "shape", "strides")

    def __init__(
        self,
        x: Tensor,
        channels_last: bool,
        *,
        tail: int = 0,
        producer: bool = False,
        scale: float = 1.0,
        bias_dim: int = 0,
        activation: str = "identity",
        config: StatisticsConfig | None = None,
    ) -> None:
        N, head = x.shape[:2]
        HW, C = math.prod(x.shape[2:]), head + tail
        config = config or statistics_config(
            N, C, HW, channels_last, gpu.num_sms(x.device), kind="write" if producer else "read"
        )
        self.chunks = config.chunks
        self.shape = (2, N, config.chunks, C)
        self.strides = (N * config.chunks * C, config.chunks * C, C, 1)
        pdl = gpu.has_programmatic_launch(x.device)
        loops = config.rows > config.tile_rows
        even = not tail and is_even(config, C, HW, channels_last)
        self._launch = Launch(
            _statistics_kernel, config.programs(N, C, channels_last), config.num_warps, pdl=pdl,
            N=N, C=C, HEAD=head, HW=HW, rows=config.rows, chunks=config.chunks, plane=N * config.chunks * C,
            biased=int(bias_dim > 0), SAMPLE_BIAS=bias_dim == 2, scale=scale, ACTIVATION=activation,
            CHANNELS_LAST=channels_last, EVEN=even, LOOP=loops, EXACT=x.dtype == torch.float32,
            C_FACTOR=vector_width(x.itemsize, C, head), HW_FACTOR=row_factor(channels_last, HW, config.rows),
            **tile_constants(config),
        )  # fmt: skip

    def on_stream(self, stream: int, x: Tensor, statistics: Tensor) -> None:
        """Computes the statistics of ``x`` on ``stream``, and stores them in ``statistics``.

        The device of x and of the stream must be the current device.
        """
        self._launch(stream, x, None, None, None, None, None, statistics)

    def __call__(
        self,
        x: Tensor,
        statistics: Tensor | None,
        *,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        tail: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        """Fills ``y`` and ``statistics``, unless they are None, on the current stream of the device of x.

        y is the sum of x, residual and bias, or the concatenation of x and tail. The module's docstring
        explains the operands. They must have no gaps in memory.
        """
        if residual is not None and bias is None:
            # If a sum has no bias, the kernel gets x as a placeholder for the bias. It does not read the
            # placeholder, because its argument ``biased`` is 0. So sums with and without a bias share one
            # compiled kernel.
            bias = x
        self._launch.run(x, residual, bias, factors, tail, y, statistics)


def is_even(config: StatisticsConfig, C: int, HW: int, channels_last: bool) -> bool:
    """True if tiles divide x (N, C, HW) evenly, so that no element is masked."""
    whole = HW % config.rows == 0 and config.rows % config.tile_rows == 0
    if channels_last:
        return whole and C % config.block == 0 and config.chunks % config.num_warps == 0
    return whole and C % config.num_warps == 0
