"""Keeps the merged weights of a whole model up to date for its CUDA graphs (``merged_adapters.py``)."""

from __future__ import annotations

import sys
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import expiring, is_expired, version_of
from sdfastgn.kernels.low_rank.op import LowRankSums
from sdfastgn.patches.core.adapter_sources import OF_CONV, Source, active_adapters, source_of
from sdfastgn.patches.core.merged_adapters import PEFT, adopt, runs_merged, unfuse
from sdfastgn.patches.core.merged_weights import read_on, records, rescale, touches, write

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Survey:
    """Keeps all merged weights of the model ``root`` up to date for its CUDA graphs.

    ``refresh`` compares everything from which the merged weights are computed. If a graph waited for this,
    the GPU would be idle for up to a millisecond in each call. So each call compares in two parts.
    ``has_same_settings`` runs before the graph is started. It is quick, and notices what users usually
    change. ``has_same_tensors`` compares the rest while the GPU runs the graph.

    The constructor also gives stand-ins to wrappers that have none yet (``adopt`` in ``merged_adapters.py``).

    Attributes:
        layers: the wrappers in ``root`` that run with merged weights.
        takes_scale: True if all layers with adapters in ``root`` are merged. Then a scale that is an argument
            of the model's call can become part of the merged weights.
        reason: why the last ``refresh`` returned False.
    """

    def __init__(self, root: nn.Module) -> None:
        self.layers = adopt(root)
        merged = set(self.layers)
        self.takes_scale = PEFT not in sys.modules or all(
            module in merged for module in root.modules() if hasattr(type(module), "scale_layer")
        )
        self.reason = ""
        self._records = [records[layer] for layer in self.layers]
        self._devices = list(dict.fromkeys(record.layer.weight.device for record in self._records))
        self._factor: float | None = None
        self._settings: list[Any] = []
        self._objects: list[Any] = []
        self._sums: LowRankSums | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The merged weights and biases."""
        return [p for record in self._records for p in record.layer.parameters()]

    def refresh(self, factor: float = 1.0) -> bool:
        """Bring all merged weights up to date, in the current stream.

        Returns False if the adapters of a layer cannot be merged any more, or if the plain layer that holds
        its merged weights (its stand-in) has another shape, dtype or setting than they need.

        ``factor``: number by which all scales are multiplied.
        """
        try:
            return not self.layers or self._refresh(factor)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError) as error:
            # Another thread is adding or deleting an adapter, so peft's dicts change or do not fit together.
            self._factor = None
            self.reason = f"its adapters were changed during a call: {one_line(error)}"
            return False

    def has_same_settings(self, factor: float) -> bool:
        """True if the adapters that are active, their scales and ``factor`` are as in the last refresh.

        Also records that the current stream is about to read the merged weights. The next write waits for it.
        """
        if not self.layers:
            return True
        for device in self._devices:
            read_on(device)
        try:
            return factor == self._factor and self._settings_now() == self._settings
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False

    def has_same_tensors(self) -> bool:
        """True if all weights, and all layers of the adapters, are as in the last refresh."""
        if not self.layers:
            return True
        try:
            return self._has_same_objects()
        except (AttributeError, LookupError, RuntimeError):  # another thread changes peft's dicts
            return False

    def _has_same_objects(self) -> bool:
        return (
            self._factor is not None
            and not any(map(is_expired, self._storage_ids))
            and self._objects_now() == self._objects
        )

    def _refresh(self, factor: float) -> bool:
        for device in self._devices:
            read_on(device)
        if self._has_same_objects():
            settings = self._settings_now()
            if settings == self._settings and factor == self._factor:
                return True
            if self._differ_in_scales(settings):
                self._factor = None
                if self._rescale(factor):
                    self._settings, self._factor = [touches(), *settings[1:]], factor
                    return True
        self._factor = self._sums = None
        if not self._find():
            return False
        found = []
        for layer, record, source in zip(self.layers, self._records, self._sources, strict=True):
            scaled = source.scaled(factor)
            if not (records.get(layer) is record and record.fits(scaled)):
                self.reason = "a layer with an adapter has other memory or settings"
                return False
            if record.is_of(scaled):
                record.wait()  # an eager call may have written the weights in another stream: wait for it
            else:
                found.append((layer, scaled))
        if found:
            write(found)
            self._settings[0] = touches()
        self._factor = factor
        return True

    def _differ_in_scales(self, settings: list[Any]) -> bool:
        """True if nothing but scales differs from the last settings, and all scales are plain numbers."""
        *others, scales = settings
        return others == self._settings[:-1] and set(map(type, scales)) <= {float, int}

    def _rescale(self, factor: float) -> bool:
        """Writes all merged weights again, with the present scales times ``factor``.

        Nothing but scales may have changed since the last refresh. Returns False, and writes nothing, if
        another thread has changed a layer meanwhile.
        """
        if self._sums is None:
            pairs = zip(self._records, self._sources, strict=True)
            self._sums = LowRankSums([total for record, source in pairs for total in record.sums(source)])
            self._names = [active_adapters(own) for own in self._owns]
            self._have_bias = [
                [name for name, pair in zip(names, source.pairs, strict=True) if pair[2] is not None]
                for names, source in zip(self._names, self._sources, strict=True)
            ]
        flat: list[float] = []
        scales = []
        for own, names, have_bias in zip(self._owns, self._names, self._have_bias, strict=True):
            now = own["scaling"]
            scales.append(tuple([now[name] * factor for name in names]))
            flat += scales[-1]
            flat += [now[name] * factor for name in have_bias]
        return rescale(self._records, self._sums, scales, flat)

    def _find(self) -> bool:
        """Find the sources of all merged weights. Returns False if a layer cannot be merged any more."""
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
        return True

    def _look(self) -> None:
        """Collect the dicts and tensors that are compared, and store their present values."""
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
        # Keeps the objects alive, so that no other object gets their ids.
        self._kept = [child for children in self._children for child in children.values()]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors]
        self._storage_ids = list(map(expiring, self._storages))
        self._settings, self._objects = self._settings_now(), self._objects_now()

    # The next two methods run at each call. To be quick, they return lists that ``map`` and ``==`` handle in
    # C.

    def _settings_now(self) -> list[Any]:
        """All settings that ``set_adapters``, ``fuse_lora`` and similar functions change.

        The last item has all scales.
        """
        owns = self._owns
        scales = list(map(_scales_of, owns))
        return [
            touches(),
            list(map(_disabled_of, owns)),
            list(map(len, map(_fused_of, owns))),
            list(chain.from_iterable(map(_active_of, owns))),
            list(map(type, scales)),
            list(chain.from_iterable(map(dict.values, scales))),
        ]

    def _objects_now(self) -> list[Any]:
        """All else from which the merged weights are computed: layers, tensors and hooks."""
        return [
            list(map(type, self._running)),
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, chain.from_iterable(map(dict.values, self._parameters)))),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(version_of, self._tensors)),
            list(map(_settings_of, self._convs)),
            list(map(len, self._dicts)),
            any(self._hooks),
        ]


_disabled_of = itemgetter("_disable_adapters")
_fused_of = itemgetter("merged_adapters")
_active_of = itemgetter("_active_adapter")
_scales_of = itemgetter("scaling")
_settings_of = itemgetter(*OF_CONV)
