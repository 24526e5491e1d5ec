"""Compiles in parallel threads all Triton kernels that a function would launch, such as a model's forward."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from sdfastgn.kernels.common import archive, gpu
from sdfastgn.kernels.common.failures import forget
from sdfastgn.kernels.common.setting import setting

# Maximum number of threads that compile at a time. Each thread takes about 100 MB of memory.
# With more threads, most of them would wait for Python's global interpreter lock.
_MAX_THREADS = 16


class _Rehearsal:
    """Compiles the kernels that a running function would launch, each once, in a pool of threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "sdfastgn-compile")
        self.jobs: dict[tuple[Any, ...], Future[None]] = {}
        # One lock for each (kernel, dtypes). Up to Triton 3.6, all compiled forms of a kernel for the same
        # dtypes share a launcher. A thread holds the lock while it builds the launcher.
        self._launchers: defaultdict[tuple[Any, ...], threading.Lock] = defaultdict(threading.Lock)
        self._caches = threading.Lock()

    def add(self, launch: Any, dtypes: tuple[torch.dtype | None, ...]) -> None:
        # Launches of a kernel that differ only in the values of its numeric arguments use the same compiled
        # kernel. So the key of a compilation has no such values.
        key = (launch.kernel, dtypes, *launch.constants.values(), *launch.options.values())
        if key in self.jobs:
            return
        launcher = self._launchers[launch.kernel, dtypes]
        self.jobs[key] = self.pool.submit(self._compile, launch, dtypes, prepare(self._device), launcher)

    def _compile(
        self,
        launch: Any,
        dtypes: tuple[torch.dtype | None, ...],
        prepared: threading.Thread,
        launcher: threading.Lock,
    ) -> None:
        prepared.join()
        with self._caches, contextlib.suppress(AttributeError):
            # Reading the kernel's entry in ``device_caches`` creates the kernel's cache for the device.
            # Without the lock ``_caches``, two threads could create two caches. ``device_caches`` is private
            # to Triton, and may be missing.
            launch.kernel.device_caches[self._device.index]
        with torch.cuda.device(self._device):  # the current device must be set: each thread has its own
            compiled = launch.kernel.warmup(
                *dtypes, *launch.numbers, grid=(1,), **launch.constants, **launch.options
            )
            try:
                # Reading the attribute ``run`` of a compiled kernel loads the kernel on the device. It also
                # builds the launcher by a C compiler, unless Triton's cache has the launcher. So the first
                # launch finds both. Without the lock ``launcher``, several threads would build the same
                # launcher.
                with launcher:
                    _ = compiled.run
            except Exception:
                forget(launch.kernel, self._device)
                raise


# The ``_Rehearsal`` of the current thread while ``rehearse`` runs, else None. A ``Launch`` whose kernel is
# not compiled yet passes the kernel to this ``_Rehearsal``, which compiles the kernel in another thread. Then
# nothing is launched.
rehearsal: contextvars.ContextVar[_Rehearsal | None] = contextvars.ContextVar(
    "sdfastgn_rehearsal", default=None
)


def without_rehearsal() -> contextlib.AbstractContextManager[None]:
    """A context that launches kernels even while ``rehearse`` runs, for callers that need the results.

    ``rehearse`` otherwise only compiles the kernels of a call.
    """
    return setting(rehearsal, None)


@functools.cache
def prepare(device: torch.device) -> threading.Thread:
    """Start a thread that prepares Triton for its first compilation, once for each device.

    The thread adds archives of kernels to Triton's cache. It lets Triton hash its own library, build its
    access to the driver with a C compiler, and import modules. Meanwhile other threads can run Python most of
    the time.

    Returns the thread. The thread does nothing if no kernel can run on ``device``.
    """
    thread = threading.Thread(target=_prepare, args=(device,), name="sdfastgn-prepare")
    thread.start()
    return thread


def _prepare(device: torch.device) -> None:
    if device.type != "cuda" or gpu.triton is None or gpu.unsupported(device):
        return
    from sdfastgn.kernels.common.nothing import nothing

    archive.add_archives(device)
    # An error of this compilation is ignored: the first launch of any other kernel raises it again.
    with contextlib.suppress(Exception), torch.cuda.device(device):
        # ``warmup`` compiles the kernel, but does not load it on the device. When this thread also loaded the
        # kernel, PyTorch's attention in another thread had to wait one second for the load, on an H100.
        nothing.warmup(torch.float32, grid=(1,))


def rehearse(call: Callable[[], object], device: torch.device) -> int:
    """Run ``call`` once, and compile in parallel threads the kernels that it would launch.

    Kernels that are not compiled yet are not launched, so the results of ``call`` are meaningless.
    Triton is prepared and compiles while ``call`` still runs, because ``call`` may spend seconds on loading
    cuDNN and cuBLAS.

    Returns the number of kernels, including those whose compilation failed.

    Raises what ``call`` raises. Errors of the compilation are ignored here: they are raised again when the
    kernel is launched.
    """
    found = _Rehearsal(device)
    try:
        with setting(rehearsal, found):
            call()
        wait(found.jobs.values())
    finally:
        # After an error or an interrupt, compilations that have not started are canceled.
        found.pool.shutdown(cancel_futures=True)
    return len(found.jobs)
