"""Merges LoRA adapters: a layer with adapters runs as one plain layer with the weight W + sum(scale * B @ A).

A *wrapper* is peft's LoRA layer around a layer of the model (``wrappers.py``). A *stand-in* is the plain
layer that runs in place of a wrapper: an ``nn.Linear`` or ``nn.Conv2d`` with memory of its own for the
*merged weight*, W + the sum of scale * B @ A. Fused code gets the stand-in from ``plain_layer``. The model's
parameters are never changed.

``adopt`` gives a wrapper its stand-in, and changes the wrapper's class to one of ``peft_layers.py``, whose
``forward`` runs the stand-in. Each call checks whether the merged weight is up to date. It compares the
active adapters, their scales, and the identity, address and version of each tensor with those from which the
weight was computed. PyTorch does not count all writes in the version, so the contents of the tensors are
compared too (``contents.py``). If anything differs, the merged weight is computed again into the same memory.
So a CUDA graph that reads this memory stays valid.

- Calls without CUDA graphs compare layer by layer (``merged_layer``). At the first layer of each call of the
  model, the contents of all layers are compared (``_group_of``).
- A CUDA graph, or a plan (a traced list of kernels), reads merged weights without running the layers. So an
  ``AdapterSurvey`` compares all layers of a model at once, in loops that run in C. If the graph has read old
  weights, it runs again.

With gradients nothing is merged (``trained_adapters.py``). A wrapper runs peft's own code in these cases:
under a compiler, in a trace, where sdfastgn's kernels do not run, if merging is forbidden (``allow``), if
there is not enough memory for the merged weight, and if ``source_of`` returns a reason, such as other code's
hooks, dropout or DoRA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.lora.contents import Calls, Contents
from sdfastgn.patches.lora.merged_weights import (
    Record,
    changing,
    forget,
    new_record,
    only_reads,
    records,
    write,
)
from sdfastgn.patches.lora.sources import Source, active_adapters, source_of, state_of
from sdfastgn.patches.lora.wrappers import has_subclass, is_wrapper, subclasses
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import restore_class

_NO_MEMORY = "there was no memory for merged weights"

# A dict from each of peft's LoRA layers to all LoRA layers of the same model.
_siblings: weakref.WeakKeyDictionary[nn.Module, _Siblings] = weakref.WeakKeyDictionary()
# All modules of the models for which ``allow`` has forbidden merged weights.
_off: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# LoRA layers that get no merged weights, because memory was too short. They run peft's code.
_short: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# A dict from a model to the configurations of the adapters that it had when ``adopt_new`` last looked. The
# configurations are kept alive, so that no other configuration gets their ids.
_adopted: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
# True while a CUDA graph is captured (``frozen``): merged weights may be read, but must not be written.
_is_frozen: ContextVar[bool] = ContextVar("sdfastgn_frozen_adapters", default=False)
# The factor by which the running call multiplies the scales of all adapters. It comes from the arguments of
# the call.
_factor: ContextVar[float] = ContextVar("sdfastgn_adapter_factor", default=1.0)


@dataclass(frozen=True)
class Merged:
    """Describes the layers of one model that run with merged weights, for the report.

    Attributes:
        path: the model's path in the pipeline; the name of the model's class if it is in no pipeline.
        layers: number of layers that run with merged weights.
        bytes: size of the merged weights, in bytes.
        adapters: names of the adapters that are active in at least one of the layers.
    """

    path: str
    layers: int
    bytes: int
    adapters: tuple[str, ...]


class _Siblings:
    """peft's LoRA layers of one model. One launch computes all their merged weights that are outdated.

    Attributes:
        layers: the LoRA layers.
        calls: tells when a new call of the model begins.
        batches: a pair for each set of merged weights that were computed together: (checksums of the
            tensors from which they were computed, the ``Record`` of each merged weight).
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = weakref.WeakSet(layers)
        self.calls = Calls()
        self.batches: list[tuple[Contents, list[Record]]] = []

    def compare(self) -> None:
        """Mark merged weights as outdated if the tensors behind them have other contents now.

        Merged weights that an ``AdapterSurvey`` has written for a CUDA graph are marked too, because the
        contents from which they were computed are not known here.
        """
        batches, self.batches = self.batches, []
        for contents, written in batches:
            if contents.are_same([tensor for record in written for tensor in record.tensors]):
                self.batches.append((contents, written))
        covered = {id(record) for _, written in self.batches for record in written}
        for record in filter(None, map(records.get, self.layers)):
            if id(record) not in covered:
                record.touch()

    def write(self, found: list[tuple[nn.Module, Source]]) -> list[Record]:
        """Compute the merged weights of the LoRA layers in ``found``, (layer, source).

        Returns a ``Record`` for each layer: the merged weights, and what they were computed from.
        """
        # Only layers in ``changed`` have new tensors. The others have new scales, so the contents that were
        # recorded for their tensors stay valid.
        changed = [pair for pair in found if _has_other_sources(*pair)]
        contents = _contents_of([source for _, source in changed]) if changed else None
        made = write(found)
        if contents is not None:
            written = [records[layer] for layer, _ in changed]
            new = set(map(id, written))
            self.batches = [each for each in self.batches if not new.issuperset(map(id, each[1]))]
            self.batches.append((contents, written))
        return made


