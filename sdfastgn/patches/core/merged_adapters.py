"""Runs a layer with LoRA adapters as one plain layer, whose weight is W + the sum of scale * B @ A.

peft replaces a layer of the model by a *wrapper*, which calls the layer and two small layers for each
adapter. Here the wrapper gets a *stand-in*: a plain ``nn.Linear`` or ``nn.Conv2d`` with the merged weight in
separate memory. Fused code gets the stand-in from ``plain_layer``, and the wrapper's own ``forward`` also
runs it. The model's parameters are never changed.

``adopt`` gives a wrapper its stand-in, and a class of ``peft_layers.py``. Each call checks whether the merged
weight is up to date. It compares the active adapters, their scales, and the identity, address and version of
each tensor with their values when the weight was computed. If anything differs, the merged weight is computed
again into the same memory. So a CUDA graph that reads this memory stays valid.

- Calls without graphs compare layer by layer (``merged_layer``).
- Before a graph is replayed, a ``Survey`` compares all layers of a model at once, in loops that run in C.

peft's own code runs with gradients, under a compiler, in traces, where no kernels run, and for every layer
for which ``source_of`` returns a reason, such as hooks, dropout or DoRA.

One change is not noticed: a write through ``.data`` into a tensor that came from ``model.parameters()``.
PyTorch does not count such a write, and the wrapper does not see that its tensor was read (``may_change``).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import current_raw_stream, expiring, is_expired
from sdfastgn.kernels.low_rank.op import Factors, LowRankSums, Sum, add_low_rank
from sdfastgn.patches.core.adapter_sources import OF_CONV, Source, active_adapters, source_of, version_of
from sdfastgn.patches.core.class_forward import change_class
from sdfastgn.patches.core.fusion import restore_class

__all__ = [
    "Merged",
    "Survey",
    "adopt",
    "allow",
    "forget",
    "frozen",
    "give_back",
    "is_allowed",
    "is_merged",
    "know",
    "leave",
    "may_change",
    "merged_in",
    "merged_layer",
    "must_release",
    "only_reads",
    "plain_layer",
    "release",
    "scaled",
    "stand_in_of",
    "why_not",
]

_PEFT = "peft.tuners.lora.layer"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Number of sizes that the constructor of a layer takes.
_SIZES = {nn.Linear: 2, nn.Conv2d: 3}
_NO_MEMORY = "there was no memory for merged weights"

# Wrapper -> its record, with the stand-in. Records are not kept in the wrapper's ``__dict__``, so that they
# are neither copied nor pickled.
_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()
# Wrapper -> all wrappers that were adopted with it.
_siblings: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
# Modules of models for which ``allow`` forbade merged weights.
_off: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Wrappers that have no merged weights because memory was short.
_short: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# The classes of ``peft_layers.py``; empty until a model has a layer of peft.
_classes: tuple[type, ...] = ()
# Counts the events after which a ``Survey`` must check all layers again: merged weights were written or
# freed, or other code may have written into a weight.
_touches = 0
# True in ``frozen``: while a graph is captured, merged weights may be read, but must not be written.
_is_frozen: ContextVar[bool] = ContextVar("sdfastgn_frozen_adapters", default=False)
# The factor by which the running call multiplies all scales. It comes from the call's arguments.
_factor: ContextVar[float] = ContextVar("sdfastgn_adapter_factor", default=1.0)
# True while other code reaches weights through their wrappers, but is known to write into none.
only_reads: ContextVar[bool] = ContextVar("sdfastgn_only_reads_adapters", default=False)
# (index of a GPU, handle of a stream) -> stream, for the streams that have read merged weights since these
# were written last. The next write waits for these streams.
_readers: dict[tuple[int, int], torch.cuda.Stream] = {}
_changing = threading.RLock()


@dataclass(frozen=True)
class Merged:
    """Describes the layers of one model that run with merged weights.

    Attributes:
        path: the model's path.
        layers: number of layers.
        bytes: size of the merged weights.
        adapters: names of the adapters that are active in at least one of the layers.
    """

    path: str
    layers: int
    bytes: int
    adapters: tuple[str, ...]


class _Record:
    """The stand-in of one wrapper, and the state from which its weight was computed."""

    def __init__(self, source: Source) -> None:
        self.layer = _stand_in(source)
        self.key: tuple[Any, ...] | None = None
        self._tensors: list[Tensor] = []
        self._storages: list[StorageWeakRef] = []
        self._places: tuple[Any, ...] = ()
        self._written: tuple[int, Any] = (0, None)

    def fits(self, source: Source) -> bool:
        """True if the stand-in can hold the merged weights of ``source``.

        Its weight must have the same dtype, device, shape and strides, and its settings must be equal.
        """
        weight, bias, like = self.layer.weight, self.layer.bias, source.weight
        return (
            (weight.dtype, weight.device, weight.shape, weight.stride())
            == (like.dtype, like.device, like.shape, like.stride())
            and (bias is not None) == source.has_bias
            and (
                type(self.layer) is nn.Linear
                or all(getattr(self.layer, name) == getattr(source.base, name) for name in OF_CONV)
            )
        )

    def is_of(self, source: Source) -> bool:
        """True if the merged weight was computed from the present values of ``source``."""
        return (
            self.key is not None
            and self.key == source.key(source.tensors)
            and not any(map(is_expired, map(expiring, self._storages)))
        )

    def sums(self, source: Source) -> Iterator[Sum]:
        """Yields the sums that ``add_low_rank`` must compute for the merged weight and bias."""
        pairs = tuple(Factors(a, b, scale) for a, b, _, scale in source.pairs)
        yield Sum(self.layer.weight, source.weight, pairs)
        if self.layer.bias is not None:
            out = self.layer.bias
            own = torch.zeros_like(out) if source.bias is None else source.bias
            biases = [(bias, scale) for _, _, bias, scale in source.pairs if bias is not None]
            yield Sum(out, own, tuple(Factors(b.new_ones(1, 1), b.view(-1, 1), s) for b, s in biases))

    def note(self, source: Source, written: tuple[int, Any]) -> None:
        """Record that the stand-in was computed from ``source``.

        ``written``: (handle of the stream that writes the weights, event after this write).
        """
        tensors = source.tensors
        key = source.key(tensors)
        if self._places != key[:2] or any(map(is_expired, map(expiring, self._storages))):
            self._places = key[:2]
            self._tensors = tensors  # while they are kept, no other tensor can have their ids
            self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._written = written
        self.key = key

    def note_scales(self, key: tuple[Any, ...], scales: tuple[float, ...], written: tuple[int, Any]) -> None:
        """Take note that the stand-in was computed again with other ``scales``. ``key``: the last key."""
        self._written = written
        self.key = (*key[:3], scales)

    def wait(self) -> None:
        """Make the current stream wait until the merged weight is written, and record that it reads it."""
        stream, event = self._written
        weight = self.layer.weight
        _read_on(weight.device)
        if event is not None and current_raw_stream(weight.device.index) != stream:
            torch.cuda.current_stream(weight.device).wait_event(event)

    def free(self) -> None:
        """Free the memory. The parameters stay, without elements, so that a graph's ``Watch`` notices."""
        self.key = None
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.new_empty(0)


