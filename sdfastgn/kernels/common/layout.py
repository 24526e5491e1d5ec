"""Memory layouts of (N, C, *spatial) tensors.

A tensor is *channels-last* if its memory order is (N, *spatial, C) without gaps. It is *channels-first* if
its memory order is (N, C, *spatial) without gaps. It is *dense* if it is channels-last or channels-first. For
example, the (N, C, L) view of (N, L, C) tokens is channels-last.

A tensor with one channel or one spatial position is both channels-last and channels-first. The kernels for
both layouts give the right result for such a tensor, and the output has exactly the strides of the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sdfastgn.kernels.common.private import in_transform

# Maximum stride between rows, in elements. With this limit, all offsets inside a tile fit into int32.
_MAX_STRIDE = 1 << 20


def is_channels_last(x: Tensor) -> bool:
    """True if ``x`` (N, C, *spatial) has the memory order (N, *spatial, C) without gaps. False for rank 2."""
    # ``is_contiguous`` with a memory format takes a twelfth of the CPU time of ``movedim`` and
    # ``is_contiguous``, which alone would give the same result. torch.vmap does not support it, so it is left
    # out in transforms.
    if x.dim() == 4 and in_transform() is None and x.is_contiguous(memory_format=torch.channels_last):
        return True
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def is_channels_first(x: Tensor) -> bool:
    """True if the memory order of ``x`` (N, C, *spatial) is (N, C, *spatial) without gaps."""
    return x.is_contiguous()


def is_dense(x: Tensor) -> bool:
    """True if ``x`` is channels-first or channels-last."""
    return is_channels_first(x) or is_channels_last(x)


def _keeps_channels_innermost(x: Tensor) -> bool:
    """True if ``dense`` copies an ``x`` with gaps in memory to channels-last, False if to channels-first."""
    return x.dim() > 2 and x.stride(1) == 1


def dense_is_channels_last(x: Tensor) -> bool:
    """True if ``dense(x)``, which is x or a copy of x without gaps, is channels-last. Makes no copy."""
    if is_dense(x):
        return is_channels_last(x)
    # A dense copy with one channel or one position is always channels-last (and channels-first).
    return x.dim() > 2 and (_keeps_channels_innermost(x) or x.shape[1] == 1 or math.prod(x.shape[2:]) == 1)


def dense(x: Tensor) -> Tensor:
    """Returns ``x`` (N, C, *spatial) if it is channels-last or channels-first without gaps, else a copy.

    The copy is channels-last if the stride of C in ``x`` is 1, else channels-first.
    """
    if is_dense(x):
        return x
    return laid_out(x, _keeps_channels_innermost(x))


def laid_out(y: Tensor, channels_last: bool) -> Tensor:
    """Returns ``y`` (N, C, *spatial) in channels-last if ``channels_last`` is True, else in channels-first.

    Returns ``y`` itself if it has this layout, else a copy. Differentiable.
    """
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else y.contiguous()


def empty_dense_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates an uninitialized tensor of ``dtype`` with the shape of ``x`` and the strides of ``dense(x)``.

    ``dense(x)`` is x, or a copy of x without gaps in memory.
    """
    if is_dense(x):
        return torch.empty_like(x, dtype=dtype)
    return empty_laid_out(x, x.shape, _keeps_channels_innermost(x), dtype)


def empty_laid_out(
    like: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Allocates an uninitialized tensor of ``shape`` (N, C, *spatial), channels-last or channels-first.

    The tensor has the device of ``like``, and the dtype of ``like`` unless ``dtype`` is given. It is not a
    view, because autograd forbids in-place changes of a view that a registered op has returned.
    """
    order = (0, *range(2, len(shape)), 1) if channels_last else range(len(shape))
    return torch.empty_permuted(shape, tuple(order), dtype=dtype or like.dtype, device=like.device)


def like_dense(y: Tensor, x: Tensor) -> Tensor:
    """Returns ``y``, which has the shape of ``x``, with the strides of ``dense(x)``.

    ``dense(x)`` is x, or a copy of x without gaps in memory. This function copies ``y`` only if the memory
    order of ``y`` is not the one of ``dense(x)``. Differentiable.
    """
    if y.stride() == x.stride() and y.is_contiguous():
        return y
    is_last = is_channels_last(x) if is_dense(x) else _keeps_channels_innermost(x)
    y = laid_out(y, is_last)
    # With one channel or one position, different strides can describe the same memory order. The result gets
    # exactly the strides of x.
    return y.as_strided(x.shape, x.stride()) if is_dense(x) and y.stride() != x.stride() else y


def writable(x: Tensor) -> Tensor:
    """Returns x, or a copy if several elements of x share memory, as after ``expand``."""
    repeats = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if repeats else x


def row_stride(x: Tensor) -> int | None:
    """Number of elements between the starts of neighboring rows of ``x`` (..., D).

    None if kernels need a copy of ``x``, because the distance is not the same for all rows, the elements of a
    row are not contiguous, rows overlap, or the distance is larger than ``_MAX_STRIDE``.
    """
    if x.is_contiguous():
        return x.shape[-1]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    # The axes are checked from the last but one to the first. The stride of an axis must be the distance
    # between rows times the number of rows in the axes that are checked before it.
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
