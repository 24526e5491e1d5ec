"""Capturing one call of a module as a graph, and the GPU's part in it (``Backend``)."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common.compile_ahead import rehearse
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import end_pool
from sdfastgn.kernels.product.op import chosen_after
from sdfastgn.patches.graphs.arguments import Call, Unsupported, clone_of, static_copy, structure_of
from sdfastgn.patches.graphs.watch import Watch

__all__ = ["Backend", "CudaBackend", "Graph", "Handle", "backend_of", "capture_call", "run_on_copies"]


class Handle(Protocol):
    """A captured call. ``output``: what it returned, in memory that ``replay`` writes again."""

    output: Any

    def replay(self) -> None: ...


class Backend(Protocol):
    """Captures calls on one device. Graphs share memory: ``lock`` and ``ordered`` let one run at a time."""

    lock: Any

    def is_busy(self) -> bool:
        """True while the caller is being captured by someone else."""

    def allocating(self) -> AbstractContextManager[Any]:
        """Memory of inputs is allocated in here."""

    def rehearse(self, fn: Callable[[], Any]) -> None:
        """Run ``fn`` for what can be prepared: kernels, matrix products. Its result is of no use."""

    def capture(self, fn: Callable[[], Any]) -> Handle:
        """Capture ``fn``. Raises whatever makes that impossible; the device is as it was then."""

    def ordered(self) -> AbstractContextManager[Any]:
        """What is enqueued inside runs after what was enqueued inside before, on whichever stream."""

    def wait(self) -> None:
        """Wait on the host until everything from ``ordered`` has run; graphs may be dropped then."""

    def memory(self) -> int:
        """Bytes that the graphs' shared memory takes."""


class Graph:
    """One captured call: memory for what goes in, what comes out, and the way to run it."""

    def __init__(self, buffers: list[Tensor], handle: Handle) -> None:
        self.buffers, self.handle, self.output = buffers, handle, static_copy(handle.output)

    def run(self, call: Call, backend: Backend) -> Any:
        with backend.ordered():
            call.fill(self.buffers)
            self.handle.replay()
            return clone_of(self.output)


def capture_call(
    module: nn.Module, call: Call, backend: Backend, watch_of_now: Callable[[], Watch], *, is_warm: bool
) -> Graph:
    """A graph of ``call``.

    ``is_warm``: this thread has run the like, so that kernels are compiled and cuDNN's choices
    made.
    """
    buffers = _buffers_of(call, backend)

    def run() -> Any:
        args, kwargs = call.rebuild(buffers)
        before = structure_of(args, kwargs)
        # Not in inference mode, where no tensor counts how often it was written; copies of the
        # result are in the caller's mode.
        with torch.inference_mode(False), torch.no_grad(), _no_autocast_cache():
            output = type(module).forward(module, *args, **kwargs)
        if structure_of(args, kwargs) != before:
            raise Unsupported("its forward changes the lists or dicts that it is given")
        return output

    if not is_warm:
        with backend.ordered():
            run()
    watch = watch_of_now()
    versions, writes = [buffer._version for buffer in buffers], watch.writes()
    graph = None
    try:
        with backend.ordered():
            graph = Graph(buffers, backend.capture(run))
    except Unsupported:
        raise
    except Exception as error:
        if not is_warm:
            raise Unsupported(f"capture failed: {one_line(error)}") from error
    if graph is None:  # it was not warm: the model has changed, or a tensor has another alignment
        return capture_call(module, call, backend, watch_of_now, is_warm=False)
    if not watch.unchanged(module):
        raise Unsupported("its forward changes the model")
    if watch.writes() != writes:  # a replay whose result is dropped would write, too
        raise Unsupported("its forward writes into its own tensors")
    if versions != [buffer._version for buffer in buffers]:
        raise Unsupported("its forward writes into its arguments")
    return graph


def run_on_copies(module: nn.Module, call: Call, backend: Backend) -> None:
    """The forward on copies of the arguments of ``call``, for what happens on the way."""
    args, kwargs = call.rebuild(_buffers_of(call, backend))
    type(module).forward(module, *args, **kwargs)


def _buffers_of(call: Call, backend: Backend) -> list[Tensor]:
    """Memory for the arguments of ``call``, filled. Raises Unsupported if they cannot be copied."""
    try:
        with torch.inference_mode(False), torch.no_grad(), backend.ordered(), backend.allocating():
            buffers = call.buffers()
            call.fill(buffers)
    except RuntimeError as error:
        raise Unsupported(f"its arguments cannot be copied: {one_line(error)}") from error
    return buffers


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """No autocast cache in a graph: it is emptied with its context, and a replay would read freed memory."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _CudaHandle:
    __slots__ = ("__weakref__", "graph", "output", "pool")

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any, output: Any) -> None:
        self.graph, self.pool, self.output = graph, pool, output

    def replay(self) -> None:
        self.graph.replay()


class CudaBackend:
    """The graphs of one GPU: one memory pool, one stream for captures, one event to order replays."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self._pool: Any = None
        self._alive: weakref.WeakSet[_CudaHandle] = weakref.WeakSet()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def is_busy(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        # On a stream where nothing else is allocated: a graph that is dropped while it runs still
        # reads this memory.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def rehearse(self, fn: Callable[[], Any]) -> None:
        with torch.cuda.device(self._device), chosen_after():
            rehearse(fn, self._device)

    def capture(self, fn: Callable[[], Any]) -> Handle:
        graph = torch.cuda.CUDAGraph()
        others = list(self._alive)  # held, because the allocator refuses a pool whose graphs are all gone
        if self._pool is None or not others:
            self._pool = torch.cuda.graph_pool_handle()
        pool = self._pool
        # What eager calls have left in the allocator's cache is of no use to a pool: given back, so
        # that both do not add up.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
                output = fn()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        handle = _CudaHandle(graph, pool, output)
        self._alive.add(handle)
        return handle

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed, and leave PyTorch fit for eager calls and other captures."""
        try:
            graph.capture_end()
        except RuntimeError:
            # What CUDA has invalidated (a synchronization does) ends halfway in PyTorch: its
            # allocator still believes in the capture, and would refuse to empty its cache from now
            # on, and the pool's graphs to be joined by another.
            self._pool = None
            if not end_pool(self._device.index, pool):
                return  # the end came as far as this, and the graph releases its pool itself
            self._broken.append(graph)  # the allocator of pinned memory keeps a function that looks into it
            self._free_generator()

    def _free_generator(self) -> None:
        # PyTorch's default generator may believe in the broken capture too, and would refuse random
        # numbers; the end of another tells it.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        torch.zeros(1, device=self._device)
        graph.capture_end()

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
        with self.lock:  # no other thread adds one meanwhile
            pools = {tuple(handle.pool) for handle in self._alive}
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools
        )


_backends: dict[torch.device, CudaBackend] = {}
_backends_lock = threading.Lock()


def _free_locks() -> None:
    """In a forked process, where nobody is left who would release them.

    CUDA itself says that it cannot run there.
    """
    global _backends_lock
    _backends_lock = threading.Lock()
    for backend in _backends.values():
        backend.lock = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)


def backend_of(device: torch.device) -> Backend | None:
    """The one backend of ``device``, made at its first use; None where there are no graphs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    backend = _backends.get(device)
    if backend is None:
        with _backends_lock:
            backend = _backends.setdefault(device, CudaBackend(device))
    return backend