def _has_other_sources(layer: nn.Module, source: Source) -> bool:
    """True if the merged weight of ``layer`` was computed from other tensors than those of ``source``.

    True also if there is no merged weight, or if it is outdated.
    """
    record = records.get(layer)
    return record is None or record.key is None or record.key[:-1] != state_of(source.tensors)


def _contents_of(sources: Iterable[Source]) -> Contents:
    """Records the present contents of all tensors in ``sources``, to find out later if they have changed.

    A later comparison reads the adapters' matrices wholly, and of each layer's own weight only a part.
    """
    tensors, whole = [], []
    for source in sources:
        of_layer = (source.weight, source.bias)
        for tensor in source.tensors:
            tensors.append(tensor)
            whole.append(all(tensor is not own for own in of_layer))
    return Contents(tensors, whole)


# ---- which of peft's LoRA layers run with merged weights


def is_merged(layer: Any) -> bool:
    """True if ``layer`` is peft's LoRA layer, and has a plain layer with merged weights that runs instead."""
    return has_subclass(layer) and layer in records


def is_allowed(module: nn.Module) -> bool:
    """True unless ``module`` is in a model for which ``allow`` forbade merged weights."""
    return module not in _off


def why_not(layer: Any) -> str | None:
    """Why peft's layer ``layer`` cannot run with merged weights; None if it can."""
    if layer in _short:
        return _NO_MEMORY
    if not is_wrapper(layer):
        return "its kind of adapter is not merged"
    found = source_of(layer)
    return found if isinstance(found, str) else None


def waits(layer: Any) -> bool:
    """True if ``layer`` is a LoRA layer without merged weights that ``adopt`` can give some."""
    return layer not in records and is_wrapper(layer) and _source_to_adopt(layer) is not None


def merged_in(root: nn.Module, path: str = "") -> Merged:
    """Describes the layers in the model ``root`` that have merged weights.

    ``path``: the dotted path of ``root`` in its pipeline; empty if ``root`` is in no pipeline.
    """
    layers = [module for module in root.modules() if is_merged(module)]
    sizes = [t.nbytes for layer in layers for t in records[layer].layer.parameters()]
    names = dict.fromkeys(name for layer in layers for name in active_adapters(vars(layer)))
    return Merged(path or type(root).__name__, len(layers), sum(sizes), tuple(names))


def has_new(root: nn.Module) -> bool:
    """True if ``root`` has other adapters than when ``adopt_new`` last looked for new ones.

    peft lists the adapters of a model in the model's attribute ``peft_config``.
    """
    now = _configurations(root)
    return bool(now) and list(map(id, now)) != list(map(id, _adopted.get(root, ())))


def _configurations(root: nn.Module) -> list[Any]:
    found = vars(root).get("peft_config")
    return list(found.values()) if isinstance(found, dict) else []


def allow(root: nn.Module, merges: bool) -> None:
    """Allow or forbid merged weights in the model ``root``.

    If ``merges`` is True, the LoRA layers that can be merged get merged weights now. Otherwise all merged
    weights are freed. Then only calls with gradients run sdfastgn's code in LoRA layers.
    """
    if not merges:
        release(root)
    for module in root.modules():
        (_off.discard if merges else _off.add)(module)
        _short.discard(module)
    (adopt if merges else _adopt_for_training)(root)


# ---- what runs in place of a LoRA layer


