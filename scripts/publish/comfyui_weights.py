"""Time ComfyUI's sampler with SDXL weights that it casts or moves at each call, stock and with sdfastgn.

python -m scripts.publish.comfyui_weights build/ComfyUI --json benchmarks/by_hand/comfyui_weights.json

The weights are in fp8 on the GPU, or in fp16 with half or all of them in main memory. For comparison they are
also timed in fp16 on the GPU, where ComfyUI neither casts nor moves them. DynamicVRAM is off.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import load_file, save_file

from scripts.publish import comfyui
from scripts.publish.comfyui_images import Images, deterministic
from scripts.publish.comfyui_options import FoldersArgument, SamplerStepsOption, check_checkouts
from scripts.publish.runs import in_a_process
from sdfastgn.bench import timing
from sdfastgn.bench.documents import FAILED, OK, document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli import comfyui_checkout
from sdfastgn.cli.options import JsonOption
from sdfastgn.kernels.common.failures import one_line

MODEL = "sdxl"
# GiB of GPU memory that the setting "half" leaves for the weights, which take 4.8 GiB, and for a call.
_HALF = 3.5


class Setting(NamedTuple):
    """Where the weights are and in which dtype.

    ``options``: command-line options of ComfyUI, which decide where the weights are. ``is_fp8``: True if the
    UNet's weights are in fp8, False if they are in fp16.
    """

    label: str
    options: tuple[str, ...] = ()
    is_fp8: bool = False


def settings(free: float, only: str = "") -> list[Setting]:
    """Returns the settings that are timed: those whose label contains ``only``.

    ``free``: GiB of free GPU memory. One setting makes ComfyUI leave all of it free except ``_HALF``, so that
    about half of the weights stay in main memory.
    """
    every = [
        Setting("fp16, all on the GPU"),
        Setting("fp8, all on the GPU", is_fp8=True),
        Setting("fp16, half in main memory", ("--reserve-vram", f"{max(free - _HALF, 0):.1f}")),
        Setting("fp16, all in main memory", ("--novram",)),
    ]
    return [setting for setting in every if only in setting.label]


def main(
    folders: FoldersArgument,
    size: Annotated[int, typer.Option(help="Width and height in pixels.")] = 1024,
    steps: SamplerStepsOption = 8,
    rounds: Annotated[int, typer.Option(help="Repetitions of each run of the sampler.")] = 3,
    only: Annotated[
        str, typer.Option(help='Time only settings whose name contains this text, such as "on the GPU".')
    ] = "",
    json_path: JsonOption = None,
) -> None:
    """Time ComfyUI's sampler with each release and setting, in a separate process for each."""
    check_checkouts(folders)
    machine = environment(torch.device("cuda"))
    # ComfyUI's main.py chooses the allocator cudaMallocAsync. The environment variable makes the processes
    # that are started below use it too.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    config = {"size": size, "steps": steps, "rounds": rounds}
    content = document("comfyui_weights", machine, config, [])
    free, _ = torch.cuda.mem_get_info()
    wanted = settings(free / 2**30, only)
    with tempfile.TemporaryDirectory() as name:
        files = Path(name)
        with stage("checkpoint written"):
            in_a_process(comfyui.write_files, folders[0], MODEL, files)
        if any(setting.is_fp8 for setting in wanted):
            (files / "fp8").mkdir()
            with stage("checkpoint in fp8 written"):
                in_a_process(write_fp8, files)
        for folder in folders:
            for setting in wanted:
                row = {"comfyui": comfyui_checkout.release_of(folder), "weights": setting.label}
                where = files / "fp8" if setting.is_fp8 else files
                try:
                    with stage(setting.label):
                        row |= in_a_process(times_of, folder, setting.options, where, size, steps, rounds)
                except Exception as error:  # the run goes on after an error, whose text is in the row
                    row |= {"status": FAILED, "reason": one_line(error)}
                print(row, flush=True)
                content["rows"].append(row)
                if json_path is not None:
                    write_json(json_path, content)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """A context that prints ``name`` and its duration in seconds when it ends."""
    start = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def write_fp8(files: Path) -> None:
    """Write the checkpoint in ``files`` to the folder ``fp8`` in it, with the UNet's weights in fp8."""
    name = f"{MODEL}_checkpoint.safetensors"
    weights = {
        key: weight.to(torch.float8_e4m3fn) if key.startswith("model.diffusion_model.") else weight
        for key, weight in load_file(files / name).items()
    }
    save_file(weights, files / "fp8" / name)


def times_of(
    folder: Path, options: tuple[str, ...], files: Path, size: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Returns iterations per second and peak memory in MiB, stock and with sdfastgn.

    Call it in a fresh process. ``folder``: the checkout of ComfyUI. ``options``: ComfyUI's options.
    ``files``: folder with the model's checkpoint.

    The result also has ``stock_gpu_mib`` and ``gpu_mib`` (MiB of weights that stay on the GPU),
    ``difference`` (of sdfastgn's latents from stock's, relative to the norm of stock's), and ``report`` (the
    lines of the text on sdfastgn's node). Two bools compare runs with PyTorch's deterministic algorithms:
    ``stock_repeats_itself`` is True if two runs of stock gave the same bits, and ``is_exact_after_ejection``
    is True if stock still gives these bits after sdfastgn's runs.
    """
    static = ["--disable-dynamic-vram"] if comfyui_checkout.has_dynamic_vram(folder) else []
    with stage("import of ComfyUI"):
        comfyui_checkout.import_comfyui(str(folder), *options, *static)
    return measured(files, size, steps, rounds)


def measured(files: Path, size: int, steps: int, rounds: int) -> dict[str, Any]:
    """Times the sampler stock and with sdfastgn. Returns the dict that ``times_of`` describes.

    ComfyUI must have been imported, with the options that decide where the weights are.
    """
    import comfy.model_management

    from sdfastgn.plans.comfyui import optimize_model, text_of

    images = Images(MODEL, size, steps, files, is_optimized=False)
    with stage("first image"):
        images.first()
    stock = images.loaded
    device = torch.device("cuda")

    def run(model: Any, name: str) -> tuple[Any, dict[str, float]]:
        # All models are unloaded before a run. Otherwise the weights of an earlier run would still be on the
        # GPU, and ComfyUI would load fewer weights of this model.
        comfy.model_management.unload_all_models()
        latents = images.sample(model)
        torch.cuda.reset_peak_memory_stats()
        seconds = [timing.time_once(lambda: images.sample(model), device)[0] for _ in range(rounds)]
        costs = {
            "it_per_s": steps / statistics.median(seconds),
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
            "gpu_mib": model.loaded_size() / 2**20,
        }
        return latents, {name + key: value for key, value in costs.items()}

    with stage("stock"):
        expected, stock_costs = run(stock, "stock_")
    with stage("stock, deterministic"), deterministic():
        exact, again = images.sample(stock), images.sample(stock)
    ours = optimize_model(stock)
    with stage("sdfastgn"):
        found, costs = run(ours, "")
    report = text_of(ours).splitlines()
    with stage("stock after ejection"), deterministic():
        after = images.sample(stock)
    return {
        "status": OK,
        **stock_costs,
        **costs,
        "difference": relative_error(found, expected),
        "stock_repeats_itself": torch.equal(again, exact),
        "is_exact_after_ejection": torch.equal(after, exact),
        "report": report,
    }


if __name__ == "__main__":
    typer.run(main)
