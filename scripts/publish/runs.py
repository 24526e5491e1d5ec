"""Functions that several measurements share: they start processes, free memory, time calls, write rows."""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sdfastgn.bench import timing
from sdfastgn.bench.documents import document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.run import describe
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.terminal import console, print_lines
from sdfastgn.kernels.common.failures import one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Calls:
    """The result, the times and the memory of several calls of a function.

    Attributes:
        result: what the last call returned; None if a call failed.
        seconds: the time of each call. Empty if a call failed.
        reserved_mib, allocated_mib: peak memory that PyTorch has reserved on the GPU, and peak memory of
            tensors, in MiB. None on the CPU, or if a call failed.
        reason: why a call failed; else empty.
    """

    result: Any = None
    seconds: Sequence[float] = ()
    reserved_mib: float | None = None
    allocated_mib: float | None = None
    reason: str = ""


def in_a_process(fn: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls ``fn`` in a fresh process, and returns its result. An error of ``fn`` is raised here too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *arguments, **options).result()


def release_memory() -> None:
    """Frees unreachable objects, and gives the GPU's unused memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def call_times(call: Callable[[], Any], count: int, device: torch.device) -> Calls:
    """Calls ``call`` ``count`` times, and times each call until ``device`` is done."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds, result = [], None
    try:
        for _ in range(count):
            took, result = timing.time_once(call, device)
            seconds.append(took)
    except Exception as error:  # out of memory, cuDNN and cuBLAS raise errors of several classes
        return Calls(reason=one_line(error))
    if not on_gpu:
        return Calls(result, seconds)
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return Calls(result, seconds, reserved / 2**20, allocated / 2**20)


def write_each(
    rows: Iterable[T], json: Path, kind: str, where: dict[str, Any], config: dict[str, Any]
) -> list[T]:
    """Returns all ``rows``. Prints each row with the seconds since the start, as soon as it is measured.

    Writes the file ``json`` after each row, so that an interrupted run keeps its results.

    ``where``: the result of ``environment``.
    """
    start = time.monotonic()
    found: list[T] = []
    for row in rows:
        found.append(row)
        print(f"{time.monotonic() - start:5.0f} s  {row}", flush=True)
        write_json(json, document(kind, where, config, found))
    return found


def finite(value: float) -> float | None:
    """Returns ``value``, or None if it is infinite or NaN, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def write_rows(
    json: Path | None, kind: str, config: BenchConfig, rows: Sequence[object], **more: object
) -> None:
    """Writes measured ``rows`` and their ``config`` to the file ``json``. If ``json`` is None, does nothing.

    ``more`` is added to the config. The file says that ``cudnn.benchmark`` had its present value during the
    measurement. So do not use this function for measurements that change the switch, such as those of
    ``sdfastgn bench``.
    """
    if json is None:
        return
    tries = torch.backends.cudnn.benchmark
    described = {**describe([config]), **more}
    described["parts"][0]["cudnn_benchmark"] = tries
    where = environment(config.torch_device, {"cudnn.benchmark": tries})
    write_json(json, document(kind, where, described, rows))
    print_lines(console(), [f"wrote {json}"])
