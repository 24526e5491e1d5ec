"""Measure the peak memory of whole pipelines, and draw images with little memory, stock and optimized.

python -m scripts.publish.memory --only peaks --json benchmarks/by_hand/memory.json
python -m scripts.publish.memory --only limits --json benchmarks/by_hand/memory_limits.json

The pipelines have random weights. There are two measurements, ``peaks`` and ``limits``:

- ``peaks`` measures peak memory without a limit. Each pipeline runs in a fresh process. Several of these
  processes run at the same time, so their times cannot be compared.
- ``limits`` measures times in one process, under limits of the memory that PyTorch may reserve
  (``torch.cuda.set_per_process_memory_fraction``). Under the smallest limit, and where stock cannot draw,
  images are also drawn after ``enable_model_cpu_offload``.

Weights are loaded before the limit is set. If the weights alone exceed the limit, the first image fails.
``cudnn.benchmark`` is off, as PyTorch's default is, so cuDNN does not try several algorithms.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sdfastgn
from scripts.publish.runs import call_times, in_a_process, release_memory, write_each
from scripts.publish.tables.memory import KIND, MemoryRow
from sdfastgn.bench import documents, gate, timing
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.environment import environment
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.models.configurations import VAES

LIMITS_GIB = (6.0, 8.0, 12.0, 16.0)
BATCHES = (1, 4)
STEPS = 4
# Number of calls of a pipeline. An optimized pipeline's first call runs the autoencoder without a CUDA graph,
# the second captures the graph, and the third replays it.
IMAGES = 3
# Batch size -> number of processes that measure peak memory at the same time. Their pipelines must fit into
# the GPU's memory together.
AT_ONCE = {1: 4, 4: 2}
# The pipelines that are measured: (model, True if its autoencoder is converted to fp32 for each decode).
PIPELINES = (("sdxl", True), ("sd15", False), ("sdxl", False))


def empty_row(model: str, upcasts: bool, batch: int, is_optimized: bool) -> MemoryRow:
    """Returns the row of a pipeline at its own image size, before it is measured."""
    return MemoryRow(model, upcasts, VAES[model]["sample_size"], batch, is_optimized)


def dtype_on(device: str) -> str:
    return "fp16" if torch.device(device).type == "cuda" else "fp32"


def config_of(row: MemoryRow, device: str) -> BenchConfig:
    return BenchConfig(
        row.model, "pipeline", row.size, row.batch, dtype_on(device), device, repeats=1, steps=STEPS
    )


def drawn(row: MemoryRow, pipe: Any, call: Callable[[], Any], device: torch.device) -> tuple[MemoryRow, Any]:
    """Calls a pipeline ``IMAGES`` times. Returns (``row`` with the times and the memory, the last images).

    If a call fails, the row has the reason, and the images are None.
    """
    calls = call_times(call, IMAGES, device)
    graphs = sdfastgn.report(pipe).graphs
    counts = [sum(getattr(each, name) for each in graphs) for name in ("captured", "dropped")]
    row = replace(
        row,
        image_s=list(calls.seconds),
        reserved_mib=calls.reserved_mib,
        allocated_mib=calls.allocated_mib,
        captured=counts[0],
        dropped=counts[1],
        status=documents.FAILED if calls.reason else documents.OK,
        reason=calls.reason,
    )
    return row, calls.result


# ---- peak memory without a limit


def peak(row: MemoryRow, device: str) -> MemoryRow:
    """Measures the pipeline of ``row`` in this process, which must be a new one. Returns the whole row."""
    workload = workloads.build_pipeline(config_of(row, device))
    pipe = workload.target
    pipe.vae.register_to_config(force_upcast=row.upcasts)
    if row.is_optimized:
        sdfastgn.optimize(pipe)
    release_memory()
    return drawn(row, pipe, workload.call, torch.device(device))[0]


def peaks(
    pipelines: Sequence[tuple[str, bool]], device: str, is_late: Callable[[], bool]
) -> Iterator[MemoryRow]:
    """Yields a row for each batch size and pipeline, stock and optimized, as soon as it is measured.

    A pipeline gets no row if ``is_late`` returns True before its measurement.
    """

    def measured(row: MemoryRow) -> MemoryRow | None:
        if is_late():
            return None
        try:
            return in_a_process(peak, row, device)
        except Exception as error:  # the row's process failed; the other rows are still measured
            return replace(row, status=documents.FAILED, reason=one_line(error))

    for batch in BATCHES:
        rows = [empty_row(*each, batch, is_optimized) for is_optimized in (False, True) for each in pipelines]
        with ThreadPoolExecutor(AT_ONCE[batch]) as pool:
            for done in as_completed([pool.submit(measured, row) for row in rows]):
                if (row := done.result()) is not None:
                    yield row


# ---- times under a limit


def set_limit(gib: float | None, device: torch.device) -> None:
    """Limits the memory that PyTorch may reserve on the GPU to ``gib`` GiB. None removes the limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * 2**30 / total))


