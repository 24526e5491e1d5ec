"""Channels that become positions, and positions that become channels, as resampling of autoencoders does it.

A cell is t x h x w neighboring positions. All tensors are (N, C, T, H, W); an image is one frame. Nothing is
copied but what the caller asks for: views of channels-last tensors have these axes in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Cell", "cells_of", "means_of", "pack_sum", "packed", "unpack_sum"]

# (t, h, w)
Cell = tuple[int, int, int]


def cells_of(y: Tensor, cell: Cell) -> Tensor:
    """y (N, C, T t, H h, W w) -> (N, T, t, H, h, W, w, C), a view."""
    cells = y.movedim(1, -1)
    for axis in (3, 2, 1):
        cells = cells.unflatten(axis, (-1, cell[axis - 1]))
    return cells


def packed(y: Tensor, cell: Cell) -> Tensor:
    """y (N, C, T t, H h, W w) -> (N, T, H, W, t, h, w, C), a view."""
    return cells_of(y, cell).permute(0, 1, 3, 5, 2, 4, 6, 7)


def means_of(x: Tensor, C: int) -> Tensor:
    """(N, C, T, H, W), channels-last: each is the mean of as many consecutive channels of x."""
    return x.movedim(1, -1).unflatten(-1, (C, -1)).mean(-1).movedim(-1, 1)


def unpack_sum(y: Tensor, h: Tensor, x: Tensor, cell: Cell) -> None:
    """Write h + x to y (N, C, T t, H h, W w), both with channels moved to the positions of a cell.

    Args:
        h: (N, t h w C', T, H, W), of which the first C of each C' channels are read.
        x: the same with fewer channels, each of which is added to as many consecutive ones of y.
        cell: (t, h, w).
    """

    def moved(u: Tensor) -> Tensor:
        return u.movedim(1, -1).unflatten(-1, (*cell, -1)).permute(0, 1, 4, 2, 5, 3, 6, 7)

    C, read = y.shape[1], moved(x)
    alike = (-1, C // read.shape[-1])
    cells = cells_of(y, cell).unflatten(-1, alike)
    torch.add(moved(h)[..., :C].unflatten(-1, alike), read[..., None], out=cells)


def pack_sum(y: Tensor, h: Tensor, x: Tensor, cell: Cell) -> None:
    """Write h + x, both (N, C, T t, H h, W w), to y (N, t h w C, T, H, W)."""
    torch.add(packed(h, cell), packed(x, cell), out=y.movedim(1, -1).unflatten(-1, (*cell, -1)))
