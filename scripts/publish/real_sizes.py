"""Time the networks of docs/coverage.md, stock and optimized, at usual image sizes.

python -m scripts.publish.real_sizes --json real_sizes.json

The networks have the architectures of published models and random weights (see
``scripts.publish.networks``). Each row has the times of one call of one model, such as a step of a UNet or a
decode of an autoencoder. ``optimize`` is called with its default arguments, so it uses CUDA graphs for models
that support them. With ``--encodes``, encodes of autoencoders are timed instead.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sdfastgn
from scripts.publish.networks import CASES, ENCODES, Case
from scripts.publish.runs import finite, release_memory
from scripts.publish.tables.real_sizes import SizeRow
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models.architectures import with_random_weights

# The timed calls of a model should take this number of seconds together. ``MIN_CALLS`` and ``MAX_CALLS``
# limit their number.
ROUND_SECONDS = 0.4
MAX_CALLS = 20
# ``--part`` divides the networks into this number of runs.
RUNS = 4
MIN_CALLS = 3
# Number of calls between the first call, which compiles kernels, and the timed calls. In an optimized model,
# the first of these calls captures a CUDA graph, and the second replays it.
WARM_UP = 2
# Maximum relative error of an optimized output. It is large because random weights amplify rounding errors.
MAX_ERROR = 0.05


def built(
    case: Case, device: torch.device, *, in_fp32: bool = False
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Returns (the case's model with random weights, a function that calls it and returns one tensor).

    ``in_fp32``: if True, the model and its inputs are cast to fp32 after they were drawn in the case's dtype,
    so they have the same values.
    """
    model = with_random_weights(case.build, case.dtype, device, seed=0)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    if in_fp32:
        nn.Module.float(model)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=case.dtype, device=device)
        return drawn.float() if in_fp32 else drawn

    prepared = case.prepare(model, draw)

    def call() -> Tensor:
        with torch.no_grad():
            found = prepared()
        while isinstance(found, tuple | list):
            found = found[0]
        return found

    return model, call


@dataclass(frozen=True)
class Timed:
    """Time and memory of a call of a model.

    Attributes:
        ms: median milliseconds until the GPU has finished its work.
        cpu_ms: median milliseconds until the call has launched all of its work. If this is less than ``ms``,
            the CPU waits for the GPU, and a CUDA graph would not make the call faster.
        mib: peak memory of tensors in MiB; None on the CPU.
    """

    ms: float
    cpu_ms: float
    mib: float | None


def timed(call: Callable[[], Tensor], device: torch.device) -> Timed:
    """Times ``call``, which must have run once before."""
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP):
        took, _ = timing.time_once(call, device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    launched, finished = [], []
    for _ in range(min(MAX_CALLS, max(MIN_CALLS, int(ROUND_SECONDS / took)))):
        timing.synchronize(device)
        start = time.perf_counter()
        call()
        launched.append(time.perf_counter() - start)
        timing.synchronize(device)
        finished.append(time.perf_counter() - start)
    mib = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None
    return Timed(statistics.median(finished) * 1e3, statistics.median(launched) * 1e3, mib)


def exact_output(case: Case, device: torch.device) -> Tensor:
    """Computes the stock model's output in fp32 without TF32. Returns a copy of it in the CPU's memory."""
    with timing.global_switches(cudnn_benchmark=False, cudnn_tf32=False):
        _, call = built(case, device, in_fp32=True)
        return call().cpu()


def measured(case: Case, device: torch.device) -> SizeRow:
    has_exact = (case.is_video or case.dtype == torch.bfloat16) and not case.is_long
    exact = exact_output(case, device) if has_exact else None
    release_memory()
    model, call = built(case, device)
    expected = call()
    stock = timed(call, device)
    sdfastgn.optimize(model)
    found = call()
    error = relative_error(found, expected)
    errors = [None if exact is None else finite(relative_error(y.cpu(), exact)) for y in (expected, found)]
    del found, expected
    optimized = timed(call, device)
    graphs = sdfastgn.report(model).graphs
    return SizeRow(
        case.name,
        str(case.dtype).removeprefix("torch."),
        stock.ms,
        optimized.ms,
        stock.mib,
        optimized.mib,
        any(each.replays for each in graphs),
        finite(error),
        stock_error=errors[0],
        optimized_error=errors[1],
        cpu_ms=optimized.cpu_ms,
        is_video=case.is_video,
        status=documents.OK if error < MAX_ERROR else documents.WRONG,
    )


def chosen(only: str, part: int | None, cases: Sequence[Case] = CASES) -> list[Case]:
    """Returns the ``cases`` whose names match the regular expression ``only``.

    ``part``: a number from 1 to ``RUNS`` selects every ``RUNS``-th of them; None selects all.
    """
    found = [case for case in cases if re.search(only, case.name)]
    return found if part is None else found[part - 1 :: RUNS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code: 1 if an output was wrong or if every network failed, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--only", default="", help="regular expression: time only matching names")
    parser.add_argument(
        "--part", type=int, choices=range(1, RUNS + 1), help="time only this quarter of the cases"
    )
    parser.add_argument("--encodes", action="store_true", help="time encodes, not steps and decodes")
    parser.add_argument("--device", default="cuda", help="device of the networks")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows: list[SizeRow] = []
    with timing.global_switches() as switches:
        where = environment(device, switches)
        timing.spin_up(device)
        # The file is written now and after each network, so that an interrupted run has written its results.
        write = functools.partial(_write, options.json, where)
        write(rows)
        for each in chosen(options.only, options.part, ENCODES if options.encodes else CASES):
            start = time.perf_counter()
            try:
                rows.append(measured(each, device))
            except Exception as error:  # the run goes on after an error, whose text is in the model's row
                rows.append(SizeRow.failed(each.name, str(each.dtype), one_line(error)))
            release_memory()
            print(f"{time.perf_counter() - start:5.1f} s  {rows[-1]}", flush=True)
            write(rows)
    return exit_code(rows) if rows else 0


def _write(path: Path, where: dict[str, Any], rows: Sequence[SizeRow]) -> None:
    documents.write_json(path, documents.document("real_sizes", where, {}, rows))


if __name__ == "__main__":
    sys.exit(main())
