"""Measure the speed of ``optimize(pipe, precision="fp8")``. ``fp8_quality.py`` measures the quality.

python -m scripts.publish.fp8 times --json benchmarks/by_hand/fp8_times.json
python -m scripts.publish.fp8 mlperf --json benchmarks/by_hand/fp8_mlperf.json

- ``times``: UNet steps and a pipeline with random weights, in fp16 and in FP8. If torchao is installed, steps
  of two samples are also timed with torch.compile and torchao's FP8.
- ``mlperf``: images per second in fp16 and in FP8, with the settings of MLPerf (``--preset mlperf``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scripts.publish.runs import finite, release_memory
from scripts.publish.tables.fp8 import MLPERF, TIMES, TORCHAO, VARIANTS
from sdfastgn.bench import documents, gate, timing, workload
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.environment import environment
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.variants import VARIANTS as EVERY
from sdfastgn.bench.variants import Variant, prepared
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli.session import exit_code

# (model, part, pixels along a side, batch, True if errors against fp32 and torchao's FP8 are measured too).
CASES = (
    ("sd15", "unet", 512, 2, True),
    ("sdxl", "unet", 1024, 2, True),
    ("sdxl", "pipeline", 1024, 1, False),
    ("sdxl", "unet", 1024, 64, False),
)
TINY = (("tiny", "unet", 64, 2, True),)
STEPS = 30
# Number of steps of images that ``mlperf`` draws but does not time, for example to compare them with stock's
# images.
FEW_STEPS = 2


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
    """Times each case with sdfastgn in fp16 and in FP8, and some cases with torch.compile and torchao too.

    Calls ``on_row`` with each row. ``cases``: tuples with the same entries as those in ``CASES``.
    """
    for model, part, size, batch, is_compared in cases:
        config = BenchConfig(
            model, part, size, batch, "fp16", device, 10, steps=STEPS, fp32_reference=is_compared
        )
        variants = [EVERY[name] for name in VARIANTS] + [PEER] * is_compared
        end_to_end.run(config, variants, on_row=on_row)
        release_memory()


def mlperf_config(device: str, *, is_tiny: bool) -> BenchConfig:
    """The settings of MLPerf's benchmark of SDXL. ``is_tiny``: True for a small model and few images."""
    settings = {**PRESETS["mlperf"].cases[0].settings, "repeats": 1}
    small = {"model": "tiny", "size": 64, "batch": 2, "steps": 3, "dtype": "fp32"}
    return BenchConfig(device=device, **settings | (small if is_tiny else {}))


def mlperf(config: BenchConfig, on_row: Callable[[end_to_end.Row], object]) -> None:
    """Times one call of the pipeline with sdfastgn in fp16 and in FP8. Calls ``on_row`` with each row.

    A call takes many seconds. So the calls before the timed call draw fewer images or make fewer steps. In
    them images are compared with stock's, FP8 learns its scales, and CUDA graphs are captured.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if all times are missing or an output was wrong, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.fp8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("times", "mlperf"), help="what is measured")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--tiny", action="store_true", help="measure a small model")
    parser.add_argument("--device", default="cuda", help="device of the models")
    options = parser.parse_args(arguments)
    device, start = torch.device(options.device), time.monotonic()
    kind = TIMES if options.what == "times" else MLPERF
    config = mlperf_config(options.device, is_tiny=options.tiny)
    steps = STEPS if kind == TIMES else config.steps
    rows: list[end_to_end.Row] = []
    with timing.global_switches() as switches, torch.no_grad():
        where = environment(device, switches)

        def keep(row: end_to_end.Row) -> None:
            # The file is written after each row, so that an interrupted run keeps its results.
            rows.append(row)
            print(f"{time.monotonic() - start:5.0f} s  {row}", flush=True)
            documents.write_json(options.json, documents.document(kind, where, {"steps": steps}, rows))

        if kind == MLPERF:
            mlperf(config, keep)
        else:
            times(TINY if options.tiny else CASES, options.device, keep)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
