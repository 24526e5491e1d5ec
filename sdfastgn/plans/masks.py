"""Attention without the masks that hide no key, or hide all keys after the first ones.

Attention with a mask takes 1.6 to 2.9 times as long. Masks of padded texts are arguments of the call, and the
same tensors in all steps of an image. When the same tensors come again, ``Masks`` computes the masks and
copies to the CPU how many keys they show, which waits for the GPU. Then it makes a plan whose attention reads
no mask. It does this again for other tensors, and after a write into these.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.plans.rewrite.masks import (
    ALL,
    FIRST,
    computed,
    keys_seen,
    masks_of,
    samples_of,
    unmasked,
)
from sdfastgn.plans.rewrite.nodes import shape
from sdfastgn.plans.run.plan import Plan, without_autocast
from sdfastgn.plans.trace.traced import Untraceable

# For each mask, the number of keys that the queries of each sample see, from the first on. None if the mask
# is needed.
Lengths = tuple[tuple[int, ...] | None, ...]
# If samples see different numbers of keys, attention runs once for each sample. With more samples than this,
# the mask stays.
_MOST_SAMPLES = 4
# Number of contents of the masks that are remembered. For instance, two prompts may take turns.
_MOST_CONTENTS = 8


class _Content:
    """The tensors of one call from which masks are computed. It does not keep them alive.

    Attributes:
        looks: how often they were looked up.
        lengths: what was found. None if the keys were not counted yet, or if all masks are needed.
    """

    def __init__(self, tensors: Sequence[Tensor], state: Any) -> None:
        self._tensors = [weakref.ref(t) for t in tensors]
        self._state = state
        self.looks = 0
        self.is_asked = False
        self.lengths: Lengths | None = None

    def is_of(self, tensors: Sequence[Tensor], state: Any) -> bool:
        return state == self._state and all(a() is b for a, b in zip(self._tensors, tensors, strict=True))


class Masks:
    """The masks of attention in ``plan`` that depend only on arguments of the call. Threads may share it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._constants, self._inputs = plan.given
        self._masks = masks_of(plan.graph, self._inputs, self._constants)
        read = {s for sources in self._masks.values() for s in sources}
        self._places = [i for i, n in enumerate(self._inputs) if n in read]
        self._contents: list[_Content] = []  # in the order of their last look-up
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def lengths(self, tensors: Sequence[Any], looks: int = 0) -> Lengths | None:
        """How many keys each mask shows for a call with these ``tensors``. None if all masks are needed.

        All masks count as needed until the same tensors, unchanged, were looked up ``looks`` times. So the
        keys are not counted for tensors that are new in each call. Inference tensors never count as the
        same, because they do not count their writes.
        ``looks``: 0 only returns what was found before.
        """
        given = [tensors[i] for i in self._places]
        if not all(isinstance(t, Tensor) and not t.is_inference() for t in given):
            return None
        state = [(t.data_ptr(), t._version) for t in given]
        with self._lock:
            content = next((c for c in self._contents if c.is_of(given, state)), None)
            if not looks:
                return None if content is None else content.lengths
            if content is None:
                content = _Content(given, state)
                del self._contents[: 1 - _MOST_CONTENTS]
            else:
                self._contents.remove(content)
            self._contents.append(content)
            content.looks += 1
            if content.looks >= looks and not content.is_asked:
                content.lengths, content.is_asked = self._asked(tensors), True
            return content.lengths

    def plan(self, seen: Sequence[str | None]) -> Plan:
        """The plan for masks that show what ``seen`` says. Raises Untraceable if there is none."""
        try:
            return self._plan.with_graph(unmasked(self._plan.graph, self._masks, seen))
        except Exception as error:  # as for other rules: the call runs the model's own code
            raise Untraceable(f"its plan without masks could not be made: {one_line(error)}") from error

    def seen(self, lengths: Lengths) -> tuple[str | None, ...]:
        """Which keys the masks show: ALL, FIRST, or None for a mask that is needed."""
        pairs = zip(lengths, self._masks, strict=True)
        return tuple(None if n is None else ALL if min(n) == shape(mask)[-1] else FIRST for n, mask in pairs)

    def numbers(self, lengths: Lengths) -> list[Tensor]:
        """The further arguments of ``plan(seen(lengths))``."""
        pairs = zip(lengths, self.seen(lengths), strict=True)
        return [torch.tensor(n, device="cpu") for n, kind in pairs if kind == FIRST]

    @functools.cached_property
    def _computed(self) -> Callable[..., list[Tensor]]:
        return computed(self._masks, [*self._constants, *self._inputs])

    def _asked(self, tensors: Sequence[Any]) -> Lengths | None:
        count = len(self._constants) + len(self._inputs)
        with torch.no_grad(), without_autocast():
            masks = self._computed(*self._plan.operands(tensors)[-count:])
            counts = iter(torch.cat([keys_seen(mask) for mask in masks]).tolist())
        lengths = tuple(_needless(tuple(islice(counts, samples_of(mask)))) for mask in self._masks)
        return lengths if any(lengths) else None


def _needless(counts: tuple[int, ...]) -> tuple[int, ...] | None:
    """``counts``, or None if a mask is needed."""
    is_needed = min(counts) < 1 or (len({*counts}) > 1 and len(counts) > _MOST_SAMPLES)
    return None if is_needed else counts
