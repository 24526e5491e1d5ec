"""Copies tensors between main memory and a GPU, through a small buffer of pinned memory.

Over PCIe a GPU reads and writes only pinned memory. To copy other memory, CUDA goes through a pinned buffer
of its own, piece by piece, with one CPU thread. Here all of PyTorch's CPU threads copy pieces into the buffer
or out of it, while the GPU copies other pieces.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

# The buffer has _SLOTS slots of _SLOT_BYTES each. Larger or more slots were not faster.
_SLOTS = 4
_SLOT_BYTES = 4 * 2**20


class StagedCopy:
    """Copies tensors between main memory and ``device``, a GPU. Each call of a method copies one tensor.

    The GPU copies on the stream that is current when the object is made. All calls must be made by the same
    thread, with this stream as the current one. When the object is freed, PyTorch keeps the pinned memory for
    the next ``StagedCopy``.

    The tensors must have no gaps in memory and no elements that share memory. The copies have the same dtype,
    shape and strides.

    Raises RuntimeError if there is no pinned memory for the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.current_stream(device)
        buffer = torch.empty((_SLOTS, _SLOT_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
        # Pairs of a slot and an event. The event is recorded after each copy that the GPU makes, so the event
        # is done when the GPU has read or written the slot.
        self._slots = itertools.cycle([(slot, torch.cuda.Event()) for slot in buffer])

    def to_gpu(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` on the GPU.

        ``tensor`` may be changed as soon as this method returns. The GPU may still be copying then.
        """
        copy = _empty_like(tensor, self.device)
        for source, target in _pieces(tensor, copy):
            slot, is_done = next(self._slots)
            is_done.synchronize()
            staged = slot[: source.numel()]
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            is_done.record(self._stream)
        return copy

    def to_cpu(self, tensor: Tensor) -> Tensor:
        """Returns a copy in main memory of ``tensor``, which is on the GPU. The copy is complete."""
        copy = _empty_like(tensor, torch.device("cpu"))
        copying: collections.deque[tuple[Tensor, Tensor, torch.cuda.Event]] = collections.deque()

        def finish_one() -> None:
            staged, target, is_done = copying.popleft()
            is_done.synchronize()
            target.copy_(staged)

        for source, target in _pieces(tensor, copy):
            if len(copying) == _SLOTS:
                finish_one()
            slot, is_done = next(self._slots)
            staged = slot[: source.numel()]
            staged.copy_(source, non_blocking=True)
            is_done.record(self._stream)
            copying.append((staged, target, is_done))
        while copying:
            finish_one()
        return copy


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (piece of ``source``, the same piece of ``target``). A piece fits into a slot of the buffer."""
    return zip(*(_bytes_of(tensor).split(_SLOT_BYTES) for tensor in (source, target)), strict=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of ``tensor``, as uint8 (bytes,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
