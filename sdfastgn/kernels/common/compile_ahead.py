"""Compile the kernels of a call in threads beside each other, before their first launch."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from sdfastgn.kernels.common.failures import forget

# A compilation holds some 100 MB, and beyond a few the part that Python does under its lock decides.
_MAX_THREADS = 16


class _Rehearsal:
    """The kernels that a call has come by so far. Each is compiled once, in threads beside the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "sdfastgn-compile")
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}

    def add(self, launch: Any, dtypes: tuple[torch.dtype | None, ...]) -> None:
        # Launches of many sizes share a compiled kernel.
        key = (launch.kernel, dtypes, *launch.constants.values(), *launch.options.values())
        if key in self.jobs:
            return
        with contextlib.suppress(AttributeError):  # a private name
            launch.kernel.device_caches[self._device.index]  # made here, and not twice by two threads
        self.jobs[key] = self.pool.submit(_compile, launch, dtypes, self._device)


# Of the thread that rehearses.
rehearsal: contextvars.ContextVar[_Rehearsal | None] = contextvars.ContextVar(
    "sdfastgn_rehearsal", default=None
)


def rehearse(call: Callable[[], object], device: torch.device) -> int:
    """Compile the kernels of ``call`` on ``device`` that are not compiled yet, in parallel threads.

    They begin while ``call`` runs: its first products and convolutions wait for libraries to be loaded.
    What it computes is of no use. A kernel that cannot be compiled says so when it is launched. Returns
    how many kernels they are; those that this process has launched before are not among them.

    Raises whatever ``call`` raises.
    """
    found = _Rehearsal(device)
    token = rehearsal.set(found)
    try:
        try:
            call()
        finally:
            rehearsal.reset(token)
        wait(found.jobs.values())
    finally:  # after an error or an interrupt only for what has begun
        found.pool.shutdown(cancel_futures=True)
    return len(found.jobs)


def _compile(launch: Any, dtypes: tuple[torch.dtype | None, ...], device: torch.device) -> None:
    with torch.cuda.device(device):  # each thread has a current one of its own
        compiled = launch.kernel.warmup(
            *dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options
        )
        try:  # the launcher, for which Triton 3.6 runs a C compiler, and the code on the device
            _ = compiled.run
        except Exception:
            forget(launch.kernel, device)
            raise
