"""Prepares each LoRA adapter of a layer once, so that the adapters can be merged with any scales later.

A merged weight is the layer's weight plus the sum of scale * B @ A over the active adapters. When other
adapters become active, or get other scales, an ``AdapterSurvey`` (``adapter_survey.py``) only combines what
was prepared for each adapter. That is possible as long as all tensors and layers are the same as when the
adapters were prepared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.low_rank.op import Factors, Matrix, Pair, Sum, matrix_of, pair_of
from sdfastgn.patches.lora.merged_weights import Record, bias_factors, bias_or_zeros
from sdfastgn.patches.lora.sources import Source, adapter_of, is_plain_adapter, state_of
from sdfastgn.patches.swap.fusion import parameters_of


class _Adapter(NamedTuple):
    """An adapter of one layer, with everything that can be computed before its scale is known.

    Attributes:
        layout: the identity, address, shape, strides and dtype of the adapter's tensors. If one of these
            changes, the adapter must be prepared again.
        tensors: A, B and the bias of B, or None for no bias.
        weight, bias: the products of matrices that the adapter adds to the layer's weight and bias, with the
            scale 1.
        weight_pair, bias_pair: the same products, prepared as arguments of the kernel that computes the sums.
            None if the kernel cannot compute them.
    """

    layout: tuple[Any, ...]
    tensors: tuple[Tensor | None, ...]
    weight: Factors
    weight_pair: Pair | None
    bias: Factors | None
    bias_pair: Pair | None


class PreparedLayer:
    """The prepared adapters of one of peft's LoRA layers, and their combination for the active adapters.

    Attributes:
        record: the ``Record`` of the layer's merged weight (``merged_weights.py``).
        names: the adapters that were combined last.
        with_bias: the items of ``names`` whose adapters have a bias.
        sums: the sums for the merged weight and bias. Their scales are 1: the real scales are arguments of
            ``LowRankSums.compute``.
        prepared: for each of ``sums``, its prepared arguments of the kernel that computes it.
        key: identity, address and version of each combined tensor. With the scales, it tells whether the
            merged weight is up to date.
        kept: the combined tensors and their storages, in the order of ``key``.
    """

    __slots__ = (
        "_adapters", "_bias", "_bias_matrix", "_layer", "_layout", "_matrix", "_source", "_storages",
        "kept", "key", "names", "prepared", "record", "sums", "with_bias",
    )  # fmt: skip

    def __init__(self, layer: nn.Module, record: Record) -> None:
        self.record, self._layer = record, layer
        self._layout: tuple[Any, ...] = ()
        self._adapters: dict[str, _Adapter] = {}

    def update(self, source: Source, names: list[str], storages: dict[int, StorageWeakRef]) -> None:
        """Prepares the active adapters for merging. What was prepared from the same tensors before is kept.

        Args:
            source: the tensors and scales from which the layer's merged weight is computed.
            names: the layer's active adapters.
            storages: a dict from the id of each tensor of the layer to a weak reference to its storage.
        """
        self._source, self._storages = source, storages
        self.names: list[str] | None = None
        weight, bias = source.weight, source.bias
        out, out_bias = parameters_of(self.record.layer)
        layout = _layout_of(weight, out) + (() if out_bias is None else _layout_of(out_bias, bias))
        kept: dict[str, _Adapter] = {}
        if layout == self._layout:
            kept = self._adapters
        else:
            self._layout = layout
            self._matrix = matrix_of(out, weight)
            self._bias: Tensor | None = None
            self._bias_matrix: Matrix | None = None
            if out_bias is not None:
                self._bias = bias_or_zeros(bias, out_bias)
                self._bias_matrix = matrix_of(out_bias, self._bias)
        self._adapters = {}
        for name, (a, b, bias, _) in zip(names, source.pairs, strict=True):
            adapter = kept.get(name)
            if adapter is None or adapter.layout != _layout_of(a, b, bias):
                self._add(name, a, b, bias)
            else:
                self._adapters[name] = adapter

    def combine(self, names: list[str]) -> bool:
        """Combines the prepared adapters ``names`` into sums for the merged weight and bias.

        Returns False if one of the adapters cannot be merged.

        Also returns False if the plain layer with the merged weights has no bias but needs one, or has a bias
        but needs none. It needs one if the model's own layer or one of these adapters has a bias.
        """
        found = []
        for name in names:
            adapter = self._adapters.get(name) or self._prepare(name)
            if adapter is None or not is_plain_adapter(vars(self._layer), name):
                return False
            found.append(adapter)
        with_bias = [name for name, adapter in zip(names, found, strict=True) if adapter.bias is not None]
        out, out_bias = parameters_of(self.record.layer)
        weight, bias = self._source.weight, self._source.bias
        if (out_bias is None) != (bias is None and not with_bias):
            return False
        self.names, self.with_bias = names, with_bias
        self.sums = [Sum(out, weight, tuple([adapter.weight for adapter in found]))]
        self.prepared: list[tuple[Matrix | None, list[Pair | None]]] = [
            (self._matrix, [adapter.weight_pair for adapter in found])
        ]
        if self._bias is not None:
            biased = [adapter for adapter in found if adapter.bias is not None]
            self.sums.append(Sum(out_bias, self._bias, tuple([adapter.bias for adapter in biased])))  # type: ignore[arg-type, misc]
            self.prepared.append((self._bias_matrix, [adapter.bias_pair for adapter in biased]))
        tensors = [weight, bias]
        for adapter in found:
            tensors += adapter.tensors
        kept = [t for t in tensors if t is not None]
        self.key = state_of(kept)
        self.kept = kept, list(map(self._storages.__getitem__, self.key[0]))
        return True

    def _prepare(self, name: str) -> _Adapter | None:
        """Prepares the adapter ``name`` for merging with any scale. Returns None if it cannot be merged."""
        found = adapter_of(self._layer, self._source, name)
        return None if found is None else self._add(name, *found)

    def _add(self, name: str, a: Tensor, b: Tensor, bias: Tensor | None) -> _Adapter:
        """Prepares the adapter ``name``, with the tensors A, B and bias of B, and stores the result."""
        of_bias = None if bias is None else bias_factors(bias, 1.0)
        matrix, bias_matrix = self._matrix, self._bias_matrix
        adapter = self._adapters[name] = _Adapter(
            _layout_of(a, b, bias),
            (a, b, bias),
            Factors(a, b, 1.0),
            None if matrix is None else pair_of(a, b, matrix),
            of_bias,
            None if of_bias is None or bias_matrix is None else pair_of(*of_bias[:2], bias_matrix),
        )
        return adapter


def _layout_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """A value that changes if one of ``tensors`` is another object, or has other memory, shape or dtype."""
    return tuple(
        [None if t is None else (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    )
