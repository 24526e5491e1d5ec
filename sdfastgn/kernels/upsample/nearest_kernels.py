"""The Triton kernels of nearest-neighbor upsampling by two, and their launch, for ``upsample/nearest.py``.

Tensors are fp16, bf16 or fp32, and channels-last: x and dx (N, H, W, C), y and dy (N, 2H, 2W, C). A program
processes a tile of pixels and channels of x. The forward reads each pixel of x once, and writes its four
copies in y. The backward reads four pixels of dy for each pixel of dx, and writes their sum to dx. Loads and
stores go along the channels, so they are vectors if C is even.

The pixels of all samples are numbered consecutively. So kernels need to know W but not H: pixel i of x is in
row r = i // W, and the first of its four copies is pixel 2 * (i + r * W) of y.

Numerics: the forward copies values. The backward adds four values in fp32, in a fixed order, and rounds once.
Offsets are int64.
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
    """Computes the indices of this program's tile of a (pixels, C) tensor.

    Returns three results: the index of the tile's first pixel, int64; the indices of the tile's pixels,
    counted from the first pixel, (BLOCK_HW, 1) int32; and the indices of the channels, (1, BLOCK_C) int32.
    """
    columns = tl.cdiv(C, BLOCK_C)
    first = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_HW
    i = tl.arange(0, BLOCK_HW)[:, None]
    c = tl.program_id(0) % columns * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return first, i, c


@triton.jit
def first_of_four(first, i, W, C: tl.constexpr):
    """Returns the offset in y of the first of the four copies of pixel ``first + i`` of x.

    The other three copies begin C, 2 W C and (2 W + 1) C elements after the first.
    """
    row = (first % W).to(tl.int32) + i
    row = first // W + row // W
    return (first + i + row * W) * (2 * C)


@triton.jit(do_not_specialize=["pixels", "W"])
def _upsample_kernel(
    x_ptr, y_ptr,
    pixels, W,
    C: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes y, the upsampled x. A program copies ``BLOCK_C`` channels of ``BLOCK_HW`` pixels of x.

    ``pixels``: number of pixels of x in all samples. ``EVEN``: True if no element is masked.
    """
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


@triton.jit(do_not_specialize=["pixels", "W"])
def _upsample_grad_kernel(
    dy_ptr, dx_ptr,
    pixels, W,
    C: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes dx: each pixel is the sum of four pixels of dy.

    A program computes ``BLOCK_C`` channels of ``BLOCK_HW`` pixels of dx.

    ``pixels``: number of pixels of dx in all samples. ``EVEN``: True if no element is masked.
    """
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
    """Makes the launch of the upsampling kernel or, if ``backward``, of the kernel of its backward.

    ``small``: the tensor with the smaller images, channels-last (N, C, H, W): x in the forward, dx in the
    backward.
    """
    N, C, H, W = small.shape
    config = tile_config(N * H * W, C, gpu.num_sms(small.device))
    return Launch(
        _upsample_grad_kernel if backward else _upsample_kernel, config.programs, config.num_warps,
        pdl=gpu.has_programmatic_launch(small.device), pixels=N * H * W, W=W, C=C,
        EVEN=config.even, BLOCK_HW=config.block_rows, BLOCK_C=config.block_c,
    )  # fmt: skip
