"""Captures one call of a module as a CUDA graph. Only ``CudaBackend`` and its helpers call CUDA."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from sdfastgn.kernels.act_linear import shared
from sdfastgn.kernels.common.compile_ahead import rehearse
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import end_pool
from sdfastgn.kernels.common.setting import setting
from sdfastgn.kernels.product.op import chosen_after, load_algorithms
from sdfastgn.patches.graphs.arguments import (
    Call,
    Unsupported,
    clone_of,
    lists_in,
    static_copy,
    structure_of,
)
from sdfastgn.patches.graphs.watch import Watch
from sdfastgn.patches.lora.merging import frozen

# PyTorch's id of the memory that belongs to no pool of CUDA graphs.
_NO_POOL = (0, 0)
# True while sdfastgn itself calls a module with copies of a user's arguments, in order to compile kernels or
# to capture the call as a CUDA graph.
on_copies: ContextVar[bool] = ContextVar("sdfastgn_on_copies", default=False)


class AnyGraph(Protocol):
    """The type of a captured call: ``Graph``, or ``TrainingGraph`` (``training.py``) if it has gradients."""

    # Returns the context in which the forward runs: ``torch.no_grad`` or ``torch.enable_grad``.
    gradients: ClassVar[Any]
    # True if the numbers in the model's attributes that ``factors.py`` lists, such as the scale of an
    # IP-Adapter, are inputs of the graph. False if a new value of such a number needs a new capture.
    has_factors: ClassVar[bool]
    # The length of each list in the call's arguments after the forward, which may remove items from a list.
    # Empty if the forward removes none.
    left: list[int]
    # Objects that must live as long as the graph, because the graph reads their memory.
    kept: Any

    def __init__(
        self, module: nn.Module, buffers: list[Tensor], run: Callable[[], Any], backend: Backend, watch: Watch
    ) -> None:
        """Capture ``run``, the forward of ``module`` with ``buffers`` as its arguments."""

    @staticmethod
    def warm_up(module: nn.Module, buffers: list[Tensor], run: Callable[[], Any]) -> None:
        """Run eagerly what the constructor captures, so that its kernels are compiled before the capture.

        cuDNN chooses its algorithms in this run too.
        """

    def run(self, call: Call, backend: Backend) -> Any:
        """Replay the graph with the arguments of ``call``, and return a copy of its output."""


class Handle(Protocol):
    """One CUDA graph. ``output``: the captured function's result, into which ``replay`` writes new values."""

    output: Any

    def replay(self) -> None: ...


class Backend(Protocol):
    """Captures and replays graphs on one device. ``CudaBackend`` is for GPUs; tests have one for the CPU.

    The graphs of a device share a memory pool, so only one of them may run at a time. (A ``TrainingGraph``
    has a pool of its own, but does not run beside other graphs either.) Each thread holds ``lock`` while it
    starts a graph. On the GPU, ``ordered`` makes each graph wait for the end of the previous graph, even if
    the previous graph runs on another stream.
    """

    lock: Any

    def is_busy(self) -> bool:
        """True if other code is capturing the current stream."""

    def allocating(self) -> AbstractContextManager[Any]:
        """A context for allocating a graph's inputs: no other work gets this memory while the graph runs."""

    def rehearse(self, fn: Callable[[], Any]) -> None:
        """Run ``fn`` only to compile its kernels and to choose algorithms for its matrix products."""

    def new_pool(self) -> Any:
        """Returns a new memory pool, for graphs that must not share memory with other graphs."""

    def capture(self, fn: Callable[[], Any], pool: Any = None) -> Handle:
        """Capture a call of ``fn``. If this fails, raise the error and leave the device as it was.

        ``pool``: a result of ``new_pool``; None for the pool that the graphs of the device share.
        """

    def ordered(self) -> AbstractContextManager[Any]:
        """A context whose GPU work starts after the GPU work of all earlier ``ordered`` contexts is done."""

    def wait(self) -> None:
        """Block until the GPU work of all ``ordered`` contexts is done. Then graphs may be dropped."""

    def memory(self) -> int:
        """Size in bytes of the memory pools of the device's graphs; 0 if PyTorch does not report it."""

    def has_room(self) -> bool:
        """True if this process can still allocate as much memory on the device as its graphs hold now.

        Then enough memory is left for models without graphs.
        """


