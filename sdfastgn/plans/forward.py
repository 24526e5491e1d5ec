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

import contextlib
import math
import threading
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.patches.code.states import MAX_STATES, States, running
from sdfastgn.patches.core import channels_last
from sdfastgn.patches.core.class_forward import class_forward
from sdfastgn.patches.core.instance_entries import InstanceEntry
from sdfastgn.patches.graphs.arguments import Call, Unsupported, global_state
from sdfastgn.patches.graphs.models import numbers_of, reason_without_graphs, switched
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy
from sdfastgn.plans.disk.saved import Saved
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.outcome import Outcome, has_shared_containers
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
# Number of kinds of calls in a row that are traced although no earlier plan was used again. A call with a
# number that is always another one, such as a timestep, would otherwise be traced each time.
_NEW_KINDS = 16
# A kind of call is traced again once after a trace that failed: the first call of some models makes
# attributes or fills caches, and the trace of a later call succeeds.
_TRACES = 2


# Keeps a plan on disk.
_Keep = Callable[[], None]


class _Made(NamedTuple):
    """A plan, the function that runs it, and what its call leaves besides tensors."""

    plan: Plan
    baked: Baked
    outcome: Outcome


class _Plans:
    """The plans of one module in one state of its code, by kind of call.

    ``refused``: kind of call -> why it has no plan, for each of the traces that failed. ``new_kinds``: how
    often a trace was wanted since a plan was last used again.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.made: OrderedDict[Any, _Made] = OrderedDict()  # least recently used first
        self.refused: defaultdict[Any, list[str]] = defaultdict(list)
        self.calls = self.new_kinds = 0

    def find(self, key: Any) -> _Made | None:
        made = self.made.get(key)
        if made is not None:
            with contextlib.suppress(KeyError):  # another thread may have dropped it meanwhile
                self.made.move_to_end(key)
            self.new_kinds = 0
        return made

    def check_repetition(self) -> None:
        """Raise Unsupported if kinds of calls hardly repeat: then the 32nd, 64th, 128th, ... is traced."""
        self.new_kinds += 1
        if self.new_kinds > _NEW_KINDS and self.new_kinds.bit_count() > 1:
            raise Unsupported("its calls hardly repeat")

    def refuse(self, key: Any, reason: str) -> None:
        if len(self.refused) > _MAX_REASONS:
            self.refused.clear()
        self.refused[key].append(reason)

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
        method: the name of the method that runs.
        states: the states of the module's code, if other code has them already.
        verifies: True compares each new plan with the module's own code once.

    Attributes:
        calls: number of calls whose result came from a plan.
        traces: number of traces so far.
        loads: number of plans that came from disk.
        own: reason -> number of calls that ran the model's own code for this reason.
    """

    # As in ``GraphedForward``: instances have no ``__dict__``, because accelerate's hooks would copy it.
    __slots__ = (
        "_by_state", "_lock", "_policy", "_states", "calls", "loads", "method", "own", "replaces_entry",
        "traces", "trusted", "verifies",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        trusted: frozenset[str] = frozenset(),
        replaces_entry: bool = False,
        method: str = "forward",
        states: States | None = None,
        verifies: bool = False,
    ) -> None:
        super().__init__(module)
        self.verifies = verifies
        self.trusted, self.replaces_entry, self.method = trusted, replaces_entry, method
        self._states = States(module) if states is None else states
        self._by_state: dict[int, _Plans] = {}
        self._policy = Policy()
        self._lock = threading.RLock()
        self.calls = self.traces = self.loads = 0
        self.own: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedForward, (self.module, *self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(memo.get(id(self.module), self.module), *self._options)

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.trusted, self.replaces_entry, self.method, None, self.verifies

    # ``inspect.signature`` reads the first of these, and torch.export the others.

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return class_forward(self.module, self.method)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return getattr(type(self.module), self.method)

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
            return getattr(type(module), self.method)(module, *args, **kwargs)
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
            return class_forward(module, self.method)(*args, **kwargs)

    def clear(self) -> None:
        """Drop all plans, and what was recorded of the module's state."""
        with self._lock:
            self._by_state.clear()

    def _kind_of(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, Any]:
        """(the arguments, their key). Raises Unsupported if no such call can run as a plan now."""
        reason = reason_without_graphs(module)
        if reason is not None:
            raise Unsupported(reason)
        # Numbers such as timesteps become tensors, so that one plan serves all their values.
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
            raise Unsupported("a list or dict occurs twice in its arguments")
        settings = global_state(call.device), switched(module)  # type: ignore[arg-type]
        return call, (call.key, _places(call), settings)

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
                    try:
                        results = made.baked.run(call.tensors)  # type: ignore[arg-type]
                    except dispatch.KernelError:  # the step's kernel is off now, and PyTorch runs instead
                        results = made.plan.run(call.tensors)  # type: ignore[arg-type]
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
            if _is_capturing(call.device):
                raise Unsupported("other code captures it before it has a plan")
            if len(plans.refused.get(key, ())) >= _TRACES:
                if not plans.guard.same():
                    self._drop(plans)
                raise Unsupported(plans.refused[key][-1])
            plans.check_repetition()
            try:
                made, keep = self._new(module, call, key, plans.guard)
            except Untraceable as error:
                plans.refuse(key, str(error))
                raise
            if not plans.guard.same():
                self._drop(plans)
                raise Unsupported(f"the model has changed: {self.last_change}")
            if self.verifies:
                try:
                    self._verify(module, call, made)
                except Untraceable as error:
                    plans.refused[key] += [str(error)] * _TRACES
                    raise
            keep()
            if channels_last.lay_out_weights(module):  # the steps of the plan want them so
                plans.guard = Guard(module, self._states, self._states.last(), call.device, self.trusted)
            plans.add(key, made)
            return made

    def _new(self, module: nn.Module, call: Call, key: Any, guard: Guard) -> tuple[_Made, _Keep]:
        """A plan from disk, or of a new trace, and the function that keeps it on disk."""
        saved = Saved.of(module, (key, self.method, self.trusted), call.device, guard)
        found = saved.load(module, call.tensors)
        if found is not None:
            self.loads += 1
            plan, outcome = found
            return _Made(plan, Baked(plan), outcome), saved.save
        self.traces += 1
        with without_collections(), guard.undoing():
            traced, outcome = trace_call(module, call, self.method)
            plan = make_plan(traced, lambda graph: saved.note(module, traced, graph, outcome))
        return _Made(plan, Baked(plan), outcome), saved.save

    def _verify(self, module: nn.Module, call: Call, made: _Made) -> None:
        """Raise Untraceable if the plan differs from the module's own code by more than rounding explains."""
        own, planned = ([t.clone() for t in call.tensors] for _ in range(2))  # type: ignore[union-attr]
        args, kwargs = call.rebuild(own)
        outcome = Outcome(args, kwargs, own)
        with running(bool(self._states.replaced(self._states.last()))):
            expected = outcome.finish(class_forward(module, self.method)(*args, **kwargs))
        found = made.baked.run(planned)
        for a, b in zip((*found, *planned), (*expected, *own), strict=True):
            difference = _difference(a, b)
            if difference > _most_difference(b.dtype):
                raise Untraceable(f"its plan differs from its own code by {difference:.1e}")

    def _drop(self, plans: _Plans) -> None:
        """Drop ``plans``, because the model is not what was traced any more."""
        with self._lock:
            if plans in self._by_state.values():
                self._policy.last_change = plans.guard.change()
                self._policy.model_changed(plans.calls)
                self._by_state = {k: v for k, v in self._by_state.items() if v is not plans}


def trace_call(module: nn.Module, call: Call, method: str = "forward") -> tuple[Traced, Outcome]:
    """Trace the method ``method`` of the model's class. Returns also what the call leaves besides tensors.

    Raises Untraceable.
    """
    outcomes: list[Outcome] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        args, kwargs = call.rebuild([tensors[place] for place in _places(call)])
        outcome = Outcome(args, kwargs, tensors)
        computed = outcome.finish(class_forward(module, method)(*args, **kwargs))
        outcomes.append(outcome)
        return computed

    with dispatch.stock_code(), running(as_stock=False):
        traced = trace(module, run, *call.tensors)
    return traced, outcomes[-1]


def _places(call: Call) -> tuple[int, ...]:
    """For each tensor of the call, the first place at which the same tensor is: code may ask ``a is b``."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(call.tensors))


def make_plan(traced: Traced, note: Callable[[fx.Graph], object] = lambda graph: None) -> Plan:
    """Rewrite the graph, which the plan takes over. Raises Untraceable, with the reason.

    ``note`` is called with the rewritten graph, which it must not keep.
    """
    try:
        graph = rewrite(traced.graph.graph)
        note(graph)
        return Plan(traced, graph)
    except Untraceable:
        raise
    except Exception as error:  # a rule that fails must not take the call down
        raise Untraceable(f"its plan could not be made: {one_line(error)}") from error


def _difference(a: Tensor, b: Tensor) -> float:
    """The relative difference of a from b; infinite if their shapes or dtypes differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return math.inf
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).norm() / b.to(wide).norm().clamp(min=1e-30))


def _most_difference(dtype: torch.dtype) -> float:
    """The largest difference that rounding may explain: 16 units of it, and 1e-4 for wider dtypes."""
    return max(1e-4, 16 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _is_capturing(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device | None) -> Any:
    return torch.cuda.device(device if device is not None and device.type == "cuda" else -1)
