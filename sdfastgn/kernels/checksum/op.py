"""Checksums, which show whether the contents of tensors have changed: ``checksums`` and ``Checksums``.

A checksum depends on each bit of a tensor, and on the bit's place in the tensor. If the tensor changes, its
checksum stays the same with a probability of 2^-64. ``checksums`` reads all tensors wholly, in one launch. A
launch of ``Checksums`` may read only a part of each tensor.

On a GPU the kernel of ``checksum/kernels.py`` runs. Elsewhere, and if it cannot be compiled,
``reference_checksums`` computes the same numbers in plain PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import without_rehearsal
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div

# Number of words, of 8 bytes each, that a program of the kernel sums.
BLOCK = 2048
_WORD = 8
# Addresses of tensors must be multiples of this number of bytes, because the kernel reads 16 bytes at once.
_ALIGNMENT = 16
_WARPS = 8


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Computes a checksum of each tensor. Returns them as int64, (number of tensors,).

    Args:
        tensors: at least one, all on the same GPU, of any dtype and layout.

    Grad: none.
    """
    return Checksums(tensors, [1] * len(tensors)).launch(tensors, 0)


class Checksums:
    """Computes checksums of the same tensors several times.

    The constructor reads addresses and shapes of all tensors, but keeps no reference to them. Each call gets
    the same tensors again. Their values may have changed, but they must not have moved in memory.

    Args:
        tensors: as for ``checksums``, but also on a CPU.
        periods: for each tensor the number of calls that together read it wholly. A tensor is divided into
            blocks of ``BLOCK`` words. A call reads the blocks of one *window*. Window w has the blocks i with
            i % period == w % period. A period above the number of blocks is replaced by this number, so each
            call reads at least one block of each tensor.

    Attributes:
        windows: number of windows. All of them together read each tensor wholly.
    """

    def __init__(self, tensors: Sequence[Tensor], periods: Sequence[int]) -> None:
        self._device = tensors[0].device
        # Memory for copies of the tensors that the kernel cannot read, because their sizes are not multiples
        # of 8 bytes, their addresses are not multiples of 16, or their memory has gaps.
        self._copies = {at: _padded(t) for at, t in enumerate(tensors) if not _is_readable(t)}
        read = self._readable(tensors)
        words = [tensor.numel() * tensor.element_size() // _WORD for tensor in read]
        blocks = [ceil_div(count, BLOCK) for count in words]
        self._periods = [max(1, min(pair)) for pair in zip(periods, blocks, strict=True)]
        self.windows = max(self._periods)
        rows = list(zip(map(Tensor.data_ptr, read), words, self._periods, strict=True))
        counts = torch.tensor(list(map(ceil_div, blocks, self._periods)), device="cpu")
        of = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), counts)
        number = torch.arange(len(of), device="cpu") - (counts.cumsum(0) - counts)[of]
        self._tensors = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self._device)
        self._blocks = torch.stack((of, number), 1).to(torch.int32).to(self._device)
        # A tensor with a row for each window: the window's index twice, in 16 bytes. ``Launch`` is fast only
        # for addresses that are multiples of 16.
        self._windows = torch.arange(self.windows, device="cpu").view(-1, 1).repeat(1, 2).to(self._device)

    def of_window(self, tensors: Sequence[Tensor], window: int) -> Tensor:
        """Computes the checksums of the blocks in ``window``, as int64, (number of tensors,).

        A window of a tensor with the period p has every p-th block of this tensor.
        """
        return (self.launch if dispatch.runs_in_triton(tensors[0]) else self.plain)(tensors, window)

    def of_all_windows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Computes the checksums of the blocks in each window, as int64, (windows, number of tensors).

        A window of a tensor with the period p has every p-th block of this tensor.
        """
        if not dispatch.runs_in_triton(tensors[0]):
            return self._plain(tensors, range(self.windows))
        return torch.stack([self.launch(tensors, window) for window in range(self.windows)])

    def launch(self, tensors: Sequence[Tensor], window: int) -> Tensor:
        """Computes the checksums of the blocks in ``window``, as int64, (number of tensors,).

        The kernel computes them, or plain PyTorch if the kernel cannot be compiled. A window of a tensor with
        the period p has every p-th block of this tensor.
        """
        self._copy(tensors)
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=self._device)
        try:
            if len(self._blocks):
                _sum_blocks(self._blocks, self._tensors, self._windows[window], sums)
        except dispatch.KernelError:
            return self.plain(tensors, window)
        return sums

    def plain(self, tensors: Sequence[Tensor], window: int) -> Tensor:
        """Computes the checksums of the blocks in ``window`` in plain PyTorch, int64 (number of tensors,).

        A window of a tensor with the period p has every p-th block of this tensor.
        """
        return self._plain(tensors, range(window, window + 1))[0]

    def _plain(self, tensors: Sequence[Tensor], windows: range) -> Tensor:
        self._copy(tensors)
        return reference_checksums(self._readable(tensors), self._periods, windows)

    def _readable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._copies.get(at, tensor) for at, tensor in enumerate(tensors)]

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for at, copy in self._copies.items():
            flat = tensors[at].detach().reshape(-1)
            copy.view(flat.dtype)[: len(flat)].copy_(flat)


def reference_checksums(tensors: Sequence[Tensor], periods: Sequence[int], windows: range) -> Tensor:
    """Computes the checksums of the blocks in each of ``windows`` in plain PyTorch, int64 (windows, tensors).

    The class ``Checksums`` explains windows and periods. The size of each tensor must be a multiple of 8
    bytes. ``windows`` must have a step of 1.
    """
    device = tensors[0].device
    chosen, starts, places = [], [], []
    for number, (tensor, period) in enumerate(zip(tensors, periods, strict=True)):
        words = _words(tensor)
        size = BLOCK if period > 1 else max(1, len(words))
        for row, window in enumerate(windows[:period]):
            for start in range(window % period * size, len(words), period * size):
                chosen.append(words[start : start + size])
                starts.append(start)
                places.append(row * len(tensors) + number)
    sums = torch.zeros(len(windows) * len(tensors), dtype=torch.int64, device=device)
    if chosen:
        lengths = torch.tensor(list(map(len, chosen)), device=device)
        firsts = torch.tensor(starts, device=device) - (lengths.cumsum(0) - lengths)
        index = torch.arange(int(lengths.sum()), device=device) + firsts.repeat_interleave(lengths)
        mixed = _mixed(torch.cat(chosen) + _mixed(index))
        sums.index_add_(0, torch.tensor(places, device=device).repeat_interleave(lengths), mixed)
    # For a tensor with the period p, only the first p of ``windows`` were computed. The later windows of this
    # tensor repeat them.
    rows = torch.arange(len(windows), device=device).view(-1, 1) % torch.tensor(periods, device=device)
    return sums.view(len(windows), len(tensors)).gather(0, rows)


def _mixed(x: Tensor) -> Tensor:
    """Computes the same bijection as ``_mixed`` in ``checksum/kernels.py``, on the 64 bits of each int64."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Returns x shifted to the right by ``bits``, with zeros at the left."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.int64)


