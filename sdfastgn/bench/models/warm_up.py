"""How long a user waits: a pipeline's first images, a new resolution, peak memory.

The clock starts with the pipeline in memory and stops with an image on the host; ``optimize`` is
within it. PyTorch's switches stay as they are by default, as for a user: cuDNN tries no algorithms.
Stock runs first, then sdfastgn with an empty Triton cache, then again with what that run left in
the cache.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sdfastgn.bench import documents, timing
from sdfastgn.bench.models import gate
from sdfastgn.bench.models import workload as workloads
from sdfastgn.bench.models.workload import BenchConfig
from sdfastgn.bench.processes import in_a_process

IMAGES = 3
STEPS_AT_NEW_SIZE = 4
# (row, optimized). Triton's cache is empty before the first.
WAYS = (("eager", False), ("sdfastgn, cold cache", True), ("sdfastgn, warm cache", True))


@dataclass(frozen=True)
class WaitRow:
    """What one process measured; without a time where the last image is wrong.

    Attributes:
        image_s: seconds of each of the first images, ``optimize`` in the first.
        new_size_s: seconds of each of the first UNet steps at a size like none before.
        peak_mib, reserved_mib: most that the CUDA allocator handed out, and held; None on the CPU.
        psnr_db: last image against stock's; None for stock or where they are equal.
    """

    variant: str
    image_s: list[float]
    new_size_s: list[float]
    peak_mib: float | None
    reserved_mib: float | None
    psnr_db: float | None = None
    status: str = documents.OK
    reason: str = ""

    @property
    def second_image_s(self) -> float:
        """Seconds until the second image is there."""
        return sum(self.image_s[:2])

    @property
    def new_size_over_s(self) -> float:
        """Seconds that the first steps at a new size take beyond as many of the last one."""
        return sum(self.new_size_s) - len(self.new_size_s) * self.new_size_s[-1]


def measure(
    config: BenchConfig, new_size: int, *, optimize: bool, triton_cache: str
) -> tuple[WaitRow, np.ndarray]:
    """One way in this process: the row without a name, and the last image (N, H, W, 3)."""
    os.environ["TRITON_CACHE_DIR"] = triton_cache
    device = config.torch_device
    workload = workloads.build_pipeline(config)
    pipe = workload.target
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    def first_image() -> Any:
        if optimize:
            import sdfastgn

            sdfastgn.optimize(pipe)
        return workload.call()

    timed = [timing.time_once(call, device) for call in (first_image, *[workload.call] * (IMAGES - 1))]
    most = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    mib = [counted(device) / 2**20 if on_gpu else None for counted in most]
    scale = pipe.vae_scale_factor
    inputs = workloads.step_inputs(config, pipe.unet, scale, size=new_size, batch=2 * config.batch)
    with torch.no_grad():
        new_size_s = [
            timing.time_once(lambda: pipe.unet(**inputs, return_dict=False), device)[0]
            for _ in range(STEPS_AT_NEW_SIZE)
        ]
    image_s = [seconds for seconds, _ in timed]
    return WaitRow("", image_s, new_size_s, mib[0], mib[1]), np.asarray(timed[-1][1])


def run(config: BenchConfig, new_size: int) -> list[WaitRow]:
    """All ``WAYS``, each in a process of its own and judged by its image."""
    rows: list[WaitRow] = []
    stock = None
    with tempfile.TemporaryDirectory() as cache:
        for name, optimize in WAYS:
            row, image = in_a_process(measure, config, new_size, optimize=optimize, triton_cache=cache)
            row = replace(row, variant=name)
            if stock is None:
                stock, reason = gate.Reference(image), gate.problem(config, image)
            else:
                judged = gate.judge(config, image, stock)
                decibel, reason = judged.psnr_db, judged.reason
                row = replace(row, psnr_db=decibel if decibel and math.isfinite(decibel) else None)
            if reason:
                row = replace(row, status=documents.WRONG, reason=reason, image_s=[], new_size_s=[])
            rows.append(row)
    return rows
