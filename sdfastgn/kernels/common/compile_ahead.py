"""Compile all kernels of a call in parallel threads, before their first launch."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from sdfastgn.kernels.common.failures import forget

# Most threads that compile at a time. Each takes about 100 MB, and more would mostly wait for Python's lock.
_MAX_THREADS = 16


class _Rehearsal:
    """Collects the kernels of a running call, and compiles each once in a pool of threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "sdfastgn-compile")
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}

    def add(self, launch: Any, dtypes: tuple[torch.dtype | None, ...]) -> None:
        # Launches that differ only in their numbers share one compiled kernel.
        key = (launch.kernel, dtypes, *launch.constants.values(), *launch.options.values())
        if key in self.jobs:
            return
        with contextlib.suppress(AttributeError):  # ``device_caches`` is private, and may be missing
            # Reading creates the kernel's cache. Done here, so that two threads do not create it twice.
            launch.kernel.device_caches[self._device.index]
        self.jobs[key] = self.pool.submit(_compile, launch, dtypes, self._device)


# The ``_Rehearsal`` of the current thread while ``rehearse`` runs, else None. A ``Launch`` that finds one
# compiles its kernel instead of launching it for the first time.
rehearsal: contextvars.ContextVar[_Rehearsal | None] = contextvars.ContextVar(
    "sdfastgn_rehearsal", default=None
)


def rehearse(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call``, and compile the kernels that it would launch for the first time, in parallel threads.

    These kernels do not run, so the results of ``call`` are meaningless. Compilation starts while ``call``
    runs, because its first matrix products and convolutions wait for libraries to be loaded.

    Returns the number of kernels that were compiled.

    Raises what ``call`` raises. Errors of the compilation are ignored here, and raised at the launch.
    """
    found = _Rehearsal(device)
    token = rehearsal.set(found)
    try:
        try:
            call()
        finally:
            rehearsal.reset(token)
        wait(found.jobs.values())
    finally:
        # After an error or an interrupt, compilations that have not started are canceled.
        found.pool.shutdown(cancel_futures=True)
    return len(found.jobs)


def _compile(launch: Any, dtypes: tuple[torch.dtype | None, ...], device: torch.device) -> None:
    with torch.cuda.device(device):  # the current device is a setting of each thread
        compiled = launch.kernel.warmup(
            *dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options
        )
        try:
            # Builds the launcher, for which Triton 3.6 runs a C compiler, and loads the code on the device.
            _ = compiled.run
        except Exception:
            forget(launch.kernel, device)
            raise
