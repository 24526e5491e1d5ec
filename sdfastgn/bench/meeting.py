"""Where the processes of a launcher time the same call at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from sdfastgn.bench.timing import time_once
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.program import launched


class Meeting:
    """All processes time a call at the same time, or learn which of them cannot.

    Each of them times or leaves. A process that was not launched meets nobody.
    """

    def __init__(self) -> None:
        self._is_open = launched()

    def seconds(self, call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
        """What ``repeats`` calls took in each process, from a common barrier on.

        Raises RuntimeError where a process cannot.
        """
        if not self._is_open:
            return []
        self._is_open = False
        from accelerate import PartialState

        def calls() -> None:
            for _ in range(repeats):
                call()

        _gathered()
        PartialState().wait_for_everyone()
        try:
            seconds, _ = time_once(calls, device)
        except Exception as error:  # the others wait for this process's answer
            return _gathered(reason=one_line(error))
        return _gathered(seconds)

    def leave(self, reason: str) -> None:
        """Tells the others why this process times nothing, if it has not timed."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(RuntimeError):
                _gathered(reason=reason)


def _gathered(seconds: float = 0.0, reason: str = "") -> list[float]:
    from accelerate.utils import gather_object

    found = gather_object([(seconds, reason)])
    reasons = [f"process {index}: {reason}" for index, (_, reason) in enumerate(found) if reason]
    if reasons:
        raise RuntimeError("; ".join(reasons))
    return [seconds for seconds, _ in found]
