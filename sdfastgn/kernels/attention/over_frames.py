"""Attention over the frames of a video: each pixel attends to the same pixel in all frames.

Formula, for each sample, head, pixel p and frame t:

    y[t, p] = sum_s softmax_s(scale * q[t, p] . k[s, p]) v[s, p],  over the frames s

With PyTorch's attention, the frames of each pixel are a separate sequence. But PyTorch's kernels are made for
many more keys than a video has frames: 14 frames fill only a ninth of a tile of 128 rows. In the kernel of
``attention/over_frames_kernels.py`` a tile has the frames of several pixels.

In memory, tokens are ordered by frame, then by pixel. So the tokens of one pixel are a constant stride apart,
and the kernel reads and writes tokens with this stride. PyTorch's attention would need copies in which the
tokens of each pixel are neighbors.

``attend_in_samples`` uses the same kernel for a batch of many short sequences. The samples of the batch take
the place of the pixels, and the tokens of a sample take the place of the frames. In memory, tokens may be
ordered by sample or by their place in the sample.

Numerics: products are accumulated in fp32, and the softmax is fp32. The softmax is rounded to the dtype of v
before the second product. y is rounded once.

The kernel is for inference only: there is no registered op and no backward. If gradients are wanted or the
kernel cannot run, ``attend_over_frames`` runs PyTorch's attention for one sample after the other, and
``attend_in_samples`` returns None.

Source: Vaswani et al., 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.attention.config import VECTOR
from sdfastgn.kernels.attention.few_keys import LEAST, fits_heads
from sdfastgn.kernels.common import dispatch, gpu, private
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache, plan_key
from sdfastgn.kernels.common.sizes import ceil_div, next_power_of_2

# Number of tokens of a tile. On Hopper, four warps multiply 64 rows of a matrix at once.
_ROWS = 64
_NUM_WARPS = 4
# Maximum number of channels that a program holds at once, and of channels of a head.
_BLOCK_D = 128
_MAX_HEAD_DIM = 512
# Minimum number of samples of ``attend_in_samples``. Fewer do not fill a GPU's multiprocessors, and PyTorch's
# kernels take little time for them.
_LEAST_SAMPLES = 64


def attend_over_frames(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor:
    """Computes attention over the frames of a video, by the kernel if it can run, else in PyTorch.

    Args:
        q, k, v: (N, heads, frames * pixels, D), any strides. Tokens are ordered by frame, then by pixel.
        frames: number of frames.

    The arguments are not checked. Returns (N, frames * pixels, heads * D), contiguous. If v of a pixel has an
    inf or NaN, results of other pixels of its tile (``_ROWS`` tokens) may be NaN, unlike in PyTorch.
    """
    if dispatch.is_plain_inference(q, (k, v)):
        try:
            y = _by_kernel(q, k, v, frames)
        except dispatch.KernelError:
            y = None
        if y is not None:
            return y
    N, H, tokens, D = q.shape

    def of_pixels(t: Tensor) -> Tensor:
        """Rearranges (N, heads, frames * pixels, D) to (N, pixels, heads, frames, D)."""
        return t.unflatten(2, (frames, -1)).permute(0, 3, 1, 2, 4)

    samples = zip(*(of_pixels(t) for t in (q, k, v)), strict=True)
    found = [private.scaled_dot_product_attention(*sample).permute(2, 0, 1, 3) for sample in samples]
    return torch.stack(found).reshape(N, tokens, H * D)


def attend_in_samples(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor | None:
    """Computes attention of the tokens of each sample to each other, for many samples with few tokens each.

    Args:
        q, k, v: (samples, heads, tokens, D), of one shape. In memory, either all tokens of a sample come
            before those of the next sample, or all first tokens of the samples come before all second ones.
        is_causal: True if a token attends to itself and to earlier tokens only.
        scale: positive. None: 1 / sqrt(D).

    Returns (samples, heads, tokens, D), or None if the kernel cannot run or would not be faster than
    PyTorch's attention. In memory, the result has the order of q, and the heads of a token lie side by side.
    """
    if not dispatch.is_plain_inference(q, (k, v)) or (pixels_first := tokens_within(q, k, v)) is None:
        return None
    B, H, L, D = q.shape
    inner = 2 if pixels_first else 0

    def one_sample(t: Tensor) -> Tensor:
        return t.as_strided((1, H, B * L, D), (VECTOR, t.stride(1), t.stride(inner), t.stride(3)))

    try:
        y = _by_kernel(one_sample(q), one_sample(k), one_sample(v), L, pixels_first, is_causal, scale)
    except dispatch.KernelError:
        return None
    if y is None:
        return None
    return y.view(B, L, H, D).transpose(1, 2) if pixels_first else y.view(L, B, H, D).permute(1, 2, 0, 3)


def tokens_within(q: Tensor, k: Tensor, v: Tensor) -> bool | None:
    """Finds the order of samples and tokens in memory, in tensors (samples, heads, tokens, D).

    Returns True if all tokens of a sample come before those of the next sample. Returns False if all first
    tokens of the samples come before all second ones. Returns None if ``attend_in_samples`` does not take
    tensors of these shapes and strides.
    """
    if q.dim() != 4 or not q.shape == k.shape == v.shape or len(q) < _LEAST_SAMPLES:
        return None
    # The kernel is faster than PyTorch's attention only if a tile has the tokens of several samples. With
    # so many tokens in a sample, two samples do not fit into a tile.
    if 2 * next_power_of_2(q.shape[2]) > _ROWS:
        return None
    for outer, inner in ((2, 0), (0, 2)):
        if all(t.stride(outer) == t.shape[inner] * t.stride(inner) for t in (q, k, v)):
            return outer == 0
    return None


# Maps shapes, strides, dtypes, device and other arguments of a call (``plan_key``) to the kernel launch for
# such calls, or to None if the kernel cannot run for them.
_launches: PlanCache[Launch | None] = PlanCache()


@dispatch.kernels_of("attend_over_frames")
def _by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frames: int,
    pixels_first: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor | None:
    """Computes ``attend_over_frames`` by the kernel. Returns None if the kernel cannot run.

    ``pixels_first``: True if tokens are ordered by pixel, then by frame. ``is_causal``: True if a frame
    attends to itself and to earlier frames only. ``scale``: None for 1 / sqrt(D).
    """
    how = frames, pixels_first, is_causal, scale
    key = plan_key((q, k, v, *how))
    launch = _launches.get(key)
    if launch is None:
        launch = _make_launch(q, k, v, *how) if key not in _launches and _fits(q, k, v, frames) else None
        _launches[key] = launch
        if launch is None:
            return None
    N, H, tokens, D = q.shape
    y = torch.empty((N, tokens, H * D), dtype=q.dtype, device=q.device)
    launch.run(q, k, v, y)
    return y


def _fits(q: Tensor, k: Tensor, v: Tensor, frames: int) -> bool:
    is_small = next_power_of_2(frames) <= _ROWS
    return q.shape == k.shape == v.shape and is_small and fits_heads(q, k, v, _MAX_HEAD_DIM, _BLOCK_D)


def _make_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    frames: int,
    pixels_first: bool,
    is_causal: bool,
    scale: float | None,
) -> Launch:
    """Make the launch with one program for each tile of pixels of each head."""
    # ``over_frames_kernels.py`` is imported only here, because it needs Triton.
    from sdfastgn.kernels.attention import over_frames_kernels

    N, H, tokens, D = q.shape
    pixels, rows = tokens // frames, next_power_of_2(frames)
    return Launch(
        over_frames_kernels._frames_attention_kernel, N * H * ceil_div(pixels, _ROWS // rows), _NUM_WARPS,
        pdl=gpu.has_programmatic_launch(q.device),
        P=pixels, T=frames, scale=math.log2(math.e) * (1 / math.sqrt(D) if scale is None else scale),
        q_n=q.stride(0) // VECTOR, k_n=k.stride(0) // VECTOR, v_n=v.stride(0) // VECTOR,
        H=H, D=D, Q_H=q.stride(1), Q_L=q.stride(2), K_H=k.stride(1), K_L=k.stride(2),
        V_H=v.stride(1), V_L=v.stride(2), VECTOR=VECTOR, ROWS=_ROWS, FRAMES=rows,
        BLOCK_D=min(_BLOCK_D, max(LEAST, next_power_of_2(D))), PIXELS_FIRST=pixels_first, CAUSAL=is_causal,
    )  # fmt: skip
