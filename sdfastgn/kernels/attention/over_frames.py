"""Attention of each pixel of a video over its frames, for tokens in the order of the frames.

Formula, for each sample n, pixel p and head, over the frames t: ``softmax(q[t] k^T scale) v``.

PyTorch's attention takes one sample of a batch after the other without copies, because the tokens of a pixel
are at equal distances in memory. All samples at once would have to be copied to the order of the pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_over_frames(q: Tensor, k: Tensor, v: Tensor, frames: int) -> Tensor:
    """Attention over frames.

    Args:
        q, k, v: (N, heads, frames * pixels, D), any strides. The tokens are in the order of the frames.
        frames: number of frames.

    Returns (N, frames * pixels, heads * D), contiguous.
    """
    N, H, tokens, D = q.shape

    def of_pixels(t: Tensor) -> Tensor:
        """(N, heads, frames * pixels, D) -> (N, pixels, heads, frames, D)"""
        return t.unflatten(2, (frames, -1)).permute(0, 3, 1, 2, 4)

    samples = zip(*(of_pixels(t) for t in (q, k, v)), strict=True)
    found = [F.scaled_dot_product_attention(*sample).permute(2, 0, 1, 3) for sample in samples]
    y = found[0] if N == 1 else torch.stack(found)
    return y.reshape(N, tokens, H * D)
