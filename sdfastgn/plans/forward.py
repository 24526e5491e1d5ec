"""A module's ``forward`` with plans: each call runs a plan, makes one, or runs the model's own code.

A call takes these steps:

1. ``arguments.py`` makes a key of the arguments. Calls with equal keys can share a plan.
2. If there is a plan for the key, it runs. While the GPU computes, ``guard.py`` compares the model with what
   it was in the trace. If it has changed, the result is dropped, and so are the plans.
3. If there is none, the call is traced, and the plan is made and runs. ``outcome.py`` keeps what the call
   returns besides tensors.
4. Every other call runs the model's own code. The reason is counted, and the report shows it.
"""

from __future__ import annotations

import threading
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.patches.code.states import MAX_STATES, States, running
from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.class_forward import class_forward
from sdfastgn.patches.core.instance_entries import InstanceEntry
from sdfastgn.patches.graphs.arguments import Call, Unsupported, global_state
from sdfastgn.patches.graphs.models import reason_now
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.refusals import is_tracing
from sdfastgn.plans.trace.traced import Traced, Untraceable
from sdfastgn.plans.trace.tracer import trace

__all__ = ["MAX_PLANS", "PlannedForward", "make_plan", "trace_call"]

# Maximum number of plans of one module. Each one is for one kind of call.
MAX_PLANS = 16
# Maximum number of reasons that are counted separately. Further reasons are counted as "other reasons".
_MAX_REASONS = 64
# A kind of call is traced again once after a trace that failed: the first call of some models makes
# attributes or fills caches, and the trace of a later call succeeds.
_TRACES = 2


class _Made(NamedTuple):
    """A plan, the function that runs it, and what its call leaves besides tensors."""

    plan: Plan
    baked: Baked
    outcome: Outcome


