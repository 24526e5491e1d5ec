"""What the CPU does around a pipeline's models: the functions that the pipeline's ``__call__`` calls.

A profiler's own cost is within, and a function that waits for the GPU has the GPU's time.
"""

from __future__ import annotations

import inspect
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdfastgn.bench import timing
from sdfastgn.bench.models import workload as workloads
from sdfastgn.bench.models.variants import VARIANTS, prepared
from sdfastgn.bench.models.workload import BenchConfig

# Ways that are compared, and images before the profile: the third replays every graph.
WAYS = ("eager", "sdfastgn")
WARM_UP = 3


@dataclass
class HostRow:
    """Milliseconds of an image in one way, as a whole and by the functions that the pipeline calls."""

    variant: str
    total_ms: float
    functions: dict[str, float]


def profiled(fn: Callable[[], object], calls_of: Any, *, repeats: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of ``calls_of``, a function that ``fn`` calls, and of each function that it calls.

    Of one call of ``fn``. Functions of one name are one; a method's name has its object's class before it.
    """
    code = inspect.unwrap(calls_of).__code__
    found: dict[str, float] = {}
    begun: list[float] = []
    total = 0.0

    # Not cProfile: Python 3.12's loses its place where a function is left by an exception.
    def see(frame: types.FrameType, event: str, called: Any) -> None:
        nonlocal total
        is_python = event in ("call", "return")
        caller = frame.f_back if is_python else frame
        if caller is not None and caller.f_code is code:
            if event in ("call", "c_call"):
                begun.append(time.perf_counter())
            elif len(begun) == 1:  # else it was called back by a function in C
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
    """Each of ``WAYS`` on one pipeline."""
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