# ---- which layers


def know(classes: Iterable[type]) -> None:
    """Record the classes of ``peft_layers.py``, which calls this when it is imported."""
    global _classes
    _classes = tuple(classes)


def is_merged(layer: Any) -> bool:
    """True if ``layer`` is a wrapper that has merged weights."""
    return type(layer) in _classes and layer in _records


def is_allowed(module: nn.Module) -> bool:
    """True unless ``module`` is in a model for which ``allow`` forbade merged weights."""
    return module not in _off


def why_not(layer: Any) -> str | None:
    """Why the wrapper ``layer`` cannot run with merged weights; None if it can."""
    if layer in _short:
        return _NO_MEMORY
    if _kind_of(layer) is None:
        return "its kind of adapter is not merged"
    found = source_of(layer)
    return found if isinstance(found, str) else None


def merged_in(root: nn.Module, path: str = "") -> Merged:
    """Describes the merged layers in ``root``."""
    layers = [module for module in root.modules() if is_merged(module)]
    sizes = [t.nbytes for layer in layers for t in _records[layer].layer.parameters()]
    names = dict.fromkeys(name for layer in layers for name in active_adapters(vars(layer)))
    return Merged(path or type(root).__name__, len(layers), sum(sizes), tuple(names))


def allow(root: nn.Module, merges: bool) -> None:
    """If ``merges``, give the layers in ``root`` merged weights. Otherwise forbid and free merged weights."""
    if not merges:
        release(root)
    for module in root.modules():
        (_off.discard if merges else _off.add)(module)
        _short.discard(module)
    if merges:
        adopt(root)


