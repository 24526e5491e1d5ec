"""Time ComfyUI's images with and without sdfastgn, for releases, models and settings.

python -m scripts.publish.comfyui build/ComfyUI build/ComfyUI-0.8.0 --json benchmarks/by_hand/comfyui.json
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from scripts.publish import comfyui_models
from scripts.publish.comfyui_images import Images, deterministic
from scripts.publish.comfyui_options import FoldersArgument, SamplerStepsOption, check_checkouts
from scripts.publish.runs import in_a_process
from sdfastgn.backend import triton_cache
from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli import comfyui_checkout
from sdfastgn.cli.checks import file_path
from sdfastgn.cli.options import JsonOption
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.program import OptionError

# Variant -> command-line arguments of ComfyUI. Stock comes first: it saves its images, with which sdfastgn's
# images are compared.
VARIANTS = {"stock": [], "channels_last": ["--force-channels-last"], "sdfastgn": []}
SIZES = {"sd15": 512, "sdxl": 1024}


class Case(NamedTuple):
    """The settings of one row. All times of a row are measured in one process.

    ``folder``: the checkout of ComfyUI. ``size``: width and height in pixels. ``rounds``: number of
    repetitions of each timed call. ``files``: folder with the model's files and with stock's images.
    """

    folder: Path
    dynamic_vram: bool
    model: str
    variant: str
    size: int
    steps: int
    rounds: int
    files: Path

    @property
    def reference(self) -> Path:
        """The file for stock's images of this release and model, with or without DynamicVRAM."""
        setting = "dynamic" if self.dynamic_vram else "static"
        return self.files / f"{self.folder.name}_{self.model}_{setting}.pt"

    def told(self) -> dict[str, Any]:
        """The fields that identify the row in the JSON file."""
        release = comfyui_checkout.release_of(self.folder)
        kept = {name: getattr(self, name) for name in ("dynamic_vram", "model", "variant", "size", "steps")}
        return {"comfyui": release, **kept}


def main(
    folders: FoldersArgument,
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"Model: {', '.join(SIZES)}. Default: each.")
    ] = None,
    size: Annotated[
        int, typer.Option(help="Width and height in pixels. 0 stands for 512, or 1024 for SDXL.")
    ] = 0,
    steps: SamplerStepsOption = 20,
    rounds: Annotated[int, typer.Option(help="Repetitions of each timed call.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds after which no further row is measured.")] = 3600.0,
    json_path: JsonOption = None,
) -> None:
    """Time images of each release and model with stock's code, stock in channels-last, and sdfastgn.

    A release with DynamicVRAM is timed with and without it. Each combination is a row of the results and runs
    in a separate process. Weights are random, in fp16.
    """
    start = time.perf_counter()
    models = models or list(SIZES)
    for model in models:
        if model not in SIZES:
            raise typer.BadParameter(f"{model!r} is none of {', '.join(SIZES)}", param_hint="--model")
    check_checkouts(folders)
    try:
        file_path("--json", json_path)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    machine = environment(torch.device("cuda"))
    # ComfyUI's main.py chooses the allocator cudaMallocAsync before it imports PyTorch. The environment
    # variable is set only now, for the processes that are started below: in this process PyTorch already uses
    # the GPU with another allocator.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    config = {"rounds": rounds, "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"]}
    content = document("comfyui", machine, config, [])
    with tempfile.TemporaryDirectory() as files:
        cases = [
            Case(folder, is_dynamic, model, variant, size or SIZES[model], steps, rounds, Path(files))
            for folder in folders
            for is_dynamic in ([False, True] if comfyui_checkout.has_dynamic_vram(folder) else [False])
            for model in models
            for variant in VARIANTS
        ]
        for row in rows_of(cases, start + seconds):
            content["rows"].append(row)
            print(f"{time.perf_counter() - start:.0f} s", line_of(row), flush=True)
            if json_path is not None:
                write_json(json_path, content)


def rows_of(cases: list[Case], end: float) -> Iterator[dict[str, Any]]:
    """Write the models' files and measure each case. Yields a row for each case.

    Each case has a process of its own. All processes import ComfyUI at the same time, because the import
    takes longer than many of the measurements. The measurements run one after another.

    ``end``: value of ``time.perf_counter`` after which no further case is measured.
    """
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for _ in cases]
        ready = [pool.submit(prepare, case) for pool, case in zip(pools, cases, strict=True)]
        for model in dict.fromkeys(case.model for case in cases):
            in_a_process(write_files, cases[0].folder, model, cases[0].files)
        futures.wait(ready)
        for pool, case, prepared in zip(pools, cases, ready, strict=True):
            yield {**case.told(), **_measured(pool, case, prepared, time.perf_counter() > end)}
            pool.shutdown()  # ``shutdown`` ends the process of the case, which frees the GPU's memory


def line_of(row: dict[str, Any]) -> str:
    """Describes a row in one line, which is shown in the terminal."""
    setting = " with DynamicVRAM" if row["dynamic_vram"] else ""
    what = f"ComfyUI {row['comfyui']}{setting}, {row['model']}, {row['variant']}"
    if row["status"] != OK:
        return f"{what}: {row['status']}, {row['reason']}"
    return f"{what}: {row['it_per_s']:.1f} it/s, VAE decode {row['decode_ms']:.1f} ms"