def plain_layer(layer: Any) -> Any:
    """Returns the layer that fused code runs in place of ``layer``.

    If ``layer`` is peft's LoRA layer and can run with merged weights, this is a plain layer whose merged
    weights are up to date. Otherwise it is ``layer`` itself.
    """
    if not has_subclass(layer):
        return layer
    found = merged_layer(layer)
    return layer if found is None else found


def merged_layer(layer: nn.Module) -> Any:
    """Returns the plain layer that runs in place of peft's LoRA layer ``layer``, or None if peft must run.

    The plain layer's merged weights are up to date. If they were outdated, they are computed here. While a
    CUDA graph is captured (``frozen``), RuntimeError is raised instead.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    record = records.get(layer)
    if record is None and (layer in _off or layer in _short):
        return None
    unfuse(layer)
    is_frozen = _is_frozen.get()
    source = source_of(layer)
    if isinstance(source, str) or not (is_frozen or runs_merged(source.weight)):
        return None
    factor = _factor.get()
    source = source.scaled(factor)
    group = None if is_frozen else _group_of(layer, source.weight)
    if record is not None and record.is_of(source) and record.fits(source):
        if not is_frozen:
            record.wait()
        return record.layer
    if group is None:
        raise RuntimeError("an adapter changed during the call")
    if _is_capturing(source.weight):
        # Other code is capturing this call as a CUDA graph. If the weights were merged now, each replay of
        # the graph would merge them again.
        return None
    try:
        record = _written(group, layer, factor)
    except torch.OutOfMemoryError:
        _short.add(layer)
        forget(layer)
        return None
    if record is None:
        return None
    record.wait()  # this also makes the next write of merged weights wait for this stream
    return record.layer


def _written(group: _Siblings, layer: nn.Module, factor: float) -> Record | None:
    """Compute the merged weights of ``layer`` if outdated. Returns its ``Record``; None if peft must run.

    Adapters and scales are read while no other thread writes merged weights. So weights with older scales
    never replace weights with newer ones.
    """
    with changing:
        source = source_of(layer)
        if isinstance(source, str):
            return None
        source, record = source.scaled(factor), records.get(layer)
        if record is None or not (record.is_of(source) and record.fits(source)):
            record, *_ = group.write([(layer, source), *_outdated_siblings(group, layer, factor)])
        return record


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _group_of(layer: nn.Module, weight: Tensor) -> _Siblings:
    """Returns the object for all LoRA layers of the model that contains ``layer``.

    If a call of the model begins with ``layer``, merged weights are first marked as outdated if the tensors
    behind them have other contents now. This is not done while a CUDA graph is captured.
    """
    group = _siblings.get(layer)
    if group is None:  # a copied or unpickled layer, which ``adopt`` has not seen, is its own group
        group = _siblings[layer] = _Siblings([layer])
    if group.calls.begins(layer) and not _is_capturing(weight):
        group.compare()
    return group


def _outdated_siblings(group: _Siblings, layer: nn.Module, factor: float) -> list[tuple[nn.Module, Source]]:
    """The LoRA layers of ``group``, except ``layer``, with outdated merged weights; each with its source.

    The ``Source`` of a layer has the tensors and scales for its merged weight. The caller computes all these
    merged weights in one launch.
    """
    found = []
    for other in group.layers:
        if other is layer or not has_subclass(other) or other in _off or other in _short:
            continue
        source, record = source_of(other), records.get(other)
        if isinstance(source, Source) and runs_merged(source.weight):
            scaled = source.scaled(factor)
            if record is None or (record.fits(scaled) and not record.is_of(scaled)):
                found.append((other, scaled))
    return found


def runs_merged(weight: Tensor) -> bool:
    return dispatch.has_kernels(weight) and dispatch.is_untraced(weight, ())


def unfuse(layer: nn.Module) -> None:
    """Subtract fused adapters that are turned off from the weight of ``layer``, as peft's forward does."""
    own: Any = vars(layer)
    if own["_disable_adapters"] and own["merged_adapters"]:
        layer.unmerge()  # type: ignore[operator]


# ---- giving merged weights to LoRA layers, and taking them away


def adopt_new(root: nn.Module) -> bool:
    """Give merged weights to the layers of ``root`` that have new adapters, if merged weights can run now.

    Returns True if ``adopt`` was called.
    """
    if not has_new(root) or torch.is_grad_enabled():
        return False
    weight = next(root.parameters(), None)
    if weight is None or not runs_merged(weight) or _is_capturing(weight):
        return False
    with changing:
        _adopted[root] = _configurations(root)
        adopt(root)
    return True


