"""Shows what plans a model would get, without a GPU and without weights: all tensors are on the device meta.

A plan is a traced call as a list of steps: calls of kernels and of PyTorch's ops.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.setting import setting
from sdfastgn.patches.code.checked import entrances
from sdfastgn.patches.graphs.arguments import Call, Unsupported
from sdfastgn.patches.graphs.models import method_of, repeats_decoder
from sdfastgn.patches.swap.class_forward import class_forward
from sdfastgn.plans.making import make_plan, trace_call
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.run.traffic import Step
from sdfastgn.plans.state import STATE, State
from sdfastgn.plans.trace.refusals import is_tracing
from sdfastgn.plans.trace.traced import Traced, Untraceable
from sdfastgn.plans.trace.tracer import trace

# For each kind of GPU, a compute capability that stands for it. The same call can have other kernels on
# another kind.
_CAPABILITIES = {"hopper": (9, 0), "other": (8, 0)}


@dataclass
class CallPlan:
    """The plan of one module for calls with equal shapes and settings.

    A plan is a traced call as a list of steps: calls of kernels and of PyTorch's ops.

    Attributes:
        path: the module's dotted path in the model; empty for the model itself.
        kind: the name of the module's class.
        calls: number of such calls.
        trace_s: seconds that the trace of the call took.
        rewrite_s: seconds that it took to make the plan from the traced graph.
        plan: the plan; None if the call cannot have one.
        reason: why there is no plan; empty if there is one.
        is_guess: for each step of the plan, True if GPUs of another kind would run other steps instead.
    """

    path: str
    kind: str
    calls: int = 0
    trace_s: float = 0.0
    rewrite_s: float = 0.0
    plan: Plan | None = None
    reason: str = ""
    is_guess: list[bool] = field(default_factory=list)

    def __str__(self) -> str:
        """The table of the plan's steps. A star marks each step that another kind of GPU would not run."""
        if self.plan is None:
            return f"no plan: {self.reason}"
        title, *lines = str(self.plan).splitlines()
        guesses = [*self.is_guess, *[False] * (len(lines) - len(self.is_guess))]
        return "\n".join([title, *(line + " *" * star for line, star in zip(lines, guesses, strict=True))])

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dict that ``json.dumps`` accepts."""
        steps = self.plan.steps if self.plan else []
        return {
            "module": self.path,
            "kind": self.kind,
            "calls": self.calls,
            "trace_s": self.trace_s,
            "rewrite_s": self.rewrite_s,
            "reason": self.reason,
            "steps": [
                {**step._asdict(), "dtype": step.dtype and str(step.dtype), "is_guess": is_guess}
                for step, is_guess in zip(steps, self.is_guess, strict=True)
            ],
        }


class _Planned:
    """A ``CallPlan``, and all that is needed to return results of its calls without computing them."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.report = CallPlan(path, type(module).__name__)
        self._outcome: Outcome | None = None
        self._results: list[dict[str, Any]] = []  # shape, dtype and device of each result

    def make(self, module: nn.Module, call: Call, state: State, gpu_kind: str) -> None:
        """Trace the call and make its plan. Raises Untraceable, with the reason, if that is not possible."""
        start = time.perf_counter()
        traced, outcome = trace_call(module, call, state, method_of(module))
        self.report.trace_s = time.perf_counter() - start
        self._results = [dict(n.meta) for n in traced.graph.graph.output_node().args[0]]
        same = traced._replace(graph=copy.deepcopy(traced.graph))
        start = time.perf_counter()
        plan = _plan_for(gpu_kind, traced)
        self.report.rewrite_s = time.perf_counter() - start
        (other_kind,) = set(_CAPABILITIES) - {gpu_kind}
        own, others = (Counter(map(_what, each.steps)) for each in (plan, _plan_for(other_kind, same)))
        self.report.is_guess = [own[_what(step)] != others[_what(step)] for step in plan.steps]
        self.report.plan, self._outcome = plan, outcome

    def run(self, module: nn.Module, args: Any, kwargs: Any, call: Call | None, state: State) -> Any:
        """Return empty tensors of the right shapes in place of the results of a call.

        Attributes in which the call keeps tensors are set too. Without a plan the module's own code runs.
        """
        self.report.calls += 1
        if self._outcome is None or call is None:
            given = {name: value for name, value in kwargs.items() if name != STATE}
            return class_forward(module, method_of(module))(*args, **given)
        results = [torch.empty(m["shape"], dtype=m["dtype"], device=m["device"]) for m in self._results]
        result = self._outcome.deliver(results, args, kwargs, call.tensors)
        state.store(kwargs.get(STATE, {}))
        return result


def plans_of(model: nn.Module, call: Callable[[], object], gpu_kind: str) -> list[CallPlan]:
    """Makes the plans that ``optimize`` would make for the calls of ``model`` in ``call()``.

    A plan is a traced call as a list of kernel calls. Calls with equal shapes and settings share a plan. A
    child of ``model`` has plans of its own if something outside of the model calls the child.

    All parameters and inputs must be on the device meta. Afterwards ``model`` can be used for nothing else.

    ``gpu_kind``: "hopper" or "other", the kind of GPU whose kernels the plans have.
    """
    found: dict[Any, _Planned] = {}
    paths = {module: path for path, module in model.named_modules()}
    states: defaultdict[nn.Module, State] = defaultdict(State)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = method_of(module)
        if is_tracing() or repeats_decoder(module, args, kwargs):
            return class_forward(module, method)(*args, **kwargs)
        arguments, planned = None, _Planned(paths[module], module)
        key: Any = len(found)
        state = states[module]
        given = {**kwargs, STATE: held} if (held := state.held()) else kwargs
        try:
            arguments = Call(args, given, {})
            key = module, arguments.key
            if key not in found:
                planned.make(module, arguments, state, gpu_kind)
        except (Unsupported, Untraceable) as error:
            grown = state.grown(module, error.kept) if isinstance(error, Untraceable) else None
            if grown is not None:
                states[module] = grown
                return forward(module, *args, **kwargs)
            planned.report.reason = str(error)
        return found.setdefault(key, planned).run(module, args, given, arguments, state)

    for module in entrances(model):
        if any(True for _ in module.children()):
            vars(module)[method_of(module)] = functools.partial(forward, module)
    # Trace something small: the first trace in a process also imports modules, which must not count in
    # ``trace_s``, the seconds that the trace of a call takes.
    trace(nn.Identity(), torch.relu, torch.empty(1, device="meta"))
    with torch.no_grad():
        call()
    return [planned.report for planned in found.values()]


def _plan_for(gpu_kind: str, traced: Traced) -> Plan:
    with setting(gpu.META_CAPABILITY, _CAPABILITIES[gpu_kind]):
        return make_plan(traced)


def _what(step: Step) -> tuple[Any, ...]:
    """Returns all fields of a step but its node's name. Steps of two graphs are equal if these fields are."""
    return step[1:]
