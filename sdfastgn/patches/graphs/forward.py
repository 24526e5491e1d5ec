"""A module's ``forward`` with CUDA graphs: each call is replayed, captured, or runs eager.

Each step of a call has its own file:

1. Describe the call: ``arguments.py`` makes a key of the arguments, ``models.py`` says when there can be no
   graph.
2. If ``store.py`` has a graph for the key and all weights are still at the addresses that the graph reads,
   start it. While the GPU runs, ``watch.py`` compares the model with the captured one. If the model changed,
   the result is discarded and the graphs are dropped.
3. Without a graph ``policy.py`` decides whether to capture the call now (``capture.py``). A model that draws
   random numbers is refused (``random_numbers.py``).
4. Every other call runs eager. Its reason is counted for the report.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.core.class_forward import class_forward
from sdfastgn.patches.core.instance_entries import InstanceEntry
from sdfastgn.patches.graphs.arguments import Call, Unsupported, contents_of, global_state, refill
from sdfastgn.patches.graphs.capture import Backend, backend_of, capture_call, run_on_copies
from sdfastgn.patches.graphs.models import is_harmless, numbers_of, reason_now
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy
from sdfastgn.patches.graphs.random_numbers import undrawn
from sdfastgn.patches.graphs.store import Store
from sdfastgn.patches.graphs.watch import Watch

__all__ = ["GraphedForward", "all_living"]

# Different reasons that are counted separately. Only calls that never repeat have more.
_MAX_REASONS = 64

# id -> ``GraphedForward``, for all that exist. Another library's wrapper may have replaced one in its module
# and still call it: then it is found only here. When memory is short, all of them drop their graphs.
_living: weakref.WeakValueDictionary[int, GraphedForward] = weakref.WeakValueDictionary()


def all_living() -> list[GraphedForward]:
    """All that exist in the process."""
    # ``valuerefs`` copies in one step of the interpreter. A loop over the dict would fail if another
    # thread adds one in the meantime.
    return [graphed for ref in _living.valuerefs() if (graphed := ref()) is not None]


class GraphedForward(InstanceEntry):
    """Replaces the ``forward`` of one instance. A copy or pickle has no graphs at first.

    Args:
        module: the instance.
        mode: ``"auto"`` captures at the second call of a kind, True at the first.
        backend: captures and replays. None: the backend of the device that the arguments are on. Tests pass
            another one.
        stands_over_own: true if the instance's ``__dict__`` had the class's ``forward`` in it before. It is
            put back when this object is removed.

    Attributes:
        eager: reason -> number of calls that ran eager for it.
    """

    # No __dict__: functools.update_wrapper (accelerate's hooks use it) would copy it into the
    # wrapper.
    __slots__ = ("_backend", "_policy", "_store", "eager", "mode", "stands_over_own")

    def __init__(
        self,
        module: nn.Module,
        mode: str | bool = "auto",
        backend: Backend | None = None,
        stands_over_own: bool = False,
    ) -> None:
        super().__init__(module)
        self.mode = mode
        self.stands_over_own = stands_over_own
        self._backend = backend
        self._store = Store()
        self._policy = Policy()
        self.eager: Counter[str] = Counter()
        _living[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedForward, (self.module, self.mode, None, self.stands_over_own)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        module = memo.get(id(self.module), self.module)
        return GraphedForward(module, self.mode, self._backend, self.stands_over_own)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The class's ``forward``, from which ``inspect.signature`` reads the parameters."""
        return class_forward(self.module)

    # A bound method has these three attributes. torch.export reads them.

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return type(self.module).forward

    @property
    def __code__(self) -> types.CodeType:
        return self.__func__.__code__

    @property
    def alive(self) -> int:
        """Number of graphs at this moment."""
        return len(self._store)

    @property
    def captured(self) -> int:
        """Number of captures so far."""
        return self._store.captured

    @property
    def replays(self) -> int:
        """Calls answered by a graph so far."""
        return self._store.replays

    @property
    def dropped(self) -> int:
        """Number of graphs dropped so far."""
        return self._store.dropped

    @property
    def last_change(self) -> str:
        """The last change of the model that made its graphs invalid, in words; empty if there was none."""
        return self._policy.last_change

    @classmethod
    def of(cls, module: nn.Module) -> list[GraphedForward]:
        """All that were made for ``module`` and still exist."""
        return [graphed for graphed in all_living() if graphed._module() is module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        try:
            return self._by_graph(module, args, kwargs)
        except Unsupported as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            reason = NO_MEMORY
            _give_memory_back()
        is_counted = reason in self.eager or len(self.eager) < _MAX_REASONS
        self.eager[reason if is_counted else "other reasons"] += 1
        containers = contents_of(args, kwargs)
        try:
            return type(module).forward(module, *args, **kwargs)
        except torch.OutOfMemoryError:
            # A call that succeeds with the stock model must not fail because graphs take memory.
            if not _give_memory_back():
                raise
        refill(containers)  # diffusers' UNet takes a T2I-Adapter's residuals out of the caller's list
        return type(module).forward(module, *args, **kwargs)

    def clear(self) -> int:
        """Drop all graphs and the record of the module's state. Returns the number of graphs."""
        backend = self._store.backend
        if backend is None:
            return 0
        with backend.lock:
            self._policy.forget_kinds()
            return self._store.clear()

    def pool_bytes(self) -> dict[int, int]:
        """{id of the backend: bytes of its memory pool}; empty without graphs.

        All modules on one device share the pool, and the id shows which pools are the same.
        """
        backend = self._store.backend
        return {id(backend): backend.memory()} if backend is not None and len(self._store) else {}

    def _by_graph(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call by a graph. Raises Unsupported with the reason if it must run eager."""
        reason = "they are turned off" if self.mode is False else reason_now(module)
        if reason is not None:
            raise Unsupported(reason)
        call = Call(args, kwargs, numbers_of(module) or {})
        backend = self._backend or backend_of(call.device)  # type: ignore[arg-type]
        if backend is None:
            raise Unsupported(f"there are no graphs on {call.device}")
        if backend.is_busy():
            raise Unsupported("the call is being captured by other code")
        key = (call.key, global_state(call.device))  # type: ignore[arg-type]
        store = self._store
        if backend is not store.backend:
            # ``clear`` takes the old device's lock, so the new one's is not taken yet. If two models
            # exchanged their devices, each thread could hold the lock that the other waits for.
            self.clear()
            store.backend = backend
        with backend.lock:
            if backend is not store.backend:
                raise Unsupported("another thread calls it on another device")
            output = self._replay_at_once(module, call, backend, key)
            if output is None:
                output = self._replay_or_capture(module, call, backend, key)
            if output is not None:
                store.replays += 1
                return output
        self._rehearse(module, call, backend, key)  # without the lock, so that other threads go on
        raise Unsupported("first call of its kind")

    def _replay_at_once(self, module: nn.Module, call: Call, backend: Backend, key: Any) -> Any:
        """Start the graph, and compare the model with the captured one while the GPU runs.

        Returns None if there is no graph, or if the model changed: then the result is discarded.
        """
        graph, watch = self._store.find(key), self._store.watch
        if graph is None or watch is None or not watch.is_in_place():
            return None
        output = graph.run(call, backend)
        return output if watch.unchanged(module) else None

    def _replay_or_capture(self, module: nn.Module, call: Call, backend: Backend, key: Any) -> Any:
        """The result of ``call`` by a graph, which is captured if there is none.

        Returns None for a first call that is not captured. Raises Unsupported with the reason if the call
        must run eager.
        """
        store, policy = self._store, self._policy
        self._check_model(module)
        graph = store.find(key)
        if graph is not None:
            return graph.run(call, backend)
        policy.check_refused(key)
        if policy.is_new(key):
            if self.mode == "auto":
                policy.first_call(key)
                return None
            self._rehearse(module, call, backend, key)
        is_warm = policy.is_warm(key)
        store.make_room()
        try:
            # ``undrawn`` also covers the first replay: on a GPU the replay draws random numbers, not the
            # capture.
            with undrawn(call.device, partial(run_on_copies, module, call, backend)):
                watch_of_now = partial(self._watch_of, module, call.device)
                graph = capture_call(module, call, backend, watch_of_now, is_warm=is_warm)
                store.add(key, graph)
                policy.was_captured(key)
                return graph.run(call, backend)
        except Unsupported as error:
            if key in store:
                store.drop(key)
            policy.refuse(key, str(error))
            raise

    def _rehearse(self, module: nn.Module, call: Call, backend: Backend, key: Any) -> None:
        """Compile all kernels of a kind of call in parallel. The first call would compile them one by one.

        This runs the forward once more, on copies of the arguments. Only models that may be captured are
        rehearsed: for others an additional run may have effects.
        """
        if self._policy.is_rehearsed(key):
            return
        run = partial(run_on_copies, module, call, backend)
        # If the rehearsal fails, so does the call that follows, and there the user sees the error.
        with contextlib.suppress(Exception):
            if Watch(module, is_harmless).reason is None:
                with undrawn(call.device, run):
                    backend.rehearse(run)

    def _check_model(self, module: nn.Module) -> None:
        """Drop the graphs if the model changed. Raises Unsupported if it must not be captured now."""
        watch = self._store.watch
        if watch is not None and not watch.unchanged(module):
            self._policy.model_changed(self._store.replays_of_state)
            self._drop_changed(module, watch)
        self._policy.check_pause()
        watch = self._store.watch
        if watch is not None and watch.reason is not None:
            raise Unsupported(watch.reason)

    def _drop_changed(self, module: nn.Module, watch: Watch) -> None:
        """Drop the graphs after ``module`` changed. The policy remembers the change in words."""
        if self.alive:
            self._policy.last_change = watch.what_changed(module)
        self.clear()

    def _watch_of(self, module: nn.Module, device: torch.device | None) -> Watch:
        """The watch over the present state of ``module``. Graphs of an earlier state are dropped.

        Raises Unsupported if the module cannot be watched.
        """
        watch = self._store.watch
        if watch is not None and not watch.unchanged(module):
            self._drop_changed(module, watch)
            watch = None
        if watch is None:
            try:
                watch = Watch(module, is_harmless, device)
            except Exception as error:  # of any class, because this runs properties of users' classes
                raise Unsupported(f"its state cannot be watched: {one_line(error)}") from error
            self._store.begin(watch)
        if watch.reason is not None:
            raise Unsupported(watch.reason)
        return watch


def _give_memory_back() -> int:
    """Drop all graphs of the process, and capture none for a while. Returns the number of dropped graphs."""
    count = 0
    for graphed in all_living():
        dropped = graphed.clear()
        if dropped:
            graphed._policy.pause_without_memory()
            count += dropped
    return count
