"""Triton kernels of nearest-neighbour upsampling by two, and their launchers. The ops are in
``upsample/nearest.py``.

Channels-last, x (N, H, W, C) and y (N, 2H, 2W, C): a program has some pixels of x and some of their
channels, and the four pixels of y that belong to each. So each element of x is read once and each
of y written once, in vectors; the backward is the same the other way round. Rows of all samples are
one sequence, of which only W has to be known: pixel i of x lies in row r = i // W, and its first
pixel of y is 2 * (i + r * W).

Numerics: the forward copies. The backward adds four values in fp32, in a fixed order, and rounds
once. Offsets are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.upsample.config import tile_config


@triton.jit
def tile_of_pixels(C, BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr):
    """(first pixel, (BLOCK_HW, 1) pixels after it, (1, BLOCK_C) channels) of this program's tile."""
    columns = tl.cdiv(C, BLOCK_C)
    first = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_HW
    i = tl.arange(0, BLOCK_HW)[:, None]
    c = tl.program_id(0) % columns * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return first, i, c


@triton.jit
def first_of_four(first, i, W, C: tl.constexpr):
    """Offset of the first pixel of y that belongs to each pixel of x; the others are C, 2 W C and
    (2 W + 1) C further.
    """
    row = (first % W).to(tl.int32) + i
    row = first // W + row // W
    return (first + i + row * W) * (2 * C)


# One program: ``BLOCK_C`` channels of ``BLOCK_HW`` pixels of x, and the four pixels of y of each.
@triton.jit(do_not_specialize=["pixels", "W"])
def _upsample_kernel(
    x_ptr, y_ptr,
    pixels, W,
    C: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    first, i, c = tile_of_pixels(C, BLOCK_HW, BLOCK_C)
    mask = None
    if not EVEN:
        mask = (i < pixels - first) & (c < C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + (first + i) * C + c, mask=mask)
    y = y_ptr + first_of_four(first, i, W, C) + c
    below = W.to(tl.int64) * (2 * C)
    tl.store(y, x, mask=mask)
    tl.store(y + C, x, mask=mask)
    tl.store(y + below, x, mask=mask)
    tl.store(y + below + C, x, mask=mask)


# One program: ``BLOCK_C`` channels of ``BLOCK_HW`` pixels of dx, and the four pixels of dy of each.
@triton.jit(do_not_specialize=["pixels", "W"])
def _upsample_grad_kernel(
    dy_ptr, dx_ptr,
    pixels, W,
    C: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    first, i, c = tile_of_pixels(C, BLOCK_HW, BLOCK_C)
    mask = None
    if not EVEN:
        mask = (i < pixels - first) & (c < C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dy = dy_ptr + first_of_four(first, i, W, C) + c
    below = W.to(tl.int64) * (2 * C)
    upper = tl.load(dy, mask=mask).to(tl.float32) + tl.load(dy + C, mask=mask).to(tl.float32)
    lower = tl.load(dy + below, mask=mask).to(tl.float32) + tl.load(dy + below + C, mask=mask).to(tl.float32)
    tl.store(dx_ptr + (first + i) * C + c, (upper + lower).to(dx_ptr.dtype.element_ty), mask=mask)


def upsample_launch(small: Tensor, *, backward: bool) -> Launch:
    """The launch for a channels-last tensor of the lower resolution."""
    N, C, H, W = small.shape
    config = tile_config(N * H * W, C, gpu.num_sms(small.device))
    return Launch(
        _upsample_grad_kernel if backward else _upsample_kernel, config.programs, config.num_warps,
        pdl=gpu.has_programmatic_launch(small.device), pixels=N * H * W, W=W, C=C,
        EVEN=config.even, BLOCK_HW=config.block_rows, BLOCK_C=config.block_c,
    )  # fmt: skip
