"""The weights of one model in E4M3 (fp8), with a scale for each row, for the model's plans.

A *plan* is a traced list of kernels that replaces the Python of a model's forward. Plans compute large linear
layers in E4M3 (``plans/rewrite/e4m3.py``). Each call computes the scales of a layer's input from the input
itself. Only weights are quantized in advance: ``RowWeights`` has a ``Copy`` in E4M3 of each weight that a
plan reads. All plans of the model share this copy, and it is freed with the last plan that reads it.

The model's parameters are never changed. A weight that was written to, moved or replaced is quantized again
before the next call or replay. Its copy stays in the same memory if the sizes are the same. PyTorch does not
count all writes into tensors, so the contents of the weights are compared too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import private
from sdfastgn.kernels.quantize_rows.op import quantize_rows
from sdfastgn.patches.fp8.products import offloading_of
from sdfastgn.patches.lora.contents import Contents
from sdfastgn.patches.lora.merged_weights import is_merged_weight, wait_for, written_now


def in_blocks(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns all modules that are inside the blocks of a model. ``modules``: all modules of the model.

    A block is a module in a ModuleList or Sequential, with a norm inside it. Layers outside of blocks compute
    embeddings, the modulations of all blocks, and the model's result.
    """
    lists = [m for m in modules if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks = [each for m in lists for each in m if any("eps" in vars(part) for part in each.modules())]
    return {part for block in blocks for part in block.modules()}


class Copy(list[Tensor]):
    """A weight in E4M3, as a list: [weight (columns, depth), fp32 scales of its rows (columns,)].

    The list is empty before the first ``write`` and after ``clear``.

    Attributes:
        holder, name: the dict of a module's parameters, and the key of the weight in this dict.
        state: the address and version of the weight when it was copied; None if it must be copied again.
    """

    __slots__ = ("__weakref__", "holder", "name", "state")

    def __init__(self, holder: dict[str, Any], name: str) -> None:
        super().__init__()
        self.holder, self.name = holder, name
        self.state: tuple[int, int] | None = None

    def clear(self) -> None:
        """Free this copy of a weight. It must be made again before the next call."""
        super().clear()
        self.state = None

    def write(self, weight: Tensor) -> bool:
        """Quantize ``weight`` into this copy. Returns True if the copy had to get other memory."""
        state = _state_of(weight)
        y, scales = (t.squeeze(0) for t in quantize_rows(weight.detach().unsqueeze(0)))
        is_replaced = bool(self) and (self[0].shape, self[0].device) != (y.shape, y.device)
        if self and not is_replaced:
            self[0].copy_(y)
            self[1].copy_(scales)
        else:
            self[:] = y, scales
        self.state = state
        return is_replaced


class RowWeights:
    """The copies in E4M3 of weights in the blocks of a model. Several threads may use this object at once.

    Attributes:
        replaced: counts how often a copy was freed or got other memory. CUDA graphs that were captured before
            are then invalid.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replaced = 0
        self._model = weakref.ref(model)
        # If hooks move the weights of any layer in each call, the model or its first linear layer has such a
        # hook too. So it is enough to look for such hooks on these two.
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self._hooked = tuple(map(weakref.ref, (model, *layers[:1])))
        self._copies: weakref.WeakValueDictionary[tuple[int, str], Copy] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._contents: Contents | None = None
        self._written: dict[torch.device, Any] = {}

    def layers(self) -> set[nn.Module]:
        """The modules whose weights may be quantized. Quantizing other layers would change results more."""
        model = self._model()
        return set() if model is None else in_blocks(model.modules())

    def copy_of(self, holder: dict[str, Any], name: str) -> Copy:
        """Returns the copy in E4M3 of the weight ``holder[name]``. A later ``refresh`` fills a new copy.

        The caller must keep a reference to the copy, because this object has only a weak one.
        """
        with self._lock:
            copy = self._copies.get((id(holder), name))
            if copy is None:
                copy = self._copies[id(holder), name] = Copy(holder, name)
            return copy

    @property
    def count(self) -> int:
        """Number of weights of which a copy in E4M3 exists."""
        return sum(map(bool, self._living()))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all copies of weights in E4M3."""
        return sum(t.nbytes for copy in self._living() for t in copy)

    def _living(self) -> list[Copy]:
        return [copy for ref in self._copies.valuerefs() if (copy := ref()) is not None]

    def _found(self) -> list[tuple[Copy, Tensor]]:
        """Returns each copy in E4M3, with the weight that the module of the copy has now."""
        found = [(copy, copy.holder.get(copy.name)) for copy in self._living()]
        return [(copy, weight) for copy, weight in found if isinstance(weight, Tensor)]

    # ---- methods that calls and CUDA graphs use. The class ``Products`` has methods of the same names.

    def reason_now(self) -> None:
        """Returns None: copies of weights in E4M3 never prevent that the model runs as a CUDA graph."""

    def copy_counts(self) -> None:
        """Does nothing. Each row of an input has its own scale, so no value is beyond the range of E4M3."""

    def offloading(self) -> str:
        """The name of what moves the weights in each call, such as group offloading; empty if nothing does.

        If something does, all copies of weights in E4M3 are freed.
        """
        found = offloading_of(self._hooked)
        if found:
            self.free()
        return found

    def is_outdated(self) -> bool:
        """True if a weight was written to, moved or replaced since it was copied in E4M3."""
        return any(copy.state != _state_of(weight) for copy, weight in self._found())

    def refresh(self) -> None:
        """Make all copies of weights in E4M3 again if one is outdated.

        The current stream waits until the copies are written.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.is_outdated():
                found = self._found()
                # The contents are recorded before the copies are made. If other code writes into a weight in
                # between, the next comparison finds a difference, and the copies are made again.
                sources = _compared(found)
                self._contents = Contents(sources, [False] * len(sources)) if sources else None
                for copy, weight in found:
                    self.replaced += copy.write(weight)
                self._written = {device: written_now(device) for device in {w.device for _, w in found}}
        for device, written in list(self._written.items()):
            wait_for(written, device)

    def compare(self) -> None:
        """Mark all copies in E4M3 as outdated if other code has changed the contents of a weight."""
        with self._lock:
            contents = self._contents
            if contents is not None and not contents.are_same(_compared(self._found())):
                self._touch()

    def note_replay(self) -> None:
        """Begin to check if the weights still have the contents that were copied in E4M3.

        Call this just before a call or replay starts in this stream.

        After the start, ``has_same_contents`` returns the result.
        """
        if self._contents is not None:
            self._contents.begin()

    def has_same_contents(self) -> bool:
        """True if the call that was started last reads copies in E4M3 of the weights' present contents.

        This method does not wait for the end of the call.
        """
        contents = self._contents
        if contents is None:
            return True
        sources = _compared(self._found())
        with self._lock:  # other threads may run this method at the same time
            if contents.are_of(sources):
                contents.look(sources)
                if contents.looked_same():
                    return True
            self._touch()
        return False

    # ---- events after which copies of weights in E4M3 must be made again

    def _touch(self) -> None:
        self._contents = None
        for copy in self._living():
            copy.state = None

    def moved(self) -> None:
        """Call this after a move of the model. If a weight is on another device now, all copies are freed."""
        if any(copy and weight.device != copy[0].device for copy, weight in self._found()):
            self.free()

    def free(self) -> None:
        """Free all copies of weights in E4M3. The next call makes them again."""
        with self._lock:
            self._contents = None
            for copy in self._living():
                self.replaced += bool(copy)
                copy.clear()


def _state_of(weight: Tensor) -> tuple[int, int]:
    """The address and the version of ``weight``. Inference tensors have no version."""
    return weight.data_ptr(), -1 if weight.is_inference() else private.version_of(weight)


def _compared(found: list[tuple[Copy, Tensor]]) -> list[Tensor]:
    """Those weights in ``found`` whose contents other code may have changed: all but merged weights."""
    return [weight for _, weight in found if not is_merged_weight(weight)]
