"""Steps that move or convert elements: views, casts, copies, concatenations and writes into parts of tensors.

A view copies only if the strides of its argument leave no other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.layout import is_channels_last, writable

aten = torch.ops.aten


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns x in another shape, as a view if possible.

    If x must be copied and the result is an image or video, the copy is channels-last where possible.
    """
    try:
        return x.view(shape)
    except RuntimeError:
        pass
    return _channels_last_reshape(x, shape) if len(shape) in (4, 5) else x.reshape(shape)


def _channels_last_reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Computes ``x.reshape(shape)``. Channels-last if axes 0 and 1 of the result join whole axes of x."""
    first, samples = 0, 1
    while samples < shape[0]:
        samples, first = samples * x.shape[first], first + 1
    end, channels = first, 1
    while end < x.dim() and channels < shape[1]:
        channels, end = channels * x.shape[end], end + 1
    if (samples, channels) != tuple(shape[:2]) or end == first:
        return x.reshape(shape)
    last = x.permute(*range(first), *range(end, x.dim()), *range(first, end))
    return last.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def permute(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.permute(dims)


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(shape)


def cut(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Returns a view of ``length`` elements of axis ``dim``, beginning at ``start``."""
    return x.narrow(dim, start, length)


def copy(x: Tensor) -> Tensor:
    return x.clone()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def write_slice_(x: Tensor, part: Tensor, *where: Any) -> Tensor:
    """Writes ``part`` into a slice of x. ``where``: dim, start, end and step, as for ``aten.slice``."""
    x = writable(x)
    aten.slice.Tensor(x, *where).copy_(part)
    return x


def write_select_(x: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    """Writes ``part`` into ``x.select(dim, index)``."""
    x = writable(x)
    x.select(dim, index).copy_(part)
    return x


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates ``parts``. The result is channels-last if a part is, unless ``dim`` is 0."""
    rank = parts[0].dim()
    if rank > 3 and dim and any(map(is_channels_last, parts)):
        last = rank - 1 if dim == 1 else dim - 1
        return aten.cat.default([part.movedim(1, -1) for part in parts], last).movedim(-1, 1)
    return aten.cat.default(parts, dim)
