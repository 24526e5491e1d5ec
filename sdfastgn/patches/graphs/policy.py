"""Decides whether a call is captured now or runs eagerly.

Calls of a kind that could not be captured run eagerly until the model changes. All calls of a module run
eagerly for a while (a *pause*) if the module changes too often, or if memory was short. If accelerate
offloads a model as a whole, its first six calls of a kind run eagerly after each move to the GPU, except with
``cuda_graphs=True``. Calls are of one kind if one CUDA graph can serve them all.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.patches.graphs.arguments import Unsupported
from sdfastgn.patches.swap.class_forward import is_offloaded_whole

# The reason given for calls that run eagerly because memory was too short for graphs.
NO_MEMORY = "memory was short"
# The reason given for the second to sixth call after an offloaded model was moved to the GPU. They are not
# captured, because an image of few steps would not save the time that its capture takes.
FEW_CALLS = "it is offloaded, and a capture takes as long as several calls"
# Maximum number of reasons that are counted separately. Further reasons are counted as "other reasons".
MAX_REASONS = 64
# Maximum number of kinds of calls that are remembered. (One CUDA graph serves all calls of a kind.) A model
# has more kinds only if its calls hardly repeat.
_MAX_REMEMBERED = 64
# Graphs that were replayed fewer times than this before the model changed had a short life. If this happens
# several times in a row, the model is not captured for a while.
_SHORT_LIFE = 3
# If a model is offloaded as a whole, this number of calls of a kind run eagerly after each move to the GPU,
# before one is captured (in the modes "auto" and "training"). For SDXL's UNet on an H100, a capture took
# 132 ms, and each replay saved 23 ms. So images of few steps have no graph.
_CALLS_AFTER_MOVE = 6
# Number of calls in a *pause*, in which no call is captured: in the longest pause after changes of the model,
# and in the first pause after memory was short.
_MAX_PAUSE = 256


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count a call that ran eagerly, and not as a CUDA graph or plan (rewritten trace), for ``reason``."""
    is_counted = reason in counts or len(counts) < MAX_REASONS
    counts[reason if is_counted else "other reasons"] += 1


