"""What runs behind ``scripts/train_digits.py``: checks, runs, verdict, pictures, JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from sdfastgn.bench import digits, documents, images, options, terminal, timing
from sdfastgn.bench.digits import Comparison, DigitsConfig, Run
from sdfastgn.bench.environment import environment
from sdfastgn.bench.tables import plots
from sdfastgn.bench.terminal import Blocks

__all__ = ["PICTURES", "Verdict", "checked", "judge", "run"]

GRID = 8
# Enlarged for people: eight digits in a row are some 500 pixels wide.
PICTURE_PIXELS = 512
PICTURES = CURVES, SAMPLES = "losses.png", "samples.png"


@dataclass(frozen=True)
class Verdict:
    """Whether the patched model learns as the stock one does. ``reasons`` is empty where it does.

    Attributes:
        gradient_error: relative error of the first step's gradient; ``gradient_bound`` says against what.
        curve_max_bound, curve_mean_bound: what the smoothed curves' differences must keep; the mean has none without a
            second stock run.
    """

    gradient_error: float
    gradient_bound: float
    curve_max_bound: float
    curve_mean_bound: float | None
    yardstick: str
    reasons: tuple[str, ...]


def checked(
    *, steps: int, batch_size: int, size: str, width: int, dtype: str, device: str | None, seed: int
) -> DigitsConfig:
    """The experiment; raises OptionError."""
    for reason in (digits.sklearn_reason(), plots.plot_reason()):
        if reason is not None:
            raise options.OptionError(reason)
    if width < digits.GROUPS or width % digits.GROUPS:
        raise options.OptionError(f"--width: must be a positive multiple of {digits.GROUPS}, got {width}")
    return DigitsConfig(
        steps=options.positive("--steps", steps),
        batch_size=options.positive("--batch-size", batch_size),
        size=int(options.one_of("--size", size, map(str, digits.SIZES))),
        width=width,
        dtype=options.one_of("--dtype", dtype, digits.DTYPES),
        device=options.device_name("--device", device),
        seed=seed,
    )


def judge(
    config: DigitsConfig, gradient: tuple[float, float], patched: Comparison, yardstick: Comparison | None
) -> Verdict:
    """The first gradient and the smoothed curves against their bounds; with a ``yardstick`` its differences are the curves'."""
    error, bound = gradient
    if yardstick is None:
        max_bound, mean_bound, source = digits.CURVE_BOUNDS[config.dtype], None, "a fixed bound"
    else:
        max_bound, mean_bound = yardstick.smoothed_max, yardstick.smoothed_mean
        source = "stock on other batches against stock"
    checks = [
        ("first gradient's error", error, bound),
        ("smoothed curves' largest difference", patched.smoothed_max, max_bound),
    ]
    if mean_bound is not None:
        checks.append(("smoothed curves' mean difference", patched.smoothed_mean, mean_bound))
    # `not <=` because a NaN is neither above nor below; an infinite yardstick measures nothing.
    reasons = [
        f"{what} {value:.3g} is above {limit:.3g}"
        for what, value, limit in checks
        if not (value <= limit and math.isfinite(limit))
    ]
    return Verdict(error, bound, max_bound, mean_bound, source, tuple(reasons))


