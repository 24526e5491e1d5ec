"""Copies tensors from main memory to a GPU, through a small buffer of pinned memory.

Over PCIe a GPU reads only pinned memory. To copy other memory, CUDA first moves it into a pinned buffer of
its own, piece by piece, with one CPU thread. Here all of PyTorch's CPU threads copy each piece into the
buffer, while the GPU reads earlier pieces. With 16 threads that was 1.4 to 2.4 times as fast.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# The buffer has _SLOTS slots of _SLOT_BYTES each. Larger or more slots were not faster.
_SLOTS = 4
_SLOT_BYTES = 4 * 2**20


class StagedCopy:
    """Copies tensors from main memory to ``device``, a GPU. Call it for each tensor.

    One thread makes the object and all calls, with the same current stream. The GPU copies on this stream.
    When the object is freed, PyTorch keeps the pinned memory for the next ``StagedCopy``.

    Raises RuntimeError if there is no pinned memory for the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        buffer = torch.empty((_SLOTS, _SLOT_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
        # Each slot with an event, which is done when the GPU has read the slot.
        self._slots = itertools.cycle([(slot, torch.cuda.Event()) for slot in buffer])

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` on the GPU, with the same dtype, shape and strides.

        ``tensor`` must have no gaps in memory and no elements that share memory. It may be changed as soon as
        this function returns. The GPU may still be copying then.
        """
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        pieces = zip(_bytes_of(tensor).split(_SLOT_BYTES), _bytes_of(copy).split(_SLOT_BYTES), strict=True)
        for source, target in pieces:
            slot, is_read = next(self._slots)
            is_read.synchronize()
            staged = slot[: source.numel()]
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            is_read.record(self._stream)
        return copy


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of ``tensor``, as uint8 (bytes,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
