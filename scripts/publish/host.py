"""Measure the CPU time of a pipeline's call, split by the functions that the pipeline calls.

python -m scripts.publish.host --model sdxl --size 512 --steps 1 --guidance 0

The times include the cost of the profiler. If a function waits for the GPU, its time includes the wait.
"""

from __future__ import annotations

import inspect
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from scripts.publish.runs import write_rows
from sdfastgn.bench import timing
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.tables.pipelines import HostRow, host_table
from sdfastgn.bench.variants import VARIANTS, prepared
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import bench_options, checks, main
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import (
    DeviceOption,
    DtypeOption,
    GuidanceOption,
    JsonOption,
    ModelOption,
    SchedulerOption,
    SizeOption,
    StepsOption,
)
from sdfastgn.cli.terminal import console
from sdfastgn.program import counted

# The variants that are compared.
WAYS = ("eager", "sdfastgn")
# Number of images that are drawn before the profile. From the third image on, every CUDA graph is replayed.
WARM_UP = 3


def profiled(fn: Callable[[], object], calls_of: Any, *, repeats: int) -> tuple[float, dict[str, float]]:
    """Calls ``fn`` ``repeats`` times, and measures ``calls_of``, a Python function that ``fn`` calls.

    Returns (total, parts), in milliseconds per call of ``fn``. ``total`` is the time of ``calls_of``.
    ``parts`` has the time of each function that ``calls_of`` calls directly: name -> time, longest first. A
    method's name is ``Class.method``. Times of functions with the same name are added up.
    """
    code = inspect.unwrap(calls_of).__code__
    found: dict[str, float] = {}
    begun: list[float] = []
    total = 0.0

    # cProfile is not used: in Python 3.12 it assigns times wrongly after an exception leaves a function.
    def see(frame: types.FrameType, event: str, called: Any) -> None:
        nonlocal total
        is_python = event in ("call", "return")
        caller = frame.f_back if is_python else frame
        if caller is not None and caller.f_code is code:
            if event in ("call", "c_call"):
                begun.append(time.perf_counter())
            elif len(begun) == 1:  # false for a function that was called back by a function in C
                name = _name_of(frame) if is_python else called.__name__
                found[name] = found.get(name, 0.0) + time.perf_counter() - begun.pop()
            else:
                begun.pop()
        elif frame.f_code is code:
            total += time.perf_counter() * (1 if event == "return" else -1)

    sys.setprofile(see)
    try:
        for _ in range(repeats):
            fn()
    finally:
        sys.setprofile(None)
    longest = sorted(found.items(), key=lambda item: -item[1])
    return 1e3 * total / repeats, {name: 1e3 * seconds / repeats for name, seconds in longest}


def _name_of(frame: types.FrameType) -> str:
    own = frame.f_locals.get("self")
    return f"{type(own).__name__}.{frame.f_code.co_name}" if own is not None else frame.f_code.co_name


def run(config: BenchConfig) -> list[HostRow]:
    """Profiles one pipeline with each variant of ``WAYS``. Returns a row per variant."""
    device, rows = config.torch_device, []
    with timing.device_scope(device):
        workload = workloads.build_pipeline(config)
        pipe = workload.target
        for name in WAYS:
            with prepared(VARIANTS[name], pipe, config.part):
                for _ in range(WARM_UP):
                    workload.call()
                found = profiled(workload.call, type(pipe).__call__, repeats=config.repeats)
                rows.append(HostRow(name, *found))
    return rows


def host(
    model: ModelOption = "sdxl",
    size: SizeOption = None,
    steps: StepsOption = 1,
    scheduler: SchedulerOption = None,
    guidance: GuidanceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Images each way.", show_default="5, on a CPU 2")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Profile the CPU time of a pipeline's call, stock and optimized."""
    with one_line_errors():
        given: dict[str, Any] = {"size": size, "steps": steps, "scheduler": scheduler, "guidance": guidance}
        given |= {"dtype": dtype, "device": device, "repeats": repeats}
        (config,) = bench_options.bench_configs(model=model, parts=["pipeline"], **given)
        checks.file_path("--json", json)
        rows = run(config)
    what = f"{config.model} pipeline, {config.size}x{config.size}, {counted(config.steps, 'step')}"
    title = f"what the pipeline calls: {what}, {config.dtype} on {config.device}"
    console().print(replace(host_table(rows), title=title))
    write_rows(json, "host", config, rows)


if __name__ == "__main__":
    main(__doc__, host)
