"""Time networks of docs/coverage.md as plans, beside what ``optimize`` gives them without plans.

python -m scripts.publish.plans --json plans.json --only "VAE decode"

The two models have the same weights, and their calls are interleaved. Neither has CUDA graphs, except for the
graphs that this script captures. The plans are those of ``optimize`` for a model without fused blocks: the
model and its children have separate plans.
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
from scripts.publish.networks import CASES, ENCODES, Case
from scripts.publish.real_sizes import built, chosen, exact_output
from scripts.publish.runs import finite, release_memory, write_each
from scripts.publish.tables.plans import Cost, PlanRow
from sdfastgn.bench import timing
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.patches.code.checked import entrances
from sdfastgn.patches.graphs.install import place_in
from sdfastgn.plans.forward import PlannedForward

KIND = "plans"
# Number of calls before the timed ones, and of timed calls of each model.
WARM_UP, CALLS = 2, 7
# Largest relative difference between the outputs. It is large because random weights amplify rounding errors.
MAX_ERROR = 0.05

Call = Callable[[], Tensor]


def planned(root: nn.Module) -> list[PlannedForward]:
    """Give ``root`` and its children plans, whether or not ``optimize`` would."""
    found = []
    for module in entrances(root):
        if place_in(module) == "forward" and any(True for _ in module.children()):
            vars(module)["forward"] = each = PlannedForward(module)
            found.append(each)
    return found


def measured(case: Case, device: torch.device) -> PlanRow:
    """The row of a case. The fused model runs first, so that it compiles the kernels that both share."""
    exact = None if case.is_long else exact_output(case, device)
    release_memory()
    names = "fused", "plan"
    models, calls, weights, outputs = {}, {}, {}, {}
    plans: list[PlannedForward] = []
    first = 0.0
    for name in names:
        before = _allocated(device)
        models[name], calls[name] = built(case, device)
        if name == "fused":
            sdfastgn.optimize(models[name], cuda_graphs=False, plans=False, missing_ok=True)
        else:
            plans = planned(models[name])
        weights[name] = _allocated(device) - before
        timing.synchronize(device)
        start = time.perf_counter()
        outputs[name] = calls[name]()
        timing.synchronize(device)
        first = time.perf_counter() - start
    errors = {n: None if exact is None else finite(relative_error(outputs[n].cpu(), exact)) for n in names}
    difference = relative_error(outputs["plan"], outputs["fused"])
    outputs.clear()
    release_memory()
    times = _interleaved(calls, device)
    costs = {}
    for name in names:
        peak = _peak_gb(calls[name], device, weights[names[name == "fused"]])
        costs[name] = Cost(*times[name], None, peak)
    release_memory()
    graphs = _in_graphs(calls, device) if device.type == "cuda" else dict.fromkeys(names)
    own = {f"{type(p.module).__name__}: {reason}" for p in plans for reason in p.own}
    if not any(p.calls for p in plans):
        raise RuntimeError(f"no call was run by a plan: {sorted(own)}")
    return PlanRow(
        case.name,
        str(case.dtype).removeprefix("torch."),
        *(Cost(c.ms, c.cpu_ms, graphs[n], c.peak_gb) for n, c in costs.items()),
        errors["fused"],
        errors["plan"],
        finite(difference),
        first,
        sorted(own),
        status=OK if difference < MAX_ERROR else WRONG,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _interleaved(calls: dict[str, Call], device: torch.device) -> dict[str, tuple[float, float]]:
    """For each call: (milliseconds until the GPU has finished, milliseconds until all work is launched)."""
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
    """Peak memory of tensors in GB, without the ``others`` bytes of the other model."""
    if device.type != "cuda":
        return None
    release_memory()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    timing.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - others) / 1e9


def _in_graphs(calls: dict[str, Call], device: torch.device) -> dict[str, float | None]:
    """For each call: median milliseconds of a replay; None if it cannot be captured."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except Exception as error:
            print(f"  {name} has no graph: {one_line(error)}", flush=True)
            timing.synchronize(device)
        else:
            graphs[name] = graph
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARM_UP + CALLS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            timing.synchronize(device)
            if i >= WARM_UP:
                taken[name].append(start.elapsed_time(end))
    return {name: statistics.median(each) if each else None for name, each in taken.items()}


def rows(cases: Sequence[Case], device: torch.device) -> Iterator[PlanRow]:
    """Yields the row of each case. A failed case has its error in the row."""
    for each in cases:
        try:
            row = measured(each, device)
        except Exception as error:  # the row gets the error's text, and the next model is timed
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
    parser.add_argument("--device", default="cuda", help="device of the networks")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cases = chosen(options.only, None, (*CASES, *ENCODES))
    with timing.global_switches() as switches:
        where: dict[str, Any] = environment(device, switches)
        timing.spin_up(device)
        found = write_each(rows(cases, device), options.json, KIND, where, {})
    return exit_code(found) if found else 0


if __name__ == "__main__":
    sys.exit(main())