class Graph:
    """One captured call without gradients: memory for its inputs, the recorded kernels, and their output."""

    gradients: ClassVar[Any] = torch.no_grad
    has_factors: ClassVar[bool] = True
    left: list[int]
    kept: Any

    def __init__(
        self, module: nn.Module, buffers: list[Tensor], run: Callable[[], Any], backend: Backend, watch: Watch
    ) -> None:
        self.buffers = buffers
        with backend.allocating():
            self._shared = shared.Capture(watch.device, watch.addresses())
        with self._shared.running():
            self.handle = backend.capture(run)
        self.output = static_copy(self.handle.output)

    @staticmethod
    def warm_up(module: nn.Module, buffers: list[Tensor], run: Callable[[], Any]) -> None:
        run()

    def run(self, call: Call, backend: Backend) -> Any:
        """Replay the graph with the arguments of ``call``, and return a copy of its output."""
        with backend.ordered():
            call.fill(self.buffers)
            self.handle.replay()
            return clone_of(self.output)


def capture_call(
    kind: type[AnyGraph],
    module: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    backend: Backend,
    watch_of_now: Callable[[], Watch],
    *,
    is_warm: bool,
    scratch: frozenset[str] = frozenset(),
) -> AnyGraph:
    """Capture ``call`` and return its graph.

    Args:
        kind: the class of the graph.
        module: the module whose state the graph depends on.
        forward: a callable that runs the call: the module's bound method, or an object that runs a *plan* of
            it (the module's code, traced once and rewritten to sdfastgn's kernels).
        call: the arguments. The graph gets copies of them.
        backend: the backend of the device of ``call``.
        watch_of_now: returns a ``Watch``: a record of the present state of the module, which later tells
            whether the module has changed. ``watch_of_now`` is called before a warm-up, and just before the
            capture.
        is_warm: True if this thread has already run a call that the same graph could serve. Then kernels are
            compiled and cuDNN has chosen its algorithms. If False, ``kind.warm_up`` does this first.
        scratch: attributes of the module that each call sets before it reads them, and that hold no tensors
            after a call.

    Raises:
        Unsupported: with the reason, if the capture fails, or if the forward changes the model, its tensors
            or its arguments. A replay would leave out changes that Python code makes, and would repeat writes
            into tensors. Two changes are allowed: the forward may set the attributes ``scratch``, and may
            take items from the front of a list. After a replay the same items can be taken from the list.
    """
    buffers = _buffers_of(call, backend)
    left: list[int] = []

    def run() -> Any:
        args, kwargs = call.rebuild(buffers)
        lists, before = lists_in(*args, kwargs), structure_of(args, kwargs)
        given = list(map(list, lists))
        # Inference mode is turned off here, because inference tensors do not count writes. A caller in
        # inference mode still gets inference tensors, because outputs are copied in the mode of the caller.
        with torch.inference_mode(False), kind.gradients(), _no_autocast_cache(), setting(on_copies, True):
            output = forward(*args, **kwargs)
        left[:] = _put_back(lists, given)
        if structure_of(args, kwargs) != before:
            raise Unsupported("its forward changes the lists or dicts that it is given")
        return output

    watch = watch_of_now()  # raises for a model that cannot be watched, before a warm-up could change it
    if not is_warm:
        with backend.ordered():
            kind.warm_up(module, buffers, run)
        watch = watch_of_now()  # a new record of the model, because the warm-up may have filled its caches
    with backend.ordered(), backend.allocating():
        watch.factors.allocate(call.device)  # type: ignore[arg-type]
    versions, writes, graph = [buffer._version for buffer in buffers], watch.writes(), None
    try:
        with backend.ordered(), frozen(), watch.factors.captured(), without_scratch(module, scratch):
            graph = kind(module, buffers, run, backend, watch)
            graph.left = left
    except Unsupported:
        raise
    except Exception as error:
        if not is_warm:
            raise Unsupported(f"capture failed: {one_line(error)}") from error
    # The capture failed although kernels were compiled in an earlier call. A new warm-up may help.
    if graph is None:
        given = kind, module, forward, call, backend, watch_of_now
        return capture_call(*given, is_warm=False, scratch=scratch)
    _refuse_writes(watch, module, writes, versions != [buffer._version for buffer in buffers])
    return graph