def must_release(root: nn.Module, merges: bool) -> bool:
    """True if ``allow(root, merges)`` would free merged weights."""
    return not merges and any(map(is_merged, root.modules()))


def _kind_of(layer: Any) -> type | None:
    """The class of ``layer`` if it is a wrapper that can be merged: peft's, or ours once it was adopted.

    None for all other layers.
    """
    if type(layer) in _classes:
        return type(layer)
    kind = type(layer)
    is_known = kind.__module__ == _PEFT and kind.__qualname__ in ("Linear", "Conv2d")
    return kind if is_known else None


# ---- what runs


def plain_layer(layer: Any) -> Any:
    """The layer that fused code runs for ``layer``: its stand-in, brought up to date, or ``layer`` itself."""
    if type(layer) not in _classes:
        return layer
    found = merged_layer(layer)
    return layer if found is None else found


def merged_layer(layer: nn.Module) -> Any:
    """The stand-in of the wrapper ``layer``, brought up to date first. None if peft's code must run."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    record = _records.get(layer)
    if record is None and (layer in _off or layer in _short):
        return None
    _unfuse(layer)
    is_frozen = _is_frozen.get()
    source = source_of(layer)
    if isinstance(source, str) or not (is_frozen or _runs_merged(source.weight)):
        return None
    factor = _factor.get()
    source = source.scaled(factor)
    if record is not None and record.is_of(source) and record.fits(source):
        if not is_frozen:
            record.wait()
        return record.layer
    if is_frozen:
        raise RuntimeError("an adapter changed during the call")
    if source.weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # other code captures this call, and its graph would write the weights at each replay
    try:
        record, *_ = _write([(layer, source), *_outdated_siblings(layer, factor)])
    except torch.OutOfMemoryError:
        _short.add(layer)
        forget(layer)
        return None
    return record.layer


def _outdated_siblings(layer: nn.Module, factor: float) -> list[tuple[nn.Module, Source]]:
    """Other wrappers of the same model whose merged weights are outdated, with their sources.

    The caller computes all of them in one launch.
    """
    found = []
    for other in _siblings.get(layer, ()):
        record = _records.get(other)
        source = None if record is None or other is layer else source_of(other)
        if isinstance(source, Source):
            scaled = source.scaled(factor)
            if record is not None and record.fits(scaled) and not record.is_of(scaled):
                found.append((other, scaled))
    return found


def _runs_merged(weight: Tensor) -> bool:
    return dispatch.has_kernels(weight) and dispatch.is_untraced(weight, ())


def _unfuse(layer: nn.Module) -> None:
    """If adapters of ``layer`` are fused but turned off, subtract them, as peft does in its next call."""
    own: Any = vars(layer)
    if own["_disable_adapters"] and own["merged_adapters"]:
        layer.unmerge()  # type: ignore[operator]


def _write(found: Iterable[tuple[nn.Module, Source]]) -> list[_Record]:
    """Compute the merged weights of the wrappers in ``found``, in the current stream.

    Returns the records of the wrappers.
    """
    global _touches
    found = list(found)
    devices = dict.fromkeys(source.weight.device for _, source in found)
    with _changing, torch.no_grad():
        _touches += 1  # so that every ``Survey`` checks again
        for device in devices:
            _wait_for_readers(device)
        records = []
        for layer, source in found:
            record = _records.get(layer)
            if record is None or not record.fits(source):
                if record is not None:
                    record.free()
                record = _records[layer] = _Record(source)
            record.key = None  # invalid until ``note``
            records.append(record)
        pairs = list(zip(records, found, strict=True))
        add_low_rank([total for record, (_, source) in pairs for total in record.sums(source)])
        written = {device: _written_now(device) for device in devices}
        for record, (_, source) in pairs:
            record.note(source, written[source.weight.device])
    return records


def _wait_for_readers(device: torch.device) -> None:
    """Make the current stream of ``device`` wait for the other streams that read merged weights."""
    if device.type == "cuda":
        for key in [key for key in list(_readers) if key[0] == device.index]:
            stream = _readers.pop(key, None)
            if stream is not None and key[1] != current_raw_stream(device.index):
                torch.cuda.current_stream(device).wait_stream(stream)


def _read_on(device: torch.device) -> None:
    """Record that the current stream of ``device`` reads merged weights."""
    if device.type == "cuda":
        key = device.index, current_raw_stream(device.index)
        if key not in _readers:
            _readers[key] = torch.cuda.current_stream(device)


def _written_now(device: torch.device) -> tuple[int, Any]:
    """Returns (handle of the current stream, event after all of its work so far); (0, None) on a CPU."""
    if device.type != "cuda":
        return 0, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return current_raw_stream(device.index), event


def _stand_in(source: Source) -> Any:
    """A plain layer with the settings of ``source.base`` and new, uninitialized weight and bias."""
    base, weight = source.base, source.weight
    layer: Any = type(base)(*((1,) * _SIZES[type(base)]), device="meta")
    # Only the settings of a plain layer are copied. The base may also have hooks, and other code may have put
    # entries into its ``__dict__``.
    for name, value in vars(layer).items():
        if not isinstance(value, (dict, set)):
            vars(layer)[name] = vars(base)[name]
    # Inference mode is off, because tensors that are made in it are inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        place = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
        bias = weight.new_empty(len(weight)) if source.has_bias else None
        vars(layer)["_parameters"] = {
            "weight": nn.Parameter(place, requires_grad=False),
            "bias": None if bias is None else nn.Parameter(bias, requires_grad=False),
        }
    return layer


# ---- adopting and releasing


def adopt(root: nn.Module) -> list[nn.Module]:
    """Give all wrappers in ``root`` that can be merged a stand-in, and return these wrappers.

    Where no kernels run, nothing is done. If there is not enough memory for all, no wrapper gets a stand-in.
    """
    if _PEFT not in sys.modules or root in _off:
        return []
    from sdfastgn.patches.core.peft_layers import MERGED

    with _changing:
        found = [(m, s) for m in root.modules() if (s := _source_to_adopt(m)) is not None]
        layers = [layer for layer, _ in found]
        for layer, source in found:
            if layer in _records and not _records[layer].fits(source):
                forget(layer)
        missing = [(layer, source) for layer, source in found if layer not in _records]
        try:
            for layer, source in missing:
                _records[layer] = _Record(source)
        except torch.OutOfMemoryError:
            release(root)
            _short.update(layers)
            return []
        for layer, _ in missing:
            if type(layer) in MERGED:
                change_class(layer, MERGED[type(layer)])
        for module in root.modules() if missing else ():
            if hasattr(module, "pack_merged"):
                module.pack_merged()  # type: ignore[operator]
        if missing:
            group = weakref.WeakSet(layers)
            for layer in layers:
                _siblings[layer] = group
    return layers


def _source_to_adopt(module: nn.Module) -> Source | None:
    if _kind_of(module) is None or module in _off or module in _short:
        return None
    source = source_of(module)
    if isinstance(source, str):
        forget(module)
        return None
    return source if _runs_merged(source.weight) else None


def stand_in_of(layer: Any) -> Any:
    """The stand-in of ``layer``, whose weights may be outdated; ``layer`` itself if it has no stand-in."""
    record = _records.get(layer) if type(layer) in _classes else None
    return layer if record is None else record.layer


def release(root: nn.Module) -> None:
    """Undo ``adopt``: give all wrappers in ``root`` peft's class again, and free the merged weights."""
    for module in root.modules():
        if type(module) in _classes:
            restore_class(module)
        leave(module)


