"""Memory layouts of (N, C, *spatial) tensors, decided once and in one place.

A tensor is *channels-last* when its memory order is (N, *spatial, C) without gaps, and *channels-first* when it is (N, C, *spatial)
without gaps. Rank 3 is included: the (N, C, L) view that attention blocks make of (N, L, C) tokens is channels-last too. Some shapes
are both (C == 1, or one spatial position): either kernel is right for those, and outputs keep the input's exact strides anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense", "is_channels_first", "is_channels_last"]


def is_channels_last(x: Tensor) -> bool:
    """True if (N, C, *spatial) ``x`` lies as (N, *spatial, C) without gaps; always false for rank 2, where there is no space."""
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def is_channels_first(x: Tensor) -> bool:
    """True if (N, C, *spatial) ``x`` lies as (N, C, *spatial) without gaps."""
    return x.is_contiguous()


def dense(x: Tensor) -> Tensor:
    """``x`` itself if it is channels-last or channels-first, else a copy that is: channels-last if C has the smallest stride."""
    if is_channels_first(x) or is_channels_last(x):
        return x
    if x.dim() > 2 and x.stride(1) == 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor with the shape of ``x`` and the strides of ``dense(x)``."""
    if is_channels_first(x) or is_channels_last(x):
        return torch.empty_like(x, dtype=dtype)
    if x.dim() > 2 and x.stride(1) == 1:
        shape = x.movedim(1, -1).shape
        return torch.empty(shape, dtype=dtype, device=x.device).movedim(-1, 1)
    return torch.empty(x.shape, dtype=dtype, device=x.device)
