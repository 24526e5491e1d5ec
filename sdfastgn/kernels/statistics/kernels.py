"""Triton kernels of per-channel statistics, and their launchers. The ops are in ``statistics/op.py``.

Statistics of x (N, C, HW) are a mean and a sum of squared deviations (M2) of each channel over each
of P chunks of ``ceil(HW / P)`` positions: fp32 (2, N, P, C), which ``merge`` in
``group_norm/kernels.py`` brings together per group. One kernel reads a tensor, or adds two, or
concatenates two, and takes the statistics of what it writes on the way.

Pointers: ``x``, ``residual``, ``tail`` as above, the latter two or None; ``bias`` (C,) or None;
``y``: where the sum or concatenation goes, or None; ``statistics``, or None where not wanted.

Numerics: fp32. Deviations are from the mean of the chunk's first tile, never raw squares; sums run
in a fixed order without atomics.

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
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _masked(x, mask):
    return x if mask is None else tl.where(mask, x, 0.0)


@triton.jit
def _tile(
    x_ptr, residual_ptr, bias_ptr, tail_ptr, y_ptr,
    bias, scale, x_offsets, tail_offsets, y_offsets, c, HEAD, mask,
):  # fmt: skip
    """One tile in fp32: of x, of (x + residual + bias) * scale, or of cat(x, tail); stored at y,
    and rounded as it is stored.
    """
    if tail_ptr is not None:
        x = tl.load(x_ptr + x_offsets, mask=mask & (c < HEAD), other=0.0).to(tl.float32)
        x += tl.load(tail_ptr + tail_offsets, mask=mask & (c >= HEAD), other=0.0).to(tl.float32)
    else:
        x = _load(x_ptr + x_offsets, mask).to(tl.float32)
    if residual_ptr is not None:
        x += _load(residual_ptr + x_offsets, mask).to(tl.float32)
    if (residual_ptr is not None) or (bias_ptr is not None):
        x = _masked((x + bias) * scale, mask)  # the bias is there where x is not
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
    """Channels-last: (sample, chunk, channel, position in the chunk, the chunk's first row) of this
    program's tile. Rows are those of all samples, in int64; channel and position are int32.
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
    """Channels-first: the same, but for the offset of the chunk's first element instead of its row."""
    columns = tl.cdiv(C, WARPS)
    n = (tl.program_id(0) // columns // chunks).to(tl.int64)
    chunk = tl.program_id(0) // columns % chunks + tl.zeros((1, 1, 1, 1), tl.int32)
    c = tl.program_id(0) % columns * WARPS + along_warps(WARPS)
    position = along_steps(STEPS) * BLOCK + along_block(BLOCK)
    return n, chunk, c, position, (n * C + c) * HW + chunk.to(tl.int64) * rows


@triton.jit
def _offsets(position, c, C, HEAD, CHANNELS_LAST: tl.constexpr):
    """From a chunk's begin to a position and channel of it: in x, in the tail and in y."""
    if CHANNELS_LAST:
        x, tail, y = position * HEAD + c, position * (C - HEAD) + (c - HEAD), position * C + c
    else:
        x, tail, y = position, position, position
    return x, tail, y


@triton.jit
def tile_mean(total, count, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Mean of a chunk's first tile, of ``TILE`` values or all ``count`` of the chunk, from their sum.

    16-bit values that are all equal have themselves for a mean: fp32 holds their sum exactly,
    and the quotient is exact too. A whole tile is a power of 2. Else the remainder corrects the
    quotient, which Triton's own division has wrong by two units in the last place; in a whole
    tile that would cost registers, and 5 % of the time of large tensors.
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
    """Sums over the steps of x - mean and of its squares."""
    d = _masked(x - mean, mask)
    return tl.sum(d, STEP_AXIS, keep_dims=True), tl.sum(d * d, STEP_AXIS, keep_dims=True)


@triton.jit
def _corrected(mean, m2, s1, count):
    """Mean and M2 of ``count`` values, from M2 around what was taken for their mean and the sum of
    deviations from it.
    """
    total = tl.maximum(count, 1).to(tl.float32)
    delta = s1 / total
    return mean + delta, tl.maximum(m2 - delta * delta * total, 0.0)


# One program: channels-last a block of channels in one chunk for each warp, channels-first one channel
# for each warp in one chunk.
@triton.jit(do_not_specialize=["C", "HEAD", "biased", "HW", "rows", "chunks", "plane", "scale"])
def _statistics_kernel(
    x_ptr, residual_ptr, bias_ptr, tail_ptr, y_ptr, statistics_ptr,
    C, HEAD, biased, HW, rows, chunks, plane, scale,
    KNOWN_C: tl.constexpr, KNOWN_HEAD: tl.constexpr, CHANNELS_LAST: tl.constexpr, EXACT: tl.constexpr,
    EVEN: tl.constexpr, LOOP: tl.constexpr, C_FACTOR: tl.constexpr, HW_FACTOR: tl.constexpr,
    PDL: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x (N, HW, C) or (N, C, HW) -> y, and mean and M2 of each channel and chunk, where wanted.

    ``C``: channels of x and tail together, ``HEAD``: of x; ``KNOWN_*``: where the compiler is to
    know them, else 0. ``biased``: 1 if there is a bias in ``bias``, else 0.
    """
    TILE: tl.constexpr = (LANES if CHANNELS_LAST else BLOCK) * STEPS
    REDUCED: tl.constexpr = LANE_AXIS if CHANNELS_LAST else 3
    C = KNOWN_C if KNOWN_C else multiple_of(C, C_FACTOR)
    # One offset for x and y where they have the same channels.
    HEAD = C if tail_ptr is None else KNOWN_HEAD if KNOWN_C else multiple_of(HEAD, C_FACTOR)
    x_step = HEAD if CHANNELS_LAST else 1
    y_step = C if CHANNELS_LAST else 1
    if CHANNELS_LAST:
        n, chunk, c, position, first = rows_of_channels(HW, rows, chunks, C, LANES, WARPS, STEPS, BLOCK)
    else:
        HW, rows = multiple_of(HW, HW_FACTOR), multiple_of(rows, HW_FACTOR)
        n, chunk, c, position, first = positions_of_channels(HW, rows, chunks, C, WARPS, STEPS, BLOCK)
    # Pointers move to the chunk in int64, offsets in it are int32: fewer registers.
    x_offsets, tail_offsets, y_offsets = _offsets(position, c, C, HEAD, CHANNELS_LAST)
    x_ptr += first * x_step
    if residual_ptr is not None:
        residual_ptr += first * x_step
    if tail_ptr is not None:
        tail_ptr += first * (C - HEAD)
    if y_ptr is not None:
        y_ptr += first * y_step
    count = tl.maximum(tl.minimum(rows, HW - chunk.to(tl.int64) * rows), 0).to(tl.int32)
    bias = 0.0
    if PDL:
        # What follows may start once every program is past the wait: x is then complete.
        gdc_wait()
        gdc_launch_dependents()
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=c < C * biased, other=0.0).to(tl.float32)
    mask = None
    if not EVEN:
        mask = (position < count) & (c < C)
    x = _tile(
        x_ptr, residual_ptr, bias_ptr, tail_ptr, y_ptr, bias, scale, x_offsets, tail_offsets, y_offsets,
        c, HEAD, mask,
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
                x_ptr, residual_ptr, bias_ptr, tail_ptr, y_ptr, bias, scale, x_offsets + start * x_step,
                tail_offsets + start * (C - HEAD), y_offsets + start * y_step, c, HEAD, mask,
            )  # fmt: skip
            if statistics_ptr is not None:
                d1, d2 = _deviations(x, mean, mask)
                s1, s2 = s1 + d1, s2 + d2
    if statistics_ptr is not None:
        m2 = tl.sum(s2, REDUCED, keep_dims=True)
        if LOOP or EXACT:
            # ``mean`` is that of the first tile, rounded. The sum of deviations from it corrects it.
            mean, m2 = _corrected(mean, m2, tl.sum(s1, REDUCED, keep_dims=True), count)
        # Partials stay apart by warp: sums over warps cost more than merging more chunks later.
        out = statistics_ptr + (n * chunks + chunk) * C + c
        tl.store(out, mean, mask=(chunk < chunks) & (c < C))
        tl.store(out + plane, m2, mask=(chunk < chunks) & (c < C))


class StatisticsLaunch:
    """The launch of ``_statistics_kernel`` for one combination of sizes, dtypes and device.

    Args:
        x: dense (N, C, *spatial) tensor, the first of two if ``tail`` channels follow.
        channels_last: its layout; must be true with ``tail``.
        tail: channels of the second tensor of a concatenation.
        producer: the kernel writes the tensor whose statistics it takes.
        scale: factor of a sum.
        has_bias: a bias is added too.
        config: how to reduce x; by default the usual way for its sizes.

    ``shape`` is that of the statistics, ``chunks`` their P.
    """

    __slots__ = ("_launch", "chunks", "shape")

    def __init__(
        self,
        x: Tensor,
        channels_last: bool,
        *,
        tail: int = 0,
        producer: bool = False,
        scale: float = 1.0,
        has_bias: bool = False,
        config: StatisticsConfig | None = None,
    ) -> None:
        N, head = x.shape[:2]
        HW, C = math.prod(x.shape[2:]), head + tail
        config = config or statistics_config(
            N, C, HW, channels_last, gpu.num_sms(x.device), kind="write" if producer else "read"
        )
        self.chunks = config.chunks
        self.shape = (2, N, config.chunks, C)
        pdl = gpu.has_programmatic_launch(x.device)
        loops = config.rows > config.tile_rows
        even = not tail and is_even(config, C, HW, channels_last)
        # Sums, and loops over tiles, would hold offsets in registers: a program less a multiprocessor.
        # Sums of one tile that is masked share a kernel instead.
        known = loops or (producer and even)
        self._launch = Launch(
            _statistics_kernel, config.programs(N, C, channels_last), config.num_warps, pdl=pdl,
            C=C, HEAD=head, HW=HW, rows=config.rows, chunks=config.chunks, plane=N * config.chunks * C,
            biased=int(has_bias), scale=scale,
            KNOWN_C=C if known else 0, KNOWN_HEAD=head if known else 0,
            CHANNELS_LAST=channels_last, EVEN=even, LOOP=loops, EXACT=x.dtype == torch.float32,
            C_FACTOR=vector_width(x.itemsize, C, head), HW_FACTOR=row_factor(channels_last, HW, config.rows),
            **tile_constants(config),
        )  # fmt: skip

    def on_stream(self, stream: int, x: Tensor, statistics: Tensor) -> None:
        """Statistics of ``x`` alone, on ``current_stream`` of the current device, which must be that of x."""
        self._launch(stream, x, None, None, None, None, statistics)

    def __call__(
        self,
        x: Tensor,
        statistics: Tensor | None,
        *,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        tail: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        if residual is not None and bias is None:
            bias = x  # any memory: no channel of it is read, and sums with and without one share a kernel
        self._launch.run(x, residual, bias, tail, y, statistics)


def is_even(config: StatisticsConfig, C: int, HW: int, channels_last: bool) -> bool:
    """True if no element of any tile is masked."""
    whole = HW % config.rows == 0 and config.rows % config.tile_rows == 0
    if channels_last:
        return whole and C % config.block == 0 and config.chunks % config.num_warps == 0
    return whole and C % config.num_warps == 0
