"""Time networks of docs/coverage.md as plans, and with fused blocks instead of plans.

python -m scripts.publish.plans --json plans.json --only "VAE decode"

A plan is a model's own code, traced and rewritten to a list of kernels. The planned and the fused model have
the same weights, and their calls are interleaved. Neither has CUDA graphs, except for the graphs that this
script captures. The model and its children have separate plans. ``optimize`` makes the same plans for a model
without fused blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdfastgn
from scripts.publish.networks import CASES, ENCODES, TRANSFORMERS, Case
from scripts.publish.real_sizes import MAX_ERROR, built, chosen, exact_output
from scripts.publish.runs import finite, release_memory, write_each
from scripts.publish.tables.plans import Cost, PlanRow
from sdfastgn.bench import timing
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.code.checked import entrances
from sdfastgn.patches.graphs.models import method_of
from sdfastgn.patches.swap.class_forward import place_in
from sdfastgn.plans.forward import PlannedForward

KIND = "plans"
# Number of calls before the timed calls, and number of timed calls, for each model.
WARM_UP, CALLS = 2, 7
NAMES = ("fused", "plan")
Call = Callable[[], Tensor]


def planned(root: nn.Module) -> list[PlannedForward]:
    """Replaces the forwards of ``root`` and its children by plans, even if ``optimize`` would not.

    A plan is a module's own code, traced and rewritten to a list of kernels. Returns the replacements.
    """
    found = []
    for module in entrances(root):
        method = method_of(module)
        if place_in(module, method) == method and any(True for _ in module.children()):
            found.append(PlannedForward(module, method=method))
            found[-1].put(method)
    return found


def measured(case: Case, device: torch.device, *, has_exact: bool = True) -> PlanRow:
    """Times a case with fused blocks and as plans. Returns its row.

    The fused model runs first, so that it compiles the kernels that both models use.
    """
    exact = exact_output(case, device) if has_exact and not case.is_long else None
    release_memory()
    calls, weights, outputs = {}, {}, {}
    plans: list[PlannedForward] = []
    first_s = 0.0
    for name in NAMES:
        before = _allocated(device)
        model, calls[name] = built(case, device)
        if name == "fused":
            sdfastgn.optimize(model, cuda_graphs=False, plans=False, missing_ok=True)
        else:
            plans = planned(model)
        weights[name] = _allocated(device) - before
        first_s, outputs[name] = timing.time_once(calls[name], device)
    errors = {
        name: None if exact is None else finite(relative_error(y.cpu(), exact)) for name, y in outputs.items()
    }
    difference = relative_error(outputs["plan"], outputs["fused"])
    outputs.clear()
    times = _interleaved(calls, device)
    peaks = {
        name: _peak_gb(calls[name], device, weights[other])
        for name, other in zip(NAMES, NAMES[::-1], strict=True)
    }
    graphs = _in_graphs(calls, device)
    if not any(each.calls for each in plans):
        raise RuntimeError(f"no call was run by a plan: {[dict(each.own) for each in plans]}")
    fused, plan = (Cost(*times[name], graphs.get(name), peaks[name]) for name in NAMES)
    return PlanRow(
        case.name,
        str(case.dtype).removeprefix("torch."),
        fused,
        plan,
        fused_error=errors["fused"],
        plan_error=errors["plan"],
        difference=finite(difference),
        first_s=first_s,
        own=sorted({f"{type(each.module).__name__}: {reason}" for each in plans for reason in each.own}),
        status=OK if difference < MAX_ERROR else WRONG,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _interleaved(calls: dict[str, Call], device: torch.device) -> dict[str, tuple[float, float]]:
    """Times the calls alternately. Returns two medians for each call, in milliseconds.

    The first is the time until the GPU has finished, the second the time until all work is launched.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for i in range(WARM_UP + CALLS):
        for name, call in calls.items():
            timing.synchronize(device)
            start = time.perf_counter()
            call()
            launched = time.perf_counter() - start
            timing.synchronize(device)
            if i >= WARM_UP:
                taken[name].append((time.perf_counter() - start, launched))
    return {
        name: (statistics.median(t for t, _ in each) * 1e3, statistics.median(t for _, t in each) * 1e3)
        for name, each in taken.items()
    }


def _peak_gb(call: Call, device: torch.device, others: int) -> float | None:
    """Peak memory of tensors in a call, in GB, without the ``others`` bytes that the other model occupies."""
    if device.type != "cuda":
        return None
    release_memory()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    timing.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - others) / 1e9


def _in_graphs(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """Captures each call as a CUDA graph. Returns {name of the call: median milliseconds of a replay}.

    A call that cannot be captured is left out. On the CPU the result is empty.
    """
    if device.type != "cuda":
        return {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except Exception as error:  # some calls cannot be captured, such as calls that copy from the CPU
            print(f"  {name} has no graph: {one_line(error)}", flush=True)
            timing.synchronize(device)
        else:
            graphs[name] = graph
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(WARM_UP + CALLS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            timing.synchronize(device)
            if i >= WARM_UP:
                taken[name].append(start.elapsed_time(end))
    return {name: statistics.median(each) for name, each in taken.items()}


def rows(cases: Sequence[Case], device: torch.device, has_exact: bool) -> Iterator[PlanRow]:
    """Yields the row of each case. A failed case has its error in the row."""
    for each in cases:
        try:
            row = measured(each, device, has_exact=has_exact)
        except Exception as error:  # the run goes on after an error, whose text is in the model's row
            traceback.print_exc(limit=4)
            row = PlanRow.failed(each.name, str(each.dtype), one_line(error))
        release_memory()
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code: 1 if an output was wrong or if every network failed, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--only", default="", help="regular expression: time only matching names")
    parser.add_argument("--no-exact", action="store_true", help="leave out errors against fp32")
    parser.add_argument("--device", default="cuda", help="device of the networks")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cases = chosen(options.only, None, (*CASES, *ENCODES, *TRANSFORMERS))
    with timing.global_switches() as switches:
        where: dict[str, Any] = environment(device, switches)
        timing.spin_up(device)
        found = write_each(rows(cases, device, not options.no_exact), options.json, KIND, where, {})
    return exit_code(found) if found else 0


if __name__ == "__main__":
    sys.exit(main())