class Policy:
    """Decides from the past calls of one module whether its next call is captured or runs eagerly.

    Calls with equal keys are of one kind: one graph serves them all. The caller of a method must hold the
    backend's lock, except for ``is_first_rehearsal``, ``pause_without_memory`` and ``check_pause``.

    Attributes:
        last_change: the last change of the model that made its graphs invalid; empty if there was none.
    """

    __slots__ = (
        "_called", "_pause", "_refused", "_rehearsed", "_short_lives", "_short_memory", "_storage",
        "last_change",
    )  # fmt: skip

    def __init__(self) -> None:
        # Kind of call -> (the thread that made its first call, number of its calls). Removed when a call of
        # this kind is captured.
        self._called: OrderedDict[Any, tuple[int, int]] = OrderedDict()
        # Kind of call -> why calls of this kind are not captured.
        self._refused: OrderedDict[Any, str] = OrderedDict()
        # Kinds of calls whose kernels were compiled ahead of a call.
        self._rehearsed: OrderedDict[Any, None] = OrderedDict()
        # Number of further calls in which nothing is captured, and the reason for this pause.
        self._pause: tuple[int, str] = (0, "")
        # How many times in a row the model changed before its graphs had saved the time of their captures.
        self._short_lives = 0
        self._short_memory = 0  # how many pauses began because memory was short
        # Weak reference to the memory that the module's first weight had when ``forget_if_moved`` last ran.
        self._storage: StorageWeakRef | None = None
        self.last_change = ""

    # ---- pauses, in which no call is captured

    def model_changed(self, replays: int, fewest: int = _SHORT_LIFE) -> None:
        """Record that the model has changed after ``replays`` replays of its graphs.

        If there were fewer than ``fewest`` replays twice in a row, the next 4 calls run eagerly. Each further
        change in a row after so few replays doubles this pause, up to 256 calls.
        """
        self._short_lives = self._short_lives + 1 if replays < fewest else 0
        if self._short_lives > 1:
            self._pause = (min(2**self._short_lives, _MAX_PAUSE), "the model changes too often")

    def pause_without_memory(self) -> None:
        """Capture no calls for a while, because memory is short. Does nothing if such a pause has begun.

        The first pause has 256 calls, and each further one is twice as long. So a model whose graphs never
        fit is captured less and less often.
        """
        if self._pause[0] and self._pause[1] == NO_MEMORY:
            return
        self._pause = (_MAX_PAUSE << self._short_memory, NO_MEMORY)
        self._short_memory += 1

    def check_pause(self) -> None:
        """During a pause, in which no call is captured, count this call and raise Unsupported.

        The message is the reason of the pause. Outside of a pause this method does nothing. If two threads
        call this method at once, they may be counted as one call.
        """
        calls, reason = self._pause
        if calls:
            self._pause = (calls - 1, reason)
            raise Unsupported(reason)

    # ---- kinds of calls (one graph serves all calls of a kind)

    def forget_kinds(self) -> None:
        """Forget which kinds of calls were made before, and which were refused: the model has changed."""
        self._called.clear()
        self._refused.clear()

    def forget_if_moved(self, module: nn.Module) -> None:
        """Forget the earlier calls of ``module`` if its weights were moved since this method was last called.

        SDXL's pipeline, for example, converts its autoencoder before each decode, and so moves its weights.
        Then each call counts as the first of its kind. In the modes "auto" and "training" first calls are not
        captured. So no graph is captured that could never be replayed.
        """
        if self._storage is not None and self._storage.expired():
            self.forget_kinds()
        weight = next((each for each in module.parameters() if type(each) is nn.Parameter), None)
        self._storage = None if weight is None else StorageWeakRef(weight.untyped_storage())

    def is_new(self, key: Any) -> bool:
        return key not in self._called

    def first_call(self, key: Any) -> None:
        """Record that this thread makes the first call of the kind ``key``."""
        _remember(self._called, key, (threading.get_ident(), 1))

    def check_offloaded(self, key: Any, module: nn.Module) -> None:
        """Count this call if accelerate offloads ``module`` as a whole.

        Raises Unsupported if the weights were moved to the GPU only a few calls ago, so that a capture would
        hardly save its time. ``first_call`` must have been called for ``key``.
        """
        thread, calls = self._called[key]
        if calls < _CALLS_AFTER_MOVE and is_offloaded_whole(module):
            self._called[key] = thread, calls + 1
            raise Unsupported(FEW_CALLS)

    def is_warm(self, key: Any) -> bool:
        """True if this thread has made the first call of the kind ``key``.

        Then kernels are compiled and cuDNN has chosen its algorithms, so the call can be captured at once.
        """
        return self._called.get(key, (None, 0))[0] == threading.get_ident()

    def captured(self, key: Any) -> None:
        """Forget the earlier calls of the kind ``key``, because the kind now has a graph.

        If the graph is dropped later, the next call of this kind counts as a first call.
        """
        self._called.pop(key, None)

    def refuse(self, key: Any, reason: str) -> None:
        """Record that calls of the kind ``key`` run eagerly for ``reason`` until the model changes."""
        _remember(self._refused, key, reason)

    def check_refused(self, key: Any) -> None:
        """Raise Unsupported with the reason if ``refuse`` was called for the kind ``key``."""
        if key in self._refused:
            raise Unsupported(self._refused[key])

    def is_first_rehearsal(self, key: Any) -> bool:
        """True if this method was not called with ``key`` before. Only the last 64 keys are remembered.

        If it is True, the caller must compile the kernels of calls of the kind ``key``
        (``GraphedForward._rehearse``). A change of the model does not matter, because kernels stay compiled.
        """
        if key in self._rehearsed:
            return False
        _remember(self._rehearsed, key, None)
        return True


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)
