"""``PlannedForward`` replaces the ``forward`` of a module. Each call runs a plan, makes one, or does without.

A plan is a traced call as a list of kernel calls, which run without the model's Python. A call of the module
goes through these steps:

1. ``arguments.py`` makes a key of the arguments. Calls with equal keys can share a plan.
2. If ``store.py`` has a plan for the key, the plan runs. Before that, merged weights of adapters are brought
   up to date (``adapters.py``). While the GPU computes, ``guard.py`` compares the model with its state during
   the trace. If the model has changed, the result and all plans are dropped, and the call begins again.
3. If there is no plan, ``making.py`` traces the call, makes the plan and runs it. ``outcome.py`` records what
   the call returns besides tensors. ``state.py`` finds attributes of modules in which a call keeps tensors
   for later calls. If attention masks hide nothing, ``masks.py`` makes a second plan from the same graph,
   without the masks.
4. Every other call runs the model's own code. The reason is counted, and the report shows it. If the model
   cannot be traced, smaller modules in it get plans (``inside.py``). The first call of some models fills
   tables that later calls read. Such a call cannot be traced, but the next one is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import without_rehearsal
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.code.states import MAX_STATES, States, running
from sdfastgn.patches.fp8.rows import RowWeights
from sdfastgn.patches.graphs.arguments import Call, Unsupported, global_state
from sdfastgn.patches.graphs.capture import is_idle, on_copies
from sdfastgn.patches.graphs.lora_scale import LoraScale
from sdfastgn.patches.graphs.models import (
    numbers_of,
    reason_without_graphs,
    repeats_decoder,
    scratch_of,
    switched,
)
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy, count_reason
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora.merging import factor_now, scaled
from sdfastgn.patches.swap.class_forward import MethodEntry, class_forward
from sdfastgn.plans.adapters import Adapters, Unmerged
from sdfastgn.plans.disk.saved import Saved
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.inside import plan_inside
from sdfastgn.plans.making import (
    compile_ahead,
    difference,
    make_plan,
    may_seed,
    most_difference,
    on,
    places,
    run_own,
    same_random_numbers,
    trace_call,
)
from sdfastgn.plans.masks import Lengths
from sdfastgn.plans.outcome import has_shared_containers
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.state import STATE, Held, State
from sdfastgn.plans.store import Made, Plans
from sdfastgn.plans.trace.refusals import is_tracing
from sdfastgn.plans.trace.traced import Untraceable

# A call becomes a CUDA graph only if Python took longer than the GPU in this number of calls of the same kind
# in a row. In one call Python may take long by chance, for instance because another thread runs.
_IDLE_CALLS = 2
# Number of times that calls with equal arguments are traced if the trace fails. The second attempt may
# succeed, because the first call of some models makes attributes or fills caches.
_TRACES = 2
# If the model changes again and again after fewer calls than this, it runs its own code for a while. A trace
# takes as long as the Python code of 30 to 60 calls, and a plan saves only a part of that in each call.
SHORT_LIFE = 16
# The keys that attention masks show are counted in the second call with the same masks: when the masks are
# looked up (``Masks.lengths``) for the second time. A module with CUDA graphs looks them up twice in a call.
# There it is the third time.
_LOOKS = 2
# Set while a call is captured as a CUDA graph: (the call's plan with all attention masks, the number of keys
# that each mask shows). The capture runs on copies of the arguments, whose keys need not be counted again.
_known: ContextVar[tuple[Made, Lengths | None] | None] = ContextVar("sdfastgn_known", default=None)
# True inside of a call that runs the model's own code although a later call may be traced. Modules in the
# model then make no plans of their own.
_is_alone: ContextVar[bool] = ContextVar("sdfastgn_is_alone", default=False)


class _Fills(Untraceable):
    """Raised if a call sets attributes of the model, for instance tables that later calls read.

    The call then runs the model's own code, and the next call is traced.
    """

    def __init__(self, reason: str, call: Call, plans: Plans) -> None:
        super().__init__(reason)
        self.call, self.plans = call, plans


class _Changed(Unsupported):
    """Raised if the model has changed since the trace. The call can be repeated: its arguments are intact."""


class _Found(NamedTuple):
    """A call of a module, and the plan that computes it.

    Attributes:
        plans: all plans of the module for the present state of its code.
        made: the plan of this call.
        call: the arguments.
        kwargs: the named arguments. The scale of adapters is left out. The tensors that modules keep between
            calls are added as one more argument.
        scale: the scale of adapters, if the call has one as an argument.
        factor: the number by which the scales of all adapters are multiplied.
        numbers: further inputs of the plan. For each attention mask that was replaced by a number, how many
            keys attention reads.
    """

    plans: Plans
    made: Made
    call: Call
    kwargs: dict[str, Any]
    scale: LoraScale
    factor: float
    numbers: list[Tensor]


class PlannedForward(MethodEntry):
    """Replaces the ``forward`` of one module, and runs its calls as plans where it can.

    A plan is a traced call as a list of kernel calls, which run without the module's Python. A copy or pickle
    of the module gets a new ``PlannedForward`` without plans.

    Args:
        module: the module.
        trusted: names of packages of which the user has said that their code keeps no state between calls.
        replaces_entry: True if the module's ``__dict__`` already has an entry ``method``.
        method: the name of the method that is replaced; "forward" for most modules.
        states: an object that numbers the states of the module's code, if a ``GraphedForward`` makes CUDA
            graphs of the module's calls. None otherwise.
        verifies: True compares the first result of each new plan with that of the module's own code.
        is_captured: True if all calls of the module may be captured as CUDA graphs. Then plans keep no
            tensors in modules between calls, and modules in this module get no plans. False if only those
            calls are captured that ``check_capturable`` allows.
        weights: the weights in E4M3, an 8-bit float dtype, that plans read. None if plans compute nothing in
            E4M3. A copy or pickle has none.

    Attributes:
        calls: number of users' calls whose result came from a plan that ran without a CUDA graph.
        traces: number of traces so far.
        loads: number of plans that were read from disk instead of traced.
        own: for each reason, the number of calls that ran the model's own code because of it.
    """

    # Instances have no ``__dict__``, because accelerate's hooks would copy it to their own wrapper.
    __slots__ = (
        "_by_state", "_captured", "_compiled", "_is_captured", "_is_timed", "_lock", "_own_threads",
        "_policy", "_served", "_state", "_states", "calls", "loads", "own", "traces", "trusted", "verifies",
        "weights",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        trusted: frozenset[str] = frozenset(),
        replaces_entry: bool = False,
        method: str = "forward",
        states: States | None = None,
        verifies: bool = False,
        is_captured: bool = False,
        weights: RowWeights | None = None,
    ) -> None:
        super().__init__(module, method, replaces_entry)
        # The class's own method. It runs while torch.compile traces the module: Dynamo could not look it up
        # on a class that diffusers has passed to ``torch._dynamo.allow_in_graph``.
        self._compiled = getattr(type(module), method)
        self.verifies, self.weights = verifies, weights
        self.trusted = trusted
        self._states = States(module) if states is None else states
        # If True, a call that keeps tensors in modules is not traced, and modules in this module get no
        # plans. A CUDA graph replays only kernels. It would neither set attributes of modules nor notice that
        # a plan of an inner module is outdated.
        self._is_captured = is_captured
        self._is_timed = states is not None and not is_captured
        self._state = State()
        self._by_state: dict[tuple[int, State], Plans] = {}
        # Plans from which CUDA graphs were captured. The plans are kept alive, because the graphs read their
        # constant tensors.
        self._captured: list[Made] = []
        self._policy = Policy()
        self._lock = threading.RLock()
        self._own_threads: list[int] = []  # ids of the threads that run the model's own code now
        # Number of calls that a plan or its CUDA graph has computed since the last change of the model.
        self._served = 0
        self.calls = self.traces = self.loads = 0
        self.own: Counter[str] = Counter()
        # If ``states`` is given, a ``GraphedForward`` replaces the method instead, and calls this object.
        if states is None:
            self.register()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedForward, (self.module, *self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(memo.get(id(self.module), self.module), *self._options)

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.trusted, self.replaces_entry, self.method, None, self.verifies

    def set_options(self, trusted: frozenset[str], verifies: bool, weights: RowWeights | None) -> None:
        """Drop all plans, and make later ones with these options. Does nothing if no option has changed."""
        if (self.trusted, self.verifies, self.weights) != (trusted, verifies, weights):
            with self._lock:
                self.clear()
                self.trusted, self.verifies, self.weights = trusted, verifies, weights

    @property
    def plans(self) -> list[Plan]:
        served = list(self._by_state.values())
        return [made.plan for plans in served for made in list(plans.made.values())]

    @property
    def last_change(self) -> str:
        """Says in words which change of the model made its plans invalid last. Empty if there was none."""
        return self._policy.last_change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():
            return self._compiled(module, *args, **kwargs)
        if is_tracing() or _is_alone.get() or not self.is_on:
            return getattr(type(module), self.method)(module, *args, **kwargs)
        if self.method != "forward" and repeats_decoder(module, args, kwargs):
            # In this call the replaced method, such as ``decode``, only calls a decoder several times. The
            # call gets no plan, because the decoder has plans of its own.
            return self._run_own(args, kwargs, contextlib.nullcontext())
        own_call: AbstractContextManager[None] = contextlib.nullcontext()
        for _ in range(2):
            try:
                return self.by_plan(*args, **kwargs)
            except _Changed as error:  # the model has changed since the trace: try once more
                reason, own_call = str(error), _alone()
            except (Unsupported, Untraceable) as error:
                reason, own_call = str(error), contextlib.nullcontext()
                if isinstance(error, _Fills):
                    own_call = self._filling(module, error.call, error.plans)
                break
        count_reason(self.own, reason)
        return self._run_own(args, kwargs, own_call)

    def _run_own(self, args: Any, kwargs: Any, inner: AbstractContextManager[None]) -> Any:
        """Return the result of a call that runs the model's own code in the context ``inner``."""
        with running(bool(self._states.replaced(self._states.look()))), self._without_traces(), inner:
            return class_forward(self.module, self.method)(*args, **kwargs)

    def by_plan(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call, computed by a plan, which is made first if needed.

        Raises Unsupported or Untraceable if the call cannot have a plan now.
        """
        found = None
        try:
            for _ in range(MAX_STATES):
                found = self._find(self.module, args, kwargs)
                results = self._run(found, args)
                if results is not None:
                    plans, made, call, given, scale, *_ = found
                    if not _is_capturing(call.device):
                        self._time(made, call)
                    elif not any(made is each for each in self._captured):
                        self._captured.append(made)
                    if not on_copies.get():
                        self.calls += 1
                        self._served += 1
                    result = made.outcome.deliver(results, args, given, call.tensors)
                    plans.state.store(given.get(STATE, {}))
                    scale.end(self.module)
                    return result
        except (Unsupported, Untraceable):
            # If hooks move the weights in each call, ``RowWeights.offloading`` frees the weights' copies in
            # E4M3. Then the plans must let go of these copies too.
            if self.weights is not None and self.weights.offloading():
                self.moved()
            raise
        except torch.OutOfMemoryError as error:
            self.clear()
            self._policy.pause_without_memory()
            if found is not None and (found.made.plan.writes or any(t is None for t in found.call.tensors)):
                raise  # the model's own code cannot compute the call: arguments were freed or written
            raise Unsupported(NO_MEMORY) from error
        raise Unsupported("other code is replaced while it runs")

    def replayed(self) -> None:
        """Count a call that replayed a CUDA graph which was captured from a plan."""
        self._served += 1

    def _time(self, made: Made, call: Call) -> None:
        """Record whether the GPU was done before Python. The slow call that made the plan does not count."""
        if self._is_timed and made.last_use and made.idle < _IDLE_CALLS:
            made.idle = made.idle + 1 if is_idle(call.device) else 0  # type: ignore[arg-type]

    def check_capturable(self, args: Any, kwargs: Any, *, saves_time: bool) -> None:
        """Raise Unsupported, with the reason, if this call's plan cannot be captured as a CUDA graph now.

        ``saves_time``: True raises Unsupported also if a graph would save no time, because the GPU has not
        waited for Python in the last calls.
        """
        if self._state.names():
            raise Unsupported("it keeps tensors for its next call")
        plans = self._by_state.get((self._states.last(), self._state))
        if plans is None:
            raise Unsupported("it had no plan yet")
        call, key = self._kind_of(self.module, args, plans.adapters.scale(self.module, kwargs).kwargs)
        made = plans.made.get(key)
        lengths = None if made is None else self._lengths_of(made, call, looks=0)
        if made is not None and made.masks and lengths:
            made = made.unmasked.get(made.masks.seen(lengths))
        if made is None or not made.plan.is_current():
            raise Unsupported("it had no plan yet")
        # A call in which a tensor occurs twice gets no CUDA graph: the graph would read a copy of each
        # argument, and could not repeat ``a is b``.
        if len(set(map(id, call.tensors))) < len(call.tensors):
            raise Unsupported("a tensor occurs twice in its arguments")
        if made.plan.copies_from_cpu:
            raise Unsupported("its plan copies tensors from the CPU")
        if saves_time and made.idle < _IDLE_CALLS:
            raise Unsupported("so far the GPU has not waited for Python")
        if not plans.guard.same():
            raise Unsupported("the model has changed")

    def lengths(self, call: Call) -> Lengths | None:
        """How many keys each attention mask of a call leaves visible. None if all masks are needed.

        Calls with other numbers need another CUDA graph.
        """
        made = self._with_masks(call)
        return None if made is None else self._lengths_of(made, call)

    @contextmanager
    def knowing(self, call: Call) -> Iterator[None]:
        """A context for capturing ``call`` as a CUDA graph, which runs on copies of the call's tensors.

        In the context, the numbers of keys that attention masks show are those of ``call``. They need not be
        counted for the copies.
        """
        made = self._with_masks(call)
        known = None
        if made is not None and made.masks is not None:
            known = made, made.masks.lengths(call.tensors)
        with setting(_known, known):
            yield

    def _with_masks(self, call: Call) -> Made | None:
        """Returns that plan of a call which reads all attention masks.

        None if the call has no plan, or if no plan of the model could ever do without a mask.
        """
        plans = self._by_state.get((self._states.last(), self._state))
        if plans is None or all(made.masks is None for made in list(plans.made.values())):
            return None
        settings = global_state(call.device), switched(self.module)  # type: ignore[arg-type]
        return plans.made.get((call.key, places(call), settings))

    @contextmanager
    def _without_traces(self) -> Iterator[None]:
        """A context in which a thread runs the model's own code while no other thread traces the model.

        A trace puts tensors without memory into the model, which this code must not find. So the context
        waits until a trace of another thread has ended, and no new trace begins while it is active.
        """
        thread = threading.get_ident()
        with self._lock:
            self._own_threads.append(thread)
        try:
            yield
        finally:
            self._own_threads.remove(thread)

    @contextmanager
    def _filling(self, module: nn.Module, call: Call, plans: Plans) -> Iterator[None]:
        """A context for a call that may fill tables for later calls, and so changes attributes of the model.

        Afterwards the model is recorded anew, so that these tables do not count as a change of the model.
        """
        with _alone():
            yield
        with self._lock:
            if not plans.made and plans.guard.is_in_state() and not plans.guard.same():
                plans.guard = self._guard(module, self._states.last(), call, plans.state, plans.adapters)

    def clear(self) -> None:
        """Drop all plans, and the records of the module with which later calls were compared."""
        with self._lock:
            self._by_state.clear()

    def moved(self) -> None:
        """Make plans let go of the weights, because some were moved to other memory. The plans stay valid.

        Copies of weights in E4M3 are freed.
        """
        for plans in list(self._by_state.values()):
            for made in list(plans.made.values()):
                for each in made.all():
                    each.baked.release()
        if self.weights is not None:
            self.weights.moved()

    def _find(self, module: nn.Module, args: Any, kwargs: Any) -> _Found:
        """Find the plan of a call. If there is none, trace the call and make a plan.

        Raises Unsupported or Untraceable, with the reason, if that is not possible.
        """
        while True:
            reason = reason_without_graphs(module)
            if reason is not None:
                raise Unsupported(reason)
            state = self._state
            plans = self._by_state.get((self._states.last(), state))
            plans = plans or self._by_state.get((self._states.look(), state))
            code = self._states.last()
            adapters = self._adapters_of(module, code) if plans is None else plans.adapters
            scale = adapters.scale(module, kwargs)
            given = {**scale.kwargs, STATE: held} if (held := state.held()) else scale.kwargs
            call, key = self._kind_of(module, args, given)
            if plans is None:
                plans = self._new_plans(module, code, call, state, adapters)
            self._check_guard(module, plans)
            plans.seen += 1
            factor = scale.in_forward * factor_now()
            made = plans.find(key) or self._trace(module, call, key, plans, factor)
            if made is not None:
                lengths = self._lengths_of(made, call)
                numbers = made.masks.numbers(lengths) if made.masks and lengths else []
                fitting = self._fitting(module, call, key, plans, made, lengths, numbers, factor)
                return _Found(plans, fitting, call, given, scale, factor, numbers)

    def _lengths_of(self, made: Made, call: Call, looks: int | None = None) -> Lengths | None:
        """How many keys each attention mask of the call shows. None if attention must read all masks.

        The masks are also needed if other code captures the call as a CUDA graph.

        ``looks``: the keys are counted once the same masks were looked up this number of times. 0 never
        counts. None stands for the usual number, ``_LOOKS``.
        """
        if made.masks is None:
            return None
        known = _known.get()
        if known is not None and known[0] is made:
            return known[1]
        if _is_capturing(call.device):  # other code captures a CUDA graph, whose replays may have other masks
            return None
        looks = _LOOKS + self._is_timed if looks is None else looks
        return made.masks.lengths(call.tensors, looks)

    def _fitting(
        self,
        module: nn.Module,
        call: Call,
        key: Any,
        plans: Plans,
        made: Made,
        lengths: Lengths | None,
        numbers: Sequence[Tensor],
        factor: float,
    ) -> Made:
        """Find or make the plan whose attention does not read the masks that hide nothing in this call.

        Raises Unsupported or Untraceable if it cannot be made now.
        """
        if lengths is None or made.masks is None:
            return made
        seen = made.masks.seen(lengths)
        found = made.unmasked.get(seen)
        if found is not None:
            found.last_use = plans.seen
            return found
        with self._lock:
            found = _made_meanwhile(made.unmasked.get(seen), call)
            if found is not None:
                return found
            plan = made.masks.plan(seen)
            found = Made(plan, Baked(plan), made.outcome)
            if self.verifies:
                self._check(module, call, key, plans, found, factor, numbers)
            plans.adapters.survey.add_reader(found.baked)
            made.add_unmasked(seen, found)
            return found

    def _adapters_of(self, module: nn.Module, code: int) -> Adapters:
        """Find the layers with adapters. Raises Unsupported while tracing pauses, as after a lack of memory.

        ``code``: the number of the present state of the module's code.
        """
        self._policy.check_pause()
        with self._lock:
            return Adapters(module, bool(self._states.replaced(code)))

    def _kind_of(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, Any]:
        """Return the arguments, and a key that is equal for calls that can share a plan.

        Raises Unsupported if such calls cannot run as plans now.
        """
        # Numbers such as timesteps become tensors. Otherwise each value would need its own plan.
        numbers = {
            name: number for name, number in (numbers_of(module) or {}).items() if not number.is_factor
        }
        call = Call(args, kwargs, numbers)
        call.tensors = list(call.as_tensors())
        first = next((t for t in call.tensors if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None or not dispatch.has_kernels(first):
            where = f"on {call.device}" if first is None else f"for {first.dtype} on {first.device}"
            raise Unsupported(f"no kernels run {where}")
        if has_shared_containers(args, kwargs):
            where = "its arguments" + f" or {STATE}" * (STATE in kwargs)
            raise Unsupported(f"a list or dict occurs twice in {where}")
        settings = global_state(call.device), switched(module)  # type: ignore[arg-type]
        return call, (call.key, places(call), settings)

    @without_collections()
    def _new_plans(self, module: nn.Module, code: int, call: Call, state: State, adapters: Adapters) -> Plans:
        """Make an empty ``Plans``, the store of the plans for this state of the module's code.

        Raises Unsupported if the module's adapters rule out plans.
        """
        if adapters.reason is not None:
            raise Unsupported(adapters.reason)
        with self._lock:
            plans = Plans(self._guard(module, code, call, state, adapters), state, adapters)
            self._by_state[code, state] = plans
        return plans

    def _check_guard(self, module: nn.Module, plans: Plans) -> None:
        """Raise Unsupported, with the reason, if the module as a whole cannot be traced.

        In this case smaller modules in it get plans first. But if the module has changed since ``plans`` was
        made, ``plans`` is dropped instead, and the next call looks at the module again.
        """
        if plans.guard.reason is not None:
            if plans.guard.same():
                self._plan_inside(module, plans)
            else:
                self._drop(plans)
            raise Unsupported(plans.guard.reason)

    def _run(self, found: _Found, args: Any) -> list[Any] | None:
        """Run the plan, and return the tensors that it computes.

        Returns None if other packages have meanwhile replaced functions that the model calls: then another
        plan is needed. If the call will replace tensors in lists, dicts and modules, the old ones are freed
        after their last use.

        Raises _Changed if the model has changed since the trace.
        """
        plans, made, call, kwargs, _, factor, numbers = found
        if made.plan.writes:
            try:
                made.plan.check_written(call.tensors)  # type: ignore[arg-type]
            except ValueError as error:
                raise Unsupported("it writes into an argument that shares memory with another") from error
        # With merged weights of adapters a plan may have to run twice, so it must not free its inputs.
        is_freed = made.baked.recorded and not plans.adapters.layers
        replaced = made.outcome.replaced(args, kwargs, call.tensors) if is_freed else []
        # With adapters, only one thread at a time may run a plan. Another thread would write merged weights
        # for its own scales.
        only_this = self._lock if plans.adapters.layers else contextlib.nullcontext()
        held = kwargs.get(STATE, {})
        try:
            with only_this:
                return plans.adapters.run(
                    lambda: self._run_once(plans, made, call, replaced, held, numbers),
                    factor,
                    is_capture=_is_capturing(call.device),
                    is_once=made.plan.writes or made.plan.draws,
                )
        except Unmerged as error:
            self._drop(plans, str(error))
            raise _Changed(f"the model has changed: {self.last_change}") from error

    def _run_once(
        self, plans: Plans, made: Made, call: Call, replaced: Any, held: Held, numbers: Sequence[Tensor]
    ) -> list[Any] | None:
        guard = plans.guard
        # Most plans run while the model is compared, and a wrong result is discarded. A plan that writes into
        # arguments, frees them or draws random numbers cannot be undone, so the model is compared before it.
        is_compared = made.plan.writes or made.plan.draws or bool(replaced)
        reads_copies = self._reads_copies(made, call.device)
        if reads_copies:
            self._refresh(waits=is_compared)
        if not is_compared or guard.same():
            given: Any = call.tensors
            tensors = [*given, *numbers]
            for container, key, i in replaced:
                container[key] = given[i] = None
            if replaced:
                plans.state.store(held)  # no module refers any more to tensors that the call will replace
            try:
                with torch.no_grad(), on(call.device):
                    try:
                        results = made.baked.run(tensors, frees=bool(replaced))
                    # The kernel that failed is off from now on. The plan runs PyTorch's ops in its place.
                    except dispatch.KernelError:
                        if replaced:
                            raise
                        results = made.plan.run(tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the error is ignored if the model has changed, such as a weight's shape
                if replaced or guard.same():
                    raise
            else:
                if is_compared:
                    return results
                if guard.same():
                    if reads_copies and not self.weights.has_same_contents():  # type: ignore[union-attr]
                        return self._run_once(plans, made, call, replaced, held, numbers)
                    return results
        if not guard.is_in_state():
            return None
        self._drop(plans)
        raise _Changed(f"the model has changed: {self.last_change}")

    def _guard(self, module: nn.Module, code: int, call: Call, state: State, adapters: Adapters) -> Guard:
        apart = state.names()
        apart[module] = apart.get(module, frozenset()) | scratch_of(module) | {self.method}
        options = self.trusted, apart, adapters.survey
        return Guard(module, self._states, code, call.device, *options)

    def _reads_copies(self, made: Made, device: torch.device | None) -> bool:
        """True if this call must bring the weights in E4M3 up to date before the plan reads them.

        False during the capture of a CUDA graph: whoever replays the graph does it before each replay.
        """
        return self.weights is not None and bool(made.plan.copies) and not _is_capturing(device)

    def _refresh(self, *, waits: bool) -> None:
        """Quantize weights to E4M3 again if they have changed.

        Raises Unsupported if hooks move the weights between devices in each call.

        ``waits``: True compares the contents of all weights now, and waits for the GPU. False leaves the
        comparison of contents to a check after the call.
        """
        weights: Any = self.weights
        if found := weights.offloading():
            raise Unsupported(f"{found} moves the weights of its products in FP8 in each call")
        if waits:
            weights.compare()
        weights.refresh()
        weights.note_replay()

    @without_collections()
    def _trace(self, module: nn.Module, call: Call, key: Any, plans: Plans, factor: float) -> Made | None:
        """Trace the call and make its plan.

        Returns None if the trace has found attributes of modules in which the call keeps tensors. The next
        trace gets these as one more argument. Raises Unsupported or Untraceable, with the reason.
        """
        with self._lock:
            made = _made_meanwhile(plans.find(key), call)
            if made is not None:
                return made
            if len(plans.refused.get(key, ())) >= _TRACES:
                if not plans.guard.same():
                    self._drop(plans)
                raise Unsupported(plans.refused[key][-1])
            if any(thread != threading.get_ident() for thread in self._own_threads):
                raise Unsupported("another thread runs the model's own code")
            plans.check_is_worth_it()
            try:
                plans.adapters.refresh(factor)
                with scaled(factor):
                    made, saved = self._new(module, call, key, plans)
            except Unmerged as error:
                self._drop(plans, str(error))
                raise _Changed(f"the model has changed: {self.last_change}") from error
            except Untraceable as error:
                plans.adapters.check_written(factor)
                grown = plans.state.grown(module, error.kept) if not self._is_captured else None
                if grown is not None:
                    self._state = grown
                    self._by_state.clear()
                    return None
                plans.refuse(key, str(error))
                if len(plans.refused[key]) < _TRACES:
                    if error.sets_attributes:
                        raise _Fills(str(error), call, plans) from error
                elif plans.guard.same():
                    self._plan_inside(module, plans)
                raise
            if not plans.guard.same():
                self._drop(plans)
                raise _Changed(f"the model has changed: {self.last_change}")
            if self.verifies:
                self._check(module, call, key, plans, made, factor)
            saved.save()
            self._prepare(module, call, plans, made)
            plans.add(key, made)
            return made

    def _prepare(self, module: nn.Module, call: Call, plans: Plans, made: Made) -> None:
        """Prepare the first run of a new plan.

        Weights become channels-last, those for products in E4M3 are quantized, and kernels are compiled.
        """
        if channels_last.lay_out_weights(module):
            plans.guard = self._guard(module, self._states.last(), call, plans.state, plans.adapters)
        plans.adapters.survey.add_reader(made.baked)
        if self._reads_copies(made, call.device):
            with contextlib.suppress(Unsupported):  # an error is ignored, because the run raises it again
                self._refresh(waits=False)
        compile_ahead(made.plan, call)

    def _plan_inside(self, module: nn.Module, plans: Plans) -> None:
        """Give plans to smaller modules in ``module``, because calls of ``module`` itself cannot be traced.

        Does this at most once for each state of the module's code, which has its own ``plans``.
        """
        with self._lock:
            if plans.is_planned_inside or self._is_captured:
                return
            plans.is_planned_inside = True
            options: Any = {"verifies": self.verifies, "weights": self.weights}
            plan_inside(module, lambda m, has: PlannedForward(m, self.trusted, has, **options))

    def _new(self, module: nn.Module, call: Call, key: Any, plans: Plans) -> tuple[Made, Saved]:
        """Load a plan from its file on disk, or make it from a new trace. Returns the plan and the file."""
        copy_of = None if self.weights is None else self.weights.copy_of
        quantized = set() if self.weights is None else self.weights.layers()
        paths = tuple(path for path, layer in module.named_modules() if layer in quantized)
        about = key, self.method, self.trusted, self.weights is not None, paths
        is_kept = not plans.state.names() and not plans.adapters.layers
        saved = Saved.of(module, about, call.device, plans.guard) if is_kept else Saved(None)
        found = saved.load(module, call.tensors, copy_of)
        if found is not None:
            self.loads += 1
            plan, outcome = found
            return Made.of(plan, outcome), saved
        self.traces += 1
        with plans.guard.undoing():
            traced, outcome = trace_call(module, call, plans.state, self.method, plans.adapters)
            layers = plans.adapters.layers
            plan = make_plan(
                traced,
                lambda traced, graph: saved.note(module, traced, graph, outcome),
                copy_of,
                lambda part: layers.get(part, part) in quantized,
            )
            if plan.draws and any(map(may_seed, plans.guard.names())):
                raise Untraceable("the call draws random numbers, and its code names what seeds them")
        return Made.of(plan, outcome), saved

    def _check(
        self,
        module: nn.Module,
        call: Call,
        key: Any,
        plans: Plans,
        made: Made,
        factor: float,
        numbers: Sequence[Tensor] = (),
    ) -> None:
        """Compare a new plan with the model's own code, by ``_verify``.

        If they differ, raise Untraceable. Then later calls with the same key get no plan.
        """
        try:
            with scaled(factor):
                self._verify(module, call, made, plans.state, numbers)
        except Untraceable as error:
            plans.made.pop(key, None)
            plans.refused[key] += [str(error)] * _TRACES
            raise

    def _verify(
        self, module: nn.Module, call: Call, made: Made, state: State, numbers: Sequence[Tensor]
    ) -> None:
        """Run the plan and the module's own code. Raise Untraceable if their results differ too much.

        A difference is too large if rounding does not explain it.
        """
        own, planned = ([t.clone() for t in call.tensors] for _ in range(2))  # type: ignore[union-attr]
        as_stock = bool(self._states.replaced(self._states.last()))
        with without_rehearsal(), running(as_stock), same_random_numbers(call.device):
            expected, _ = run_own(module, call, state, self.method, own)
        if self._reads_copies(made, call.device):
            self._refresh(waits=True)
        with without_rehearsal(), same_random_numbers(call.device):
            found = made.baked.run([*planned, *numbers])
        for a, b in zip((*found, *planned), (*expected, *own), strict=True):
            by = difference(a, b)
            if by > most_difference(made.plan, b.dtype):
                raise Untraceable(f"its plan differs from its own code by {by:.1e}")

    def _drop(self, plans: Plans, change: str = "") -> None:
        """Drop ``plans``, because the model has changed since the trace.

        ``change``: what has changed, in words. If it is empty, this method finds it out.
        """
        with self._lock:
            if plans in self._by_state.values():
                self._policy.last_change = change or plans.guard.change()
                self._policy.model_changed(self._served, SHORT_LIFE)
                self._served = 0
                self._by_state = {k: v for k, v in self._by_state.items() if v is not plans}
                self._state = State()  # the old ``State`` may list modules that have left the model


def _alone() -> AbstractContextManager[None]:
    """A context in which modules inside of the model run their own code, and make no plans."""
    return setting(_is_alone, True)


def _is_capturing(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _made_meanwhile(found: Made | None, call: Call) -> Made | None:
    """Return ``found``, the plan that another thread may have made while this one waited for the lock.

    If it is None and the call is being captured as a CUDA graph, raise Unsupported: no call can be traced in
    a capture.
    """
    if found is None and _is_capturing(call.device):
        raise Unsupported("other code captures it before it has a plan")
    return found
