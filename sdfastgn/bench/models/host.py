"""What the CPU does around a pipeline's models: the functions that the pipeline's ``__call__`` calls.

A profiler's own cost is within, and a function that waits for the GPU has the GPU's time.
"""

from __future__ import annotations

import cProfile
import inspect
import pstats
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

    Of one call of ``fn``. Functions of one name are one.
    """
    profile = cProfile.Profile()
    for _ in range(repeats):
        profile.runcall(fn)
    code = inspect.unwrap(calls_of).__code__
    key = (code.co_filename, code.co_firstlineno, code.co_name)
    stats: Any = pstats.Stats(profile)
    stats.calc_callees()
    found: dict[str, float] = {}
    for (_, _, name), (*_, seconds) in stats.all_callees[key].items():
        found[name] = found.get(name, 0.0) + 1e3 * seconds / repeats
    longest = dict(sorted(found.items(), key=lambda item: -item[1]))
    return 1e3 * stats.stats[key][3] / repeats, longest


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
