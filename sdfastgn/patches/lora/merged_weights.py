"""Allocates, writes and frees the merged weights of stand-ins (``merging.py``).

The current stream writes the weights. Before a write, it waits for each other stream that has read
merged weights since the last write. Before a read, the reading stream waits for the last write.
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

# Class of a layer -> number of sizes (channels, kernel size) that its constructor takes.
_SIZES = {nn.Linear: 2, nn.Conv2d: 3}
# The dicts of hooks that a stand-in shares with its layer.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

# Wrapper -> its record, with the stand-in. Records are not kept in the wrapper's ``__dict__``, so that they
# are neither copied nor pickled.
records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
# Wrapper -> its record, which has no memory since the wrapper was moved. Plans refer to the stand-in, so the
# record is used again.
_moved: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
# id -> weight or bias of a stand-in, for all that exist.
_merged: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
# True while code runs that gets weights from wrappers but writes into none: some code of peft, and the
# forward of a model that is captured. Then ``may_change`` does nothing, and merged weights stay valid.
only_reads: ContextVar[bool] = ContextVar("sdfastgn_only_reads_adapters", default=False)
# (index of a GPU, handle of a stream) -> stream, for the streams that have read merged weights since these
# were written last. The next write waits for these streams.
_readers: dict[tuple[int, int], torch.cuda.Stream] = {}
# Held while records are made, written or forgotten.
changing = threading.RLock()


class Record:
    """The merged weights of one wrapper (peft's layer with adapters), and what they were computed from.

    Attributes:
        layer: the stand-in: a plain layer that has the merged weights and runs instead of the wrapper.
        tensors: the tensors from which the weights were computed. Empty if there are no weights.
        key: the ``Source.key`` of the tensors from which the weights were computed. None if the weights are
            outdated.
        touches: a number that grows with each event after which an ``AdapterSurvey`` must check the wrapper
            again: the merged weights were written or freed, or other code may have changed a tensor from
            which they are computed.
        written: (handle of the stream that wrote the weights last, event after this write).
        readers: objects that keep the weights' memory alive until their method ``release`` is called.
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
        """True if the stand-in ``layer`` can hold the merged weights of ``source``.

        It must have the settings and forward hooks of ``source.base``, and a weight with dtype, device, shape
        and strides of ``source.weight``.
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
        """Give the stand-in new memory for the weights of ``source``. Returns True if it fits them then."""
        own, fresh = list(self.layer.parameters()), list(_stand_in(source).parameters())
        if len(own) != len(fresh):  # one of them has no bias
            return False
        for parameter, new in zip(own, fresh, strict=True):
            parameter.data = new.data
        self.device = source.weight.device
        return self.fits(source)

    def is_of(self, source: Source) -> bool:
        """True if the merged weight was computed from the present values of ``source``."""
        return self.key is not None and self.has_key(source.key(source.tensors))

    def sums(self, source: Source) -> Iterator[Sum]:
        """Yields the sums that ``add_low_rank`` must compute for the merged weight and bias."""
        pairs = tuple(Factors(a, b, scale) for a, b, _, scale in source.pairs)
        yield Sum(self.layer.weight, source.weight, pairs)
        if self.layer.bias is not None:
            out = self.layer.bias
            biases = [(bias, scale) for _, _, bias, scale in source.pairs if bias is not None]
            yield Sum(out, bias_or_zeros(source.bias, out), tuple(bias_factors(*each) for each in biases))

    def note(self, source: Source, written: tuple[int, torch.cuda.Event | None]) -> None:
        """Record that the stand-in's weights were computed from ``source``, and are up to date.

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
        """Record that the merged weights were computed from prepared parts (``prepared_sources.py``).

        Args:
            key: ``Source.key`` of the tensors from which the weights were computed: the layer's own weight
                and bias, and the matrices and biases of its adapters.
            kept: (these tensors, their storages), in the order of ``key``. If a storage is freed, ``has_key``
                returns False.
            written: the same as for ``note``.
        """
        self._places, self.written = key[:2], written
        self.tensors, self._storages = kept  # alive, so that no other tensor gets their ids
        self.key = key

    def touch(self) -> None:
        """Mark the merged weight as outdated, until ``note`` or ``note_prepared`` is called."""
        self.key = None
        self.touches += 1

    def has_key(self, key: tuple[Any, ...]) -> bool:
        """True if the merged weight was computed from tensors with this key (``Source.key``).

        False if the memory of one of these tensors was freed since.
        """
        return self.key == key and not any(map(is_expired, map(expiring, self._storages)))

    def wait(self) -> None:
        """Make the current stream wait until the weights are written, and record that it reads them.

        The next write then waits for this stream.
        """
        read_on(self.device)
        wait_for(self.written, self.device)

    def free(self) -> None:
        """Free the memory of the stand-in's weight and bias.

        The parameters stay, but have no elements. So the ``Watch`` (``graphs/watch.py``) of a graph that
        reads them notices the change.
        """
        self.touch()
        self.tensors = ()
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.new_empty(0)
        for reader in list(self.readers):
            reader.release()


def _stand_in(source: Source) -> Any:
    """A plain layer with the settings and forward hooks of ``source.base``, and new, uninitialized weight and
    bias.
    """
    base, weight = source.base, source.weight
    layer: Any = type(base)(*((1,) * _SIZES[type(base)]), device="meta")
    # Only attributes that a new layer has too, its settings, are copied from ``base``. ``base`` may also have
    # attributes of other code.
    for name, value in vars(layer).items():
        if not isinstance(value, (dict, set)):
            vars(layer)[name] = vars(base)[name]
    # A model's first or last convolution has sdfastgn's hooks for layouts. The stand-in shares the dicts of
    # hooks, because these hooks may be added and removed later.
    for name in _HOOKS:
        vars(layer)[name] = vars(base)[name]
    # Inference mode is off, because tensors that are made in it are inference tensors, which count no writes.
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
    """True if ``tensor`` is a stand-in's weight or bias. Only this file writes into it, and counts this."""
    return _merged.get(id(tensor)) is tensor


def bias_or_zeros(bias: Tensor | None, like: Tensor) -> Tensor:
    """The bias of a layer, to which the biases of its adapters are added. Zeros if it has none."""
    return torch.zeros_like(like) if bias is None else bias


def bias_factors(bias: Tensor, scale: float) -> Factors:
    """The bias of an adapter (B's bias) as factors: ``scale * bias`` is the product of a column and a 1."""
    return Factors(bias.new_ones(1, 1), bias.view(-1, 1), scale)


def write(found: Iterable[tuple[nn.Module, Source]]) -> list[Record]:
    """Compute the merged weights of the wrappers in ``found``, in the current stream.

    Returns the records of the wrappers.
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
    """Compute merged weights from prepared parts (``prepared_sources.py``), in the current stream.

    Args:
        those: (record, key, kept) for each wrapper. ``key`` and ``kept`` are passed to
            ``Record.note_prepared``.
        sums: computes the merged weights and biases of the records: a layer's weight or bias, plus the
            scaled products of its adapters' matrices.
        scales: the scales of the products, in the order of ``sums``.
        is_valid: returns False if another thread has changed something since the parts were prepared. No
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
    """A record for the wrapper ``layer``, which has none: the record from before a move, if it fits."""
    record = _moved.pop(layer, None)
    return record if record is not None and record.allocate(source) else Record(source)


def is_record_of(layer: nn.Module, record: Record, source: Source) -> bool:
    """True if ``layer`` has this ``record``, and it fits ``source``. After a move it gets memory again."""
    if layer not in records and _moved.get(layer) is record:
        with changing:
            if layer not in records:
                records[layer] = new_record(layer, source)
    return records.get(layer) is record and record.fits(source)


def move(layer: nn.Module) -> None:
    """Free the merged weights of the wrapper ``layer``, because it is moved."""
    record = records.pop(layer, None)
    if record is not None:
        record.free()
        _moved[layer] = record


def forget(layer: nn.Module) -> None:
    """Free the merged weights of the wrapper ``layer``, and drop its ``Record``."""
    move(layer)
    _moved.pop(layer, None)


def may_change(layer: nn.Module) -> None:
    """Mark the merged weights of ``layer`` as outdated, because other code may have changed its weights."""
    # torch.compile cannot trace the ContextVar. The forward that it compiles only writes weights to subtract
    # fused adapters that were turned off. Turning them off, by ``enable_adapters``, has called this function.
    if torch.compiler.is_dynamo_compiling():
        return
    record = None if only_reads.get() else records.get(layer)
    if record is not None:
        record.touch()