def _put_back(lists: list[list[Any]], given: list[list[Any]]) -> list[int]:
    """Put back the items that a forward took from the fronts of ``lists``.

    Returns the length of each list without these items; an empty list if no item was taken. ``given``: the
    former items of each list.
    """
    lengths = list(map(len, lists))
    if not any(map(operator.ne, lengths, map(len, given))):
        return []
    for items, others in zip(lists, given, strict=True):
        items[:0] = others[: len(others) - len(items)]
    return lengths


def _refuse_writes(watch: Watch, module: nn.Module, writes: list[int], is_argument_written: bool) -> None:
    """Raise Unsupported if the capture has changed ``module``, its tensors or its arguments.

    ``writes``: the result of ``watch.writes()`` before the capture.
    """
    if not watch.unchanged(module):
        raise Unsupported("its forward changes the model")
    # A replay of the graph would repeat the writes into the model's tensors, even if the result of the replay
    # is discarded because the model has changed.
    if watch.writes() != writes:
        raise Unsupported("its forward writes into its own tensors")
    if is_argument_written:
        raise Unsupported("its forward writes into its arguments")


@contextmanager
def without_scratch(module: nn.Module, scratch: frozenset[str]) -> Iterator[None]:
    """A context that begins without the attributes ``scratch`` of ``module``, and restores them at its end.

    A forward that reads one of these attributes before it sets the attribute raises AttributeError. Raises
    Unsupported if one of the attributes holds a tensor at the end, because the replay of a CUDA graph would
    not set the attribute again.
    """
    attributes = vars(module)
    before = {name: attributes.pop(name) for name in scratch if name in attributes}
    try:
        yield
        for name in sorted(scratch):
            items = attributes.get(name)
            if any(isinstance(item, Tensor) for item in (items if isinstance(items, list) else (items,))):
                raise Unsupported(f"its forward leaves a tensor in the attribute {name}")
    finally:
        for name in scratch & attributes.keys():
            del attributes[name]
        attributes.update(before)


def run_on_copies(forward: Callable[..., Any], call: Call, backend: Backend) -> None:
    """Call ``forward`` with copies of the arguments of ``call``, and ignore its result."""
    args, kwargs = call.rebuild(_buffers_of(call, backend))
    with setting(on_copies, True):
        forward(*args, **kwargs)


