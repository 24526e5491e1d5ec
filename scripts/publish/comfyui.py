"""Time ComfyUI's sampler (iterations per second) and VAE decode (ms): stock, channels-last and sdfastgn.

python -m scripts.publish.comfyui build/ComfyUI --model sdxl --json benchmarks/by_hand/comfyui_sdxl.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from scripts.publish import comfyui_models
from scripts.publish.runs import in_a_process
from sdfastgn.bench import timing
from sdfastgn.bench.documents import document, write_json
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.cli import comfyui_checkout
from sdfastgn.cli.checks import file_path
from sdfastgn.program import OptionError

# Variant -> the command-line arguments with which ComfyUI runs.
VARIANTS = {"stock": [], "channels_last": ["--force-channels-last"], "sdfastgn": []}
WARM_UP_RUNS = 2
TIMED_RUNS = 5


def main(
    folder: Annotated[Path, typer.Argument(help="Checkout of ComfyUI.")],
    model: Annotated[str, typer.Option(help=f"Model: {', '.join(comfyui_models.MODELS)}.")] = "sd15",
    size: Annotated[
        int, typer.Option(help="Width and height in pixels. 0 stands for 512, or 1024 for SDXL.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the sampler, with guidance.")] = 30,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write all results to this file.")
    ] = None,
) -> None:
    """Time each variant in a process of its own, with random weights in fp16."""
    if model not in comfyui_models.MODELS:
        raise typer.BadParameter(
            f"{model!r} is none of {', '.join(comfyui_models.MODELS)}", param_hint="--model"
        )
    if not (folder / "comfy").is_dir():
        raise typer.BadParameter(f"{str(folder)!r} is no checkout of ComfyUI", param_hint="folder")
    try:
        file_path("--json", json_path)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    size = size or {"sd15": 512, "sdxl": 1024}[model]
    config = {"model": model, "size": size, "steps": steps}
    content = document("comfyui", environment(torch.device("cuda")), config, [])
    for name in VARIANTS:
        found = in_a_process(times_of, name, folder, model, size, steps)
        content["rows"].append({"variant": name, **found})
        print(f"{name}: {found['it_per_s']:.2f} it/s, VAE decode {found['decode_ms']:.1f} ms")
        if json_path is not None:
            write_json(json_path, content)


def times_of(variant: str, folder: Path, name: str, size: int, steps: int) -> dict[str, Any]:
    """Returns one variant's times, versions and peak memory. Call it in a fresh process.

    For sdfastgn it also has the differences to stock's latents and image. ``exact_after_ejection`` says
    whether the stock model gives the same bits as before when sdfastgn has been removed from it.
    ``stock_repeats_itself`` says whether two stock runs gave the same bits before sdfastgn was applied.
    """
    version = comfyui_checkout.import_comfyui(str(folder), *VARIANTS[variant])
    import comfy.sample

    config = comfyui_models.MODELS[name]
    model = comfyui_models.load_model(config, torch.float16, "cuda")
    vae = comfyui_models.load_vae(comfyui_models.VAE, "cuda")
    prompts = [comfyui_models.conditioning(config, seed) for seed in (5, 6)]
    latent = torch.zeros(1, 4, size // 8, size // 8)
    noise = comfy.sample.prepare_noise(latent, 3)

    @torch.inference_mode()
    def sample(patcher: Any) -> torch.Tensor:
        return comfy.sample.sample(
            patcher, noise, steps, 4.0, "euler", "normal", *prompts, latent, disable_pbar=True, seed=3
        )

    @torch.inference_mode()
    def decode(which: Any, latents: torch.Tensor) -> torch.Tensor:
        return which.decode(latents)

    found: dict[str, Any] = {"comfyui": version, "torch": torch.__version__}
    found["gpu"] = torch.cuda.get_device_name()
    patcher, decoder = model, vae
    if variant == "sdfastgn":
        from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae
        from sdfastgn.patches.comfyui.report import text_of

        stock = sample(model)
        image = decode(vae, stock)

        def repeated() -> dict[str, bool]:
            return {
                "sampler": torch.equal(sample(model), stock),
                "vae": torch.equal(decode(vae, stock), image),
            }

        found["stock_repeats_itself"] = repeated()
        patcher, decoder = optimize_model(model), optimize_vae(vae)
        found["latent_difference"] = relative_error(sample(patcher), stock)
        found["image_difference"] = float((decode(decoder, stock) - image).abs().max())
        found["report"] = text_of(patcher).splitlines()
        found["exact_after_ejection"] = repeated()
    latents = sample(patcher)
    found["it_per_s"] = steps / seconds_of(lambda: sample(patcher))
    found["decode_ms"] = 1000 * seconds_of(lambda: decode(decoder, latents))
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the median time of ``TIMED_RUNS`` calls, including ComfyUI's own work around the model."""
    device = torch.device("cuda")
    times = [timing.time_once(call, device)[0] for _ in range(WARM_UP_RUNS + TIMED_RUNS)]
    return statistics.median(times[WARM_UP_RUNS:])


if __name__ == "__main__":
    typer.run(main)
