"""Time a pipeline's first images and first steps at a new size, and measure its peak memory.

python -m scripts.publish.warm_up --model sdxl --json warm_up.json

The clock starts when the pipeline is in memory, and stops when an image is on the host. The time of the first
image includes ``optimize``. PyTorch's switches keep their defaults, so cuDNN does not try several algorithms
(``cudnn.benchmark``). There are three runs: stock, sdfastgn with an empty Triton cache, and sdfastgn with the
Triton cache that the second run has filled. With ``--archive`` there is a fourth run: sdfastgn with an empty
Triton cache and an archive of compiled kernels, as ``sdfastgn-compiled`` has.

Three things would disturb the times. Some machines write no bytecode (``PYTHONDONTWRITEBYTECODE``), so the
packages' bytecode is written before all runs, as ``pip install`` does. The garbage of the imports takes half
a second to collect, so it is collected before the clock starts. On a fresh machine the first run reads the
libraries from disk, so stock runs once before the three runs, and this run gets no row.
"""

from __future__ import annotations

import compileall
import gc
import importlib.util
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from scripts.publish.runs import in_a_process, write_rows
from sdfastgn.bench import documents, gate, timing
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.tables.end_to_end import GATE
from sdfastgn.bench.tables.warm_up import WaitRow, warm_up_table
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import bench_options, checks, main
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SizeOption,
    StepsOption,
    WeightsOption,
)
from sdfastgn.cli.session import exit_code
from sdfastgn.cli.terminal import console
from sdfastgn.kernels.common import archive as archives
from sdfastgn.program import OptionError, counted

# The packages from which the timed part imports modules.
PACKAGES = ("diffusers", "sdfastgn", "torch", "triton")
IMAGES = 3
STEPS_AT_NEW_SIZE = 4
# The runs in their order: (name of the row, True if the pipeline is optimized). They share the folder of
# Triton's cache, which is empty at the start. The second run fills it for the third.
WAYS = (("eager", False), ("sdfastgn, cold cache", True), ("sdfastgn, warm cache", True))
# The name of the row of the run with an archive of compiled kernels. This run begins with a Triton cache of
# its own, which is empty.
WITH_ARCHIVE = "sdfastgn, cold cache, compiled kernels"


def measure(
    config: BenchConfig, new_size: int, *, optimize: bool, triton_cache: str, archive: Path | None = None
) -> tuple[WaitRow, np.ndarray]:
    """Times the pipeline in this process, which must be a new one.

    Returns (the row without its name, the images (N, H, W, 3) of the last call). Raises OptionError if the
    GPU cannot use the kernels of ``archive``.
    """
    os.environ["TRITON_CACHE_DIR"] = triton_cache
    if archive is not None:
        os.environ[archives.VARIABLE] = str(archive)
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

    gc.collect()
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
    state = archives.state(device) or ""
    if archive is not None and not state.startswith("compiled kernels from"):
        raise OptionError(f"--archive: {str(archive)!r} was not used: {state or 'no kernel ran on a GPU'}")
    image_s = [seconds for seconds, _ in timed]
    return WaitRow("", image_s, new_size_s, mib[0], mib[1]), np.asarray(timed[-1][1])


def write_bytecode() -> None:
    """Compiles all files of ``PACKAGES`` that are not compiled yet."""
    for spec in filter(None, map(importlib.util.find_spec, PACKAGES)):
        for folder in spec.submodule_search_locations or ():
            compileall.compile_dir(folder, quiet=2, workers=0)


def run(config: BenchConfig, new_size: int, archive: Path | None = None) -> list[WaitRow]:
    """Makes the runs that ``WAYS`` lists, each in a new process, and one with ``archive`` if it is given.

    Returns a row for each run. A row has no times if its last image is wrong: not finite, or too different
    from stock's image.
    """
    rows: list[WaitRow] = []
    stock = None
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as own:
        ways: list[tuple[str, dict[str, Any]]] = [
            (name, {"optimize": optimize, "triton_cache": cache}) for name, optimize in WAYS
        ]
        if archive is not None:
            ways.append((WITH_ARCHIVE, {"optimize": True, "triton_cache": own, "archive": archive}))
        in_a_process(measure, config, new_size, **ways[0][1])
        for name, options in ways:
            row, image = in_a_process(measure, config, new_size, **options)
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


def first_images(
    model: ModelOption = "sdxl",
    size: SizeOption = None,
    new_size: Annotated[
        int | None,
        typer.Option(help="Size in pixels of the UNet steps after the images.", show_default="3/4 of --size"),
    ] = None,
    steps: StepsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    archive: Annotated[
        Path | None,
        typer.Option(help="Also time sdfastgn with this archive of compiled kernels.", exists=True),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Time a pipeline's first images and first steps at a new size, stock and optimized."""
    with one_line_errors():
        (config,) = bench_options.bench_configs(
            model=model,
            parts=["pipeline"],
            size=size,
            steps=steps,
            dtype=dtype,
            device=device,
            weights=weights,
            repeats=1,
        )
        new_size = config.size * 3 // 32 * 8 if new_size is None else new_size
        checks.image_size("--new-size", new_size)
        checks.file_path("--json", json)
        write_bytecode()
        rows = run(config, new_size, archive)
    what = f"{config.model} pipeline, {config.size}x{config.size}, {counted(config.steps, 'step')}"
    title = f"{what}, then {new_size}x{new_size}, {config.dtype} on {config.device}"
    shown = warm_up_table(rows)
    judged = f"{GATE}: {gate.gate_text(config)}"
    console().print(replace(shown, title=title, notes=[*shown.notes, judged]))
    write_rows(json, "warm_up", config, rows, new_size=new_size)
    raise typer.Exit(exit_code(rows))


if __name__ == "__main__":
    main(__doc__, first_images)
