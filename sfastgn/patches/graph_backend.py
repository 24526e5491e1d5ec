"""Capturing and replaying on an NVIDIA GPU; and what a stand-in for tests has to offer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

__all__ = ["Backend", "CudaBackend", "Handle", "backend_of"]


class Handle(Protocol):
    """A captured call. ``output``: what it returned, in memory that ``replay`` writes again."""

    output: Any

    def replay(self) -> None: ...


class Backend(Protocol):
    """Captures calls on one device. All graphs of one backend share memory, so that only one may run at a time: ``lock`` on the host and
    ``ordered`` on the device see to that."""

    lock: Any

    def is_busy(self) -> bool:
        """True while the caller is being captured by someone else."""

    def allocating(self) -> AbstractContextManager[Any]:
        """Memory of inputs is allocated in here."""

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run ``fn`` once, as a capture will. Raises what ``fn`` raises."""

    def capture(self, fn: Callable[[], Any]) -> Handle:
        """Capture ``fn``. Raises whatever makes that impossible; the device is as it was then."""

    def ordered(self) -> AbstractContextManager[Any]:
        """What is enqueued inside runs after what was enqueued inside before, on whichever stream."""

    def wait(self) -> None:
        """Wait on the host until everything from ``ordered`` has run; graphs may be dropped then."""

    def memory(self) -> int:
        """Bytes that the graphs' shared memory takes."""


class _CudaHandle:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any) -> None:
        self.graph, self.output = graph, output

    def replay(self) -> None:
        self.graph.replay()


class CudaBackend:
    """The graphs of one GPU of this process: one memory pool, one stream for captures, one event for the order of replays."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._retired: list[Any] = []
        self._done = torch.cuda.Event()

    def is_busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        # On the stream of captures, which wait for the whole device: memory that was freed early is not reused before all its readers ran.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            fn()
        current.wait_stream(self._stream)

    def capture(self, fn: Callable[[], Any]) -> Handle:
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph leaves its stream current when the end of a failed capture raises; the outer block puts it back.
            with torch.cuda.stream(self._stream):
                context = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
                with context:
                    output = fn()
        except BaseException:
            # Whatever state the pool was left in, no later graph is to share it; those that are in it keep it alive.
            self._retired.append(self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return _CudaHandle(graph, output)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)

    def wait(self) -> None:
        self._done.synchronize()

    def memory(self) -> int:
        pools = {tuple(pool) for pool in (self._pool, *self._retired)}
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) in pools
        )


_backends: dict[torch.device, CudaBackend] = {}
_backends_lock = threading.Lock()


def backend_of(device: torch.device) -> Backend | None:
    """The one backend of ``device`` in this process, made at its first use; None where there are no graphs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    backend = _backends.get(device)
    if backend is None:
        with _backends_lock:
            backend = _backends.setdefault(device, CudaBackend(device))
    return backend