def _is_readable(tensor: Tensor) -> bool:
    """True if the kernel can read ``tensor`` without a copy."""
    return (
        tensor.numel() * tensor.element_size() % _WORD == 0
        and tensor.data_ptr() % _ALIGNMENT == 0
        and (
            tensor.is_contiguous()
            or torch.empty_like(tensor, device="meta").stride()
            == tensor.stride()  # slower than ``is_contiguous``, but finds all layouts without gaps
        )
    )


def _padded(tensor: Tensor) -> Tensor:
    """Allocates zeros for a copy of ``tensor``. Their size is rounded up to a multiple of 8 bytes."""
    size = ceil_div(tensor.numel() * tensor.element_size(), _WORD) * _WORD
    return torch.zeros(size, dtype=torch.uint8, device=tensor.device)


@dispatch.kernels_of("checksums")
def _sum_blocks(blocks: Tensor, tensors: Tensor, window: Tensor, sums: Tensor) -> None:
    with without_rehearsal():
        _launch(len(blocks), blocks.device).run(blocks, tensors, window, sums)


@functools.lru_cache(maxsize=1024)
def _launch(programs: int, device: torch.device) -> Launch:
    from sdfastgn.kernels.checksum.kernels import checksum_kernel

    return Launch(checksum_kernel, programs, _WARPS, BLOCK=BLOCK)
