"""Measure ``optimize(pipe, precision="fp8")``: its speed, and the quality of its images.

python -m scripts.publish.fp8 times --json benchmarks/by_hand/fp8_times.json
python -m scripts.publish.fp8 mlperf --json benchmarks/by_hand/fp8_mlperf.json
python -m scripts.publish.fp8 quality --json benchmarks/by_hand/fp8_quality.json --png docs/images/fp8.png

- ``times``: UNet steps and a pipeline with random weights, in fp16 and in FP8. If torchao is installed, steps
  of two samples are also timed with torch.compile and torchao's FP8.
- ``mlperf``: images per second in fp16 and in FP8, with the settings of MLPerf (``--preset mlperf``).
- ``quality``: the trained pipeline of digits draws the same images with stock in fp32 and fp16, with sdfastgn
  in fp16, and in FP8. All are compared with fp32's, and a classifier reads the digits.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sdfastgn
from scripts.publish.runs import finite, release_memory
from scripts.publish.tables.fp8 import MLPERF, QUALITY, TIMES, TORCHAO, VARIANTS, QualityRow
from sdfastgn.bench import documents, gate, timing, workload
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import psnr, ssim
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.variants import VARIANTS as EVERY
from sdfastgn.bench.variants import Variant, prepared
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import digits, digits_pipeline
from sdfastgn.cli.session import exit_code
from sdfastgn.models.pipelines import load_pipeline

# (model, part, pixels along a side, batch, True if errors against fp32 and torchao's FP8 are measured too).
CASES = (
    ("sd15", "unet", 512, 2, True),
    ("sdxl", "unet", 1024, 2, True),
    ("sdxl", "pipeline", 1024, 1, False),
    ("sdxl", "unet", 1024, 64, False),
)
TINY = (("tiny", "unet", 64, 2, True),)
IMAGES, STEPS = 200, 30
# ``mlperf`` draws images that are not timed, such as those for the comparison with stock, in this number of
# steps.
FEW_STEPS = 2
# Number of images in a call of the pipeline.
BATCH = 50
# Seeds of images that are drawn first, so that FP8 learns its scales. The images that are compared have other
# seeds.
OTHERS = range(1000, 1000 + BATCH)


def _torchao_reason(device: torch.device) -> str | None:
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    reason = EVERY["compile_channels_last"].available(device)
    return reason or EVERY["sdfastgn_fp8"].available(device)


def _torchao(target: Any, part: str, undo: contextlib.ExitStack) -> None:
    """Quantizes the linear layers of transformer blocks with torchao, and compiles the model."""
    quantization = importlib.import_module("torchao.quantization")
    # torchao's own settings make inductor try many variants of each kernel: compiling SD1.5's UNet then took
    # more than 230 s on 16 cores.
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerTensor(), set_inductor_config=False
    )
    quantization.quantize_(
        target,
        config,
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and "transformer_blocks" in name,
    )
    EVERY["compile_channels_last"].apply(target, part, undo)


PEER = Variant(
    TORCHAO, "torch.compile + torchao, FP8", _torchao_reason, _torchao, slack=EVERY["sdfastgn_fp8"].slack
)


def times(
    cases: Sequence[tuple[str, str, int, int, bool]], device: str, on_row: Callable[[end_to_end.Row], object]
) -> None:
    """Times each case with each of ``VARIANTS``, and some cases with ``PEER`` too. ``cases``: as ``CASES``.

    Calls ``on_row`` with each row.
    """
    for model, part, size, batch, is_compared in cases:
        config = BenchConfig(
            model, part, size, batch, "fp16", device, 10, steps=STEPS, fp32_reference=is_compared
        )
        variants = [EVERY[name] for name in VARIANTS] + [PEER] * is_compared
        end_to_end.run(config, variants, on_row=on_row)
        release_memory()


def mlperf_config(device: str, *, is_tiny: bool) -> BenchConfig:
    """The settings of MLPerf. ``is_tiny``: with a small model and few images instead."""
    settings = {**PRESETS["mlperf"].cases[0].settings, "repeats": 1}
    small = {"model": "tiny", "size": 64, "batch": 2, "steps": 3, "dtype": "fp32"}
    return BenchConfig(device=device, **settings | (small if is_tiny else {}))


def mlperf(config: BenchConfig, on_row: Callable[[end_to_end.Row], object]) -> None:
    """Times one call of the pipeline with each of ``VARIANTS``. Calls ``on_row`` with each row.

    A call takes many seconds. So fewer steps or images are drawn to compare with stock's images, to learn
    FP8's scales and to capture CUDA graphs.
    """
    device = config.torch_device
    whole = workload.build_pipeline(config)
    pipe = whole.target
    few = workload.build_pipeline(replace(config, steps=FEW_STEPS), pipe)
    one = workload.build_pipeline(replace(config, steps=STEPS, batch=1), pipe)
    stock = gate.Reference(few.call())
    for variant in (EVERY[name] for name in VARIANTS):
        what = config.model, config.part, config.size, config.batch, config.dtype, variant.name
        if (reason := variant.available(device)) is not None:
            on_row(end_to_end.Row(*what, documents.UNAVAILABLE, reason, steps=config.steps))
            continue
        with prepared(variant, pipe, config.part):
            start = time.monotonic()
            if not variant.is_ready(pipe):
                one.call()
            few.call()
            found = gate.judge(config, few.call(), stock, variant.slack)
            row = end_to_end.Row(
                *what,
                documents.WRONG if found.reason else documents.OK,
                found.reason,
                ready_s=time.monotonic() - start,
                error_eager=finite(found.error),
                psnr_db=found.psnr_db and finite(found.psnr_db),
                steps=config.steps,
            )
            if not found.reason:
                seconds, _ = timing.time_once(whole.call, device)
                row.median_ms, row.note = 1e3 * seconds, variant.describe(pipe)
        on_row(row)
        release_memory()


def drawn(pipe: Any, every: range, steps: int) -> np.ndarray:
    """Draws the images with the numbers ``every``, (N, 64, 64, 3) in [0, 1].

    Each number is the seed of its image's noise. The noise is drawn in fp32 on the CPU, because a pipeline in
    fp16 would draw other noise from the same seed.
    """
    unet = pipe.unet
    shape = unet.config.in_channels, unet.config.sample_size, unet.config.sample_size
    images = []
    for first in range(0, len(every), BATCH):
        numbers = every[first : first + BATCH]
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number in numbers]
        images.append(
            pipe(
                [asked(number)[1] for number in numbers],
                latents=torch.stack(noise).to(unet.device, unet.dtype),
                num_inference_steps=steps,
                guidance_scale=digits_pipeline.GUIDANCE,
                output_type="np",
            ).images
        )
    return np.concatenate(images)


def asked(number: int) -> tuple[int, str]:
    """The digit that the image with this number shall show, and its prompt."""
    digit, inks = number % len(digits_pipeline.NUMERALS), list(digits_pipeline.INKS)
    return digit, digits_pipeline.prompt_of(digit, inks[number % len(inks)])


def quality(device: str, count: int, steps: int) -> Iterator[tuple[QualityRow, np.ndarray]]:
    """Yields (row, images) of stock in fp32 and in fp16, and of each variant of sdfastgn."""
    folder, dtype = str(digits_pipeline.FOLDER), torch.float16
    exact = load_pipeline("digits", folder, torch.float32, device)
    exact.set_progress_bar_config(disable=True)
    reference = drawn(exact, range(count), steps)
    yield _row("fp32", exact, reference, reference), reference
    pipe = load_pipeline("digits", folder, dtype, device)
    pipe.set_progress_bar_config(disable=True)
    images = drawn(pipe, range(count), steps)
    yield _row("fp16", pipe, images, reference), images
    for variant in VARIANTS:
        sdfastgn.optimize(pipe, precision="fp8" if variant == "sdfastgn_fp8" else None)
        drawn(pipe, OTHERS, steps)  # with FP8, these calls learn its scales
        images = drawn(pipe, range(count), steps)
        yield _row(variant, pipe, images, reference), images


def _row(variant: str, pipe: Any, images: np.ndarray, reference: np.ndarray) -> QualityRow:
    found = digits_pipeline.read(images)
    read = sum(a == asked(number)[0] for number, a in enumerate(found))
    row = QualityRow(variant, len(images), read)
    if images is not reference:
        least = min(psnr(a, b) for a, b in zip(images, reference, strict=True))
        row = replace(
            row,
            psnr_db=finite(psnr(images, reference)),
            least_psnr_db=finite(least),
            ssim=ssim(images, reference),
        )
    for state in sdfastgn.report(pipe).fp8:
        row = replace(
            row,
            products=state.products,
            in_e4m3=state.in_e4m3,
            error=finite(state.error),
            beyond=state.beyond,
        )
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code: 1 if all times are missing or an output was wrong, else 0. It is 0 for ``quality``.
    """
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.fp8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("times", "mlperf", "quality"), help="what is measured")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--png", type=Path, help="file for a picture of ten images, with quality")
    parser.add_argument("--tiny", action="store_true", help="measure a small model, or few images")
    parser.add_argument("--device", default="cuda", help="device of the models")
    options = parser.parse_args(arguments)
    device, start = torch.device(options.device), time.monotonic()

    def write(kind: str, where: dict[str, Any], config: dict[str, Any], rows: Sequence[object]) -> None:
        # The file is written after each row, so that an interrupted run keeps its results.
        print(f"{time.monotonic() - start:5.0f} s  {rows[-1]}", flush=True)
        documents.write_json(options.json, documents.document(kind, where, config, rows))

    rows: list[end_to_end.Row] = []
    if options.what != "quality":
        kind = TIMES if options.what == "times" else MLPERF
        config = mlperf_config(options.device, is_tiny=options.tiny)
        steps = STEPS if kind == TIMES else config.steps
        with timing.global_switches() as switches, torch.no_grad():
            where = environment(device, switches)

            def keep(row: end_to_end.Row) -> None:
                rows.append(row)
                write(kind, where, {"steps": steps}, rows)

            if kind == MLPERF:
                mlperf(config, keep)
            else:
                times(TINY if options.tiny else CASES, options.device, keep)
        return exit_code(rows)
    count, steps = (10, 3) if options.tiny else (IMAGES, STEPS)
    found: list[QualityRow] = []
    images: list[np.ndarray] = []
    # With TF32 the images of stock in fp32 would not be exact.
    with timing.global_switches(cudnn_tf32=False) as switches:
        where = environment(device, switches)
        for each, its_images in quality(options.device, count, steps):
            found.append(each)
            images.append(its_images[:10])
            write(QUALITY, where, {"steps": steps}, found)
    if options.png is not None:
        prompts = [asked(number)[1] for number in range(10)]
        digits.grid(prompts, {"stock, fp32": images[0], "FP8": images[-1]}).save(options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
