"""Moves channels to positions and back, as the resampling of autoencoders does (pixel shuffle).

A cell is t x h x w neighboring positions (frames, rows, columns). All tensors are (N, C, T, H, W); an image
has one frame. Rearranged tensors are views, so only means and sums are written to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Cell", "cells_of", "means_of", "pack_sum", "packed", "unpack_sum"]

# The size of a cell: (t, h, w).
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
    """Means of groups of k consecutive channels: x (N, k C, T, H, W) -> (N, C, T, H, W), channels-last."""
    return x.movedim(1, -1).unflatten(-1, (C, -1)).mean(-1).movedim(-1, 1)


def unpack_sum(y: Tensor, h: Tensor, x: Tensor, cell: Cell) -> None:
    """Moves the channels of h and x to the positions of a cell, and writes the sum to y.

    Args:
        y: (N, C, T t, H h, W w).
        h: (N, t h w C', T, H, W) with C' >= C. For each position the first C of the C' channels are read.
        x: (N, t h w C'', T, H, W), where C'' divides C. Each channel of x is added to C / C'' consecutive
            channels of y.
        cell: (t, h, w).
    """

    def moved(u: Tensor) -> Tensor:
        """(N, t h w C', T, H, W) -> (N, T, t, H, h, W, w, C'), a view."""
        return u.movedim(1, -1).unflatten(-1, (*cell, -1)).permute(0, 1, 4, 2, 5, 3, 6, 7)

    C, read = y.shape[1], moved(x)
    alike = (-1, C // read.shape[-1])
    cells = cells_of(y, cell).unflatten(-1, alike)
    torch.add(moved(h)[..., :C].unflatten(-1, alike), read[..., None], out=cells)


def pack_sum(y: Tensor, h: Tensor, x: Tensor, cell: Cell) -> None:
    """Writes h + x to y, with the positions of each cell moved to channels.

    Args:
        y: (N, t h w C, T, H, W).
        h, x: (N, C, T t, H h, W w).
        cell: (t, h, w).
    """
    torch.add(packed(h, cell), packed(x, cell), out=y.movedim(1, -1).unflatten(-1, (*cell, -1)))
