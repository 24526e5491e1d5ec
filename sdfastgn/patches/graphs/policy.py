"""When a call is captured, and when a module or a kind of call is left to run eager."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from sdfastgn.patches.graphs.arguments import Unsupported

__all__ = ["NO_MEMORY", "Policy"]

# The reason given for calls that run eagerly because memory was too short for graphs.
NO_MEMORY = "memory was short"
# Kinds of calls that are remembered. There are more only if calls never repeat.
_MAX_REMEMBERED = 64
# Replays after which a capture has saved more time than it took.
_WORTHWHILE = 3
# The longest pause, in calls.
_MAX_PAUSE = 256


class Policy:
    """Decides from the past calls of one module whether the next one is captured or runs eager.

    Calls of one kind have the same key in the store. The caller must hold the backend's lock, except for
    ``is_rehearsed`` and ``pause_without_memory``.

    Attributes:
        last_change: the last change of the model that made its graphs invalid; empty if there was none.
    """

    __slots__ = ("_pause", "_refused", "_rehearsed", "_short_lives", "_threads", "last_change")

    def __init__(self) -> None:
        # Kind of call -> the thread that made its first call. Dropped when the kind is captured.
        self._threads: OrderedDict[Any, int] = OrderedDict()
        self._refused: OrderedDict[Any, str] = OrderedDict()  # kind -> reason
        self._rehearsed: OrderedDict[Any, None] = OrderedDict()
        self._pause: tuple[int, str] = (0, "")  # calls that are still to run eager, and why
        # How many times in a row the model changed before its captures had saved any time.
        self._short_lives = 0
        self.last_change = ""

    # ---- pauses

    def model_changed(self, replays: int) -> None:
        """Take note that the model changed after ``replays`` replays of its graphs.

        If there were too few replays twice in a row, the next 4 calls run eagerly. Each further time doubles
        this pause.
        """
        self._short_lives = self._short_lives + 1 if replays < _WORTHWHILE else 0
        if self._short_lives > 1:
            self._pause = (min(2**self._short_lives, _MAX_PAUSE), "the model changes too often")

    def pause_without_memory(self) -> None:
        """Capture nothing for a while: the graphs were dropped because memory is short."""
        self._pause = (_MAX_PAUSE, NO_MEMORY)

    def check_pause(self) -> None:
        """During a pause: count this call and raise Unsupported with the reason."""
        calls, reason = self._pause
        if calls:
            self._pause = (calls - 1, reason)
            raise Unsupported(reason)

    # ---- kinds of calls

    def forget_kinds(self) -> None:
        """Forget first calls and refusals, because the model has changed and they may no longer be true."""
        self._threads.clear()
        self._refused.clear()

    def is_new(self, key: Any) -> bool:
        return key not in self._threads

    def first_call(self, key: Any) -> None:
        """Take note that this thread makes the first call of its kind. The second is captured."""
        _remember(self._threads, key, threading.get_ident())

    def is_warm(self, key: Any) -> bool:
        """True if this thread made the first call: then kernels are compiled and cuDNN has chosen."""
        return self._threads.get(key) == threading.get_ident()

    def was_captured(self, key: Any) -> None:
        """Forget the first call. If the graph is dropped later, the next call counts as a first one."""
        self._threads.pop(key, None)

    def refuse(self, key: Any, reason: str) -> None:
        """Capture no call of this kind any more, until the model changes."""
        _remember(self._refused, key, reason)

    def check_refused(self, key: Any) -> None:
        """Raise Unsupported with the reason if the kind was refused."""
        if key in self._refused:
            raise Unsupported(self._refused[key])

    def is_rehearsed(self, key: Any) -> bool:
        """Whether this kind was rehearsed before. Marks it as rehearsed: the caller does so after False.

        A change of the model does not reset this, because kernels stay compiled.
        """
        if key in self._rehearsed:
            return True
        _remember(self._rehearsed, key, None)
        return False


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)
