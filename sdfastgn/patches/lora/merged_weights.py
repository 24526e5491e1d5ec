"""Allocates, writes and frees merged weights: copies of layers' weights to which LoRA adapters were added.

A *wrapper* is peft's LoRA layer around a layer of the model. A *stand-in* is a plain ``nn.Linear`` or
``nn.Conv2d`` with the merged weight, which runs in place of the wrapper. A *record* holds the stand-in of one
wrapper, and what its merged weight was computed from.

Merged weights are written in the current stream. Before a write, this stream waits for each other stream that
has read merged weights since the last write. Before a read, the reading stream waits for the last write.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common.private import current_raw_stream, expiring, is_expired
from sdfastgn.kernels.low_rank.op import Factors, LowRankSums, Sum, add_low_rank
from sdfastgn.patches.lora.sources import OF_CONV, Source
from sdfastgn.patches.swap.fusion import parameters_of

# For ``nn.Linear`` and ``nn.Conv2d``, the number of sizes (channels, kernel size) that the constructor takes.
_SIZES = {nn.Linear: 2, nn.Conv2d: 3}
# The names of the dicts of hooks that the plain layer with a merged weight shares with the model's own layer.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

# A dict from peft's LoRA layer to the record of its merged weight (``Record``). Records are not kept in the
# ``__dict__`` of the LoRA layer, so that they are neither copied nor pickled with it.
records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
# A dict from peft's LoRA layer to its ``Record``, for layers that were moved, which frees the merged weight.
# Plans (traced lists of kernels) refer to the plain layer in the record. So the record is used again when the
# layer gets a merged weight again.
_moved: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
# A dict from ids to tensors, for all merged weights and biases that exist.
_merged: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
# True while code runs that reads weights of LoRA layers but writes into none: some code of peft, and the
# forward of a model during the capture of a CUDA graph. Then ``may_change`` does nothing, and merged weights
# stay valid.
only_reads: ContextVar[bool] = ContextVar("sdfastgn_only_reads_adapters", default=False)
# The streams that have read merged weights since these were written last, by (index of the GPU, handle of the
# stream). The next write waits for these streams.
_readers: dict[tuple[int, int], torch.cuda.Stream] = {}
# The lock that a thread holds while it makes, writes or frees merged weights.
changing = threading.RLock()


class Record:
    """The merged weights of one of peft's LoRA layers, and what they were computed from.

    Attributes:
        layer: the stand-in: a plain layer that has the merged weights and runs instead of the LoRA layer.
        tensors: the tensors from which the merged weights were computed. Empty if the weights were not
            computed yet, or were freed.
        key: a value made of these tensors' ids, addresses and versions, and of the adapters' scales. None if
            the merged weights are outdated.
        touches: a number that grows with each event after which an ``AdapterSurvey`` must check the LoRA
            layer again: the merged weights were written or freed, or other code may have changed a tensor
            from which they are computed.
        written: (handle of the stream that wrote the weights last, event after this write).
        readers: objects, such as CUDA graphs, that keep the weights' memory alive until their method
            ``release`` is called.
    """

    def __init__(self, source: Source) -> None:
        self.layer = _stand_in(source)
        self.device = source.weight.device
        self.key: tuple[Any, ...] | None = None
        self.touches = 0
        self.readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.tensors: Sequence[Tensor] = ()
        self._storages: Sequence[StorageWeakRef] = ()
        self._places: tuple[Any, ...] = ()
        self.written: tuple[int, torch.cuda.Event | None] = (0, None)

    def fits(self, source: Source) -> bool:
        """True if ``self.layer`` can hold the merged weight and bias computed from ``source``.

        ``self.layer``, a plain layer, must have the settings and forward hooks of ``source.base``, the
        model's own layer. Its weight must have the dtype, device, shape and strides of the own layer's
        weight. It must have a bias exactly if the own layer or an adapter has one.
        """
        (weight, bias), like = parameters_of(self.layer), source.weight
        own, base = vars(self.layer), vars(source.base)
        return (
            (weight.dtype, weight.device, weight.shape, weight.stride())
            == (like.dtype, like.device, like.shape, like.stride())
            and (bias is not None) == source.has_bias
            and all(own[name] is base[name] for name in _HOOKS)
            and (
                type(self.layer) is nn.Linear
                or all(getattr(self.layer, name) == getattr(source.base, name) for name in OF_CONV)
            )
        )

    def allocate(self, source: Source) -> bool:
        """Give ``self.layer``, a plain layer, new memory for the merged weight and bias from ``source``.

        Returns False if the layer cannot hold them, for instance because it has no bias but needs one.
        """
        own, fresh = list(self.layer.parameters()), list(_stand_in(source).parameters())
        if len(own) != len(fresh):  # ``self.layer`` has a bias but needs none, or needs one but has none
            return False
        for parameter, new in zip(own, fresh, strict=True):
            parameter.data = new.data
        self.device = source.weight.device
        return self.fits(source)

    def is_of(self, source: Source) -> bool:
        """True if the merged weight was computed from the tensors of ``source`` as they are now.

        Only changes that PyTorch counts are noticed.
        """
        return self.key is not None and self.has_key(source.key(source.tensors))

    def sums(self, source: Source) -> Iterator[Sum]:
        """Yields the sums for ``add_low_rank``: weight or bias, plus the scaled products of adapters."""
        pairs = tuple(Factors(a, b, scale) for a, b, _, scale in source.pairs)
        yield Sum(self.layer.weight, source.weight, pairs)
        if self.layer.bias is not None:
            out = self.layer.bias
            biases = [(bias, scale) for _, _, bias, scale in source.pairs if bias is not None]
            yield Sum(out, bias_or_zeros(source.bias, out), tuple(bias_factors(*each) for each in biases))

    def note(self, source: Source, written: tuple[int, torch.cuda.Event | None]) -> None:
        """Record that the merged weights were computed from ``source``, and are up to date.

        ``written``: (handle of the stream that writes the weights, event after this write).
        """
        tensors = source.tensors
        key, kept = source.key(tensors), (self.tensors, self._storages)
        if self._places != key[:2] or any(map(is_expired, map(expiring, self._storages))):
            kept = tensors, [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.note_prepared(key, kept, written)

    def note_prepared(
        self, key: tuple[Any, ...], kept: Any, written: tuple[int, torch.cuda.Event | None]
    ) -> None:
        """Record that the merged weights were just computed from the tensors and scales in ``key``.

        Args:
            key: ``Source.key`` of the tensors from which the weights were computed: the layer's own weight
                and bias, and the matrices and biases of its adapters.
            kept: (these tensors, their storages), in the order of ``key``. If a storage is freed, ``has_key``
                returns False.
            written: (handle of the stream that writes the weights, event after this write).
        """
        self._places, self.written = key[:2], written
        # The tensors are kept alive, so that no other tensor gets their ids.
        self.tensors, self._storages = kept
        self.key = key

    def touch(self) -> None:
        """Mark the merged weight as outdated, until ``note`` or ``note_prepared`` records a new write."""
        self.key = None
        self.touches += 1

    def has_key(self, key: tuple[Any, ...]) -> bool:
        """True if the merged weight was computed from the tensors and scales that ``key`` names.

        False if the memory of one of these tensors was freed since.
        """
        return self.key == key and not any(map(is_expired, map(expiring, self._storages)))

    def wait(self) -> None:
        """Make the current stream wait until the merged weights are written, and record that it reads them.

        The next write of merged weights then waits for this stream.
        """
        read_on(self.device)
        wait_for(self.written, self.device)

    def free(self) -> None:
        """Free the memory of the merged weight and bias.

        The parameters stay, but have no elements. Before a CUDA graph that reads them is replayed, the
        addresses of parameters are compared, so the change is noticed (``graphs/watch.py``).
        """
        self.touch()
        self.tensors = ()
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.new_empty(0)
        for reader in list(self.readers):
            reader.release()


def _stand_in(source: Source) -> Any:
    """Makes a plain layer with the settings and forward hooks of ``source.base``, the model's own layer.

    The new layer's weight and bias are uninitialized.
    """
    base, weight = source.base, source.weight
    layer: Any = type(base)(*((1,) * _SIZES[type(base)]), device="meta")
    # Of the attributes of ``base``, only settings are copied: those that a new layer has too. Other code may
    # have given ``base`` further attributes.
    for name, value in vars(layer).items():
        if not isinstance(value, (dict, set)):
            vars(layer)[name] = vars(base)[name]
    # A model's first or last convolution has sdfastgn's hooks that change memory layouts. The plain layer
    # shares the dicts of hooks with it, because these hooks may be added and removed later.
    for name in _HOOKS:
        vars(layer)[name] = vars(base)[name]
    # Inference mode is off: parameters that are made in it would be inference tensors, which count no writes.
    with torch.inference_mode(False), torch.no_grad():
        place = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
        bias = weight.new_empty(len(weight)) if source.has_bias else None
        vars(layer)["_parameters"] = {
            "weight": nn.Parameter(place, requires_grad=False),
            "bias": None if bias is None else nn.Parameter(bias, requires_grad=False),
        }
    _merged.update((id(parameter), parameter) for parameter in layer.parameters())
    return layer


def is_merged_weight(tensor: Tensor) -> bool:
    """True if ``tensor`` is a merged weight or bias. Only this file writes into it, and counts each write."""
    return _merged.get(id(tensor)) is tensor


def bias_or_zeros(bias: Tensor | None, like: Tensor) -> Tensor:
    """Returns the layer's own ``bias``, or zeros like ``like`` if the layer has none.

    The biases of adapters are added to the result.
    """
    return torch.zeros_like(like) if bias is None else bias


def bias_factors(bias: Tensor, scale: float) -> Factors:
    """Returns an adapter's bias as a product of matrices for the kernel: the column ``bias`` times a 1."""
    return Factors(bias.new_ones(1, 1), bias.view(-1, 1), scale)


