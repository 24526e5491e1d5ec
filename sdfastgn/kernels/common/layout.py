"""Memory layouts of (N, C, *spatial) tensors.

A tensor is *channels-last* if its memory order is (N, *spatial, C) without gaps, and *channels-first* if
it is (N, C, *spatial) without gaps. It is *dense* if it is channels-last or channels-first. Rank 3 is
included: the (N, C, L) view of (N, L, C) tokens is channels-last.

A tensor with one channel or one spatial position is both channels-last and channels-first. Kernels for either
layout then give the right result, and outputs have exactly the input's strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Largest stride between rows for which all offsets inside a tile are sure to fit into int32.
_MAX_STRIDE = 1 << 20


def is_channels_last(x: Tensor) -> bool:
    """True if ``x`` (N, C, *spatial) lies as (N, *spatial, C) without gaps. False for rank 2."""
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def is_channels_first(x: Tensor) -> bool:
    """True if ``x`` (N, C, *spatial) lies as (N, C, *spatial) without gaps."""
    return x.is_contiguous()


def is_dense(x: Tensor) -> bool:
    """True if ``x`` is channels-first or channels-last."""
    return is_channels_first(x) or is_channels_last(x)


def _keeps_channels_innermost(x: Tensor) -> bool:
    """True if ``dense`` copies ``x``, which is not dense, to channels-last."""
    return x.dim() > 2 and x.stride(1) == 1


def dense_is_channels_last(x: Tensor) -> bool:
    """``is_channels_last(dense(x))``, without a copy."""
    if is_dense(x):
        return is_channels_last(x)
    # A dense copy with one channel or one position is always channels-last (and channels-first).
    return x.dim() > 2 and (_keeps_channels_innermost(x) or x.shape[1] == 1 or math.prod(x.shape[2:]) == 1)


def dense(x: Tensor) -> Tensor:
    """``x`` if it is dense, else a dense copy: channels-last if the stride of C is 1."""
    if is_dense(x):
        return x
    return laid_out(x, _keeps_channels_innermost(x))


def laid_out(y: Tensor, channels_last: bool) -> Tensor:
    """``y`` (N, C, *spatial), channels-last if ``channels_last``, else channels-first.

    Differentiable. ``y`` itself if it has this layout, else a copy.
    """
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else y.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized tensor of ``dtype`` with the shape of ``x`` and the strides of ``dense(x)``."""
    if is_dense(x):
        return torch.empty_like(x, dtype=dtype)
    return empty_laid_out(x, x.shape, _keeps_channels_innermost(x), dtype)


def empty_laid_out(
    like: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Uninitialized tensor of ``shape`` (N, C, *spatial): channels-last or channels-first.

    It has the device of ``like``, and its dtype unless ``dtype`` is given. It is not a view, because
    autograd forbids in-place changes of a view that a registered op returned.
    """
    order = (0, *range(2, len(shape)), 1) if channels_last else range(len(shape))
    return torch.empty_permuted(shape, tuple(order), dtype=dtype or like.dtype, device=like.device)


def like_dense(y: Tensor, x: Tensor) -> Tensor:
    """Give ``y`` the strides of ``dense(x)``. ``y`` has the shape of ``x``.

    Differentiable. It copies only if the memory order of ``y`` differs.
    """
    if y.stride() == x.stride() and y.is_contiguous():
        return y
    is_last = is_channels_last(x) if is_dense(x) else _keeps_channels_innermost(x)
    y = laid_out(y, is_last)
    # With one channel or one position, different strides can describe the same memory order.
    return y.as_strided(x.shape, x.stride()) if is_dense(x) and y.stride() != x.stride() else y


def row_stride(x: Tensor) -> int | None:
    """Elements between the starts of neighboring rows of ``x`` (..., D).

    None if kernels need a copy of ``x``: distances between rows differ, elements of a row are not contiguous,
    or rows overlap or lie farther apart than ``_MAX_STRIDE``.
    """
    if x.is_contiguous():
        return x.shape[-1]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    # From the last but one axis outwards: each axis must step over all rows of the axes inside it.
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
    return found if found is not None and x.shape[-1] <= found <= _MAX_STRIDE else None
