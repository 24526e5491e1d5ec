"""Captures one call of a module as a graph. ``CudaBackend`` is the part that talks to CUDA."""

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
    """A captured call. ``output`` is what the forward returned; each ``replay`` overwrites its memory."""

    output: Any

    def replay(self) -> None: ...


class Backend(Protocol):
    """Captures and replays graphs on one device. Tests use another one, for the CPU.

    All graphs of a device share one memory pool, so only one may run at a time. ``lock`` ensures that for
    the threads of the host, ``ordered`` for the streams of the GPU.
    """

    lock: Any

    def is_busy(self) -> bool:
        """True if other code is capturing the current stream."""

    def allocating(self) -> AbstractContextManager[Any]:
        """Inside, memory for a graph's inputs may be allocated."""

    def rehearse(self, fn: Callable[[], Any]) -> None:
        """Run ``fn`` only to compile its kernels and to choose algorithms for its matrix products."""

    def capture(self, fn: Callable[[], Any]) -> Handle:
        """Capture ``fn``. If that fails, the error is raised and the device is left as it was."""

    def ordered(self) -> AbstractContextManager[Any]:
        """Work that is enqueued inside waits for all work of earlier blocks, also on other streams."""

    def wait(self) -> None:
        """Wait on the host until all work of ``ordered`` blocks is done. Then graphs may be dropped."""

    def memory(self) -> int:
        """Bytes of the memory pool that the graphs share."""


class Graph:
    """One captured call: memory for its inputs, the recorded kernels, and their output."""

    def __init__(self, buffers: list[Tensor], handle: Handle) -> None:
        self.buffers, self.handle, self.output = buffers, handle, static_copy(handle.output)

    def run(self, call: Call, backend: Backend) -> Any:
        """The result for the arguments of ``call``, in new memory."""
        with backend.ordered():
            call.fill(self.buffers)
            self.handle.replay()
            return clone_of(self.output)


def capture_call(
    module: nn.Module, call: Call, backend: Backend, watch_of_now: Callable[[], Watch], *, is_warm: bool
) -> Graph:
    """A graph of ``call``.

    Args:
        module: its forward is captured.
        call: the arguments. The graph gets copies of them.
        backend: of the device of ``call``.
        watch_of_now: returns a Watch over the present state of ``module``. It is called just before the
            capture.
        is_warm: True if this thread has made such a call before, so that kernels are compiled and cuDNN
            has chosen its algorithms. Otherwise the forward runs once before the capture.

    Raises:
        Unsupported: with the reason, if the capture fails or the forward has effects that a replay would
            lack or repeat.
    """
    buffers = _buffers_of(call, backend)

    def run() -> Any:
        args, kwargs = call.rebuild(buffers)
        before = structure_of(args, kwargs)
        # Not in inference mode, because its tensors do not count how often they are written into. The
        # caller gets copies, which are made in the caller's mode.
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
    # The capture failed without a warm-up: the model has changed, or a tensor is aligned in another way.
    if graph is None:
        return capture_call(module, call, backend, watch_of_now, is_warm=False)
    if not watch.unchanged(module):
        raise Unsupported("its forward changes the model")
    if watch.writes() != writes:  # every replay would write, even one whose result is discarded
        raise Unsupported("its forward writes into its own tensors")
    if versions != [buffer._version for buffer in buffers]:
        raise Unsupported("its forward writes into its arguments")
    return graph


def run_on_copies(module: nn.Module, call: Call, backend: Backend) -> None:
    """Run the forward on copies of the arguments of ``call`` and ignore its result."""
    args, kwargs = call.rebuild(_buffers_of(call, backend))
    type(module).forward(module, *args, **kwargs)


def _buffers_of(call: Call, backend: Backend) -> list[Tensor]:
    """Copies of the tensors of ``call``. Raises Unsupported if they cannot be copied."""
    try:
        with torch.inference_mode(False), torch.no_grad(), backend.ordered(), backend.allocating():
            buffers = call.buffers()
            call.fill(buffers)
    except RuntimeError as error:
        raise Unsupported(f"its arguments cannot be copied: {one_line(error)}") from error
    return buffers


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Inside, autocast caches no cast weights: their memory is freed later, but a replay would read it."""
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
        # PyTorch's allocator reuses memory on the stream where it was allocated. This stream has no
        # other work, so nothing overwrites the inputs of a graph that is dropped while it runs.
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
        # Kept alive during the capture, because the allocator refuses a pool whose graphs are all gone.
        others = list(self._alive)
        if self._pool is None or not others:
            self._pool = torch.cuda.graph_pool_handle()
        pool = self._pool
        # The pool cannot use memory that eager calls left in the allocator's cache. So that is given
        # back first.
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
        """End a failed capture, so that PyTorch can make eager calls and other captures again."""
        try:
            graph.capture_end()
        except RuntimeError:
            # CUDA has invalidated the capture, for example because of a synchronization. PyTorch's
            # ``capture_end`` then stops halfway: the allocator still believes that it is capturing. It
            # would not empty its cache any more, and would add no other graph to this pool.
            self._pool = None
            if not end_pool(self._device.index, pool):
                return  # ``capture_end`` had ended it already, and the graph releases its pool itself
            # Kept alive: the allocator of pinned memory has a callback that reads from it.
            self._broken.append(graph)
            self._free_generator()

    def _free_generator(self) -> None:
        # PyTorch's default generator may also believe that it is capturing, and would refuse to draw.
        # The end of an empty capture resets it.
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
        with self.lock:  # so that no other thread adds a graph meanwhile
            pools = {tuple(handle.pool) for handle in self._alive}
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools
        )


_backends: dict[torch.device, CudaBackend] = {}
_backends_lock = threading.Lock()


def _free_locks() -> None:
    """Make new locks in a forked process: no thread is there that could release the old ones.

    CUDA does not run there and raises an error that says so.
    """
    global _backends_lock
    _backends_lock = threading.Lock()
    for backend in _backends.values():
        backend.lock = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)


def backend_of(device: torch.device) -> Backend | None:
    """The only backend of ``device``, made at its first use; None for a device without CUDA graphs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    backend = _backends.get(device)
    if backend is None:
        with _backends_lock:
            backend = _backends.setdefault(device, CudaBackend(device))
    return backend
