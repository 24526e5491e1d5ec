"""A module's ``forward`` with CUDA graphs: each call replays a graph, captures one, or runs eagerly.

A call takes these steps, each in its own file:

1. ``models.py`` says whether the model can run as a graph, and ``arguments.py`` makes a key of the arguments.
2. If ``store.py`` has a graph for the key, and all weights are still at the addresses that the graph reads,
   new scales of adapters, new values of numbers that are graph inputs (``factors.py``) and new FP8 weights
   are written into memory, and the graph is started. While the GPU runs it, ``watch.py`` compares the model
   with its state at the capture. If the model has changed, the result is discarded and the graphs are
   dropped. ``code/states.py`` finds out whether other code has replaced functions that the call runs. If so,
   the result is discarded, and another ``GraphedForward`` runs the call: there is one for the original
   functions, and one for each set of replaced functions. If fused blocks would ignore a replaced function,
   the call runs as a *plan*: the model's own code, traced once and rewritten to sdfastgn's kernels. A
   ``Planner`` makes the plan, which is captured too. Of a transformer only plans are captured.
3. If there is no graph, ``policy.py`` decides whether ``capture.py`` captures the call now. A model that
   draws random numbers is not captured (``random_numbers.py``).
4. Every other call runs eagerly. The reason for this is counted, and ``sdfastgn.report`` shows it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.patches.code.states import States, running
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs.arguments import Call, Unsupported, global_state
from sdfastgn.patches.graphs.capture import (
    AnyGraph,
    Backend,
    Graph,
    backend_of,
    capture_call,
    run_on_copies,
)
from sdfastgn.patches.graphs.lora_scale import LoraScale
from sdfastgn.patches.graphs.models import (
    is_harmless,
    numbers_of,
    reason_for,
    reason_in_training,
    reason_now,
    switched,
    takes_gigabytes,
)
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy, count_reason
from sdfastgn.patches.graphs.random_numbers import undrawn
from sdfastgn.patches.graphs.store import Store
from sdfastgn.patches.graphs.training import Flags, TrainingGraph
from sdfastgn.patches.graphs.watch import Watch, reason_of_error
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey
from sdfastgn.patches.lora.merging import adopt_new, give_back, scaled
from sdfastgn.patches.offload.repeated import until_it_fits
from sdfastgn.patches.swap.class_forward import MethodEntry, class_forward

# Maximum number of graphs of one module for calls with gradients.
_MAX_TRAINING_GRAPHS = 4

# If other code replaces functions of the model during a call, the call starts again. After this number of
# attempts, the call runs the model's code without graphs and without sdfastgn's kernels.
_MAX_CHANGES = 4

# Held while a ``GraphedForward`` makes the object that runs its calls as plans (rewritten traces of the
# module's code). All threads must use the same object.
_making = threading.Lock()


class _Outdated(Exception):  # noqa: N818  # not an error: the call starts again
    """Raised if the model has changed since the call read the state of the model."""


class _CodeChanged(Exception):  # noqa: N818  # not an error: the call starts again
    """Raised if, during a call, other code has replaced functions that the call runs, or put them back."""


class Planner(NamedTuple):
    """Says when calls of a module run as *plans*: the module's code, traced and rewritten to kernels.

    Attributes:
        make: function (module, name of the method, states of its code) -> a callable that runs the calls.
        is_always: True if plans run all calls, because the module has no fused blocks. False if plans run
            calls only while other code has replaced functions that fused blocks would ignore.
        is_required: True if only plans are captured as CUDA graphs, and only if Python takes longer than the
            GPU. False if the module's own code may be captured for a call without a plan.
    """

    make: Callable[[nn.Module, str, States], Any]
    is_always: bool
    is_required: bool = False


class _Current(NamedTuple):
    """One call of a module, and everything that running it as a graph needs.

    Attributes:
        module: the module.
        forward: the method that is called, of the class of ``module`` and bound to it; or the object that
            runs such calls as plans.
        call: the arguments.
        backend: the object that captures and replays graphs on the device of the arguments.
        key: calls with equal keys are of one kind, and can use the same graph.
        survey: the module's layers with merged weights of adapters. In calls with gradients no layer has
            merged weights. Then the survey is a ``Flags``: it records which parameters require gradients.
        scale: the scale for all adapters, if the arguments contain one.
        as_stock: True if the model runs without fused blocks, because other code has replaced functions that
            fused blocks would ignore.
    """

    module: nn.Module
    forward: Any
    call: Call
    backend: Backend
    key: Any
    survey: AdapterSurvey
    scale: LoraScale
    as_stock: bool

    def refresh(self, watch: Watch | None = None, *, compares_later: bool = False) -> bool:
        """Write new merged weights into the memory that graphs read, and the numbers of ``watch``, if given.

        Returns False if the graphs cannot be used any more: for example, an adapter can no longer be merged,
        or a number that is a graph input has become 0, for which the model skips kernels of the graph.

        ``compares_later``: True if the contents of adapters need not be compared here, because the caller
        calls ``survey.has_same_tensors`` before it uses a result.
        """
        with self.backend.ordered():
            is_merged = self.survey.refresh(self.scale.factor, compares_later)
            return is_merged and (watch is None or watch.factors.refresh())

    def refresh_fp8(self, *, compares_later: bool = False) -> None:
        """Bring the FP8 weights and scales of the module up to date, for its graphs.

        ``compares_later``: True if the contents of weights need not be compared here, because the caller
        calls ``fp8.has_same_contents`` before it uses a result.
        """
        if not compares_later:
            fp8.compare(self.module)
        if fp8.is_outdated(self.module):
            with self.backend.ordered():
                fp8.refresh(self.module)
        if compares_later:
            fp8.note_replay(self.module)


class GraphedForward(MethodEntry):
    """Replaces the ``forward`` of one module, or another method, and runs its calls as graphs where it can.

    A copy or pickle of the module gets a new ``GraphedForward`` without graphs.

    Args:
        module: the module.
        mode: ``"auto"``: the second call of a kind is captured. If the model is offloaded as a whole, the
            seventh call of a kind after each move to the GPU is captured instead. True: the first call of a
            kind is captured. False: all calls run eagerly. ``"training"``: like ``"auto"``, but calls with
            gradients become graphs too. Calls are of one kind if one graph serves them all.
        backend: the object that captures and replays. None: the backend of the device of the arguments.
            Tests pass a backend for the CPU.
        replaces_entry: True if the module's ``__dict__`` already had an entry with the replaced method.
        method: the name of the method.
        scratch: attributes of the module that each call sets before it reads them. They are not compared.
        states: the states in which the module's code was seen. Code has a new state when other code replaces
            a function of it.
        state: the index of the state in which this object serves calls.
        planner: says when calls run as plans; None if no calls do.

    Attributes:
        eager: reason -> number of calls that ran eagerly for this reason.
        training: runs the calls with gradients in mode ``"training"``; None in other modes.
    """

    # accelerate's hooks call functools.update_wrapper, which would copy the items of a ``__dict__`` into the
    # wrapper. So instances have slots and no ``__dict__``.
    __slots__ = (
        "_backend", "_compiled", "_others", "_planned", "_policy", "_rehearsed", "_state", "_states",
        "_store", "eager", "mode", "planner", "scratch", "training",
    )  # fmt: skip
    # The class of this object's graphs.
    _kind: type[Graph] | type[TrainingGraph] = Graph

    def __init__(
        self,
        module: nn.Module,
        mode: str | bool = "auto",
        backend: Backend | None = None,
        replaces_entry: bool = False,
        method: str = "forward",
        scratch: frozenset[str] = frozenset(),
        states: States | None = None,
        state: int = 0,
        planner: Planner | None = None,
    ) -> None:
        super().__init__(module, method, replaces_entry)
        # While torch.compile traces a call, it cannot read a method of a class that diffusers has marked with
        # ``allow_in_graph``. So the method is read here, before any call.
        self._compiled = getattr(type(module), method)
        self.scratch = scratch
        self._backend = backend
        self._store = Store()
        self._policy = Policy()
        # A record of the module's state when ``_rehearse`` last ran. The next capture uses the record.
        self._rehearsed: Watch | None = None
        self._states = States(module) if states is None else states
        self._state = state
        self.planner = planner
        # The object that runs calls as plans, which are rewritten traces of the module's code. ``planner``
        # makes this object.
        self._planned: Any = None
        # Index of a state of the module's code (original, or with certain functions replaced) -> the
        # ``GraphedForward`` that serves calls in this state. This object itself serves state 0.
        self._others: dict[int, GraphedForward] = {}
        self.eager: Counter[str] = Counter()
        self.mode: str | bool = False
        self.training: _TrainingForward | None = None
        self.set_mode(mode)
        # If ``states`` is given, another ``GraphedForward`` has made this object for one state of the code
        # (``_of_state``). ``all_of`` must find only that other one, so only it is registered.
        if states is None:
            self.register()

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedForward, (self.module, self.mode, None, *self._options, None, 0, self.planner)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedForward:
        module = memo.get(id(self.module), self.module)
        planner = copy.deepcopy(self.planner, memo)
        return GraphedForward(module, self.mode, self._backend, *self._options, planner=planner)

    @property
    def _options(self) -> tuple[bool, str, frozenset[str]]:
        return self.replaces_entry, self.method, self.scratch

    @property
    def planned(self) -> list[Any]:
        """The objects that run calls as plans (rewritten traces of the module's code).

        There is at most one for each state of the code: original, or with certain functions replaced.
        """
        return [each._planned for each in self._all() if each._planned is not None]

    @property
    def alive(self) -> int:
        """Number of graphs that exist now."""
        return sum(len(each._store) for each in self._all())

    @property
    def captured(self) -> int:
        """Number of captures so far."""
        return sum(each._store.captured for each in self._all())

    @property
    def replays(self) -> int:
        """Number of calls so far whose result came from a graph."""
        return sum(each._store.replays for each in self._all())

    @property
    def dropped(self) -> int:
        """Number of graphs dropped so far."""
        return sum(each._store.dropped for each in self._all())

    @property
    def last_change(self) -> str:
        """The last change of the model that made its graphs invalid, in words; empty if there was none."""
        return self._policy.last_change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():
            own = self._compiled if self._needs_plan else getattr(type(module), self.method)
            return own(module, *args, **kwargs)
        if not self.is_on:
            return getattr(type(module), self.method)(module, *args, **kwargs)
        training = self.training
        if training is not None and torch.is_grad_enabled():
            return training(*args, **kwargs)
        for _ in range(_MAX_CHANGES):
            state = self._states.last()
            server, as_stock = self._of_state(state), bool(self._states.replaced(state))
            try:
                with running(as_stock and not server._is_planned(as_stock)):
                    return server._serve(module, args, kwargs, as_stock)
            except _CodeChanged:
                if self._states.are_too_many:
                    self.clear()
        with dispatch.stock_code():
            return self._run_eagerly(module, args, kwargs, as_stock=False)

    def set_mode(self, mode: str | bool, backend: Backend | None = None) -> None:
        """Drop all graphs, and run later calls in ``mode``.

        Does nothing if ``mode`` is the present mode and ``backend`` is None.
        """
        if (self.mode, backend) == (mode, None):
            return
        self.clear()
        if self.training is not None:
            self.training.clear()
        self._backend = backend or self._backend
        args = self.module, "auto", self._backend, *self._options
        self.training = _TrainingForward(*args) if mode == "training" else None
        self.mode = mode

    def _serve(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], as_stock: bool) -> Any:
        """Run the call and return its result.

        ``as_stock``: True if fused blocks do not run, because other code has replaced functions that the
        blocks would ignore.

        Raises _CodeChanged if other code replaces functions, or puts them back, during the call.
        """
        try:
            try:
                return self._by_graph(module, args, kwargs, as_stock)
            except _Outdated:  # the model has changed: if a second attempt fails too, the call runs eagerly
                return self._by_graph(module, args, kwargs, as_stock)
        except _Outdated:
            reason = "another thread changes it"
        except Unsupported as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            reason = NO_MEMORY
            _free_memory()
            # Memory is short, so no call is captured for a while, even if there were no graphs to drop.
            self._policy.pause_without_memory()
        count_reason(self.eager, reason)
        self._check_code(as_stock)
        return self._run_eagerly(module, args, kwargs, as_stock)

    def clear(self) -> int:
        """Drop this object's graphs and its record of the module's state. Returns the number of graphs.

        Graphs with gradients belong to ``training``, whose own ``clear`` drops them.
        """
        return sum(each._clear() for each in self._all())

    def _clear(self) -> int:
        self._rehearsed = None
        backend = self._store.backend
        if backend is None:
            return 0
        with backend.lock:
            self._policy.forget_kinds()
            return self._store.clear()

    def moved(self) -> None:
        """Drop the graphs if the model has changed since the capture, so that other models get the memory.

        For instance, its weights were moved or replaced. The record of the model's state at the capture is
        dropped with the graphs, because it keeps replaced weights alive.
        """
        self._rehearsed = None
        if self.training is not None:
            self.training.moved()
        if self._planned is not None:
            self._planned.moved()
        for other in self._others.values():
            other.moved()
        store = self._store
        if store.backend is None:
            return
        with store.backend.lock:
            watch = store.watch
            if watch is None or not len(store):
                return
            if not (watch.is_in_place() and watch.unchanged(self.module)):
                self._policy.model_changed(store.replays_of_state)
                self._drop_changed(self.module, watch)

    def pool_bytes(self) -> dict[int, int]:
        """Returns {id of the backend: size of all its memory pools in bytes}; empty if there are no graphs.

        All modules on one device share one backend. The id lets callers count its pools only once. A size is
        0 if PyTorch's allocator does not report it, as with ``cudaMallocAsync``.
        """
        backend = self._store.backend
        own = {id(backend): backend.memory()} if backend is not None and self.alive else {}
        return own if self.training is None else own | self.training.pool_bytes()

    # ---- one ``GraphedForward`` for the module's original code, and one for each set of replaced functions

    def _of_state(self, index: int) -> GraphedForward:
        """The ``GraphedForward`` that serves calls while the module's code is in the state ``index``.

        Code has a new state when other code replaces a function of it (``code/states.py``).
        """
        if index == 0:
            return self
        other = self._others.get(index)
        if other is None:
            options = *self._options, self._states, index
            other = type(self)(self.module, self.mode, self._backend, *options, self.planner)
            other.eager = self.eager
            # If another thread has meanwhile added an object for the same state, that object is used.
            other = self._others.setdefault(index, other)
        other.mode = self.mode
        return other

    def set_planner(self, planner: Planner | None) -> None:
        """Replace the ``Planner``: it says when calls run as plans (rewritten traces of the module's code).

        The caller must have dropped all graphs before.
        """
        for each in self._all():
            each.planner, each._planned = planner, None

    def _is_planned(self, as_stock: bool) -> bool:
        """True if calls run as plans: the module's own code, traced once and rewritten to kernels.

        ``as_stock``: True if other code has replaced functions that fused blocks would ignore.
        """
        return self.planner is not None and (as_stock or self.planner.is_always)

    @property
    def _needs_plan(self) -> bool:
        return self.planner is not None and self.planner.is_required

    def _runner(self, module: nn.Module, as_stock: bool) -> Any:
        """The method of the module's class, or the object that runs calls as plans (rewritten traces)."""
        if self.planner is None or not self._is_planned(as_stock):
            return class_forward(module, self.method)
        if self._planned is None:
            with _making:
                if self._planned is None:
                    self._planned = self.planner.make(module, self.method, self._states)
        return self._planned

    def _all(self) -> list[GraphedForward]:
        return [self, *self._others.values()]

    def _check_code(self, as_stock: bool) -> None:
        """Raise _CodeChanged if other code has replaced functions since this call began, or put them back.

        ``as_stock``: True if functions were replaced when the call began, so that no fused blocks run.
        """
        states, state = self._states, self._state
        change = "" if states.same(state) else states.change(state)
        if change and states.look() != state:
            self._policy.last_change = f"other code has replaced {change}, or put it back"
            raise _CodeChanged
        if bool(states.replaced(state)) != as_stock:
            self._clear()
            raise _CodeChanged

    @property
    def _unwatched(self) -> frozenset[str]:
        """Attributes of the module that may change without making its graphs invalid."""
        return self.scratch | {self.method}

    def _run_eagerly(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], as_stock: bool
    ) -> Any:
        """Run the call without a graph and return its result."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._runner(module, as_stock)(*args, **kwargs)

        return until_it_fits(run, args, kwargs, self._frees_memory)

    def _frees_memory(self) -> bool:
        """Free memory for a call that found too little. False if there is nothing to free.

        A call that succeeds without sdfastgn must not fail because graphs or merged weights take memory. So
        graphs are dropped first. If the call fails again, merged weights are freed.
        """
        if not _free_memory():
            return False
        # For a while this module is not captured. A capture would take the freed memory again, and then the
        # next call of another model would run out of memory and drop the new graph.
        self._policy.pause_without_memory()
        return True

    def _by_graph(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], as_stock: bool
    ) -> Any:
        """Run the call as a graph and return its result.

        Raises Unsupported, with the reason, if the call must run eagerly.
        """
        store = self._store
        if self._needs_plan:
            adopt_new(module)
        reason = self._refusal(module)
        if reason is not None:
            raise Unsupported(reason)
        if not len(store):
            # During a pause no call is captured, and a call must take hardly longer than in a model without
            # graphs. So this check comes before the arguments are looked at.
            self._policy.check_pause()
            self._check_plan(module, args, kwargs, as_stock)
        survey = store.survey or (AdapterSurvey(module, False) if as_stock else self._survey_of(module))
        scale = LoraScale(module, kwargs, survey)
        call = Call(args, scale.kwargs, numbers_of(module) or {})
        reason = reason_for(module, call)
        if reason is not None:
            raise Unsupported(reason)
        backend = self._backend or backend_of(call.device)  # type: ignore[arg-type]
        if backend is None:
            raise Unsupported(f"there are no graphs on {call.device}")
        if backend.is_busy():
            raise Unsupported("the call is being captured by other code")
        key = self._key_of(module, call)
        if len(store) and key not in store:
            self._check_plan(module, args, kwargs, as_stock)
        if backend is not store.backend:
            # If the model has moved, ``clear`` releases the old device's lock before the new lock is taken: a
            # thread with both locks could deadlock with a thread whose model moves in the other direction.
            self.clear()
            store.backend = backend
        with backend.lock:
            if backend is not store.backend:
                raise Unsupported("another thread calls it on another device")
            forward = self._runner(module, as_stock)
            current = _Current(module, forward, call, backend, key, survey, scale, as_stock)
            output = self._replay_at_once(current)
            if output is None:
                output = self._replay_or_capture(current)
            if output is not None:
                fp8.copy_counts(module)
                store.replayed(key, call)
                if self._planned is not None:
                    self._planned.replayed()
                scale.end(module)
                return output
        self._rehearse(current)  # compiles kernels while no lock is held, so other threads can use graphs
        raise Unsupported("first call of its kind")

    def _refusal(self, module: nn.Module) -> str | None:
        """Why no call at all can run as a graph now. None if the arguments decide."""
        if self._states.are_too_many:
            return "other code replaces and puts back what it runs, in too many ways"
        return "they are turned off" if self.mode is False else self._reason_now(module)

    def _check_plan(self, module: nn.Module, args: Any, kwargs: Any, as_stock: bool) -> None:
        """Raise Unsupported if the call runs as a plan, and the plan is not captured as a CUDA graph now.

        A plan is a rewritten trace of the module's code. With ``cuda_graphs=True`` this method does nothing:
        ``_replay_or_capture`` makes this check then. The caller calls this method before it compares the
        model and its adapters with their earlier state, because the plan makes these comparisons itself.
        """
        if self._needs_plan and self.mode is not True:
            self._runner(module, as_stock).check_capturable(args, kwargs, saves_time=True)

    # ---- methods that ``_TrainingForward`` overrides

    def _reason_now(self, module: nn.Module) -> str | None:
        """Why no call of ``module`` can run as a graph now; None if calls can."""
        return reason_now(module)

    def _survey_of(self, module: nn.Module) -> AdapterSurvey:
        return AdapterSurvey(module)

    def _key_of(self, module: nn.Module, call: Call) -> Any:
        """Returns the key of ``call``. Calls with equal keys are of one kind, and can share a graph."""
        settings = global_state(call.device)  # type: ignore[arg-type]
        lengths = self._planned.lengths(call) if self._needs_plan and self._planned is not None else None
        return call.key, settings, switched(module), lengths, fp8.generation(module)

    def _is_warm(self, key: Any) -> bool:
        """True if this thread has run a call of the kind ``key``, so that it can be captured at once."""
        return self._policy.is_warm(key)

    def _knowing(self, current: _Current) -> Any:
        """A context for calls with copies of the arguments of ``current``.

        A plan depends on how many keys an attention mask hides. In the context, plans use the numbers that
        were counted in the original masks, and do not read the copies.
        """
        return current.forward.knowing(current.call) if self._needs_plan else contextlib.nullcontext()

    def _make_room(self) -> None:
        """Drop the least recently used graphs, so that there is room for one more.

        A subclass may keep all graphs and raise Unsupported instead.
        """
        self._store.make_room()

    # ---- steps of a call

    def _replay_at_once(self, current: _Current) -> Any:
        """Start the call's graph and, while the GPU runs it, check that the model has not changed.

        Returns the graph's result. Returns None if the call has no graph, or if the model or the weights of
        its adapters have changed since the capture.
        """
        store, survey = self._store, current.survey
        graph, watch = self._find(current.key), store.watch
        if graph is None or watch is None or not watch.is_in_place():
            return None
        is_current = survey.has_same_settings(current.scale.factor) and watch.factors.are_written()
        if not (is_current or current.refresh(watch, compares_later=True)):
            return None
        current.refresh_fp8(compares_later=True)
        output = graph.run(current.call, current.backend)
        self._check_code(current.as_stock)
        is_same = survey.has_same_tensors() and watch.unchanged(current.module)
        is_same = is_same and survey.has_same_contents() and fp8.has_same_contents(current.module)
        return output if is_same else None

    def _replay_or_capture(self, current: _Current) -> Any:
        """Run the graph of the call and return its result. If it has no graph yet, capture it first.

        In the modes "auto" and "training", returns None for the first call of a kind: the first of the calls
        that one graph can serve. Raises Unsupported, with the reason, if the call must run eagerly.
        """
        module, key, policy = current.module, current.key, self._policy
        self._check_code(current.as_stock)
        self._check_model(current)
        current.refresh_fp8()
        graph = self._find(key)
        if graph is not None:
            return graph.run(current.call, current.backend)
        policy.forget_if_moved(module)
        policy.check_refused(key)
        if self.mode is not True:
            if policy.is_new(key):
                policy.first_call(key)
                # The first call of a kind runs eagerly. But if a plan (rewritten trace) runs the calls, it
                # has run eagerly before a call gets here, so the call is captured at once.
                if not self._needs_plan:
                    return None
            policy.check_offloaded(key, module)
        elif policy.is_new(key):
            with self._knowing(current):
                self._rehearse(current)
        with self._knowing(current):
            if self._needs_plan:
                args, kwargs = current.call.rebuild(current.call.tensors)  # type: ignore[arg-type]
                current.forward.check_capturable(args, kwargs, saves_time=self.mode is not True)
                self._rehearse(current)
            return self._capture(current)

    def _find(self, key: Any) -> AnyGraph | None:
        """The graph for calls of kind ``key``, or None.

        A graph that was captured from plans, which are rewritten traces of code, may contain constants that
        were computed from CPU tensors. If such a CPU tensor was written since, the graph is dropped.
        """
        graph = self._store.find(key)
        if graph is not None and not all(plan.is_current() for plan in graph.kept or ()):
            self._store.drop(key)
            return None
        return graph

    def _capture(self, current: _Current) -> Any:
        """Capture the call, replay its graph once and return the result.

        Raises Unsupported, with the reason, if the graph cannot be captured or must not be kept.
        """
        store, policy = self._store, self._policy
        module, call, backend, key = current.module, current.call, current.backend, current.key
        is_warm = self._is_warm(key)
        self._make_room()
        try:
            # ``undrawn`` checks that no random numbers are drawn. On a GPU a capture only records the kernels
            # that draw them, so the first replay must run inside of ``undrawn`` too.
            with (
                without_collections(),
                scaled(current.scale.in_forward),
                undrawn(call.device, partial(run_on_copies, current.forward, call, backend)),
            ):
                self._states.see(self._state)
                self._check_code(current.as_stock)
                graph = capture_call(
                    self._kind,
                    module,
                    current.forward.by_plan if self._needs_plan else current.forward,
                    call,
                    backend,
                    partial(self._watch_of, current),
                    is_warm=is_warm,
                    scratch=self.scratch,
                )
                graph.kept = getattr(current.forward, "plans", None)
                self._check_code(current.as_stock)
                # If another thread has, say, switched off a module's attention, the key has changed. Then the
                # graph is of no use, and the call starts again.
                if self._key_of(module, call) != key:
                    raise _Outdated
                store.add(key, graph)
                if (self._needs_plan or takes_gigabytes(module)) and not backend.has_room():
                    raise Unsupported(NO_MEMORY)
                policy.captured(key)
                return graph.run(call, backend)
        except Unsupported as error:
            if key in store:
                store.drop(key)
            policy.refuse(key, str(error))
            raise

    def _rehearse(self, current: _Current) -> None:
        """Compile the kernels that this kind of call needs, in parallel.

        Otherwise the call would compile them one by one. To find the kernels, the forward runs once on copies
        of the arguments. In some models this additional run would have an effect, for instance on a counter.
        So this method does nothing for models that cannot be captured.
        """
        module, call, backend = current.module, current.call, current.backend
        # The key's last item counts how often FP8 weights were replaced. The kernels only depend on whether
        # FP8 is on, so ``is_allowed`` takes the place of this item.
        if not self._policy.is_first_rehearsal((*current.key[:-1], fp8.is_allowed(module))):
            return
        run = partial(run_on_copies, current.forward, call, backend)
        # An error here is ignored: the call itself follows, and raises the same error to the user.
        with contextlib.suppress(Exception), scaled(current.scale.in_forward):
            watch = self._store.watch or self._new_watch(current)
            if watch.reason is None:
                # ``watch`` notices changes of the model. It is kept for the capture, unless layers have
                # merged weights of adapters: at the capture these may be other layers.
                self._rehearsed = None if current.survey.layers else watch
                with undrawn(call.device, run):
                    backend.rehearse(run)

    def _check_model(self, current: _Current) -> None:
        """Check that the model has not changed since the capture. If it has changed, drop the graphs.

        Raises _Outdated after a change, and Unsupported if the model must not be captured now.
        """
        store, module, survey = self._store, current.module, current.survey
        watch = store.watch
        if watch is not None and not (current.refresh(watch) and watch.unchanged(module)):
            self._policy.model_changed(store.replays_of_state)
            self._drop_changed(module, watch, survey.reason)
            raise _Outdated
        # If another thread has captured the module meanwhile, its survey of the layers with merged weights is
        # in the store, and this call must start again.
        if store.survey not in (None, survey):
            raise _Outdated
        self._policy.check_pause()
        if watch is not None and watch.reason is not None:
            raise Unsupported(watch.reason)
        if not current.refresh():
            raise Unsupported(survey.reason)

    def _drop_changed(self, module: nn.Module, watch: Watch, change: str = "") -> None:
        """Drop the graphs because the model has changed, and store what changed, for ``sdfastgn.report``.

        ``change``: what changed, in words; empty if ``watch`` has to find it.
        """
        if self.alive:
            self._policy.last_change = change or watch.what_changed(module)
        self.clear()

    def _watch_of(self, current: _Current) -> Watch:
        """Returns a ``Watch`` that records the present state of the module.

        If the state is still the one that the store's ``Watch`` has recorded, that ``Watch`` is returned.
        Otherwise the graphs are dropped and a new ``Watch`` is made. Raises Unsupported if the state cannot
        be watched.
        """
        module = current.module
        watch = self._store.watch
        if watch is not None and not watch.unchanged(module):
            self._drop_changed(module, watch, current.survey.reason)
            watch = None
        if watch is None:
            try:
                watch, self._rehearsed = self._rehearsed, None
                if watch is None or not watch.unchanged(module):
                    watch = self._new_watch(current)
            except Exception as error:
                raise Unsupported(reason_of_error(error)) from error
            self._store.begin(watch, current.survey)
        if watch.reason is not None:
            raise Unsupported(watch.reason)
        return watch

    def _new_watch(self, current: _Current) -> Watch:
        options = current.call.device, current.survey, self._kind.has_factors
        return Watch(current.module, is_harmless, *options, unwatched=self._unwatched)


class _TrainingForward(GraphedForward):
    """Runs the calls with gradients of a module that was optimized with ``cuda_graphs="training"``."""

    __slots__ = ()
    _kind = TrainingGraph

    def _reason_now(self, module: nn.Module) -> str | None:
        return reason_in_training(module)

    def _survey_of(self, module: nn.Module) -> AdapterSurvey:
        return Flags(module)

    def _is_planned(self, as_stock: bool) -> bool:
        return False  # plans, the rewritten traces of a module's code, have no backward

    def _key_of(self, module: nn.Module, call: Call) -> Any:
        wanted = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in call.tensors)
        return super()._key_of(module, call), wanted

    def _is_warm(self, key: Any) -> bool:
        # cuDNN chooses algorithms for each thread. A captured backward runs in this thread, for which cuDNN
        # may not have chosen any, because an eager backward runs in autograd's thread.
        return False

    def _make_room(self) -> None:
        # A training graph holds all that its forward saves for the backward, so few of them fit into memory.
        # If old graphs were dropped to make room, shapes that alternate would be captured again and again. So
        # further kinds of calls run eagerly.
        if len(self._store) >= _MAX_TRAINING_GRAPHS:
            raise Unsupported(f"there are graphs for {_MAX_TRAINING_GRAPHS} other kinds of calls")

    def _rehearse(self, current: _Current) -> None:
        """Does nothing: the first call compiles the kernels of the forward and of the backward."""


def _free_memory() -> int:
    """Drop all graphs in the process. Modules that had graphs are then not captured for a while.

    If there are no graphs, free the merged weights of adapters in all models.

    Returns the number of dropped graphs, or of layers whose merged weights were freed.
    """
    count = 0
    for module in GraphedForward.owners():
        for graphed in GraphedForward.all_of(module):
            dropped = graphed.clear()
            if dropped:
                graphed._policy.pause_without_memory()
                count += dropped
    return count or give_back()
