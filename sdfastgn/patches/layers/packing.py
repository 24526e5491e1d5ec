"""Moves channels to positions and back, as the resampling of autoencoders does (pixel shuffle).

A *cell* is t x h x w neighboring positions (frames, rows, columns). For example, if a cell is 1 x 2 x 2, four
channels of one pixel are moved to a square of 2 x 2 pixels. All tensors are (N, C, T, H, W); an image
has one frame. Rearranged tensors are views, so only means and sums are written to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common.layout import empty_laid_out

# The size of a cell: (t, h, w).
Cell = tuple[int, int, int]


def cells_of(y: Tensor, cell: Cell) -> Tensor:
    """Splits each axis of positions into (cells, positions in a cell), a view.

    y (N, C, T t, H h, W w) -> (N, T, t, H, h, W, w, C).
    """
    cells = y.movedim(1, -1)
    for axis in (3, 2, 1):
        cells = cells.unflatten(axis, (-1, cell[axis - 1]))
    return cells


def packed(y: Tensor, cell: Cell) -> Tensor:
    """Moves each cell's positions beside the channels. y (N, C, T t, H h, W w) -> (N, T, H, W, t, h, w, C).

    The result is a view.
    """
    return cells_of(y, cell).permute(0, 1, 3, 5, 2, 4, 6, 7)


def means_of(x: Tensor, C: int) -> Tensor:
    """Means of groups of k consecutive channels: x (N, k C, T, H, W) -> (N, C, T, H, W), channels-last."""
    return x.movedim(1, -1).unflatten(-1, (C, -1)).mean(-1).movedim(-1, 1)


def unpack_sum(y: Tensor, h: Tensor, x: Tensor, cell: Cell) -> None:
    """Moves the channels of h and x to the positions of cells, and writes the sum to y.

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


def upsampled(h: Tensor, x: Tensor, times: int, alone: int) -> Tensor:
    """h + x with channels moved to positions: (N, C', T, H, W) -> (N, C, T', 2 H, 2 W), channels-last.

    Args:
        h: (N, 4 * times * C, T, H, W).
        x: (N, C_x, T, H, W), with fewer channels than h. After the move to positions, each channel of x is
            added to several consecutive channels of h.
        times: number of frames that one frame becomes.
        alone: number of first frames that stay one frame each. For each of their positions h has times * C
            channels, and only the first C are used.
    """
    N, C_h, T, H, W = h.shape
    y = empty_laid_out(h, (N, C_h // (4 * times), alone + (T - alone) * times, 2 * H, 2 * W), True)
    if alone:
        unpack_sum(y[:, :, :alone], h[:, :, :alone], x[:, :, :alone], (1, 2, 2))
    if alone < T:
        unpack_sum(y[:, :, alone:], h[:, :, alone:], x[:, :, alone:], (times, 2, 2))
    return y


def downsampled(h: Tensor, x: Tensor, times: int, alone: int) -> Tensor:
    """h + means of x with positions moved to channels: (N, C, T, H, W) -> (N, C', T', H / 2, W / 2).

    The result is channels-last.

    Args:
        h: (N, C_h, T, H, W). C' is 4 * times * C_h.
        x: (N, C, T, H, W), where C_h divides C. Each mean is over C / C_h consecutive channels.
        times: number of frames that become one frame.
        alone: number of first frames that stay one frame each. For these, the channels of h are written
            twice, and each mean is over half as many channels of x.
    """
    (N, C_h, T, H, W) = h.shape
    y = empty_laid_out(h, (N, 4 * times * C_h, alone + (T - alone) // times, H // 2, W // 2), True)
    if alone:
        # Here ``times`` is 2. A cell of one frame has half as many positions as a cell of two frames, and so
        # would fill only half of the channels of y. As in stock, each channel of h is written twice. x gives
        # twice as many means, because each mean is over half as many channels.
        first, image = y[:, :, :alone].movedim(1, -1), (1, 2, 2)
        first.unflatten(-1, (2, 2, 2, -1)).copy_(packed(h[:, :, :alone], image))
        first.unflatten(-1, (1, 2, 2, -1)).add_(packed(means_of(x[:, :, :alone], 2 * C_h), image))
    if alone < T:
        means = means_of(x[:, :, alone:], C_h)
        pack_sum(y[:, :, alone:], h[:, :, alone:], means, (times, 2, 2))
    return y