def write(found: Iterable[tuple[nn.Module, Source]]) -> list[Record]:
    """Compute the merged weights of peft's LoRA layers in ``found``, (layer, source), in the current stream.

    Returns the ``Record`` of each layer: its merged weights, and what they were computed from.
    """
    found = list(found)
    devices = dict.fromkeys(source.weight.device for _, source in found)
    with _writing(devices):
        made = []
        for layer, source in found:
            record = records.get(layer)
            if record is None or not record.fits(source):
                if record is not None:
                    record.free()
                record = records[layer] = new_record(layer, source)
            record.touch()
            made.append(record)
        pairs = list(zip(made, found, strict=True))
        add_low_rank([total for record, (_, source) in pairs for total in record.sums(source)])
        written = {device: written_now(device) for device in devices}
        _count_writes(made)
        for record, (_, source) in pairs:
            record.note(source, written[source.weight.device])
    return made


def write_prepared(
    those: Sequence[tuple[Record, tuple[Any, ...], Any]],
    sums: LowRankSums,
    scales: Sequence[float],
    is_valid: Callable[[], bool] = lambda: True,
) -> bool:
    """Compute merged weights from adapters that were prepared before, in the current stream.

    Args:
        those: (``Record``, key, kept) for each LoRA layer. ``key`` and ``kept`` are passed to
            ``Record.note_prepared``.
        sums: computes the merged weights and biases of the records: a layer's weight or bias, plus the scaled
            products of its adapters' matrices.
        scales: the scales of the products, in the order of ``sums``.
        is_valid: returns False if another thread has changed something since the adapters were prepared. No
            thread can change a record between the call of ``is_valid`` and the write.

    Returns False if nothing was written because ``is_valid`` returned False.
    """
    devices = dict.fromkeys([record.device for record, _, _ in those])
    with changing:
        if not is_valid():
            return False
        with _writing(devices):
            for record, _, _ in those:
                record.touch()
            sums.compute(scales)
            written = {device: written_now(device) for device in devices}
            _count_writes([record for record, _, _ in those])
            for record, key, kept in those:
                record.note_prepared(key, kept, written[record.device])
    return True


