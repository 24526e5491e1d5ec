"""Notices when other code writes into the weights from which a copy was computed, whoever writes.

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

# Number of comparisons that together read a large weight. For SDXL's UNet one comparison then reads about 100
# MB, which takes less than a thousandth of a step. An image of about 30 steps reads all weights.
WINDOWS = 32
# A new call of a model is assumed to have begun if one of its parts runs more often than this.
_MOST_RUNS = 8


class Calls:
    """Tells when a call of a model begins, from the parts of the model that run."""

    def __init__(self) -> None:
        self._first = 0
        self._runs: Counter[int] = Counter()

    def begins(self, part: object) -> bool:
        """True if a call of the model begins with ``part``, which runs now.

        Most calls begin with the same part, so a call begins when the first part of the last call runs again.
        If this part does not run, a call begins when another part runs more than ``_MOST_RUNS`` times.
        """
        key = id(part)
        is_first = not self._runs or key == self._first or self._runs[key] == _MOST_RUNS
        if is_first:
            self._first = key
            self._runs.clear()
        self._runs[key] += 1
        return is_first


class Contents:
    """The contents of tensors at the time of ``note``, to be compared with later ones.

    Call ``note``, which the constructor also does, before a copy is computed from the tensors, and compute
    all copies again after each ``note``. So the copies are never older than the contents with which later
    ones are compared. No reference to the tensors is kept: each method gets the same tensors again.

    Args:
        tensors: the tensors, on any devices.
        whole: for each tensor, True if each comparison reads it wholly.
    """

    def __init__(self, tensors: Sequence[Tensor], whole: Sequence[bool]) -> None:
        self._places = _places(tensors)
        self._window = 0
        by_device: dict[torch.device, list[int]] = {}
        for at, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(at)
        # Inference tensors could not be written to in later calls, outside of inference mode.
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
        """True if ``tensors`` have the addresses with which this object was made. Only then compare them."""
        return _places(tensors) == self._places

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Record the present contents, with which later contents are compared. Waits for the GPU."""
        with torch.inference_mode(False), torch.no_grad():
            for part, own in self._with_tensors(tensors):
                part.note(own)

    def are_same(self, tensors: Sequence[Tensor]) -> bool:
        """Compare now. Waits for the GPU's work in the current stream so far."""
        if not self.are_of(tensors):
            return False
        self.begin()
        self.look(tensors)
        return self.looked_same()

    def begin(self) -> None:
        """The next ``look`` sees all writes of the work in the current stream so far."""
        for part, _ in self._parts:
            part.begin()

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Start a comparison in a separate stream, beside the work after ``begin``."""
        self._window += 1
        with torch.inference_mode(False), torch.no_grad():
            for part, own in self._with_tensors(tensors):
                part.look(own, self._window)

    def _with_tensors(self, tensors: Sequence[Tensor]) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        """Yields each part with its own tensors."""
        for part, places in self._parts:
            # Copying a list of two thousand tensors takes as long as all else that a comparison does.
            yield part, tensors if len(self._parts) == 1 else [tensors[at] for at in places]

    def looked_same(self) -> bool:
        """True if the last ``look`` found the contents of ``note``. Does not wait for later work."""
        return all(part.looked_same() for part, _ in self._parts)


class _Part:
    """The ``Contents`` of tensors on one device. ``periods``: as in ``Checksums``."""

    def __init__(self, tensors: Sequence[Tensor], periods: Sequence[int]) -> None:
        device = tensors[0].device
        is_gpu = device.type == "cuda"
        self._device = device
        self._sums = Checksums(tensors, periods)
        # Work of a high priority gets the next free multiprocessors, so it does not wait for a graph's end.
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
