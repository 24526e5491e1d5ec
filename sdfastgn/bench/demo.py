"""The main job on a machine without a GPU: build, save, load, generate, optimize, compare, restore."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from rich.console import Console
from rich.table import Table

import sdfastgn
from sdfastgn.bench.images import psnr, write_png
from sdfastgn.bench.models.pipelines import build_pipeline

PROMPT = "a photograph of an astronaut riding a horse"
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

    decibel = psnr(optimized, stock)
    # On a CPU stock's code runs all along, so the image alone would not tell.
    same = bool(np.array_equal(restored, stock)) and not sdfastgn.report(pipe).fused
    table = Table()
    for header in ("pipeline", "seconds", "PSNR to stock", "largest difference", "verdict"):
        table.add_column(header, justify="left" if header in ("pipeline", "verdict") else "right")
    table.add_row("stock", f"{stock_seconds:.2f}", "", "", "")
    agrees = decibel >= LEAST_PSNR[device]
    verdict = "same image" if agrees else f"DIFFERS (at least {LEAST_PSNR[device]:.0f} dB wanted)"
    exact = "bit-identical" if same else "DIFFERS"
    for name, image, seconds, judged in (
        ("optimized", optimized, optimized_seconds, verdict),
        ("restored", restored, restored_seconds, exact),
    ):
        difference = f"{np.abs(image - stock).max():.1e}"
        table.add_row(name, f"{seconds:.2f}", f"{psnr(image, stock):.1f} dB", difference, judged)
    console.print(table)
    if device == "cpu":
        console.print(
            "On a CPU an optimized pipeline runs stock's own code: the seconds above say nothing about a GPU."
        )
    for name, image in zip(PICTURES, (stock, optimized), strict=True):
        console.print(f"wrote {write_png(image, output_dir / name, scale=3)}", soft_wrap=True)
    return 0 if agrees and same else 1


def _generate(pipe: Any) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    result = pipe(
        PROMPT,
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=7.5,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="np",
    )
    return result.images, time.perf_counter() - start