def give_back(root: nn.Module) -> int:
    """Free the merged weights in ``root`` because memory is short. Returns the number of freed layers."""
    layers = [module for module in root.modules() if is_merged(module)]
    if layers:
        release(root)
        _short.update(layers)
    return len(layers)


def leave(module: nn.Module) -> None:
    """Remove ``module`` from all tables of this file, and free its merged weights."""
    forget(module)
    _off.discard(module)
    _short.discard(module)


def forget(layer: nn.Module) -> None:
    """Free the merged weights of ``layer``."""
    global _touches
    record = _records.pop(layer, None)
    if record is not None:
        _touches += 1
        record.free()


def may_change(layer: nn.Module) -> None:
    """Mark the merged weights of ``layer`` as outdated, because other code may have changed its weights."""
    global _touches
    if only_reads.get():
        return
    record = _records.get(layer)
    if record is not None:
        record.key = None
        _touches += 1


@contextmanager
def frozen() -> Iterator[None]:
    """A context in which merged weights are never written. A call with outdated ones raises RuntimeError."""
    token = _is_frozen.set(True)
    try:
        yield
    finally:
        _is_frozen.reset(token)


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """A context in which all scales of adapters are multiplied by ``factor``."""
    token = _factor.set(factor)
    try:
        yield
    finally:
        _factor.reset(token)