def adopt(root: nn.Module) -> list[nn.Module]:
    """Give each of peft's LoRA layers in ``root`` that can be merged a plain layer with merged weights.

    Returns these LoRA layers. Nothing is done where sdfastgn's kernels do not run. If there is not enough
    memory for the merged weights of all layers, no layer gets them.
    """
    own = subclasses()
    if not own or root in _off:
        return []
    with changing:
        found = [(m, s) for m in root.modules() if (s := _source_to_adopt(m)) is not None]
        layers = [layer for layer, _ in found]
        for layer, source in found:
            if layer in records and not records[layer].fits(source):
                forget(layer)
        missing = [(layer, source) for layer, source in found if layer not in records]
        try:
            for layer, source in missing:
                records[layer] = new_record(layer, source)
        except torch.OutOfMemoryError:
            release(root)
            _short.update(layers)
            return []
        for layer, _ in missing:
            if type(layer) in own:
                change_class(layer, own[type(layer)])
        for module in root.modules() if missing else ():
            if hasattr(module, "pack_merged"):
                module.pack_merged()  # type: ignore[operator]
        if missing:
            group = _Siblings(layers)
            for layer in layers:
                _siblings[layer] = group
    return layers


def _adopt_for_training(root: nn.Module) -> None:
    """Give peft's linear LoRA layers in ``root`` the class of ``peft_layers.py``, but no merged weights.

    In calls with gradients this class runs the code of ``trained_adapters.py``, in others peft's code.
    """
    own = subclasses()
    for module in root.modules() if own else ():
        source = source_of(module) if type(module) in own else ""
        if isinstance(source, Source) and type(source.base) is nn.Linear and runs_merged(source.weight):
            change_class(module, own[type(module)])


def _source_to_adopt(module: nn.Module) -> Source | None:
    if not is_wrapper(module) or module in _off or module in _short:
        return None
    source = source_of(module)
    if isinstance(source, str):
        forget(module)
        return None
    return source if runs_merged(source.weight) else None


def stand_in_of(layer: Any) -> Any:
    """Returns the plain layer with merged weights that runs in place of the LoRA layer ``layer``.

    The merged weights may be outdated. Returns ``layer`` itself if it has no merged weights.
    """
    record = records.get(layer) if has_subclass(layer) else None
    return layer if record is None else record.layer


def release(root: nn.Module) -> None:
    """Give all LoRA layers in ``root`` peft's class again, and free their merged weights."""
    for module in root.modules():
        if has_subclass(module):
            restore_class(module)
        leave(module)


def give_back(root: nn.Module | None = None) -> int:
    """Free the merged weights in ``root`` because memory is short. Returns the number of layers freed.

    From now on these layers run peft's code. ``root``: None for all models.
    """
    # Other threads may add entries to ``records`` during the loop. ``keyrefs`` copies the keys at once.
    every = [ref() for ref in records.keyrefs()] if root is None else root.modules()
    layers = [layer for layer in every if layer is not None and is_merged(layer)]
    for layer in layers:
        release(layer)
    _short.update(layers)
    return len(layers)


def leave(module: nn.Module) -> None:
    """Free the merged weights of ``module``, and forget why it must get none. It may get some again."""
    forget(module)
    _off.discard(module)
    _short.discard(module)
    _adopted.pop(module, None)


@contextmanager
def frozen() -> Iterator[None]:
    """A context for the capture of a CUDA graph, in which merged weights are not written.

    If merged weights are outdated, a call in this context raises RuntimeError. Elsewhere merged weights also
    count as outdated after code has read ``layer.weight``, because such code may write into this tensor. In
    this context they do not, because the model's own forward may read ``layer.weight``: diffusers'
    ``ImageProjection`` does so in each call.
    """
    tokens = _is_frozen.set(True), only_reads.set(True)
    try:
        yield
    finally:
        _is_frozen.reset(tokens[0])
        only_reads.reset(tokens[1])


def is_frozen() -> bool:
    return _is_frozen.get()


def factor_now() -> float:
    """The number by which the running call multiplies the scales of all adapters; usually 1.0."""
    return _factor.get()


def scaled(factor: float) -> AbstractContextManager[None]:
    """A context in which all scales from which merged weights are computed are multiplied by ``factor``."""
    return setting(_factor, factor)
