"""Copies to the CPU how many values were beyond the range of E4M3 (fp8), without making the CPU wait.

Kernels that write E4M3 count such values on the GPU. Results are right all the same: the kernels have written
the values again with a larger scale (``kernels/common/e4m3.py``). The CPU only lets later calls of the model
begin with the larger scale, and there is no hurry. So a copy to the CPU is started after a call, and a later
call reads the copy if it has arrived.

A *quantizer* is a tensor on the GPU with the scale of a matrix product's input, and with these counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdfastgn.kernels.common.e4m3 import TOTAL

if TYPE_CHECKING:
    from sdfastgn.patches.fp8.product import Product


class Counts:
    """Copies to the CPU how many values were beyond the range of E4M3 in calls of one model.

    Attributes:
        beyond: number of values beyond the range so far in calls without a CUDA graph, as far as their counts
            have arrived on the CPU.
    """

    def __init__(self) -> None:
        self.beyond = 0
        # For each kernel that wrote E4M3 outside of a CUDA graph: the matrix product whose input it wrote,
        # the tensor with its scale and count (*quantizer*), and its stream.
        self._written: list[tuple[Product, Tensor, torch.cuda.Stream | None]] = []
        # The copy to the CPU that is under way, or None: the matrix products, a tensor on the CPU for their
        # scales and counts, an event at the end of the copy, and True if the counts are from calls without a
        # CUDA graph.
        self._copying: tuple[Sequence[Product], Tensor, torch.cuda.Event | None, bool] | None = None

    def note(self, product: Product, quantizer: Tensor) -> None:
        """Record that a kernel has written E4M3 with ``quantizer``, a tensor with a scale and a count.

        The tensor belongs to this call alone, so a later copy to the CPU still has the call's count.
        """
        self._written.append((product, quantizer, _stream_of(quantizer)))

    def copy_noted(self) -> None:
        """Start a copy to the CPU of the counts that kernels in the current stream have written."""
        noted, self._written = self._written, []
        # Counts of kernels in other streams are left out, because these kernels may not have run yet.
        own = [(product, tensor) for product, tensor, stream in noted if stream == _stream_of(tensor)]
        if own:
            products, quantizers = zip(*own, strict=True)
            self.copy(products, torch.stack(quantizers), is_noted=True)

    def copy(self, products: Sequence[Product], quantizers: Tensor, *, is_noted: bool = False) -> None:
        """Start a copy of ``quantizers`` to the CPU, unless another copy is under way.

        ``quantizers``: a row with the scale and the count for each of ``products``. ``is_noted``: True if the
        counts are from calls without a CUDA graph.
        """
        if self._copying is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            # With ``non_blocking=True`` the copy goes to pinned memory, and the CPU does not wait for it.
            found = quantizers.to("cpu", non_blocking=True, copy=True)
        stream = _stream_of(quantizers)
        self._copying = products, found, None if stream is None else stream.record_event(), is_noted

    def arrived(self, *, waits: bool = False) -> list[tuple[Product, list[float]]]:
        """Returns the matrix products that had values beyond the range of E4M3, with their scales and counts.

        They come from the last copy to the CPU. The list is empty if this copy has not arrived, or was
        returned before. ``waits``: True to wait until the copy has arrived.
        """
        copying = self._copying  # read once: another thread may set ``self._copying`` to None
        if copying is None:
            return []
        products, found, end, is_noted = copying
        if end is not None:
            if waits:
                end.synchronize()
            elif not end.query():
                return []
        self._copying = None
        if is_noted:
            self.beyond += int(found[:, TOTAL].sum().item())
        return [(products[i], found[i].tolist()) for i in found[:, TOTAL].nonzero().flatten().tolist()]


def _stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """The current stream of the device of ``tensor``; None on the CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
