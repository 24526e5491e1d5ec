"""Lets all processes that a launcher started time the same call at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from sdfastgn.bench.timing import time_once
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.program import launched


class Meeting:
    """One measurement that all processes make at the same time.

    Each process calls ``seconds``. A process that cannot measure calls ``leave`` with the reason instead.
    Then ``seconds`` raises a RuntimeError with this reason in all other processes. In a process that no
    launcher (such as torchrun) started, ``leave`` does nothing, and ``seconds`` returns an empty list.
    """

    def __init__(self) -> None:
        self._is_open = launched()

    def seconds(self, call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
        """Time ``repeats`` calls in all processes at once. Returns the seconds that each process took.

        All processes start at a barrier. Returns an empty list in a process that no launcher started. Raises
        RuntimeError if any process cannot measure.
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
        except Exception as error:  # the other processes wait for this process, so they get the error's text
            return _gathered(reason=one_line(error))
        return _gathered(seconds)

    def leave(self, reason: str) -> None:
        """Tell the other processes why this process does not measure.

        Does nothing if ``seconds`` or ``leave`` was called before in this process.
        """
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
