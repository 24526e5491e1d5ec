"""What several of the measurements in this folder use: fresh processes, freed memory, written rows."""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from sdfastgn.bench.documents import document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.run import describe
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.terminal import console, print_lines

T = TypeVar("T")


def in_a_process(fn: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls ``fn`` in a fresh process, and returns its result. An error of ``fn`` is raised here too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *arguments, **options).result()


def release_memory() -> None:
    """Frees unreachable objects, and gives the GPU's unused memory back."""
    gc.collect()
    torch.cuda.empty_cache()


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
