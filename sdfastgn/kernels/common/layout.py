"""Memory layouts of (N, C, *spatial) tensors, decided once and in one place.

A tensor is *channels-last* when its memory order is (N, *spatial, C) without gaps, and
*channels-first* when it is (N, C, *spatial) without gaps. Rank 3 is included: the (N, C, L) view
that attention blocks make of (N, L, C) tokens is channels-last too. Some shapes are both (C == 1,
or one spatial position): either kernel is right for those, and outputs keep the input's exact
strides anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements from one row to the next up to which offsets inside a tile fit into int32.
_MAX_STRIDE = 1 << 20


def is_channels_last(x: Tensor) -> bool:
    """True if ``x`` (N, C, *spatial) lies as (N, *spatial, C) without gaps; never at rank 2."""
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def is_channels_first(x: Tensor) -> bool:
    """True if (N, C, *spatial) ``x`` lies as (N, C, *spatial) without gaps."""
    return x.is_contiguous()


def is_dense(x: Tensor) -> bool:
    """True if ``x`` is channels-first or channels-last."""
    return is_channels_first(x) or is_channels_last(x)


def _keeps_channels_innermost(x: Tensor) -> bool:
    return x.dim() > 2 and x.stride(1) == 1


def dense_is_channels_last(x: Tensor) -> bool:
    """``is_channels_last(dense(x))``, without making it."""
    if is_dense(x):
        return is_channels_last(x)
    # Without gaps, one channel or one position lies both ways.
    return x.dim() > 2 and (_keeps_channels_innermost(x) or x.shape[1] == 1 or math.prod(x.shape[2:]) == 1)


def dense(x: Tensor) -> Tensor:
    """``x`` if it is without gaps, else a copy that is: channels-last if C has the smallest stride."""
    if is_dense(x):
        return x
    return laid_out(x, _keeps_channels_innermost(x))


def laid_out(y: Tensor, channels_last: bool) -> Tensor:
    """``y`` in dense memory: channels-last if ``channels_last``, else channels-first.

    Differentiable. It copies only if ``y`` does not have this layout yet.
    """
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else y.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized tensor with the shape of ``x`` and the strides of ``dense(x)``."""
    if is_dense(x):
        return torch.empty_like(x, dtype=dtype)
    return empty_laid_out(x, x.shape, _keeps_channels_innermost(x), dtype)


def empty_laid_out(
    like: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Uninitialized (N, C, *spatial) with the device and, unless given, the dtype of ``like``.

    It is no view: autograd lets nobody write to a view that an op of a library returns.
    """
    order = (0, *range(2, len(shape)), 1) if channels_last else range(len(shape))
    return torch.empty_permuted(shape, tuple(order), dtype=dtype or like.dtype, device=like.device)


def like_dense(y: Tensor, x: Tensor) -> Tensor:
    """``y`` (as ``x`` in shape) with the strides of ``dense(x)``. Differentiable; copies only if needed."""
    if y.stride() == x.stride() and y.is_contiguous():
        return y
    is_last = is_channels_last(x) if is_dense(x) else _keeps_channels_innermost(x)
    y = laid_out(y, is_last)
    # One channel or one position lies both ways, with other strides.
    return y.as_strided(x.shape, x.stride()) if is_dense(x) and y.stride() != x.stride() else y


def row_stride(x: Tensor) -> int | None:
    """Elements from each row of (..., D) to the next; None if they differ, or a row is not without gaps."""
    if x.is_contiguous():
        return x.shape[-1]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    # Outwards from the last axis, each must step by the whole of those inside it.
    found: int | None = None
    rows = 1
    for size, stride in reversed(tuple(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if found is None:
            found = stride
        if stride != found * rows:
            return None
        rows *= size
    # Far or overlapping rows, which no view of a model's tokens has, would ask for int64 offsets
    # inside a tile.
    return found if found is not None and x.shape[-1] <= found <= _MAX_STRIDE else None