def _measured(
    pool: ProcessPoolExecutor, case: Case, prepared: Future[str | None], is_over: bool
) -> dict[str, Any]:
    """Returns the row of ``case``: its times, or the reason why it cannot be measured."""
    if is_over:
        return {"status": UNAVAILABLE, "reason": "the time was over"}
    try:
        reason = prepared.result()
        if reason is not None:
            return {"status": UNAVAILABLE, "reason": reason}
        return {"status": OK, **pool.submit(times_of, case).result()}
    except Exception as error:
        return {"status": FAILED, "reason": one_line(error)}


def prepare(case: Case) -> str | None:
    """Import ComfyUI in this process with the settings of ``case``.

    Returns None, or the reason why this machine cannot run these settings.
    """
    arguments = [*VARIANTS[case.variant]]
    if not case.dynamic_vram and comfyui_checkout.has_dynamic_vram(case.folder):
        arguments.append("--disable-dynamic-vram")
    comfyui_checkout.import_comfyui(
        str(case.folder), *arguments, modules=["comfy.controlnet", "comfy.sample", "comfy.sd"]
    )
    if case.dynamic_vram and not comfyui_checkout.start_dynamic_vram():
        return "comfy-aimdo does not work on this machine"
    if case.variant == "sdfastgn":
        from sdfastgn.patches.comfyui import model_patcher  # noqa: F401
    return None


def write_files(folder: Path, model: str, files: Path) -> None:
    """Write a checkpoint, a LoRA and a ControlNet with random weights in fp16 into the folder ``files``.

    ``folder``: the checkout of ComfyUI whose classes name the weights. Call it in a fresh process.
    """
    comfyui_checkout.import_comfyui(str(folder), modules=["comfy.cldm.cldm", "comfy.sd"])
    comfyui_models.write_files(files, model, "cuda")


def times_of(case: Case) -> dict[str, Any]:
    """Measures ``case``, and returns the fields of its row. Call it after ``prepare`` in the same process.

    All rows have times and peak memory. ``first_s``: seconds from the start of reading the checkpoint to the
    first image. ``first_compiled``: number of entries that the first image has added to Triton's cache.
    ``changed_strength_s``: seconds for an image after the LoRA got another strength.

    Rows of sdfastgn also have the text that sdfastgn's node shows. If the stock variant was measured before,
    they also have the differences from its latents and pixels, and two dicts with the keys "sampler" and
    "vae". ``exact_after_ejection``: True for each output that has stock's bits after sdfastgn was removed.
    ``stock_repeats_itself``: True for each output that had the same bits in two runs of stock. The outputs
    for these dicts are computed with PyTorch's deterministic algorithms.
    """
    device = torch.device("cuda")
    images = Images(case.model, case.size, case.steps, case.files, case.variant == "sdfastgn")
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "allocator": torch.cuda.get_allocator_backend(),
    }
    before = _compiled()
    found["first_s"], (latents, pixels) = timing.time_once(images.first, device)
    found["first_compiled"] = _compiled() - before

    def seconds(call: Any) -> float:
        return statistics.median(timing.time_once(call, device)[0] for _ in range(case.rounds))

    found["it_per_s"] = case.steps / seconds(lambda: images.sample(images.model))
    found["decode_ms"] = 1e3 * seconds(lambda: images.decode(latents))
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    made: dict[str, Any] = {"latents": latents, "pixels": pixels}
    if case.variant == "sdfastgn":
        found["report"] = images.text().splitlines()
    elif case.variant == "stock":
        made["exact"], again = _exact(images, latents), _exact(images, latents)
        made["repeats_itself"] = {part: torch.equal(made["exact"][part], again[part]) for part in again}
    images.with_control()
    made["control"] = images.sample(images.model, images.controlled)
    found["control_it_per_s"] = case.steps / seconds(lambda: images.sample(images.model, images.controlled))
    if case.variant == "sdfastgn":
        found["control_report"] = images.text().splitlines()
    images.with_lora(0.8)
    made["lora"] = images.sample(images.patched)
    found["lora_it_per_s"] = case.steps / seconds(lambda: images.sample(images.patched))
    strengths = itertools.cycle((0.6, 0.8))
    found["changed_strength_s"] = seconds(lambda: images.with_lora_changed(next(strengths)))
    if case.variant == "stock":
        torch.save(made, case.reference)
    elif case.variant == "sdfastgn" and case.reference.exists():
        found |= _compared(images, made, torch.load(case.reference))
    return found


def _compiled() -> int:
    """Number of entries in Triton's cache. It grows with each kernel that Triton compiles."""
    cache = triton_cache()
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0


def _compared(images: Images, made: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's fields about differences of ``made`` (sdfastgn's outputs) from ``stock`` (stock's).

    Also removes sdfastgn from ``images``, and checks whether the outputs then have the same bits as stock's.
    """
    found: dict[str, Any] = {
        "latent_difference": relative_error(made["latents"], stock["latents"]),
        "lora_difference": relative_error(made["lora"], stock["lora"]),
        "control_difference": relative_error(made["control"], stock["control"]),
        "image_difference": float((images.decode(stock["latents"]) - stock["pixels"]).abs().max()),
    }
    images.eject()
    found["stock_repeats_itself"] = stock["repeats_itself"]
    after = _exact(images, stock["latents"])
    found["exact_after_ejection"] = {part: torch.equal(after[part], stock["exact"][part]) for part in after}
    return found


def _exact(images: Images, latents: Tensor) -> dict[str, Tensor]:
    """Returns the latents of a new run of the sampler ("sampler"), and the pixels of ``latents`` ("vae").

    PyTorch computes them with deterministic algorithms.
    """
    with deterministic():
        return {"sampler": images.sample(images.model), "vae": images.decode(latents)}


if __name__ == "__main__":
    typer.run(main)
