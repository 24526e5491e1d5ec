"""Compile the kernels of a call in threads beside each other, before the call runs."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from sdfastgn.kernels.common.failures import forget

__all__ = ["rehearse", "wanted_kernels"]

_Wanted = list[tuple[Any, tuple[torch.dtype | None, ...]]]
# Of the thread that rehearses: what it would have compiled.
wanted_kernels: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar(
    "sdfastgn_wanted_kernels", default=None
)
# A compilation holds some 100 MB, and beyond a few the part that Python does under its lock decides.
_MAX_THREADS = 16


def rehearse(call: Callable[[], object], device: torch.device) -> int:
    """Compile the kernels of ``call`` on ``device`` that are not compiled yet, in parallel threads.

    So what ``call`` computes is of no use. A kernel that cannot be compiled says so when it is launched.
    Returns how many kernels they are; those that this process has launched before are not among them.

    Raises whatever ``call`` raises.
    """
    wanted: _Wanted = []
    token = wanted_kernels.set(wanted)
    try:
        call()
    finally:
        wanted_kernels.reset(token)
    # Launches of many sizes share a compiled kernel.
    distinct = {
        (launch.kernel, dtypes, *launch.constants.values(), *launch.options.values()): (launch, dtypes)
        for launch, dtypes in wanted
    }.values()
    for launch, _ in distinct:  # made by the first who asks, and not twice by two threads
        with contextlib.suppress(AttributeError):  # a private name
            launch.kernel.device_caches[device.index]
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "sdfastgn-compile")
    try:
        done = [pool.submit(_compile, launch, dtypes, device) for launch, dtypes in distinct]
        wait(done)
    finally:  # an interrupt waits for no more than what has begun
        pool.shutdown(cancel_futures=True)
    return len(distinct)


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
