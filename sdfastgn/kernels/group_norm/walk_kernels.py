"""The Triton kernel of GroupNorm's backward for x and dy that are larger than L2.

One program computes the gradients of one group. It walks from the group's first position to the last, and
computes sums. It keeps the last positions in registers. Then it walks back. It reads x and dy of the other
positions again, and writes dx. If the groups that run at the same time fit into L2, most of the second read
comes from L2. Three launches (``SplitConfig``) would read everything twice from memory.

dy has the layout of x. ``group_norm/backward_kernels.py`` explains pointers, formulas and numerics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sdfastgn.kernels.common.tiles import multiple_of
from sdfastgn.kernels.group_norm.backward_kernels import STRIDES, grad_tile, store_totals
from sdfastgn.kernels.group_norm.channels import channel_affine


@triton.jit
def _walk_there(
    x_ptr, dy_ptr,
    offsets, row, walked, in_range, centre, rstd, scale, offset,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, SHIFT_GRAD: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums dz, dz * xhat and, if ``SHIFT_GRAD``, xhat over the first ``walked`` positions of a group.

    dz is the gradient of the activation's argument, xhat the normalized x. Returns three (BLOCK_HW, BLOCK_C)
    tiles, which the caller has to sum over their rows.
    """
    tiles = tl.cdiv(walked, BLOCK_HW)
    sum_dz = tl.zeros((BLOCK_HW, BLOCK_C), tl.float32)
    sum_dz_xhat, sum_xhat = sum_dz, sum_dz
    for i in range(tiles):
        # The last tile ends at position ``walked``. So the first tile may begin before position 0. Positions
        # before 0 are masked.
        start = walked - (tiles - i) * BLOCK_HW
        at = offsets + start * STEP
        mask = (start + row >= 0) & in_range
        dz, xhat = grad_tile(x_ptr, dy_ptr, at, at, mask, centre, rstd, scale, offset, ACTIVATION, PAIRS, "")
        sum_dz += dz
        sum_dz_xhat += dz * xhat
        if SHIFT_GRAD:
            sum_xhat += xhat
    return sum_dz, sum_dz_xhat, sum_xhat


@triton.jit
def _walk_back(
    x_ptr, dy_ptr, dx_ptr,
    offsets, row, walked, in_range, centre, rstd, scale, offset, mean_g, mean_g_xhat,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HW: tl.constexpr,
):  # fmt: skip
    """Stores dx of the first ``walked`` positions of a group, beginning with the last tile."""
    for i in range(tl.cdiv(walked, BLOCK_HW)):
        start = walked - (i + 1) * BLOCK_HW
        at = offsets + start * STEP
        mask = (start + row >= 0) & in_range
        # x and dy are read here for the second and last time. "evict_first" lets L2 keep other data instead.
        dz, xhat = grad_tile(
            x_ptr, dy_ptr, at, at, mask, centre, rstd, scale, offset, ACTIVATION, PAIRS, "evict_first"
        )
        dx = rstd * (dz * scale - mean_g - xhat * mean_g_xhat)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=[*STRIDES, "HW", "plane"])
