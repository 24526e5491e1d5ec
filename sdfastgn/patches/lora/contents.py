"""Notices when any code writes into weights from which sdfastgn has computed a copy.

sdfastgn computes copies from a model's weights: merged weights of adapters (``merging.py``) and
weights in E4M3 (``fp8/product.py``). A copy must be computed again after its *sources*, the weights, have
changed. PyTorch's count of writes (``_version``) does not show each change: fused optimizers and writes
through ``.data`` do not raise it. So contents are compared too: the GPU computes checksums, and the CPU
compares them.

A checksum of all sources would read gigabytes. So small sources, the matrices of adapters, are read wholly at
each comparison, and others in ``WINDOWS`` parts, one at each comparison. An optimizer, an average of weights
or a fused adapter changes all parts of a weight, and is noticed by the next comparison. A write into a few
rows of a large weight is noticed after at most ``WINDOWS`` comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sdfastgn.kernels.checksum.op import Checksums

# Each comparison reads one part of a large weight, and this number of comparisons reads all of it. For SDXL's
# UNet one comparison then reads about 100 MB, which takes less than a thousandth of the time of a step. An
# image has about 30 steps, so one image compares nearly all weights.
WINDOWS = 32
# A new call of a model is assumed to have begun if one layer of the model has run more often than this since
# the last call began.
_MOST_RUNS = 8


class Calls:
    """Finds out when a call of a model begins. All it learns is which layer runs."""

    def __init__(self) -> None:
        self._first = 0
        self._runs: Counter[int] = Counter()

    def begins(self, part: object) -> bool:
        """True if a call of the model begins with ``part``, a layer or another object that runs now.

        Most calls begin with the same layer. So a new call has begun if the first layer of the last call runs
        again, or if another layer has run more than ``_MOST_RUNS`` times.
        """
        key = id(part)
        is_first = not self._runs or key == self._first or self._runs[key] == _MOST_RUNS
        if is_first:
            self._first = key
            self._runs.clear()
        self._runs[key] += 1
        return is_first


class Contents:
    """Checksums of the contents of tensors, to find out later whether other code has changed the contents.

    ``note`` computes the checksums; the constructor calls it. The caller computes copies from the tensors,
    such as merged weights. It must call ``note`` before that, and compute all copies again after each
    ``note``. Then no copy is older than the checksums. No reference to the tensors is kept: each method gets
    the same tensors again.

    Args:
        tensors: the tensors, on any devices.
        whole: for each tensor, True if each comparison reads all of it. Of other tensors each comparison
            reads one of ``WINDOWS`` parts.
    """

    def __init__(self, tensors: Sequence[Tensor], whole: Sequence[bool]) -> None:
        self._places = _places(tensors)
        self._window = 0
        by_device: dict[torch.device, list[int]] = {}
        for at, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(at)
        # The tensors for the checksums are made outside of inference mode. Otherwise later calls outside of
        # this mode could not write into them.
        with torch.inference_mode(False), torch.no_grad():
            self._parts = [
                (
                    _Part([tensors[at] for at in places], [1 if whole[at] else WINDOWS for at in places]),
                    places,
                )
                for places in by_device.values()
            ]
        self.note(tensors)

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """True if ``tensors`` are at the addresses for which this object was made.

        The other methods may only be called with such tensors.
        """
        return _places(tensors) == self._places

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Compute and keep the checksums of the present contents of ``tensors``. Waits for the GPU."""
        with torch.inference_mode(False), torch.no_grad():
            for part, own in self._with_tensors(tensors):
                part.note(own)

    def are_same(self, tensors: Sequence[Tensor]) -> bool:
        """True if the contents of ``tensors`` are as the last ``note`` recorded them.

        Waits for all work in the current stream so far.
        """
        if not self.are_of(tensors):
            return False
        self.begin()
        self.look(tensors)
        return self.looked_same()

    def begin(self) -> None:
        """Mark this point in the current stream: the next ``look`` compares what was written before it."""
        for part, _ in self._parts:
            part.begin()

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Start a comparison of ``tensors`` with the checksums, in a stream of its own.

        The comparison runs at the same time as work that the current stream got after ``begin``.
        """
        self._window += 1
        with torch.inference_mode(False), torch.no_grad():
            for part, own in self._with_tensors(tensors):
                part.look(own, self._window)

    def _with_tensors(self, tensors: Sequence[Tensor]) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        """Yields (the ``_Part`` with the checksums, the tensors) of each device."""
        for part, places in self._parts:
            # With one device, ``tensors`` itself is yielded: making another list of two thousand tensors
            # takes as long as the comparison.
            yield part, tensors if len(self._parts) == 1 else [tensors[at] for at in places]

    def looked_same(self) -> bool:
        """True if the comparison that ``look`` started found the recorded contents.

        Waits for this comparison, but not for other work.
        """
        return all(part.looked_same() for part, _ in self._parts)


class _Part:
    """The checksums of the contents of the tensors on one device.

    ``periods``: for each tensor, the number of comparisons that together read the whole tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], periods: Sequence[int]) -> None:
        device = tensors[0].device
        is_gpu = device.type == "cuda"
        self._device = device
        self._sums = Checksums(tensors, periods)
        # The checksums are computed in a stream of high priority, which gets the next free multiprocessors.
        # So a comparison does not wait for the end of a CUDA graph.
        self._stream = torch.cuda.Stream(device, priority=-1) if is_gpu else None
        self._start, self._end = (torch.cuda.Event() if is_gpu else None for _ in range(2))
        self._found = torch.empty(len(tensors), dtype=torch.int64, device="cpu", pin_memory=is_gpu)
        self._window = 0

    def note(self, tensors: Sequence[Tensor]) -> None:
        self._known = self._sums.of_all_windows(tensors).cpu()

    def begin(self) -> None:
        if self._start is not None:
            self._start.record(torch.cuda.current_stream(self._device))

    def look(self, tensors: Sequence[Tensor], window: int) -> None:
        self._window = window % self._sums.windows
        if self._stream is None:
            self._found.copy_(self._sums.of_window(tensors, self._window))
            return
        self._stream.wait_event(self._start)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):
            self._found.copy_(self._sums.of_window(tensors, self._window), non_blocking=True)
            self._end.record(self._stream)  # type: ignore[union-attr]

    def looked_same(self) -> bool:
        if self._end is not None:
            self._end.synchronize()
        return torch.equal(self._found, self._known[self._window])


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
