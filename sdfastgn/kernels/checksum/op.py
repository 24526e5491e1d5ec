"""Tells whether the content of tensors on a GPU has changed: ``checksums``.

A checksum depends on each bit of a tensor, and on the bit's place in the tensor. If the tensor changes, its
checksum stays the same with a probability of 2^-64. The kernel reads each tensor once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sdfastgn.kernels.common.compile_ahead import without_rehearsal
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.sizes import ceil_div

# Number of words, of 8 bytes each, that a program of the kernel sums.
BLOCK = 2048
_WARPS = 8


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Computes a checksum of each tensor. Returns them as int64, (number of tensors,).

    Args:
        tensors: at least one, all on the same GPU, of any dtype. Each has a multiple of 8 bytes, and fills
            its memory without gaps. Its address is a multiple of 16. These conditions are not checked.

    Grad: none.

    Raises:
        KernelError: the kernel cannot be compiled or loaded, or the GPU is too old.
    """
    # Each sum is padded to 16 bytes: ``Launch`` is fast only for addresses that are multiples of 16.
    sums = torch.zeros((len(tensors), 2), dtype=torch.int64, device=tensors[0].device)
    with without_rehearsal():
        for tensor, total in zip(tensors, sums, strict=True):
            words = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.int64)
            _launch(len(words), tensor.device).run(words, total)
    return sums[:, 0]


@functools.lru_cache(maxsize=1024)
def _launch(words: int, device: torch.device) -> Launch:
    from sdfastgn.kernels.checksum.kernels import checksum_kernel

    return Launch(checksum_kernel, ceil_div(words, BLOCK), _WARPS, words=words, BLOCK=BLOCK)
