"""What calls have counted beyond the range of E4M3, on the CPU, which does not wait for it.

The result of such a call is right: on the GPU its values were written again with a larger scale
(``kernels/common/e4m3.py``). The CPU only makes the larger scale the learned one, and it may do so later. So
a copy to the CPU is started after a call, and a later call reads it if it has arrived.
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
    """The quantizers that calls of one model have used, and their copies on the CPU.

    Attributes:
        beyond: number of values beyond the range in the copies of ``copy_noted`` that have arrived.
    """

    def __init__(self) -> None:
        self.beyond = 0
        # The product, quantizer and stream of each kernel that wrote E4M3 outside of a graph.
        self._written: list[tuple[Product, Tensor, torch.cuda.Stream | None]] = []
        # The products, their quantizers on the CPU, the end of the copy, and True for ``copy_noted``. None if
        # no copy is under way.
        self._copying: tuple[Sequence[Product], Tensor, torch.cuda.Event | None, bool] | None = None

    def note(self, product: Product, quantizer: Tensor) -> None:
        """Call this after a kernel that wrote E4M3 with ``quantizer``, which no other call uses."""
        self._written.append((product, quantizer, _stream_of(quantizer)))

    def copy_noted(self) -> None:
        """Start a copy to the CPU of the quantizers that ``note`` got in the current stream."""
        noted, self._written = self._written, []
        # Work in another stream may not be done yet.
        own = [(product, tensor) for product, tensor, stream in noted if stream == _stream_of(tensor)]
        if own:
            products, quantizers = zip(*own, strict=True)
            self.copy(products, torch.stack(quantizers), is_noted=True)

    def copy(self, products: Sequence[Product], quantizers: Tensor, *, is_noted: bool = False) -> None:
        """Start a copy of ``quantizers``, a row for each product, to the CPU, unless one is under way."""
        if self._copying is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            # To memory from which the GPU can copy while the CPU works on.
            found = quantizers.to("cpu", non_blocking=True, copy=True)
        stream = _stream_of(quantizers)
        self._copying = products, found, None if stream is None else stream.record_event(), is_noted

    def arrived(self, *, waits: bool = False) -> list[tuple[Product, list[float]]]:
        """Each product of the last copy that has counted, and its quantizer's numbers.

        Empty if the copy has not arrived. Each copy is returned once. ``waits``: True to wait for it.
        """
        copying = self._copying  # another thread may read it too
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
