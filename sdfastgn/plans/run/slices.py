"""``Slices`` runs a call with a large batch slice by slice, so that it takes only the memory of one slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from sdfastgn.kernels.common.layout import empty_laid_out
from sdfastgn.plans.run.source import ALIGNMENT


class Slices(NamedTuple):
    """Divides the tensors of a call into slices of its samples, and joins the results.

    Attributes:
        number: how many slices there are.
        inputs: for each tensor of the call, the axis that is divided. None if each slice reads the whole
            tensor.
        results: for each result, the axis along which slices are joined. None for a result that is equal in
            all slices.
    """

    number: int
    inputs: tuple[int | None, ...]
    results: tuple[int | None, ...]

    def run(self, run: Callable[[list[Tensor]], list[Any]], tensors: Sequence[Tensor]) -> list[Any]:
        """Computes the results of the call. ``run`` computes the results of one slice."""
        whole: list[Any] = []
        for i in range(self.number):
            parts = run(self.slice(tensors, i))
            if not whole:
                axes = zip(parts, self.results, strict=True)
                whole = [part if axis is None else self._empty(part, axis) for part, axis in axes]
            for y, part, axis in zip(whole, parts, self.results, strict=True):
                if axis is not None:
                    y.narrow(axis, i * part.shape[axis], part.shape[axis]).copy_(part)
        return whole

    def slice(self, tensors: Sequence[Tensor], i: int) -> list[Tensor]:
        """Returns the part of each tensor that slice ``i`` reads."""
        pairs = zip(tensors, self.inputs, strict=True)
        return [t if axis is None else self._part(t, axis, i) for t, axis in pairs]

    def whole(self, shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
        """Returns the shape of a tensor in the whole call. ``shape`` is its shape in one slice."""
        return tuple(size * self.number if i == axis else size for i, size in enumerate(shape))

    def _part(self, t: Tensor, axis: int, i: int) -> Tensor:
        size = t.shape[axis] // self.number
        part = t.narrow(axis, i * size, size)
        # Kernels are compiled for aligned addresses. So a part that begins at another address is copied.
        return part.clone() if part.data_ptr() % ALIGNMENT else part

    def _empty(self, part: Tensor, axis: int) -> Tensor:
        is_last = part.dim() > 3 and part.stride(1) == 1
        return empty_laid_out(part, self.whole(part.shape, axis), channels_last=is_last)
