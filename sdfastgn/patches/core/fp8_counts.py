"""The counts of values beyond the range of E4M3, read while the GPU still runs the graph that counts.

The counts of a replay must be read before its result is used. They are final when the last kernel that writes
E4M3 has run. Other kernels follow it: SDXL's last up block, for example, has no products. So the graph has a
second branch, which begins after that kernel and copies the counts into memory of the CPU. The CPU waits for
this copy, and not for the end of the graph. So the CPU's work for the next call begins earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.e4m3 import BEYOND

if TYPE_CHECKING:
    from sdfastgn.patches.core.fp8_product import Products

__all__ = ["Counts", "note_written"]

# Stands for a count that the replay has not copied yet.
_UNKNOWN = -1.0
# The counts of the graph that is being captured in this thread; None outside of a capture.
_captured: ContextVar[Counts | None] = ContextVar("sdfastgn_captured_counts", default=None)
# Memory and events into which a replay may still write although its graph was freed.
_abandoned: list[tuple[Tensor, torch.cuda.Event | None]] = []


def note_written() -> None:
    """In a capture, call this after each kernel that writes E4M3."""
    counts = _captured.get()
    if counts is not None:
        counts.note()


class Counts:
    """The counts that one graph copies to the CPU in each replay.

    Args:
        quantizers: the quantizers that the graph reads, (products, 4).
        model: returns the ``Products`` of the graph's model; None if they were freed.
    """

    def __init__(self, quantizers: Tensor, model: Callable[[], Products | None]) -> None:
        self._is_pending = self._is_used = False
        self._quantizers, self._model = quantizers, model
        is_gpu, device = quantizers.is_cuda, quantizers.device
        with torch.inference_mode(False):
            self._copy = torch.zeros(quantizers.shape, dtype=torch.float32, device="cpu", pin_memory=is_gpu)
        # No work runs in this stream. It only makes the branch in a capture.
        self._branch = torch.cuda.Stream(device, priority=-1) if is_gpu else None
        self._written = torch.cuda.Event() if is_gpu else None
        # "external" makes each replay record the event.
        self._copied = torch.cuda.Event(external=True) if is_gpu else None

    def __del__(self) -> None:
        if self._is_pending:
            _abandoned.append((self._copy, self._copied))

    def captured(self, run: Callable[[], Any]) -> Any:
        """Returns ``run()``. Call this in a capture: it adds the copy of the counts to the graph."""
        token = _captured.set(self)
        try:
            output = run()
        finally:
            _captured.reset(token)
        if self._is_used:
            self._add_copy()
        return output

    def note(self) -> None:
        self._is_used = True
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self._quantizers.device))

    def _add_copy(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self._branch is None:
                self._copy.copy_(self._quantizers)
                return
            # The branch waits for the last kernel that was noted, and not for the kernels after it.
            self._branch.wait_event(self._written)  # type: ignore[arg-type]
            with torch.cuda.stream(self._branch):
                self._copy.copy_(self._quantizers, non_blocking=True)
                self._copied.record(self._branch)  # type: ignore[union-attr]
            torch.cuda.current_stream(self._quantizers.device).wait_stream(self._branch)

    def begin(self, wait: Callable[[], None]) -> None:
        """Call this before each replay. ``wait``: waits for the end of all replays."""
        model = self._model()
        if model is not None:
            model.replayed = self
        if self._is_pending:  # nobody has read the counts of the last replay, which may still run
            wait()
        self._is_pending = self._is_used
        self._copy.fill_(_UNKNOWN)

    def read(self) -> list[float]:
        """The count of each product after the last replay; empty if the graph has no products.

        Waits until the counts are final. The replay must be in the current stream.
        """
        if not self._is_used:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        counts = self._copy[:, BEYOND].tolist()
        if _UNKNOWN in counts:  # the CPU has not waited for the copy, so it waits for the whole graph
            counts = self._quantizers[:, BEYOND].tolist()
        self._is_pending = False
        return counts