def _write_samples(samples: torch.Tensor, path: Path) -> Path:
    """The samples in rows of eight, the last one filled up with black."""
    count, _, size, _ = samples.shape
    columns = min(GRID, count)
    rows = -(-count // columns)
    pitch = size + 1  # a line between neighbours, half as bright as ink
    cells = np.full((rows * columns, pitch, pitch), 0.5)
    cells[:, :size, :size] = 0
    cells[:count, :size, :size] = samples[:, 0].numpy()
    grid = (
        cells.reshape(rows, columns, pitch, pitch)
        .transpose(0, 2, 1, 3)
        .reshape(1, rows * pitch, columns * pitch, 1)
    )
    return images.write_png(grid.repeat(3, axis=3), path, scale=max(1, PICTURE_PIXELS // (columns * pitch)))


def _write_curves(runs: Sequence[Run], window: int, path: Path) -> None:
    curves = {run.name: digits.smoothed(run.losses, window) for run in runs}
    stock = curves["stock"]
    differences = {
        name: (np.abs(curve - stock) / stock).tolist() for name, curve in curves.items() if name != "stock"
    }
    plots.loss_curves({name: curve.tolist() for name, curve in curves.items()}, window, differences, path)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN and no infinity.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _print(
    out: Console,
    config: DigitsConfig,
    runs: Sequence[Run],
    comparisons: dict[str, Comparison],
    verdict: Verdict,
) -> None:
    title = f"{config.size}x{config.size} digits, batch {config.batch_size}, {config.steps} steps, {config.dtype} on {config.device}"
    header = (
        "run",
        "steps/s",
        "step MiB",
        "peak MiB",
        "last loss",
        "difference, max",
        "mean",
        "single steps, max",
    )
    body = []
    for run in runs:
        found = comparisons.get(run.name)
        body.append(
            [
                run.name,
                f"{run.steps_per_s:.4g}",
                *("-" if value is None else f"{value:.5g}" for value in (run.step_mib, run.peak_mib)),
                f"{digits.smoothed(run.losses, comparisons['sdfastgn'].window)[-1]:.5f}",
                *(
                    ["-"] * 2
                    if found is None
                    else [f"{found.smoothed_max:.2e}", f"{found.smoothed_mean:.2e}"]
                ),
                "-" if found is None or found.step_max is None else f"{found.step_max:.2e}",
            ]
        )
    out.print(Blocks(header, body, title))
    window = comparisons["sdfastgn"].window
    out.print(
        f"losses are means of {window} steps; the curves' yardstick is {verdict.yardstick}", style="dim"
    )
    out.print(
        f"error of the first gradient: {verdict.gradient_error:.2e}, bound {verdict.gradient_bound:.2e}"
    )
    for reason in verdict.reasons:
        out.print(f"DISAGREES: {reason}", style="bold red")
    if not verdict.reasons:
        out.print("the patched model learns as the stock one does", style="green")


def run(
    config: DigitsConfig, *, samples: int, stock_repeat: bool, output: Path, json: Path | None, out: Console
) -> int:
    """Trains, judges, prints and writes; returns 0, or 1 where the patched model does not learn as the stock one does."""
    device = config.torch_device
    with timing.global_switches(cudnn_tf32=False) as switches:
        where = environment(device, switches)
    with timing.device_scope(device):
        data = digits.load_images(config.size, device)
        stock = digits.build_model(config)
        patched = digits.patched_copy(stock)
        exact = digits.first_gradients(dataclasses.replace(config, dtype="fp32"), stock, data)
        stock_gradients, ours = (digits.first_gradients(config, model, data) for model in (stock, patched))
        gradient = digits.gradient_verdict(config.dtype, stock_gradients, ours, exact)
        repeat = digits.build_model(config) if stock_repeat else None
        timing.spin_up(device)
        trainings = [("stock", stock, config.seed), ("sdfastgn", patched, config.seed)]
        if repeat is not None:
            trainings.append(("stock, other batches", repeat, config.seed + 1))
        with terminal.step_progress(config.steps) as on_step:
            runs = [
                digits.train(config, model, data, name=name, data_seed=seed, on_step=on_step)
                for name, model, seed in trainings
            ]
        drawn = digits.sample(config, patched, samples)
    comparisons = {each.name: digits.compare(config, each, runs[0]) for each in runs[1:]}
    verdict = judge(config, gradient, comparisons["sdfastgn"], comparisons.get("stock, other batches"))
    _print(out, config, runs, comparisons, verdict)
    _write_curves(runs, comparisons["sdfastgn"].window, output / CURVES)
    _write_samples(drawn, output / SAMPLES)
    for name in PICTURES:
        out.print(f"wrote {output / name}", style="dim", soft_wrap=True)
    if json is not None:
        content = documents.document("train_digits", where, dataclasses.asdict(config), runs)
        content["rows"] = [
            {**row, "losses": [x if math.isfinite(x) else None for x in row["losses"]]}
            for row in content["rows"]
        ]
        compared = {name: _finite(dataclasses.asdict(each)) for name, each in comparisons.items()}
        judged = _finite(dataclasses.asdict(verdict))
        documents.write_json(json, {**content, "comparisons": compared, "verdict": judged})
        out.print(f"wrote {json}", style="dim", soft_wrap=True)
    return 1 if verdict.reasons else 0
