"""Keeps the merged weights of all LoRA layers of a model up to date at once.

A *wrapper* is peft's LoRA layer around a layer of the model. A *merged weight* is a copy of the layer's
weight to which the adapters were added. CUDA graphs and plans (traced lists of kernels) read merged weights
without running the wrappers' Python. So an ``AdapterSurvey`` compares everything from which the merged
weights are computed with what it was before, for all wrappers at once. Merged weights that are outdated are
computed again.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import expiring, is_expired, refers_to, version_of
from sdfastgn.kernels.low_rank.op import LowRankSums
from sdfastgn.patches.lora.contents import Contents
from sdfastgn.patches.lora.merged_weights import Record, is_record_of, read_on, records, write_prepared
from sdfastgn.patches.lora.merging import adopt, runs_merged, unfuse
from sdfastgn.patches.lora.prepared_sources import PreparedLayer
from sdfastgn.patches.lora.sources import (
    OF_CONV,
    Source,
    active_adapters,
    is_class_of_scales,
    source_of,
)
from sdfastgn.patches.lora.wrappers import PEFT

# ``_objects_now`` returns a list of lists. The list at the first of these indices has the addresses of the
# tensors from which merged weights are computed, the list at the second has those of the merged weights.
_ADDRESSES, _MERGED = 3, 4
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class AdapterSurvey:
    """Keeps all merged weights of the model ``root`` up to date for its CUDA graphs.

    ``refresh`` compares everything from which the merged weights are computed. If a graph waited for this,
    the GPU would be idle for up to a millisecond in each call. So each call compares in three steps:

    - ``has_same_settings`` runs before the graph is started. It is quick, and notices what users usually
      change: active adapters and scales.
    - ``has_same_tensors`` compares the tensors and layers while the GPU runs the graph.
    - ``has_same_contents`` says whether the tensors have the same contents. PyTorch does not count all
      writes, so the GPU compares the contents while it runs the graph.

    The constructor also gives merged weights to layers that have none yet (``adopt`` in ``merging.py``). With
    ``merges=False`` no layer counts as merged: LoRA layers run peft's code.

    Attributes:
        layers: peft's LoRA layers in ``root`` that run with merged weights.
        takes_scale: True if all layers with adapters in ``root`` are merged. Then a scale for all adapters
            that is an argument of the model's call can become part of the merged weights.
        reason: why the last ``refresh`` returned False.
    """

    def __init__(self, root: nn.Module, merges: bool = True) -> None:
        self.layers = adopt(root) if merges else []
        merged = set(self.layers)
        self.takes_scale = PEFT not in sys.modules or all(
            module in merged for module in root.modules() if hasattr(type(module), "scale_layer")
        )
        self.reason = ""
        self._records = [records[layer] for layer in self.layers]
        self._merged = self.parameters
        self._prepared = list(map(PreparedLayer, self.layers, self._records))
        self._devices = list(dict.fromkeys(record.layer.weight.device for record in self._records))
        self._tensors: list[Tensor] = []
        self._storages: list[StorageWeakRef] = []
        self._factor: float | None = None
        self._settings: list[Any] = []
        self._objects: list[Any] = []
        self._names: list[list[str]] | None = None
        self._sums: LowRankSums | None = None
        self._places: list[int] = []
        self._contents: Contents | None = None
        self._compared: list[Tensor] = []  # tensors that ``_contents`` compares

    @property
    def parameters(self) -> list[Tensor]:
        """All merged weights and biases of the model."""
        return [p for record in self._records for p in record.layer.parameters()]

    @property
    def stand_ins(self) -> dict[nn.Module, nn.Module]:
        """A dict from each plain layer with merged weights to the model's own layer that it replaces.

        The own layer is inside peft's LoRA layer.
        """
        bases = (layer._modules["base_layer"] for layer in self.layers)
        return {record.layer: base for record, base in zip(self._records, bases, strict=True)}  # type: ignore[misc]

    def add_reader(self, reader: Any) -> None:
        """Let ``reader.release`` be called when a merged weight is freed. A reader is, say, a CUDA graph.

        Only a weak reference to ``reader`` is kept.
        """
        for record in self._records:
            record.readers.add(reader)

    def refresh(self, factor: float = 1.0, compares_later: bool = False) -> bool:
        """Compute all outdated merged weights in the current stream. Returns True if all are up to date.

        Returns False instead if the adapters of a layer cannot be merged any more, or if another thread
        changes the adapters meanwhile. Also returns False if the plain layer that runs with merged weights in
        place of a LoRA layer has another shape, dtype or setting than is needed now.

        Args:
            factor: number by which all scales are multiplied.
            compares_later: True if the caller calls ``has_same_tensors`` before it uses a result that was
                computed with the merged weights. Then this method compares only the tensors' addresses, if
                nothing but active adapters or scales has changed.
        """
        try:
            return not self.layers or self._refresh(factor, compares_later)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError) as error:
            # If another thread is adding or deleting an adapter, peft's dicts change or do not fit together.
            self._factor = None
            self.reason = f"its adapters were changed during a call: {one_line(error)}"
            return False

    def has_same_settings(self, factor: float) -> bool:
        """True if the active adapters, their scales and ``factor`` are the same as in the last ``refresh``.

        This method also records that the current stream is about to read the merged weights, so that the next
        write of merged weights waits for this stream. A later ``has_same_contents`` sees everything that the
        current stream has written up to now.
        """
        if not self.layers:
            return True
        for device in self._devices:
            read_on(device)
        if self._contents is not None:
            self._contents.begin()
        return self._has_same_settings(factor)

    def is_current(self, factor: float) -> bool:
        """True if settings, tensors and merged weights are the same as after the last ``refresh``.

        Settings are the active adapters and their scales. The contents of tensors are not compared, but a
        write into a merged weight is noticed.
        """
        try:
            return not self.layers or (self._has_same_settings(factor) and self._has_same_objects())
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False

    def is_written(self, factor: float) -> bool:
        """True if all merged weights are up to date, no matter which code has written them.

        This method looks at each layer, but gives the GPU no work. So it may be called while a CUDA graph is
        captured. The contents of tensors are not compared.
        """
        try:
            return all(map(partial(_is_written, factor=factor), self.layers, self._records))
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False

    def wait(self) -> None:
        """Make the current stream wait until all merged weights are written."""
        for record in {id(record.written): record for record in self._records}.values():
            record.wait()

    def _has_same_settings(self, factor: float) -> bool:
        try:
            return factor == self._factor and self._settings_now() == self._settings
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False

    def has_same_tensors(self) -> bool:
        """True if all weights, and all layers of the adapters, are the same as in the last ``refresh``.

        If they are, the GPU begins to compare the contents of the weights: ``has_same_contents`` returns the
        result.
        """
        if not self.layers:
            return True
        try:
            is_same = self._has_same_objects()
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False
        if is_same and self._contents is not None:
            self._contents.look(self._compared)
        return is_same

    def has_same_contents(self) -> bool:
        """True if the tensors behind the merged weights have the same contents as in the last ``refresh``.

        If not, all merged weights are marked as outdated. This method waits for the work that the GPU got
        before the last ``has_same_settings``, but not for later work.
        """
        if self._contents is None or self._contents.looked_same():
            return True
        self._touch()
        return False

    def _touch(self) -> None:
        """Mark all merged weights as outdated."""
        for record in self._records:
            record.touch()

    def _has_same_objects(self) -> bool:
        return (
            self._factor is not None
            and not any(map(is_expired, self._storage_ids))
            and self._objects_now() == self._objects
        )

    def _has_same_values(self) -> bool:
        """True if the layers and tensors behind the merged weights are as in the last ``refresh``.

        The contents of the tensors are compared too. This method waits for the GPU.
        """
        return (
            self._has_same_objects()
            and self._contents is not None
            and self._contents.are_same(self._compared)
        )

    def _note(self) -> None:
        """Mark all merged weights as outdated, unless the tensors behind them have the recorded contents.

        Merged weights are computed from these tensors. Their new contents are recorded.
        """
        # Only tensors on the devices of the merged weights are compared. Inactive adapters may be in main
        # memory, where diffusers' ``set_lora_device`` puts them.
        self._compared = [tensor for tensor in self._tensors if tensor.device in self._devices]
        has_contents = self._contents is not None and self._contents.are_of(self._compared)
        if has_contents and self._contents.are_same(self._compared):  # type: ignore[union-attr]
            return
        self._touch()
        self._settings[0] = self._touches()
        if has_contents:
            self._contents.note(self._compared)  # type: ignore[union-attr]
        else:
            own = {id(t) for part in self._parameters[: len(self.layers)] for t in part.values()}
            self._contents = Contents(self._compared, [id(tensor) not in own for tensor in self._compared])

    def _is_in_place(self) -> bool:
        """True if merged weights, and the tensors behind them, are where they were in the last ``refresh``.

        A change of the tensors' contents is not noticed.
        """
        return (
            self._factor is not None
            and not any(map(is_expired, self._storage_ids))
            and list(map(Tensor.data_ptr, self._tensors)) == self._objects[_ADDRESSES]
            and list(map(Tensor.data_ptr, self._merged)) == self._objects[_MERGED]
        )

    def _refresh(self, factor: float, compares_later: bool) -> bool:
        for device in self._devices:
            read_on(device)
        if self._is_in_place() if compares_later else self._has_same_values():
            settings = self._settings_now()
            if settings == self._settings and factor == self._factor:
                return True
            if self._differ_in_adapters(settings):
                self._factor = None
                count = self._write(factor, settings)
                if count is not None:
                    self._settings, self._factor = [settings[0] + count, *settings[1:]], factor
                    return True
        self._factor = self._names = self._sums = None
        if not self._find():
            return False
        self._note()
        count = self._write(factor)
        if count is None:
            self.reason = "another thread has changed its adapters"
            return False
        self._settings[0] += count
        self._factor = factor
        return True

    def _differ_in_adapters(self, settings: list[Any]) -> bool:
        """True if only active adapters and scales in ``settings`` have changed since the last ``refresh``.

        False also if adapters are fused into weights, or if a scale is no number.
        """
        (touched, _, fused, _, kinds, scales), old = settings, self._settings
        is_same = (touched, fused, kinds) == (old[0], old[2], old[4])
        return is_same and not any(fused) and all(map(is_class_of_scales, set(map(type, scales))))

    def _write(self, factor: float, settings: list[Any] | None = None) -> int | None:
        """Writes all merged weights that are outdated.

        Each adapter of a layer was prepared before (``PreparedLayer``), and here the active ones are combined
        with their scales, each multiplied by ``factor``. Returns the number of layers whose merged weights
        were written. Returns None if the adapters of a layer cannot be combined, or if another thread has
        changed a layer meanwhile. Then nothing was written.

        ``settings``: what ``_settings_now`` returns at present, if only active adapters and scales may have
        changed since the last ``refresh``. None if more may have changed.
        """
        names = self._names
        if names is None or settings is None or settings[1:4] != self._settings[1:4]:
            names = list(map(active_adapters, self._owns))
        changed = [pair for pair in zip(self._prepared, names, strict=True) if pair[0].names != pair[1]]
        if changed:
            self._names = self._sums = None
            if not all(layer.combine(its_names) for layer, its_names in changed):
                return None
        outdated, places = [], []
        flat: list[float] = []
        for place, (layer, own, its_names) in enumerate(zip(self._prepared, self._owns, names, strict=True)):
            now, record = own["scaling"], layer.record
            scales = tuple([float(now[name]) * factor for name in its_names])
            key = (*layer.key, scales)
            if record.has_key(key):
                # Another stream may still be writing this layer's merged weight, for a call without a CUDA
                # graph.
                record.wait()
                continue
            outdated.append((record, key, layer.kept))
            places.append(place)
            flat += scales
            if layer.with_bias:
                flat += [float(now[name]) * factor for name in layer.with_bias]
        self._names = names
        if not outdated:
            return 0
        if self._sums is None or places != self._places:
            layers = [self._prepared[place] for place in places]
            sums = [total for layer in layers for total in layer.sums]
            self._sums = LowRankSums(sums, [each for layer in layers for each in layer.prepared])
            self._places = places
        is_written = write_prepared(
            outdated, self._sums, flat, lambda: settings is None or settings[0] == self._touches()
        )
        return len(outdated) if is_written else None

    def _find(self) -> bool:
        """Find the tensors and scales for all merged weights.

        Returns False if a layer cannot be merged any more.
        """
        for layer in self.layers:
            unfuse(layer)
        self._look()
        self._sources: list[Source] = []
        for layer in self.layers:
            source = source_of(layer)
            if isinstance(source, str) or not runs_merged(source.weight):
                why = source if isinstance(source, str) else "no kernels run"
                self.reason = f"an adapter cannot be merged any more: {why}"
                return False
            self._sources.append(source)
        return self._prepare()

    def _prepare(self) -> bool:
        """Prepare the adapters of all layers, so that they can be added to the weights with any scales later.

        Returns False if the plain layer that runs with a layer's merged weights was replaced, or if its
        memory or settings do not fit any more.
        """
        storages = dict(zip(map(id, self._tensors), self._storages, strict=True))
        for layer, own, record, source, prepared in zip(
            self.layers, self._owns, self._records, self._sources, self._prepared, strict=True
        ):
            if not is_record_of(layer, record, source):
                self.reason = "a layer with an adapter has other memory or settings"
                return False
            prepared.update(source, active_adapters(own), storages)
        return True

    def _look(self) -> None:
        """Collect the layers, dicts and tensors that later calls compare, and store their state."""
        owns = list(map(vars, self.layers))
        bases = [own["_modules"]["base_layer"] for own in owns]
        parts = [own["_modules"][side]._modules for own in owns for side in ("lora_A", "lora_B")]
        adapters = [module for part in parts for module in part.values()]
        running = [*self.layers, *bases, *adapters]
        self._owns = owns
        self._children = [own["_modules"] for own in owns] + parts
        self._running = running
        self._dicts = list(map(vars, running))
        self._hooks = list(chain.from_iterable(map(_hooks_of, self._dicts)))
        self._parameters = [module._parameters for module in (*bases, *adapters)]
        self._convs = [vars(module) for module in (*bases, *adapters) if type(module) is nn.Conv2d]
        # Weak references to storages that are still right are used again, because making and freeing a new
        # one takes a microsecond.
        known = dict(zip(map(id, self._tensors), self._storages, strict=True))
        tensors = [t for part in self._parameters for t in part.values() if t is not None]
        # ``_kept`` keeps the layers' children alive, so that no other object gets their ids.
        self._kept = [child for children in self._children for child in children.values()]
        storages = [_storage_of(tensor, known.get(id(tensor))) for tensor in tensors]
        self._tensors, self._storages = tensors, storages
        self._storage_ids = list(map(expiring, self._storages))
        self._settings, self._objects = self._settings_now(), self._objects_now()

    def _touches(self) -> int:
        """A number that grows with each event after which merged weights must be checked again."""
        return sum(map(_touches_of, self._records))

    # ``_settings_now`` and ``_objects_now`` run at each call. To be quick, they make lists with ``map``, and
    # their callers compare the lists with ``==``: both loops run in C.

    def _settings_now(self) -> list[Any]:
        """Returns all settings that ``set_adapters``, ``fuse_lora`` and similar functions change.

        The last item of the list has all scales.
        """
        owns = self._owns
        scales = list(map(_scales_of, owns))
        return [
            self._touches(),
            list(map(_disabled_of, owns)),
            list(map(len, map(_fused_of, owns))),
            list(map(tuple, map(_active_of, owns))),  # copies, because the lists may change in place
            list(map(type, scales)),
            list(chain.from_iterable(map(dict.values, scales))),
        ]

    def _objects_now(self) -> list[Any]:
        """Returns types, ids, addresses and versions of all objects from which merged weights are computed.

        These are the layers, their tensors and their hooks.
        """
        return [
            list(map(type, self._running)),
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, chain.from_iterable(map(dict.values, self._parameters)))),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(Tensor.data_ptr, self._merged)),
            list(map(version_of, self._tensors)),
            list(map(_settings_of, self._convs)),
            list(map(len, self._dicts)),
            list(map(id, chain.from_iterable(map(dict.values, filter(None, self._hooks))))),
        ]


def _is_written(layer: nn.Module, record: Record, *, factor: float) -> bool:
    source = source_of(layer)
    if isinstance(source, str) or records.get(layer) is not record:
        return False
    scaled = source.scaled(factor)
    return record.is_of(scaled) and record.fits(scaled)


def _storage_of(tensor: Tensor, known: StorageWeakRef | None) -> StorageWeakRef:
    """Returns a weak reference to the storage of ``tensor``.

    If ``known`` is a reference to this storage, ``known`` itself is returned, because making a new reference
    takes a microsecond.
    """
    is_right = known is not None and refers_to(known, tensor)
    return known if is_right else StorageWeakRef(tensor.untyped_storage())  # type: ignore[return-value]


_touches_of = attrgetter("touches")
_hooks_of = itemgetter(*_HOOKS)
_disabled_of = itemgetter("_disable_adapters")
_fused_of = itemgetter("merged_adapters")
_active_of = itemgetter("_active_adapter")
_scales_of = itemgetter("scaling")
_settings_of = itemgetter(*OF_CONV)
