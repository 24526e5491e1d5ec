"""Makes the plan of a call: traces the call, rewrites its graph to kernels, and compiles the kernels.

A plan is this rewritten graph. It runs later calls without the model's Python.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.code.states import running
from sdfastgn.patches.graphs.arguments import Call, Unsupported
from sdfastgn.patches.graphs.capture import without_scratch
from sdfastgn.patches.graphs.models import scratch_of
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.lora.merging import frozen
from sdfastgn.patches.swap.class_forward import class_forward
from sdfastgn.plans.adapters import Adapters
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.rewrite.slices import sliced
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.state import STATE, State
from sdfastgn.plans.trace.traced import Traced, Untraceable
from sdfastgn.plans.trace.tracer import trace

# Largest relative difference that the check of a new plan allows between the plan and the model's own code.
# This number is for plans with matrix products in E4M3, an 8-bit float dtype. Single products differ by 0.04,
# and results of whole models by 0.1 (docs/fp8.md). If a kernel were wrong, results would differ by about 1.
_MOST_IN_E4M3 = 0.3
# (GPU, name of a kernel, dtype) for all kernels that this process has compiled for some plan.
_COMPILED: set[tuple[torch.device, str, torch.dtype | None]] = set()


def trace_call(
    module: nn.Module, call: Call, state: State, method: str = "forward", adapters: Adapters | None = None
) -> tuple[Traced, Outcome]:
    """Trace a call of the method ``method`` of the model's class.

    Returns the graph, and the structure of the call's result with the changes that the call makes in lists
    and dicts. Raises Untraceable, with the reason.

    Args:
        module: the model.
        call: the arguments, including the values of ``state``.
        state: the attributes of modules in which calls keep tensors for later calls.
        method: the name of the method.
        adapters: the model's layers with adapters, such as a LoRA. None if there are none.
    """
    layers = {} if adapters is None else adapters.layers
    outcomes: list[Outcome] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = [tensors[place] for place in places(call)]
        try:
            computed, outcome = run_own(module, call, state, method, given)
        except Unsupported as error:
            raise Untraceable(str(error)) from error
        outcomes.append(outcome)
        return computed

    def strides_of(part: nn.Module, weight: Tensor) -> tuple[int, ...]:
        return channels_last.stock_strides(layers.get(part, part), weight)

    with dispatch.stock_code(), running(as_stock=False), frozen():
        traced = trace(module, run, *call.tensors, strides_of=strides_of, beside=layers)
    if adapters is not None:
        adapters.check(traced)
    return traced, outcomes[-1]


def run_own(
    module: nn.Module, call: Call, state: State, method: str, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Outcome]:
    """Run the module's own code on ``tensors``.

    Returns the tensors that it computes, and the structure of its result with its changes in lists and dicts.
    """
    args, kwargs = call.rebuild(list(tensors))
    outcome = Outcome(args, kwargs, tensors)
    held = kwargs.pop(STATE, {})
    with state.replaced(held), without_scratch(module, scratch_of(module)):
        result = class_forward(module, method)(*args, **kwargs)
    return outcome.finish(result), outcome


def places(call: Call) -> tuple[int, ...]:
    """For each tensor of the call, the index of its first occurrence among all of them.

    A call that gets one tensor as two arguments must not share a plan with calls that get two tensors there,
    because code may ask ``a is b``.
    """
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(call.tensors))


def make_plan(
    traced: Traced,
    note: Callable[[Traced, fx.Graph], object] = lambda traced, graph: None,
    copy_of: Any = None,
    may_copy: Callable[[nn.Module], bool] = lambda module: True,
) -> Plan:
    """Rewrite a traced graph to kernels, and make a ``Plan`` of it. Raises Untraceable, with the reason.

    Args:
        traced: the result of a trace. Its graph is changed.
        note: is called with the rewritten graph, and with the trace from which it was made: of the call, or
            of one slice of its samples. It must not keep the graph, because the plan changes the graph.
        copy_of: a function that finds the copy of a weight in E4M3 (``Plan``). None without E4M3.
        may_copy: returns True for a module whose weights may be read in E4M3.
    """
    try:
        traced = sliced(traced)
        # The first nodes of the graph are the placeholders of the parameters.
        weights = zip(traced.graph.graph.nodes, traced.parameters, strict=False)
        in_e4m3 = [n for n, (module, *_) in weights if copy_of is not None and may_copy(module)]
        graph = rewrite(traced.graph.graph, in_e4m3)
        note(traced, graph)
        return Plan(traced, graph, copy_of)
    except Untraceable:
        raise
    except Exception as error:  # callers catch Untraceable, and run the model's own code
        raise Untraceable(f"its plan could not be made: {one_line(error)}") from error


def compile_ahead(plan: Plan, call: Call) -> None:
    """Compile the kernels of ``plan`` in parallel threads, if earlier plans did not have them all.

    Does nothing if the plan writes into arguments or draws random numbers, because compiling runs each step.
    """
    device: Any = call.device
    kernels = {(device, step.target, step.dtype) for step in plan.steps if step.kind == "kernel"}
    new = kernels - _COMPILED
    if device.type != "cuda" or not new or plan.writes or plan.draws:
        return
    with contextlib.suppress(Exception), on(device):  # errors are ignored: the first run raises them again
        plan.compile_ahead(call.tensors, device)  # type: ignore[arg-type]
    _COMPILED.update(new)


def may_seed(named: tuple[str, Any, Any]) -> bool:
    """True if ``named`` is something with which code may seed PyTorch's random generators.

    ``named``: (owner, name, value) of a value that the traced code reads by its name.
    """
    value = named[-1]
    is_function = getattr(value, "__module__", None) in ("torch.random", "torch.cuda.random")
    return is_function or isinstance(value, torch.Generator)


def same_random_numbers(device: torch.device | None) -> Any:
    """A context at whose end PyTorch's random generators get back the states from before it."""
    is_gpu = device is not None and device.type == "cuda"
    return torch.random.fork_rng([device] if is_gpu else [])


def difference(a: Tensor, b: Tensor) -> float:
    """Returns ``norm(a - b) / norm(b)`` in fp64. Infinite if the shapes or dtypes of a and b differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return math.inf
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).norm() / b.to(wide).norm().clamp(min=1e-30))


def most_difference(plan: Plan, dtype: torch.dtype) -> float:
    """The largest relative difference between a plan and the model's own code that counts as rounding.

    It is 16 eps of ``dtype``, but at least 1e-4; 0.3 for plans with products in E4M3; 0 for other dtypes than
    floats.
    """
    if plan.copies:
        return _MOST_IN_E4M3
    return max(1e-4, 16 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def on(device: torch.device | None) -> Any:
    return torch.cuda.device(device if device is not None and device.type == "cuda" else -1)