def _count_writes(those: Iterable[Record]) -> None:
    """Raise the versions of merged weights, because PyTorch does not count the writes of our kernels."""
    torch.autograd.graph.increment_version([parameters_of(record.layer)[0] for record in those])


@contextmanager
def _writing(devices: Iterable[torch.device]) -> Iterator[None]:
    """A context for writing merged weights in the current streams of ``devices``.

    These streams first wait for the other streams that read merged weights.
    """
    with changing, torch.no_grad():
        for device in devices:
            _wait_for_readers(device)
        yield


def _wait_for_readers(device: torch.device) -> None:
    """Make the current stream of ``device`` wait for the other streams that read merged weights."""
    if device.type == "cuda":
        for key in [key for key in list(_readers) if key[0] == device.index]:
            stream = _readers.pop(key, None)
            if stream is not None and key[1] != current_raw_stream(device.index):
                torch.cuda.current_stream(device).wait_stream(stream)


def read_on(device: torch.device) -> None:
    """Record that the current stream of ``device`` reads merged weights. The next write waits for it."""
    if device.type == "cuda":
        key = device.index, current_raw_stream(device.index)
        if key not in _readers:
            _readers[key] = torch.cuda.current_stream(device)


def written_now(device: torch.device) -> tuple[int, torch.cuda.Event | None]:
    """Returns (handle of the current stream, event after all of its work so far); (0, None) on a CPU."""
    if device.type != "cuda":
        return 0, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return current_raw_stream(device.index), event


