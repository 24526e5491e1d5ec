"""Attention of each pixel of a video over its frames, for tokens in the order of the frames.

Formula, for each sample, pixel p and head, over the frames s:

    y[t, p] = softmax_s(scale * q[t, p] . k[s, p]) v[s, p]

PyTorch's kernels take the frames of a pixel as a sequence of its own, and are made for many more keys than a
video has frames: 14 rows fill a ninth of a tile of 128. Here a tile has the frames of several pixels. They
are read where they are, at equal distances in memory, and y is written in the same order. So nothing is
copied to the order of the pixels and back.

Numerics: as in ``attention/few_keys.py``.

This is for inference only: there is no op and no backward. Where the kernel cannot run, PyTorch's attention
takes one sample after the other.

Source: Vaswani et al., 2017.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.attention.few_keys import runs_on
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Rows of a tile: what four warps multiply at once on Hopper.
_ROWS = 64
# Smallest side of a tile in a matrix product.
_LEAST = 16
# Maximum number of channels of a head.
_MAX_HEAD_DIM = 256
# Number of 16-bit elements of a 16-byte load.
_VECTOR = 8
_NUM_WARPS = 4


def attend_over_frames(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor:
    """Attention over frames.

    Args:
        q, k, v: (N, heads, frames * pixels, D), any strides. The tokens are in the order of the frames.
        frames: number of frames.

    The arguments are not checked. Returns (N, frames * pixels, heads * D), contiguous.
    """
    if dispatch.is_plain_inference(q, (k, v)):
        y = _by_kernel(q, k, v, frames)
        if y is not None:
            return y
    N, H, tokens, D = q.shape

    def of_pixels(t: Tensor) -> Tensor:
        """(N, heads, frames * pixels, D) -> (N, pixels, heads, frames, D)"""
        return t.unflatten(2, (frames, -1)).permute(0, 3, 1, 2, 4)

    samples = zip(*(of_pixels(t) for t in (q, k, v)), strict=True)
    found = [F.scaled_dot_product_attention(*sample).permute(2, 0, 1, 3) for sample in samples]
    return torch.stack(found).reshape(N, tokens, H * D)


# Kind of call -> its launch, or None if the kernel cannot run.
_launches: PlanCache[Launch | None] = PlanCache()


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor | None:
    """``attend_over_frames`` by the kernel; None if it cannot run."""
    key = plan_key((q, k, v, frames))
    launch = _launches.get(key)
    if launch is None:
        launch = _make_launch(q, k, v, frames) if key not in _launches and _fits(q, k, v, frames) else None
        _launches[key] = launch
        if launch is None:
            return None
    N, H, tokens, D = q.shape
    y = torch.empty((N, tokens, H * D), dtype=q.dtype, device=q.device)
    try:
        launch.run(q, k, v, y)
    except dispatch.KernelError:
        return None
    return y


def _fits(q: Tensor, k: Tensor, v: Tensor, frames: int) -> bool:
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and q.shape == k.shape == v.shape
        and q.numel() > 0
        and next_power_of_2(frames) <= _ROWS
        and q.shape[3] <= _MAX_HEAD_DIM
        and q.shape[3] % _VECTOR == 0
        and all(t.stride(3) == 1 and not any(s % _VECTOR for s in t.stride()[:3]) for t in (q, k, v))
        and (not q.is_cuda or runs_on(torch.cuda.get_device_capability(q.device), q.shape[3]))
    )


def _make_launch(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Launch:
    """Make the launch with one program for each tile of pixels of each head."""
    from sdfastgn.kernels.attention import over_frames_kernels  # needs Triton

    N, H, tokens, D = q.shape
    pixels, rows = tokens // frames, next_power_of_2(frames)
    return Launch(
        over_frames_kernels._frames_attention_kernel, N * H * ceil_div(pixels, _ROWS // rows), _NUM_WARPS,
        pdl=gpu.has_programmatic_launch(q.device),
        P=pixels, T=frames, scale=math.log2(math.e) / math.sqrt(D),
        q_n=q.stride(0) // _VECTOR, k_n=k.stride(0) // _VECTOR, v_n=v.stride(0) // _VECTOR,
        H=H, D=D, Q_H=q.stride(1), Q_L=q.stride(2), K_H=k.stride(1), K_L=k.stride(2),
        V_H=v.stride(1), V_L=v.stride(2), VECTOR=_VECTOR, ROWS=_ROWS, FRAMES=rows,
        BLOCK_D=max(_LEAST, next_power_of_2(D)),
    )  # fmt: skip