class Survey:
    """Keeps all merged weights of the model ``root`` up to date for its CUDA graphs.

    The constructor also adopts layers that are new.

    Attributes:
        layers: the wrappers in ``root`` that run with merged weights.
        takes_scale: True if all layers with adapters in ``root`` are merged. Then a scale that is an argument
            of the model's call can become part of the merged weights.
        reason: why the last ``refresh`` returned False.
    """

    def __init__(self, root: nn.Module) -> None:
        self.layers = adopt(root)
        merged = set(self.layers)
        self.takes_scale = _PEFT not in sys.modules or all(
            module in merged for module in root.modules() if hasattr(type(module), "scale_layer")
        )
        self.reason = ""
        self._records = [_records[layer] for layer in self.layers]
        self._devices = list(dict.fromkeys(record.layer.weight.device for record in self._records))
        self._factor: float | None = None
        self._before: list[Any] = []
        self._sums: LowRankSums | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The merged weights and biases."""
        return [p for record in self._records for p in record.layer.parameters()]

    def refresh(self, factor: float = 1.0) -> bool:
        """Bring all merged weights up to date, in the current stream.

        Returns False if a layer cannot be merged any more, or if its stand-in no longer fits.

        ``factor``: number by which all scales are multiplied.
        """
        try:
            return not self.layers or self._refresh(factor)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError) as error:
            # Another thread is adding or deleting an adapter, so peft's dicts change or do not match.
            self._factor = None
            self.reason = f"its adapters were changed during a call: {one_line(error)}"
            return False

    def _refresh(self, factor: float) -> bool:
        for device in self._devices:
            _read_on(device)
        if self._factor is not None and not any(map(is_expired, self._storage_ids)):
            seen = self._seen()
            if seen == self._before and factor == self._factor:
                return True
            if self._differ_in_scales(seen):
                self._factor = None
                if self._rescale(factor):
                    seen[0] = _touches
                    self._before, self._factor = seen, factor
                    return True
        self._factor = self._sums = None
        if not self._find():
            return False
        found = []
        for layer, record, source in zip(self.layers, self._records, self._sources, strict=True):
            scaled = source.scaled(factor)
            if not (_records.get(layer) is record and record.fits(scaled)):
                self.reason = "a layer with an adapter has other memory or settings"
                return False
            if not record.is_of(scaled):
                found.append((layer, scaled))
        if found:
            _write(found)
            self._before[0] = _touches
        self._factor = factor
        return True

    def _differ_in_scales(self, seen: list[Any]) -> bool:
        """True if ``seen`` has at most other scales than before, and only plain numbers."""
        before = self._before
        return (
            seen[:_SCALES] == before[:_SCALES]
            and seen[_SCALES + 1 :] == before[_SCALES + 1 :]
            and set(map(type, seen[_SCALES])) <= {float, int}
        )

    def _rescale(self, factor: float) -> bool:
        """Write all merged weights again, with the present scales times ``factor``.

        Nothing but scales may have changed since the last refresh. Returns False, and writes nothing, if
        another thread has changed a layer meanwhile.
        """
        global _touches
        if self._sums is None:
            pairs = zip(self._records, self._sources, strict=True)
            self._sums = LowRankSums([total for record, source in pairs for total in record.sums(source)])
            self._names = [active_adapters(own) for own in self._owns]
            self._have_bias = [
                [name for name, pair in zip(names, source.pairs, strict=True) if pair[2] is not None]
                for names, source in zip(self._names, self._sources, strict=True)
            ]
        scales: list[float] = []
        of_records = []
        for own, names, have_bias in zip(self._owns, self._names, self._have_bias, strict=True):
            now = own["scaling"]
            of_records.append(tuple([now[name] * factor for name in names]))
            scales += of_records[-1]
            scales += [now[name] * factor for name in have_bias]
        with _changing, torch.no_grad():
            keys = [record.key for record in self._records]
            if None in keys:
                return False
            _touches += 1  # another ``Survey`` may expect other values
            for device in self._devices:
                _wait_for_readers(device)
            for record in self._records:
                record.key = None  # invalid until ``note_scales``
            self._sums.compute(scales)
            written = {device: _written_now(device) for device in self._devices}
            for record, key, own_scales in zip(self._records, keys, of_records, strict=True):
                record.note_scales(key, own_scales, written[record.layer.weight.device])
        return True

    def _find(self) -> bool:
        """Find the sources of all merged weights. Returns False if a layer cannot be merged any more."""
        for layer in self.layers:
            _unfuse(layer)
        self._look()
        self._sources: list[Source] = []
        for layer in self.layers:
            source = source_of(layer)
            if isinstance(source, str) or not _runs_merged(source.weight):
                why = source if isinstance(source, str) else "no kernels run"
                self.reason = f"an adapter cannot be merged any more: {why}"
                return False
            self._sources.append(source)
        return True

    def _look(self) -> None:
        """Collect the dicts and tensors that ``_seen`` reads, and store its present result."""
        owns = list(map(vars, self.layers))
        bases = [own["_modules"]["base_layer"] for own in owns]
        parts = [own["_modules"][side]._modules for own in owns for side in ("lora_A", "lora_B")]
        adapters = [module for part in parts for module in part.values()]
        running = [*self.layers, *bases, *adapters]
        self._owns = owns
        self._children = [own["_modules"] for own in owns] + parts
        self._running = running
        self._dicts = list(map(vars, running))
        self._hooks = [vars(module)[name] for module in running for name in _HOOKS]
        self._parameters = [module._parameters for module in (*bases, *adapters)]
        self._convs = [vars(module) for module in (*bases, *adapters) if type(module) is nn.Conv2d]
        self._tensors = [t for part in self._parameters for t in part.values() if t is not None]
        # While these are kept, no other object can have their ids.
        self._kept = [child for children in self._children for child in children.values()]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors]
        self._storage_ids = list(map(expiring, self._storages))
        self._before = self._seen()

    def _seen(self) -> list[Any]:
        """Values that change if a merged weight would change. The lists are built and compared in C."""
        owns = self._owns
        scales = list(map(_scales_of, owns))
        return [
            _touches,
            list(map(type, self._running)),
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, chain.from_iterable(map(dict.values, self._parameters)))),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(version_of, self._tensors)),
            list(map(_disabled_of, owns)),
            list(map(len, map(_fused_of, owns))),
            list(chain.from_iterable(map(_active_of, owns))),
            list(map(type, scales)),
            list(chain.from_iterable(map(dict.values, scales))),
            list(map(_settings_of, self._convs)),
            list(map(len, self._dicts)),
            any(self._hooks),
        ]


# Index of the scales in what ``Survey._seen`` returns.
_SCALES = 10
_disabled_of = itemgetter("_disable_adapters")
_fused_of = itemgetter("merged_adapters")
_active_of = itemgetter("_active_adapter")
_scales_of = itemgetter("scaling")
_settings_of = itemgetter(*OF_CONV)