class _Plans:
    """The plans of one module in one state of its code, by kind of call.

    ``refused``: kind of call -> why it has no plan, for each of the traces that failed.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.made: OrderedDict[Any, _Made] = OrderedDict()  # least recently used first
        self.refused: defaultdict[Any, list[str]] = defaultdict(list)
        self.calls = 0

    def find(self, key: Any) -> _Made | None:
        made = self.made.get(key)
        if made is not None:
            self.made.move_to_end(key)
        return made

    def add(self, key: Any, made: _Made) -> None:
        while len(self.made) >= MAX_PLANS:
            self.made.popitem(last=False)
        self.made[key] = made


class PlannedForward(InstanceEntry):
    """Replaces the ``forward`` of one module, and runs its calls as plans where it can.

    A copy or pickle of the module gets a new ``PlannedForward`` without plans.

    Args:
        module: the module.
        trusted: packages of whose code the user has said that it keeps no state between calls.
        replaces_entry: True if the module's ``__dict__`` already had an entry "forward" with the method of
            the module's own class.

    Attributes:
        calls: number of calls whose result came from a plan.
        traces: number of traces so far.
        own: reason -> number of calls that ran the model's own code for this reason.
    """

    # As in ``GraphedForward``: instances have no ``__dict__``, because accelerate's hooks would copy it.
    __slots__ = (
        "_by_state", "_lock", "_policy", "_states", "calls", "own", "replaces_entry", "traces", "trusted",
    )  # fmt: skip

    def __init__(
        self, module: nn.Module, trusted: frozenset[str] = frozenset(), replaces_entry: bool = False
    ) -> None:
        super().__init__(module)
        self.trusted, self.replaces_entry = trusted, replaces_entry
        self._states = States(module)
        self._by_state: dict[int, _Plans] = {}
        self._policy = Policy()
        self._lock = threading.RLock()
        self.calls = self.traces = 0
        self.own: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedForward, (self.module, self.trusted, self.replaces_entry)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(memo.get(id(self.module), self.module), self.trusted, self.replaces_entry)

    # ``inspect.signature`` reads the first of these, and torch.export the others.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return class_forward(self.module)

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
    def plans(self) -> list[Plan]:
        """The plans that exist now."""
        served = list(self._by_state.values())
        return [made.plan for plans in served for made in list(plans.made.values())]

    @property
    def last_change(self) -> str:
        """The last change of the model that made its plans invalid, in words; empty if there was none."""
        return self._policy.last_change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling() or is_tracing():
            return type(module).forward(module, *args, **kwargs)
        try:
            call, key = self._kind_of(module, args, kwargs)
            for _ in range(MAX_STATES):
                plans = self._plans_of(module, call)
                made = plans.find(key) or self._trace(module, call, key, plans)
                results = self._run(plans, made, call)
                if results is not None:
                    self.calls += 1
                    plans.calls += 1
                    return made.outcome.deliver(results, args, kwargs, call.tensors)
            reason = "other code is replaced while it runs"
        except (Unsupported, Untraceable) as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            self.clear()
            self._policy.pause_without_memory()
            reason = NO_MEMORY
        is_counted = reason in self.own or len(self.own) < _MAX_REASONS
        self.own[reason if is_counted else "other reasons"] += 1
        with running(bool(self._states.replaced(self._states.look()))):
            return class_forward(module)(*args, **kwargs)

    def clear(self) -> None:
        """Drop all plans, and what was recorded of the module's state."""
        with self._lock:
            self._by_state.clear()

    def _kind_of(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, Any]:
        """(the arguments, their key). Raises Unsupported if no such call can run as a plan now."""
        reason = reason_now(module)
        if reason is not None:
            raise Unsupported(reason)
        call = Call(args, kwargs, {})
        first = next((t for t in call.tensors if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None or not dispatch.has_kernels(first):
            where = f"on {call.device}" if first is None else f"for {first.dtype} on {first.device}"
            raise Unsupported(f"no kernels run {where}")
        return call, (call.key, _places(call), global_state(call.device))  # type: ignore[arg-type]

    def _plans_of(self, module: nn.Module, call: Call) -> _Plans:
        """The plans in the state of the code that was seen last. Raises Unsupported if there can be none."""
        state = self._states.last()
        plans = self._by_state.get(state)
        if plans is None:
            self._policy.check_pause()
            with self._lock:
                guard = Guard(module, self._states, state, call.device, self.trusted)
                plans = self._by_state[state] = _Plans(guard)
        if plans.guard.reason is not None:
            if not plans.guard.same():
                self._drop(plans)
            raise Unsupported(plans.guard.reason)
        return plans

    def _run(self, plans: _Plans, made: _Made, call: Call) -> list[Any] | None:
        """The tensors that the plan computes; None if other code was replaced meanwhile.

        Raises Unsupported if the model is not what was traced. Then no argument was written to.
        """
        guard = plans.guard
        if made.plan.writes:
            try:
                made.plan.check_written(call.tensors)  # type: ignore[arg-type]
            except ValueError as error:
                raise Unsupported("it writes into an argument that shares memory with another") from error
        # A plan that writes into arguments must not run for a changed model.
        if not made.plan.writes or guard.same():
            try:
                with torch.no_grad(), _on(call.device):
                    results = made.baked.run(call.tensors)  # type: ignore[arg-type]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # for instance because a weight has another shape now
                if guard.same():
                    raise
            else:
                if made.plan.writes or guard.same():
                    return results
        if not guard.is_in_state():
            return None
        self._drop(plans)
        raise Unsupported(f"the model has changed: {self.last_change}")

    def _trace(self, module: nn.Module, call: Call, key: Any, plans: _Plans) -> _Made:
        """Trace the call and make its plan. Raises Unsupported or Untraceable, with the reason."""
        with self._lock:
            made = plans.find(key)
            if made is not None:  # another thread was faster
                return made
            if len(plans.refused[key]) == _TRACES:
                if not plans.guard.same():
                    self._drop(plans)
                raise Unsupported(plans.refused[key][-1])
            try:
                made = self._traced(module, call)
            except Untraceable as error:
                plans.refused[key].append(str(error))
                raise
            if not plans.guard.same():
                self._drop(plans)
                raise Unsupported(f"the model has changed: {self.last_change}")
            if channels_last.lay_out_weights(module):  # the steps of the plan want them so
                plans.guard = Guard(module, self._states, self._states.last(), call.device, self.trusted)
            plans.add(key, made)
            return made

    def _traced(self, module: nn.Module, call: Call) -> _Made:
        self.traces += 1
        with without_collections():
            traced, outcome = trace_call(module, call)
            plan = make_plan(traced)
        return _Made(plan, Baked(plan), outcome)

    def _drop(self, plans: _Plans) -> None:
        """Drop ``plans``, because the model is not what was traced any more."""
        with self._lock:
            if plans in self._by_state.values():
                self._policy.last_change = plans.guard.change()
                self._policy.model_changed(plans.calls)
                self._by_state = {k: v for k, v in self._by_state.items() if v is not plans}


def trace_call(module: nn.Module, call: Call) -> tuple[Traced, Outcome]:
    """Trace the model's own code for ``call``. Returns also what the call leaves besides tensors.

    Raises Untraceable.
    """
    outcomes: list[Outcome] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        args, kwargs = call.rebuild([tensors[place] for place in _places(call)])
        outcome = Outcome(args, kwargs, tensors)
        computed = outcome.finish(class_forward(module)(*args, **kwargs))
        outcomes.append(outcome)
        return computed

    with dispatch.stock_code(), running(as_stock=False):
        traced = trace(module, run, *call.tensors)
    return traced, outcomes[-1]


def _places(call: Call) -> tuple[int, ...]:
    """For each tensor of the call, the first place at which the same tensor is: code may ask ``a is b``."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(call.tensors))


def make_plan(traced: Traced) -> Plan:
    """Rewrite the graph, which the plan takes over. Raises Untraceable, with the reason."""
    try:
        return Plan(traced, rewrite(traced.graph.graph))
    except Untraceable:
        raise
    except Exception as error:  # a rule that fails must not take the call down
        raise Untraceable(f"its plan could not be made: {one_line(error)}") from error


def _on(device: torch.device | None) -> Any:
    return torch.cuda.device(device if device is not None and device.type == "cuda" else -1)
