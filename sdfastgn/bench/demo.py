"""The main job on a machine without a GPU: build, save, load, generate, optimize, compare, restore."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import numpy_to_pil
from rich.console import Console

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.bench.models.pipelines import build_pipeline
from sdfastgn.bench.models.workload import GUIDANCE, PROMPT
from sdfastgn.bench.terminal import Blocks

SIZE, STEPS = 128, 8
PICTURES = ("stock.png", "optimized.png")
# fp32 on both sides: what is left is the order of additions.
# On a GPU convolutions run in TF32 by default, and another layout takes another algorithm.
LEAST_PSNR = {"cpu": 60.0, "cuda": 40.0}


def run_demo(output_dir: Path, console: Console) -> int:
    """Show on a tiny Stable Diffusion pipeline what sdfastgn does, and check it.

    Writes ``stock.png`` and ``optimized.png`` (noise: the weights are random) into ``output_dir``.
    Returns 0 if the optimized image agrees with the stock one to ``LEAST_PSNR`` dB, and the
    restored pipeline has nothing fused and gives the stock image bit for bit, else 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        console.print(
            "1. A small but complete StableDiffusionPipeline, built offline, saved, and loaded again."
        )
        build_pipeline("tiny", dtype=torch.float32, device="cpu").save_pretrained(folder)
        pipe = DiffusionPipeline.from_pretrained(folder).to(device)
    pipe.set_progress_bar_config(disable=True)
    _generate(pipe)  # the first call pays for lazy imports and allocations

    stock, stock_seconds = _generate(pipe)
    console.print(f"2. Stock image: {SIZE}x{SIZE}, {STEPS} steps with guidance, on {device}.")
    sdfastgn.optimize(pipe)
    _generate(pipe)
    optimized, optimized_seconds = _generate(pipe)
    report = sdfastgn.report(pipe)
    console.print("3. sdfastgn.optimize(pipe), and sdfastgn.report(pipe):\n")
    console.print(str(report), style="cyan", highlight=False, soft_wrap=True)
    sdfastgn.restore(pipe)
    restored, restored_seconds = _generate(pipe)
    console.print("\n4. sdfastgn.restore(pipe), and the results beside each other:\n")

    agrees = psnr(optimized, stock) >= LEAST_PSNR[device]
    # On a CPU stock's code runs all along, so the image alone would not tell.
    same = bool(np.array_equal(restored, stock)) and not sdfastgn.report(pipe).fused
    body = [["stock", f"{stock_seconds:.2f}"]]
    for name, image, seconds, verdict in (
        ("optimized", optimized, optimized_seconds, "same image" if agrees else "DIFFERS"),
        ("restored", restored, restored_seconds, "bit-identical" if same else "DIFFERS"),
    ):
        difference = f"{np.abs(image - stock).max():.1e}"
        body.append([name, f"{seconds:.2f}", f"{psnr(image, stock):.1f} dB", difference, verdict])
    header = ("pipeline", "seconds", "PSNR to stock", "largest difference", "verdict")
    caption = f"The optimized image has to reach {LEAST_PSNR[device]:.0f} dB."
    console.print(Blocks(header, body, caption=caption))
    if device == "cpu":
        console.print(
            "On a CPU an optimized pipeline runs stock's own code: the seconds above say nothing about a GPU."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, image in zip(PICTURES, (stock, optimized), strict=True):
        (picture,) = numpy_to_pil(image)
        picture.resize((3 * SIZE, 3 * SIZE), resample=0).save(output_dir / name)
        console.print(f"wrote {output_dir / name}", soft_wrap=True)
    return 0 if agrees and same else 1


def _generate(pipe: Any) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    result = pipe(
        PROMPT,
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="np",
    )
    return result.images, time.perf_counter() - start