def walk_grad_kernel(
    x_ptr, dy_ptr, dx_ptr, totals_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, shift_ptr, ada_scale_ptr,
    ada_shift_ptr,
    shift_stride, ada_scale_stride, ada_shift_stride, HW, plane,
    C: tl.constexpr, CG: tl.constexpr,
    ACTIVATION: tl.constexpr, SHIFT_GRAD: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    PDL: tl.constexpr, PAIRS: tl.constexpr, HW_FACTOR: tl.constexpr,
    BLOCK_HW: tl.constexpr, KEPT_HW: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program computes dx of one group, which has ``CG`` channels, of one sample.

    It also stores sums in ``totals``, unless this is None. ``totals`` has planes of ``plane`` fp32 values,
    each with one value for each sample and channel: the sum of dz (the gradient of the activation's
    argument), the sum of dz * xhat (xhat: the normalized x), and the gradient of the shift. From these sums
    another kernel computes the gradients of the operands other than x.

    Constants:
        SHIFT_GRAD: True if the gradient of the shift is wanted.
        KEPT_HW: positions that stay in registers, the last ones of the group; at most HW.
        HW_FACTOR: a divisor of HW. It tells the compiler how loads are aligned.
    """
    STEP: tl.constexpr = C if CHANNELS_LAST else 1
    group = tl.program_id(0)
    n = (group // (C // CG)).to(tl.int64)
    j = tl.arange(0, BLOCK_C)[None, :]
    c = group % (C // CG) * CG + j
    in_range = j < CG
    HW = multiple_of(HW, HW_FACTOR)
    # Offsets within the sample are int32, which takes half the registers of int64.
    x_ptr += n * HW * C
    dy_ptr += n * HW * C
    dx_ptr += n * HW * C
    row = tl.arange(0, BLOCK_HW)[:, None]
    offsets = row * C + c if CHANNELS_LAST else c * HW + row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # ``centre`` is the mean of x + shift, minus shift, so that the normalized x is (x - centre) * rstd. Mean
    # and rstd are loaded as scalars, which take fewer registers than the blocks that ``_centre`` of
    # ``backward_kernels.py`` loads.
    centre = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    if shift_ptr is not None:
        centre -= tl.load(shift_ptr + n * shift_stride + c, mask=in_range, other=0.0).to(tl.float32)
    scale, offset = channel_affine(
        n, c, in_range, weight_ptr, bias_ptr, ada_scale_ptr, ada_shift_ptr,
        ada_scale_stride, ada_shift_stride)  # fmt: skip
    walked = HW - KEPT_HW
    sum_dz, sum_dz_xhat, sum_xhat = _walk_there(
        x_ptr, dy_ptr, offsets, row, walked, in_range, centre, rstd, scale, offset, STEP, ACTIVATION,
        SHIFT_GRAD, PAIRS, BLOCK_HW, BLOCK_C,
    )  # fmt: skip
    kept_row = walked + tl.arange(0, KEPT_HW)[:, None]
    kept_at = kept_row * C + c if CHANNELS_LAST else c * HW + kept_row
    mask = (kept_row < HW) & in_range
    kept_dz, kept_xhat = grad_tile(
        x_ptr, dy_ptr, kept_at, kept_at, mask, centre, rstd, scale, offset,
        ACTIVATION, PAIRS, "evict_first")  # fmt: skip
    sum_dz = tl.sum(sum_dz, 0, keep_dims=True) + tl.sum(kept_dz, 0, keep_dims=True)
    sum_dz_xhat = tl.sum(sum_dz_xhat, 0, keep_dims=True) + tl.sum(kept_dz * kept_xhat, 0, keep_dims=True)
    positions = HW.to(tl.float32)
    mean_g = tl.sum(scale * sum_dz, 1, keep_dims=True) / (positions * CG)
    mean_g_xhat = tl.sum(scale * sum_dz_xhat, 1, keep_dims=True) / (positions * CG)
    if totals_ptr is not None:
        if SHIFT_GRAD:
            sum_xhat = tl.sum(sum_xhat, 0, keep_dims=True) + tl.sum(kept_xhat, 0, keep_dims=True)
        store_totals(
            totals_ptr + n * C + c, plane, in_range, sum_dz, sum_dz_xhat, sum_xhat, positions, rstd, scale,
            mean_g, mean_g_xhat, SHIFT_GRAD,
        )  # fmt: skip
    dx = (rstd * (kept_dz * scale - mean_g - kept_xhat * mean_g_xhat)).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + kept_at, dx, mask=mask, eviction_policy="evict_first")
    _walk_back(
        x_ptr, dy_ptr, dx_ptr, offsets, row, walked, in_range, centre, rstd, scale, offset, mean_g,
        mean_g_xhat, STEP, ACTIVATION, PAIRS, BLOCK_HW,
    )  # fmt: skip