def _buffers_of(call: Call, backend: Backend) -> list[Tensor]:
    """Copies of the tensors of ``call``. A copy requires gradients if its tensor does.

    Raises Unsupported if the tensors cannot be copied.
    """
    try:
        with torch.inference_mode(False), torch.no_grad(), backend.ordered(), backend.allocating():
            buffers = call.buffers()
            call.fill(buffers)
            for buffer, value in zip(buffers, call.tensors, strict=True):
                buffer.requires_grad_(isinstance(value, Tensor) and value.requires_grad)
    except RuntimeError as error:
        raise Unsupported(f"its arguments cannot be copied: {one_line(error)}") from error
    return buffers


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """A context in which autocast does not cache weights that it has cast to another dtype.

    The end of autocast frees the cache, but replays of a captured graph would still read the cached weights.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _CudaHandle:
    """One CUDA graph on a GPU (a ``Handle``). ``pool``: the memory pool of the graph."""

    __slots__ = ("__weakref__", "graph", "output", "pool")

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any, output: Any) -> None:
        self.graph, self.pool, self.output = graph, pool, output

    def replay(self) -> None:
        self.graph.replay()


class CudaBackend:
    """Captures and replays the CUDA graphs of one GPU.

    It has a stream for captures, and an event by which each replay waits for the previous replay.
    """

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
        # If a model is deleted, its graphs are freed at once, perhaps while the GPU still runs one. Until the
        # GPU is done, no other work may get the memory of the graph's inputs. PyTorch's allocator reuses
        # freed memory only on the stream where it was allocated. So the inputs are allocated on a stream that
        # runs only captures.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def rehearse(self, fn: Callable[[], Any]) -> None:
        def call() -> None:
            fn()
            # ``fn`` has started threads that compile its kernels. While they work, the driver loads the
            # algorithms for matrix products that are timed later.
            load_algorithms()

        with torch.cuda.device(self._device), chosen_after(), shared.rehearsed():
            rehearse(call, self._device)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], Any], pool: Any = None) -> Handle:
        graph = torch.cuda.CUDAGraph()
        # PyTorch frees a pool when its last graph is gone. This list keeps the graphs alive until the new
        # graph uses their pool too.
        others = list(self._alive)
        if pool is None:
            if self._pool is None or not any(tuple(other.pool) == tuple(self._pool) for other in others):
                self._pool = self.new_pool()
            pool = self._pool
        # A pool of CUDA graphs cannot use memory that is in the allocator's cache. So the cache is returned
        # to the GPU.
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
            # CUDA has invalidated the capture, for example because of a synchronization. Then PyTorch's
            # ``capture_end`` stops halfway, and the allocator still believes that a capture is running. In
            # this state the allocator never empties its cache, and adds no graph to this pool. ``end_pool``
            # ends this state.
            self._pool = None
            if not end_pool(self._device.index, pool):
                # If ``end_pool`` returns False, the allocator has stopped already, or this version of PyTorch
                # cannot stop it. The pool is freed with the graph.
                return
            # The graph is kept alive, because the allocator of pinned memory has a callback that reads the
            # graph.
            self._broken.append(graph)
            self._free_generator()

    def _free_generator(self) -> None:
        # After a failed capture PyTorch's default generator may also believe that the capture is running,
        # and then refuses to draw random numbers. The end of a small capture that succeeds corrects this.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=self._device)
        finally:
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
        sizes = pool_sizes()
        if not sizes:
            return 0
        with self.lock:  # the lock keeps other threads from adding a graph during the loop
            pools = {tuple(handle.pool) for handle in self._alive}
        return sum(sizes[pool] for pool in pools)

    def has_room(self) -> bool:
        # The cache of PyTorch's allocator does not count as free here. But it is nearly empty, because
        # ``capture`` has just emptied it.
        free, total = torch.cuda.mem_get_info(self._device)
        # ``torch.cuda.set_per_process_memory_fraction`` may limit how much memory this process may allocate.
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total
        return min(free, allowed - torch.cuda.memory_reserved(self._device)) >= self.memory()


def pool_sizes() -> Counter[tuple[int, ...]]:
    """Returns {id of a memory pool of CUDA graphs: its size in bytes}; empty if PyTorch reports no sizes."""
    sizes: Counter[tuple[int, ...]] = Counter()
    if torch.cuda.get_allocator_backend() != "native":
        # ``memory_snapshot`` raises an error if the allocator is cudaMallocAsync, as by default in ComfyUI.
        return sizes
    for segment in torch.cuda.memory_snapshot():
        sizes[tuple(segment["segment_pool_id"])] += segment["total_size"]
    del sizes[_NO_POOL]
    return sizes


def is_idle(device: torch.device) -> bool:
    """True if ``device`` has done all work of the current stream. Must not be called during a capture."""
    return device.type != "cuda" or torch.cuda.current_stream(device).query()


_backends: dict[torch.device, CudaBackend] = {}
_backends_lock = threading.Lock()


def _renew_locks() -> None:
    """Make new locks in a forked process.

    If a thread held an old lock during the fork, this lock would never be released: the thread does not exist
    in the forked process, so a call there would hang. CUDA cannot be used in a process that was forked after
    CUDA was initialized. With new locks a call raises CUDA's error about this.
    """
    global _backends_lock
    _backends_lock = threading.Lock()
    for backend in _backends.values():
        backend.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork, and so no ``os.register_at_fork``
    os.register_at_fork(after_in_child=_renew_locks)


def backend_of(device: torch.device) -> Backend | None:
    """The backend of ``device``, made at the first call; None if ``device`` is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    backend = _backends.get(device)
    if backend is None:
        with _backends_lock:
            backend = _backends.setdefault(device, CudaBackend(device))
    return backend
