"""Makes plans whose attention reads no mask, for calls in which the masks are not needed.

A mask is not needed if it hides no key, or if it hides all keys after the first ones. In the second case
attention reads only the first keys. Attention with a mask takes 1.6 to 2.9 times as long.

Masks of padded texts are arguments of the call, and they are the same tensors in all denoising steps of an
image. When the same tensors come a second time, ``Masks`` computes from them the masks that attention reads.
It counts the keys that each mask shows, and copies the numbers to the CPU, which waits for the GPU. Then it
makes a plan without the masks. For other tensors, and after a write into the same ones, it counts again.
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

# For each attention mask: how many of the first keys the queries of each sample see. They see no others. None
# stands for a mask that attention must read.
Lengths = tuple[tuple[int, ...] | None, ...]
# If the samples of a batch see different numbers of keys, attention without a mask must run once for each
# sample. For more samples than this, attention reads the mask instead.
_MOST_SAMPLES = 4
# For this number of different mask arguments, the counted keys are remembered. More than one is needed, for
# instance, if calls for two prompts take turns.
_MOST_CONTENTS = 8


class _Content:
    """The arguments of one call from which attention masks are computed. The tensors are not kept alive.

    Attributes:
        looks: how often these tensors were looked up, unchanged since the first time.
        lengths: how many keys each mask shows. None if the keys were not counted yet, or if all masks are
            needed.
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
    """The attention masks in ``plan`` that are computed from arguments of the call alone.

    Several threads may use one object.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._constants, self._inputs = plan.given
        self._masks = masks_of(plan.graph, self._inputs, self._constants)
        read = {s for sources in self._masks.values() for s in sources}
        self._places = [i for i, n in enumerate(self._inputs) if n in read]
        self._contents: list[_Content] = []  # arguments of earlier calls, sorted by the last look-up
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def lengths(self, tensors: Sequence[Any], looks: int = 0) -> Lengths | None:
        """How many keys each mask shows in a call with these ``tensors``. None if all masks are needed.

        The keys are counted when the same tensors, unchanged, are looked up for the ``looks``-th time. Until
        then None is returned. So no keys are counted for tensors that are new in each call. For inference
        tensors keys are never counted: they have no version counter, which would show a write into them.

        ``looks``: 0 counts no keys, and only returns what was found before.
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
        """Make the plan whose attention does not read the masks that ``seen`` marks as not needed.

        ``seen``: for each mask ALL, FIRST or None, as the method ``seen`` returns it.

        Raises Untraceable if the plan cannot be made.
        """
        try:
            return self._plan.with_graph(unmasked(self._plan.graph, self._masks, seen))
        except Exception as error:  # callers catch Untraceable, and run the model's own code
            raise Untraceable(f"its plan without masks could not be made: {one_line(error)}") from error

    def seen(self, lengths: Lengths) -> tuple[str | None, ...]:
        """Which keys each mask shows: ALL, or the FIRST ones. None for a mask that attention must read."""
        pairs = zip(lengths, self._masks, strict=True)
        return tuple(None if n is None else ALL if min(n) == shape(mask)[-1] else FIRST for n, mask in pairs)

    def numbers(self, lengths: Lengths) -> list[Tensor]:
        """Further arguments of the plan without masks: for each mask of the kind FIRST, its numbers of keys.

        Each is an int64 tensor on the CPU with one element a sample.
        """
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
    """Return ``counts``, the number of keys for each sample, or None if attention must read the mask.

    The mask must be read if a query sees no key, or other keys than the first ones. It must also be read if
    the numbers differ among more than ``_MOST_SAMPLES`` samples.
    """
    is_needed = min(counts) < 1 or (len({*counts}) > 1 and len(counts) > _MOST_SAMPLES)
    return None if is_needed else counts
