"""The demo: it loads a small pipeline, draws digits, optimizes it, draws again, compares, and restores it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import numpy_to_pil
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.cli import digits_pipeline
from sdfastgn.cli.digits_pipeline import INKS, NUMERALS, SIZE, prompt_of
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.program import writing

PICTURE = "demo.png"
STEPS = digits_pipeline.STEPS
# Inks of the demo's images; each is used for two digits. "orange" is left out: the pipeline was trained with
# prompts such as "a orange handwritten seven", which the demo should not show.
INK_WORDS = tuple(ink for ink in INKS if ink != "orange")
DIGITS = tuple(range(len(NUMERALS)))
# Device -> minimum PSNR in dB of the optimized images against stock's images. Both are drawn in fp32. On a
# CPU they should be equal, because no kernel runs. On a GPU convolutions run in TF32, and use another
# algorithm for the channels-last images of the optimized pipeline than for stock's channels-first images.
LEAST_PSNR = {"cpu": 60.0, "cuda": 40.0}
# Sizes in the picture, in pixels. A cell shows an image at twice the image's size.
CELL, LABEL_WIDTH, LABEL_HEIGHT, FONT_SIZE = 2 * SIZE, 120, 44, 12


def run_demo(output_dir: Path, console: Console, pipeline: Path = digits_pipeline.FOLDER) -> int:
    """Show on the small trained pipeline in the folder ``pipeline`` what sdfastgn does, and check it.

    Writes ``demo.png`` into ``output_dir``, with stock's images, the optimized pipeline's images, and their
    difference. Two things are checked: the optimized images reach ``LEAST_PSNR`` against stock's images; and
    the restored pipeline has nothing fused, and draws stock's images bit for bit. Returns 0 if both are true,
    else 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print("1. A small StableDiffusionPipeline, trained on handwritten digits, is loaded from")
    console.print(f"   {pipeline}", soft_wrap=True)
    pipe = load_pipeline("demo", str(pipeline), torch.float32, device)
    pipe.set_progress_bar_config(disable=True)
    prompts = [prompt_of(digit, INK_WORDS[digit % len(INK_WORDS)]) for digit in DIGITS]

    stock, stock_seconds = _timed(pipe, prompts)
    console.print(f"2. Stock: {len(prompts)} images {SIZE}x{SIZE}, {STEPS} steps with guidance, on {device}.")
    sdfastgn.optimize(pipe)
    optimized, optimized_seconds = _timed(pipe, prompts)
    report = sdfastgn.report(pipe)
    console.print("3. sdfastgn.optimize(pipe), and sdfastgn.report(pipe):\n")
    console.print(str(report), style="cyan", highlight=False, soft_wrap=True)
    sdfastgn.restore(pipe)
    restored, restored_seconds = _timed(pipe, prompts)
    console.print("\n4. sdfastgn.restore(pipe), and the results beside each other:\n")

    agrees = psnr(optimized, stock) >= LEAST_PSNR[device]
    # On a CPU even the optimized pipeline runs stock's code. So the restored pipeline's images do not prove
    # that it was restored. The report must also say that nothing is fused.
    same = bool(np.array_equal(restored, stock)) and not sdfastgn.report(pipe).fused
    body = [["stock", f"{stock_seconds:.2f}", _read(stock, pipeline)]]
    for name, images, seconds, verdict in (
        ("optimized", optimized, optimized_seconds, "same images" if agrees else "DIFFERS"),
        ("restored", restored, restored_seconds, "bit-identical" if same else "DIFFERS"),
    ):
        difference = f"{np.abs(images - stock).max():.1e}"
        decibel = f"{psnr(images, stock):.1f} dB"
        body.append([name, f"{seconds:.2f}", _read(images, pipeline), decibel, difference, verdict])
    header = ("pipeline", "seconds", "digits read", "PSNR to stock", "largest difference", "verdict")
    caption = (
        f"A classifier reads the digits. The optimized images have to reach {LEAST_PSNR[device]:.0f} dB."
    )
    console.print(Blocks(header, body, caption=caption))
    labels = f"stock\n{stock_seconds:.2f} s", f"optimized\n{optimized_seconds:.2f} s"
    if device == "cpu":
        console.print(
            "No kernel runs on this machine, so the optimized pipeline ran stock's own code and its images "
            "are bit-identical. On a GPU they differ a little. The seconds say nothing about a GPU."
        )
        labels = "stock", "optimized\n(no kernel runs\non this machine)"
    picture = grid(prompts, dict(zip(labels, (stock, optimized), strict=True)))
    with writing(output_dir / PICTURE):
        output_dir.mkdir(exist_ok=True)
        picture.save(output_dir / PICTURE)
    console.print(f"wrote {output_dir / PICTURE}", soft_wrap=True)
    return 0 if agrees and same else 1


def grid(prompts: Sequence[str], rows: dict[str, np.ndarray]) -> Image.Image:
    """A picture with three rows: the two rows of images in ``rows``, and their difference.

    The prompts are above the columns, and labels before the rows. The difference is multiplied by the largest
    power of ten for which no value exceeds one.
    """
    first, second = rows.values()
    difference = np.abs(second - first)
    largest = float(difference.max())
    factor = 10.0 ** -math.ceil(math.log10(largest)) if largest > 0 else 1.0
    label = f"difference\ntimes {factor:,.0f}" if largest > 0 else "difference\nnone"
    rows = {**rows, label: difference * factor}
    width, height = LABEL_WIDTH + len(prompts) * CELL, LABEL_HEIGHT + len(rows) * CELL
    picture = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(FONT_SIZE)

    def write(text: str, x: int, y: int) -> None:
        pen.multiline_text((x, y), text, "black", font, anchor="mm", align="center")

    for column, prompt in enumerate(prompts):
        lines = "\n".join(prompt.rsplit(" ", 1))  # a prompt gets two lines: it is wider than its image
        write(lines, LABEL_WIDTH + column * CELL + CELL // 2, LABEL_HEIGHT // 2)
    for row, (name, images) in enumerate(rows.items()):
        top = LABEL_HEIGHT + row * CELL
        write(name, LABEL_WIDTH // 2, top + CELL // 2)
        for column, image in enumerate(numpy_to_pil(images)):
            picture.paste(image.resize((CELL, CELL)), (LABEL_WIDTH + column * CELL, top))
    return picture


def _read(images: np.ndarray, pipeline: Path) -> str:
    found = digits_pipeline.read(images, pipeline)
    return f"{sum(a == b for a, b in zip(found, DIGITS, strict=True))} of {len(DIGITS)}"


def _timed(pipe: Any, prompts: list[str]) -> tuple[np.ndarray, float]:
    # Two calls come before the timed call. The first imports modules and allocates memory. The second
    # captures a CUDA graph, if the pipeline is optimized.
    for _ in range(2):
        digits_pipeline.generate(pipe, prompts, num_inference_steps=1)
    start = time.perf_counter()
    images = digits_pipeline.generate(pipe, prompts, num_inference_steps=STEPS)
    return images, time.perf_counter() - start