def wait_for(written: tuple[int, torch.cuda.Event | None], device: torch.device) -> None:
    """Make the current stream of ``device`` wait for ``written``, a result of ``written_now``."""
    stream, event = written
    if event is not None and current_raw_stream(device.index) != stream:
        torch.cuda.current_stream(device).wait_event(event)


def new_record(layer: nn.Module, source: Source) -> Record:
    """Returns a ``Record`` of merged weights for peft's LoRA layer ``layer``, which has none.

    If the layer was moved before, its former record is used again, provided that it fits.
    """
    record = _moved.pop(layer, None)
    return record if record is not None and record.allocate(source) else Record(source)


def is_record_of(layer: nn.Module, record: Record, source: Source) -> bool:
    """True if ``record`` is the ``Record`` of ``layer``, and can hold merged weights made from ``source``.

    If the layer was moved, which frees its merged weights, the record first gets memory again.
    """
    if layer not in records and _moved.get(layer) is record:
        with changing:
            if layer not in records:
                records[layer] = new_record(layer, source)
    return records.get(layer) is record and record.fits(source)


def move(layer: nn.Module) -> None:
    """Free the merged weights of ``layer``, a LoRA layer that ``.to()`` or a similar method moves.

    Its record is kept for the next merged weights.
    """
    record = records.pop(layer, None)
    if record is not None:
        record.free()
        _moved[layer] = record


def forget(layer: nn.Module) -> None:
    """Free the merged weights of the LoRA layer ``layer``, and delete its ``Record``."""
    move(layer)
    _moved.pop(layer, None)


def may_change(layer: nn.Module) -> None:
    """Mark the merged weights of ``layer`` as outdated, because other code may have changed its weights."""
    # torch.compile cannot trace the ContextVar that is read below. A forward that it traces writes into a
    # weight only to subtract a fused adapter that was turned off. ``enable_adapters``, which turned the
    # adapter off, has called this function already. So nothing is left to do here.
    if torch.compiler.is_dynamo_compiling():
        return
    record = None if only_reads.get() else records.get(layer)
    if record is not None:
        record.touch()
