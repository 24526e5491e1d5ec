"""A module's ``forward`` with plans: each call runs a plan, makes one, or runs the model's own code.

A call takes these steps:

1. ``arguments.py`` makes a key of the arguments. Calls with equal keys can share a plan.
2. If there is a plan for the key, it runs. While the GPU computes, ``guard.py`` compares the model with what
   it was in the trace. If it has changed, the result is dropped, and so are the plans.
3. If there is none, the call is traced, and the plan is made and runs. ``outcome.py`` keeps what the call
   returns besides tensors. ``state.py`` has the attributes of modules in which a call keeps tensors.
4. Every other call runs the model's own code. The reason is counted, and the report shows it. If the reason
   is in the model, modules inside get plans (``inside.py``).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.garbage import without_collections
from sdfastgn.patches.code.states import MAX_STATES, States, running
from sdfastgn.patches.fp8.rows import RowWeights
from sdfastgn.patches.graphs.arguments import Call, Unsupported, global_state
from sdfastgn.patches.graphs.models import numbers_of, reason_without_graphs, switched
from sdfastgn.patches.graphs.policy import NO_MEMORY, Policy
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora.merged_adapters import is_wrapper
from sdfastgn.patches.swap.class_forward import MethodEntry, class_forward
from sdfastgn.plans.disk.saved import Saved
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.inside import plan_inside
from sdfastgn.plans.outcome import Outcome, has_shared_containers
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.state import STATE, State
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
# A plan that was used again within so many calls makes no room for another. With 17 sizes in rotation, each
# call would otherwise be a trace.
_IN_USE = 128
# A kind of call is traced again once after a trace that failed: the first call of some models makes
# attributes or fills caches, and the trace of a later call succeeds.
_TRACES = 2
# Largest relative difference of a plan with products in E4M3 from the model's own code. Single products
# differ by 0.04, whole models by 0.1 (docs/fp8.md), and results of wrong steps by about 1.
_MOST_IN_E4M3 = 0.3


@dataclasses.dataclass(slots=True)
class _Made:
    """A plan, the function that runs it, and what its call leaves besides tensors."""

    plan: Plan
    baked: Baked
    outcome: Outcome
    last_use: int = 0  # number of the call; 0 if it was not used again


class _Plans:
    """The plans of one module in one state of its code, by kind of call. ``state``: what is kept in modules.

    Attributes:
        refused: kind of call -> why it has no plan, for each of the traces that failed.
        seen: number of calls, with or without a plan.
        calls: number of calls that plans have run.
        new_kinds: how often a trace was wanted since a plan was last used again.
    """

    def __init__(self, guard: Guard, state: State) -> None:
        self.guard, self.state = guard, state
        self.is_planned_inside = False
        self.made: dict[Any, _Made] = {}  # oldest first
        self.refused: defaultdict[Any, list[str]] = defaultdict(list)
        self.seen = self.calls = self.new_kinds = 0

    def find(self, key: Any) -> _Made | None:
        made = self.made.get(key)
        if made is not None:
            made.last_use = self.seen
            self.new_kinds = 0
        return made

    def check_is_worth_it(self) -> None:
        """Raise Unsupported if another trace would save no time.

        If kinds of calls hardly repeat, the 32nd, 64th, 128th, ... is traced.
        """
        self.new_kinds += 1
        if self.new_kinds > _NEW_KINDS and self.new_kinds.bit_count() > 1:
            raise Unsupported("its calls hardly repeat")
        if len(self.made) >= MAX_PLANS and all(map(self._is_in_use, self.made.values())):
            raise Unsupported(f"it has {MAX_PLANS} plans for other kinds of calls, and all are in use")

    def _is_in_use(self, made: _Made) -> bool:
        return made.last_use > 0 and self.seen - made.last_use < _IN_USE

    def refuse(self, key: Any, reason: str) -> None:
        if len(self.refused) > _MAX_REASONS:
            self.refused.clear()
        self.refused[key].append(reason)

    def add(self, key: Any, made: _Made) -> None:
        if len(self.made) >= MAX_PLANS:
            del self.made[min(self.made, key=lambda kind: self.made[kind].last_use)]
        self.made[key] = made


class PlannedForward(MethodEntry):
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
        weights: the weights in E4M3 that plans read; None if plans compute nothing in E4M3. A copy or pickle
            has none.

    Attributes:
        calls: number of calls whose result came from a plan.
        traces: number of traces so far.
        loads: number of plans that came from disk.
        own: reason -> number of calls that ran the model's own code for this reason.
    """

    # As in ``GraphedForward``: instances have no ``__dict__``, because accelerate's hooks would copy it.
    __slots__ = (
        "_by_state", "_captured", "_compiled", "_is_captured", "_lock", "_policy", "_state", "_states",
        "calls", "loads", "own", "replaces_entry", "traces", "trusted", "verifies", "weights",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        trusted: frozenset[str] = frozenset(),
        replaces_entry: bool = False,
        method: str = "forward",
        states: States | None = None,
        verifies: bool = False,
        weights: RowWeights | None = None,
    ) -> None:
        super().__init__(module, method)
        # torch.compile cannot read the method from a class that diffusers has allowed in graphs.
        self._compiled = getattr(type(module), method)
        self.verifies, self.weights = verifies, weights
        self.trusted, self.replaces_entry = trusted, replaces_entry
        self._states = States(module) if states is None else states
        # A CUDA graph would not repeat what a call sets in modules, nor check the plans of modules inside.
        self._is_captured = states is not None
        self._state = State()
        self._by_state: dict[tuple[int, State], _Plans] = {}
        self._captured: list[_Made] = []  # CUDA graphs read the constants of these plans
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
        if torch.compiler.is_compiling():
            return self._compiled(module, *args, **kwargs)
        if is_tracing():
            return getattr(type(module), self.method)(module, *args, **kwargs)
        call = None
        try:
            for _ in range(MAX_STATES):
                call, plans, made, given = self._find(module, args, kwargs)
                results = self._run(plans, made, call, args, given)
                if results is not None:
                    if _is_capturing(call.device) and not any(made is each for each in self._captured):
                        self._captured.append(made)
                    self.calls += 1
                    plans.calls += 1
                    result = made.outcome.deliver(results, args, given, call.tensors)
                    plans.state.store(given.get(STATE, {}))
                    return result
            reason = "other code is replaced while it runs"
        except (Unsupported, Untraceable) as error:
            reason = str(error)
            if self.weights is not None and self.weights.offloading():  # this has freed the weights in E4M3
                self.moved()
        except torch.OutOfMemoryError:
            self.clear()
            self._policy.pause_without_memory()
            if call is not None and any(t is None for t in call.tensors):
                raise  # some arguments are gone, as after an error in the model's own code
            reason = NO_MEMORY
        is_counted = reason in self.own or len(self.own) < _MAX_REASONS
        self.own[reason if is_counted else "other reasons"] += 1
        with running(bool(self._states.replaced(self._states.look()))):
            return class_forward(module, self.method)(*args, **kwargs)

    def clear(self) -> None:
        """Drop all plans, and what was recorded of the module's state."""
        with self._lock:
            self._by_state.clear()

    def moved(self) -> None:
        """Let go of weights that were moved away, and free their copies in E4M3."""
        for plans in list(self._by_state.values()):
            for made in list(plans.made.values()):
                made.baked.release()
        if self.weights is not None:
            self.weights.moved()

    def _find(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Call, _Plans, _Made, dict[str, Any]]:
        """The plan of a call, after a trace if there was none; and the named arguments with the state.

        Raises Unsupported or Untraceable, with the reason.
        """
        while True:
            state = self._state
            given = {**kwargs, STATE: held} if (held := state.held()) else kwargs
            call, key = self._kind_of(module, args, given)
            plans = self._plans_of(module, call, state)
            plans.seen += 1
            made = plans.find(key) or self._trace(module, call, key, plans)
            if made is not None:
                return call, plans, made, given

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
            where = "its arguments" + f" or {STATE}" * (STATE in kwargs)
            raise Unsupported(f"a list or dict occurs twice in {where}")
        settings = global_state(call.device), switched(module)  # type: ignore[arg-type]
        return call, (call.key, _places(call), settings)

    def _plans_of(self, module: nn.Module, call: Call, state: State) -> _Plans:
        """The plans in the state of the code that was seen last. Raises Unsupported if there can be none."""
        code = self._states.last()
        plans = self._by_state.get((code, state))
        if plans is None:
            self._policy.check_pause()
            with self._lock:
                plans = _Plans(self._guard(module, code, call, state), state)
                self._by_state[code, state] = plans
        if plans.guard.reason is not None:
            if plans.guard.same():
                self._plan_inside(module, plans)
            else:
                self._drop(plans)
            raise Unsupported(plans.guard.reason)
        return plans

    def _run(
        self, plans: _Plans, made: _Made, call: Call, args: Any, kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """The tensors that the plan computes; None if other code was replaced meanwhile.

        Tensors in lists and dicts that the call will replace are freed after their last use.

        Raises Unsupported if the model is not what was traced. Then no argument was written to or freed.
        """
        guard = plans.guard
        if made.plan.writes:
            try:
                made.plan.check_written(call.tensors)  # type: ignore[arg-type]
            except ValueError as error:
                raise Unsupported("it writes into an argument that shares memory with another") from error
        replaced = made.outcome.replaced(args, kwargs, call.tensors) if made.baked.recorded else []
        # A plan that writes into arguments, frees them or draws random numbers runs only for the same model.
        is_compared = made.plan.writes or made.plan.draws or bool(replaced)
        reads_copies = self._reads_copies(made, call.device)
        if reads_copies:
            self._refresh(waits=is_compared)
        if not is_compared or guard.same():
            given: Any = call.tensors
            tensors = list(given)
            for container, key, i in replaced:
                container[key] = given[i] = None
            try:
                with torch.no_grad(), _on(call.device):
                    try:
                        results = made.baked.run(tensors, frees=bool(replaced))
                    except dispatch.KernelError:  # the step's kernel is off now, and PyTorch runs instead
                        if replaced:
                            raise
                        results = made.plan.run(tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # for instance because a weight has another shape now
                if replaced or guard.same():
                    raise
            else:
                if is_compared:
                    return results
                if guard.same():
                    if reads_copies and not self.weights.has_same_contents():  # type: ignore[union-attr]
                        return self._run(plans, made, call, args, kwargs)
                    return results
        if not guard.is_in_state():
            return None
        self._drop(plans)
        raise Unsupported(f"the model has changed: {self.last_change}")

    def _reads_copies(self, made: _Made, device: torch.device | None) -> bool:
        """True if the call must keep weights in E4M3 up to date. For graphs, others do it before replays."""
        return self.weights is not None and bool(made.plan.copies) and not _is_capturing(device)

    def _refresh(self, *, waits: bool) -> None:
        """Bring the weights in E4M3 up to date. Raises Unsupported if hooks move the weights in each call.

        ``waits``: True to compare contents now, which waits for the GPU, and not after the call.
        """
        weights: Any = self.weights
        if found := weights.offloading():
            raise Unsupported(f"{found} moves the weights of its products in FP8 in each call")
        if waits:
            weights.compare()
        weights.refresh()
        weights.note_replay()

    def _guard(self, module: nn.Module, code: int, call: Call, state: State) -> Guard:
        return Guard(module, self._states, code, call.device, self.trusted, state.names())

    def _trace(self, module: nn.Module, call: Call, key: Any, plans: _Plans) -> _Made | None:
        """Trace the call and make its plan. None if the trace found state that was not known.

        Raises Unsupported or Untraceable, with the reason.
        """
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
            if any(map(is_wrapper, module.modules())):
                raise Unsupported("it has layers with adapters, such as a LoRA")
            plans.check_is_worth_it()
            try:
                made, saved = self._new(module, call, key, plans)
            except Untraceable as error:
                grown = plans.state.grown(module, error.kept) if not self._is_captured else None
                if grown is not None:
                    self._state = grown
                    self._by_state.clear()
                    return None
                plans.refuse(key, str(error))
                if len(plans.refused[key]) >= _TRACES and plans.guard.same():
                    self._plan_inside(module, plans)
                raise
            if not plans.guard.same():
                self._drop(plans)
                raise Unsupported(f"the model has changed: {self.last_change}")
            if self.verifies:
                try:
                    self._verify(module, call, made, plans.state)
                except Untraceable as error:
                    plans.refused[key] += [str(error)] * _TRACES
                    raise
            saved.save()
            if channels_last.lay_out_weights(module):  # the steps of the plan want them so
                plans.guard = self._guard(module, self._states.last(), call, plans.state)
            plans.add(key, made)
            return made

    def _plan_inside(self, module: nn.Module, plans: _Plans) -> None:
        """Give modules in ``module`` plans, because a call of it has none. Once in a state of the model."""
        with self._lock:
            if plans.is_planned_inside or self._is_captured:
                return
            plans.is_planned_inside = True
            options: Any = {"verifies": self.verifies, "weights": self.weights}
            plan_inside(module, lambda m, has: PlannedForward(m, self.trusted, has, **options))

    def _new(self, module: nn.Module, call: Call, key: Any, plans: _Plans) -> tuple[_Made, Saved]:
        """A plan from disk, or of a new trace, and its file."""
        about = key, self.method, self.trusted, self.weights is not None
        copy_of = None if self.weights is None else self.weights.copy_of
        saved = Saved(None) if plans.state.names() else Saved.of(module, about, call.device, plans.guard)
        found = saved.load(module, call.tensors, copy_of)
        if found is not None:
            self.loads += 1
            plan, outcome = found
            return _Made(plan, Baked(plan), outcome), saved
        self.traces += 1
        with without_collections(), plans.guard.undoing():
            traced, outcome = trace_call(module, call, plans.state, self.method)
            plan = make_plan(traced, lambda graph: saved.note(module, traced, graph, outcome), copy_of)
            if plan.draws and any(map(_may_seed, plans.guard.names())):
                raise Untraceable("the call draws random numbers, and its code names what seeds them")
        return _Made(plan, Baked(plan), outcome), saved

    def _verify(self, module: nn.Module, call: Call, made: _Made, state: State) -> None:
        """Raise Untraceable if the plan differs from the module's own code by more than rounding explains."""
        own, planned = ([t.clone() for t in call.tensors] for _ in range(2))  # type: ignore[union-attr]
        with running(bool(self._states.replaced(self._states.last()))), _same_random_numbers(call.device):
            expected, _ = _run_own(module, call, state, self.method, own)
        if self._reads_copies(made, call.device):
            self._refresh(waits=True)
        with _same_random_numbers(call.device):
            found = made.baked.run(planned)
        for a, b in zip((*found, *planned), (*expected, *own), strict=True):
            difference = _difference(a, b)
            if difference > (_MOST_IN_E4M3 if made.plan.copies else _most_difference(b.dtype)):
                raise Untraceable(f"its plan differs from its own code by {difference:.1e}")

    def _drop(self, plans: _Plans) -> None:
        """Drop ``plans``, because the model is not what was traced any more."""
        with self._lock:
            if plans in self._by_state.values():
                self._policy.last_change = plans.guard.change()
                self._policy.model_changed(plans.calls)
                self._by_state = {k: v for k, v in self._by_state.items() if v is not plans}
                self._state = State()  # it may have modules that are not in the model any more


def trace_call(
    module: nn.Module, call: Call, state: State, method: str = "forward"
) -> tuple[Traced, Outcome]:
    """Trace the method ``method`` of the model's class. Returns also what the call leaves besides tensors.

    ``call``: its arguments, and the values of ``state``. Raises Untraceable.
    """
    outcomes: list[Outcome] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = [tensors[place] for place in _places(call)]
        computed, outcome = _run_own(module, call, state, method, given)
        outcomes.append(outcome)
        return computed

    with dispatch.stock_code(), running(as_stock=False):
        traced = trace(module, run, *call.tensors, strides_of=channels_last.stock_strides)
    return traced, outcomes[-1]


def _run_own(
    module: nn.Module, call: Call, state: State, method: str, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Outcome]:
    """The tensors that the module's own code computes from ``tensors``, and what it leaves besides them."""
    args, kwargs = call.rebuild(list(tensors))
    outcome = Outcome(args, kwargs, tensors)
    held = kwargs.pop(STATE, {})
    with state.replaced(held):
        result = class_forward(module, method)(*args, **kwargs)
    return outcome.finish(result), outcome


def _places(call: Call) -> tuple[int, ...]:
    """For each tensor of the call, the first place at which the same tensor is: code may ask ``a is b``."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(call.tensors))


def make_plan(
    traced: Traced, note: Callable[[fx.Graph], object] = lambda graph: None, copy_of: Any = None
) -> Plan:
    """Rewrite the graph, which the plan takes over. Raises Untraceable, with the reason.

    ``note`` is called with the rewritten graph, which it must not keep. ``copy_of``: as in ``Plan``; None if
    nothing is computed in E4M3.
    """
    try:
        graph = rewrite(traced.graph.graph, in_e4m3=copy_of is not None)
        note(graph)
        return Plan(traced, graph, copy_of)
    except Untraceable:
        raise
    except Exception as error:  # a rule that fails must not take the call down
        raise Untraceable(f"its plan could not be made: {one_line(error)}") from error


def _may_seed(named: tuple[str, Any, Any]) -> bool:
    """True if the value that code names may set the state of PyTorch's random generators."""
    value = named[-1]
    is_function = getattr(value, "__module__", None) in ("torch.random", "torch.cuda.random")
    return is_function or isinstance(value, torch.Generator)


def _same_random_numbers(device: torch.device | None) -> Any:
    """A context after which PyTorch's random generators have their former states."""
    is_gpu = device is not None and device.type == "cuda"
    return torch.random.fork_rng([device] if is_gpu else [])


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
