"""The forward of one instance with CUDA graphs: replay where a graph fits, else capture or run eager.

A call is answered by a replay only if a graph was captured for the same arguments (``arguments.py``)
and nothing has changed in the model since (``watch.py``). A replay starts as soon as it is safe; whether
it was right is checked while the GPU runs, and a result that was not is dropped. Every other call runs
eager, with a reason in the report.
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

__all__ = ["GraphedForward"]

# Reasons that are counted, each by itself: there are more only if calls never repeat.
_MAX_REASONS = 64

# By id, to find those that other code has wrapped (a forward put over ours keeps calling it), and those
# that hold memory.
_living: weakref.WeakValueDictionary[int, GraphedForward] = weakref.WeakValueDictionary()


def _all_living() -> list[GraphedForward]:
    # ``valuerefs`` is one step of the interpreter: other threads may add some meanwhile.
    return [graphed for ref in _living.valuerefs() if (graphed := ref()) is not None]


class GraphedForward(InstanceEntry):
    """Stands for the ``forward`` of one instance. Copies and pickles begin without graphs.

    Args:
        module: the instance.
        mode: ``"auto"`` captures at the second call of a kind, True at the first.
        backend: what captures, for tests; else that of the device of the arguments.
        stands_over_own: true if the instance had its class's ``forward`` in its ``__dict__``, which
            then comes back to there.
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
        """The class's ``forward``; ``inspect.signature`` looks here."""
        return class_forward(self.module)

    # As of the bound method that it stands for; torch.export looks at its code.

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
        """What changed in the model when its graphs were last dropped for it; empty if never."""
        return self._policy.last_change

    @classmethod
    def of(cls, module: nn.Module) -> list[GraphedForward]:
        """Every one that was made for ``module`` and is still referred to."""
        return [graphed for graphed in _all_living() if graphed._module() is module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        try:
            return self._replayed(module, args, kwargs)
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
            # Memory of graphs must not make a call fail that the stock model can make.
            if not _give_memory_back():
                raise
        refill(containers)  # diffusers' UNet takes a T2I-Adapter's residuals out of the caller's list
        return type(module).forward(module, *args, **kwargs)

    def clear(self) -> int:
        """Drop all graphs and what is known of the module. Returns the number of graphs."""
        backend = self._store.backend
        if backend is None:
            return 0
        with backend.lock:
            self._policy.forget_kinds()
            return self._store.clear()

    def pool_bytes(self) -> dict[int, int]:
        """Memory of the backend that holds this module's graphs, by its id: several modules share one."""
        backend = self._store.backend
        return {id(backend): backend.memory()} if backend is not None and len(self._store) else {}

    def _replayed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call by a graph. Raises Unsupported with the reason where there is none."""
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
            # Before the lock of the new device is taken: two models that change places would each
            # hold the lock that the other waits for.
            self.clear()
            store.backend = backend
        with backend.lock:
            if backend is not store.backend:
                raise Unsupported("another thread calls it on another device")
            output = self._started_at_once(module, call, backend, key)
            if output is None:
                output = self._result_of_graph(module, call, backend, key)
            if output is not None:
                store.replays += 1
                return output
        self._rehearse(module, call, backend, key)  # outside the lock: other threads go on
        raise Unsupported("first call of its kind")

    def _started_at_once(self, module: nn.Module, call: Call, backend: Backend, key: Any) -> Any:
        """The result of a replay that began before the watch had looked at everything.

        None where there is no graph, or the model has changed: whatever ran then is nobody's result.
        """
        graph, watch = self._store.find(key), self._store.watch
        if graph is None or watch is None or not watch.is_in_place():
            return None
        output = graph.run(call, backend)
        return output if watch.unchanged(module) else None

    def _result_of_graph(self, module: nn.Module, call: Call, backend: Backend, key: Any) -> Any:
        """The result of ``call`` by a graph, captured if it is time; None for a first call of its kind.

        Raises Unsupported with the reason.
        """
        store, policy = self._store, self._policy
        self._check_watch(module)
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
            # With the first replay, which draws the random numbers of the capture on a GPU.
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
        """Compile all kernels of a kind of call at once, not one by one as the first call needs them.

        The forward runs once more for it, as it does for a capture, on copies of the arguments. So
        only what may be captured is rehearsed.
        """
        if self._policy.is_rehearsed(key):
            return
        run = partial(run_on_copies, module, call, backend)
        # Whatever is wrong, the call itself will say.
        with contextlib.suppress(Exception):
            if Watch(module, is_harmless).reason is None:
                with undrawn(call.device, run):
                    backend.rehearse(run)

    def _check_watch(self, module: nn.Module) -> None:
        """Drop the graphs if the model has changed. Raises Unsupported if there are none to be now."""
        watch = self._store.watch
        if watch is not None and not watch.unchanged(module):
            self._policy.model_changed(self._store.replays_of_state)
            self._drop_changed(module, watch)
        self._policy.check_pause()
        watch = self._store.watch
        if watch is not None and watch.reason is not None:
            raise Unsupported(watch.reason)

    def _drop_changed(self, module: nn.Module, watch: Watch) -> None:
        """Drop the graphs, which are of another state of ``module``, and keep what the difference is."""
        if self.alive:
            self._policy.last_change = watch.what_changed(module)
        self.clear()

    def _watch_of(self, module: nn.Module, device: torch.device | None) -> Watch:
        """What has to stay as it is for the graphs to be right.

        Raises Unsupported if that cannot be said.
        """
        watch = self._store.watch
        if watch is not None and not watch.unchanged(module):
            self._drop_changed(module, watch)
            watch = None
        if watch is None:
            try:
                watch = Watch(module, is_harmless, device)
            except Exception as error:  # whatever a property or a comparison of someone else's raises
                raise Unsupported(f"its state cannot be watched: {one_line(error)}") from error
            self._store.begin(watch)
        if watch.reason is not None:
            raise Unsupported(watch.reason)
        return watch


def _give_memory_back() -> int:
    """Drop every graph of the process; there will be none for a while.

    Returns how many there were.
    """
    count = 0
    for graphed in _all_living():
        dropped = graphed.clear()
        if dropped:
            graphed._policy.pause_without_memory()
            count += dropped
    return count
