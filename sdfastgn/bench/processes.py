"""Fresh processes, and those of ``accelerate launch`` or ``torchrun``, each with a device of its own."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from sdfastgn.bench.documents import OptionError
from sdfastgn.bench.timing import time_once
from sdfastgn.kernels.common.failures import one_line

T = TypeVar("T")

# How long a process waits for the slowest: its compiling, or its share of a day's images. NCCL
# would give up after ten minutes.
PATIENCE = datetime.timedelta(days=2)


def in_a_process(fn: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """What ``fn`` returns in a fresh process; its errors are raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *arguments, **options).result()


def launched() -> bool:
    """Whether a launcher started this process. ``torchrun`` says so of a single one too."""
    return "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """Whether this process prints and writes what all have measured."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Any, str]]:
    """Accelerate's ``PartialState`` and the name of this process's device, with the others met.

    A process that was not launched is the only one, and has ``device``.
    """
    if launched() and device not in ("cuda", "cpu"):
        raise OptionError(f"--device: each process has a GPU of its own, got {device!r}; give cuda or cpu")
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
    yield state, str(state.device) if launched() and device == "cuda" else device
    state.destroy_process_group()  # not after an error: others may still wait for this process


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