class Limited:
    """A pipeline that draws the same images under several limits of memory, first stock, then optimized.

    ``rows`` yields a row for each limit, with and without offloading. It stops when ``is_late`` returns True.
    """

    def __init__(self, model: str, device: str, is_late: Callable[[], bool]) -> None:
        self.config = config_of(empty_row(model, False, 1, False), device)
        self.device = torch.device(device)
        self.workload = workloads.build_pipeline(self.config)
        self.pipe = self.workload.target
        self.is_late = is_late

    def rows(self, upcasts: bool) -> Iterator[MemoryRow]:
        self.pipe.vae.register_to_config(force_upcast=upcasts)
        reference = None
        offloaded = {min(LIMITS_GIB)}
        for is_optimized in (False, True):
            for offloads in (False, True):
                # The largest limit comes first, because stock can draw under it most probably. All images are
                # compared with the first one that could be drawn.
                for limit in sorted(LIMITS_GIB, reverse=True):
                    if offloads and limit not in offloaded:
                        continue
                    if self.is_late():
                        return
                    row = empty_row(self.config.model, upcasts, 1, is_optimized)
                    row, images = self.one(replace(row, limit_gib=limit, offloads=offloads))
                    if images is None:
                        offloaded |= set() if is_optimized else {limit}
                    else:
                        reference = reference or gate.Reference(images)
                        if reason := gate.judge(self.config, images, reference).reason:
                            row = replace(row, status=documents.WRONG, reason=reason, image_s=[])
                    yield row

    def one(self, row: MemoryRow) -> tuple[MemoryRow, Any]:
        """Draws images with the settings in ``row``. Returns (the whole row, the images).

        If the images could not be drawn, the row has the reason, and None takes the place of the images.
        """
        pipe = self.pipe
        if row.is_optimized:
            sdfastgn.optimize(pipe)
        if row.offloads:
            pipe.enable_model_cpu_offload(device=self.device)
        release_memory()
        set_limit(row.limit_gib, self.device)
        try:
            return drawn(row, pipe, self.workload.call, self.device)
        finally:
            set_limit(None, self.device)
            if row.offloads:
                pipe.remove_all_hooks()
            # A failed decode may have left the autoencoder in fp32. ``nn.Module.to`` is called, because
            # diffusers' own ``to`` would print a warning.
            torch.nn.Module.to(pipe.vae, self.config.torch_dtype)
            pipe.to(self.device)
            sdfastgn.restore(pipe)
            release_memory()


def limited(
    pipelines: Sequence[tuple[str, bool]], device: str, is_late: Callable[[], bool]
) -> Iterator[MemoryRow]:
    """Yields a row for each pipeline and limit, stock and optimized, as soon as it is measured.

    Under the smallest limit, and under limits where stock cannot draw, there are also rows with offloading.
    No row is measured once ``is_late`` returns True.
    """
    for model in sorted({model for model, _ in pipelines}):
        held = Limited(model, device, is_late)
        for name, upcasts in sorted(pipelines):
            if name == model:
                yield from held.rows(upcasts)
        del held
        release_memory()


# Value of the option ``--only`` -> the function that makes this measurement and yields its rows.
MEASUREMENTS = {"peaks": peaks, "limits": limited}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if an image was wrong or every row failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--only", choices=MEASUREMENTS, help="measure only this")
    parser.add_argument("--tiny", action="store_true", help="measure small pipelines")
    parser.add_argument("--device", default="cuda", help="device of the pipelines")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no further row starts after this time"
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    pipelines = (("tiny_xl", True), ("tiny", False)) if options.tiny else PIPELINES
    device = torch.device(options.device)
    with timing.global_switches(cudnn_benchmark=False) as switches:
        where = environment(device, switches)
        config = {"dtype": dtype_on(options.device), "steps": STEPS}
        measured = itertools.chain.from_iterable(
            MEASUREMENTS[name](pipelines, options.device, lambda: time.monotonic() - start > options.seconds)
            for name in ([options.only] if options.only else MEASUREMENTS)
        )
        rows = write_each(measured, options.json, KIND, where, config)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
