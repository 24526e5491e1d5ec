"""One run of the harness as a user sees it: progress, tables, the gate in words, JSON, exit code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sfastgn.bench import (
    end_to_end,
    kernels,
    markdown,
    plots,
    profile_tables,
    providers,
    suite_tables,
    suites,
    tables,
    workloads,
)
from sfastgn.bench.cells import KernelConfig, KernelRow, shape_text
from sfastgn.bench.end_to_end import OK, WRONG, Row
from sfastgn.bench.norm_suites import SUITES
from sfastgn.bench.suites import SuiteConfig
from sfastgn.bench.variants import Variant
from sfastgn.bench.workloads import BenchConfig

# A file or a pipe has no width; narrower than this, rich would cut the tables.
PIPE_WIDTH = 160
# Between two signs of life of a training: redrawn on a terminal, lines of a log elsewhere. A single step is too short for either.
REDRAW_S, LINE_S = 0.2, 10.0


def console() -> Console:
    """Standard output as tables want it: a terminal as wide as it is, anything else wide enough."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=max(out.width, PIPE_WIDTH))


def _progress() -> Progress:
    # On standard error, so that a redirected standard output holds the tables only.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def _counter(progress: Progress, total: int) -> Callable[[Sequence[int], str], None]:
    """What a run of kernels calls before each cell."""
    task = progress.add_task("building", total=total)
    return lambda shape, name: progress.update(task, description=f"{shape_text(shape)} {name}", advance=1)


@contextlib.contextmanager
def step_progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """What trainings of ``total`` steps each call with their name after each step: a bar, or lines where there is no terminal."""
    with _progress() as progress:
        task = progress.add_task("building", total=total)
        shown = time.monotonic()

        def on_step(name: str, step: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if step not in (1, total) and now - shown < (LINE_S if progress.disable else REDRAW_S):
                return
            shown = now
            if progress.disable:
                print(f"{name}: step {step} of {total}", file=sys.stderr)
            progress.update(task, description=name, completed=step)

        yield on_step


def _where(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "diffusers") if packages[name])
    switches = ", ".join(f"{name}={value}" for name, value in environment["switches"].items())
    return f"{environment['gpu'] or environment['machine']}, {versions}; for every variant {switches}"


def _print_part(out: Console, config: BenchConfig, rows: Sequence[Row]) -> None:
    steps = f", {config.steps} steps" if config.part == "pipeline" else ""
    what = f"{config.model} {config.part}, {config.size}x{config.size}, batch {config.batch}{steps}"
    out.print(tables.end_to_end_table(rows, f"{what}, {config.dtype} on {config.device}, {config.weights} weights"))
    out.print(f"correctness gate, before any time: {workloads.gate_text(config)}", style="dim")
    if config.fp32_reference and config.part == "pipeline":
        out.print("no fp32 reference: a full pipeline is compared with eager only", style="dim")
    for line in tables.graph_notes(rows):
        out.print(line, style="dim")
    if config.profile:
        _print_profile(out, rows)


def _print_profile(out: Console, rows: Sequence[Row]) -> None:
    table = profile_tables.profile_table(rows, f"where the time of {profile_tables.row_title(rows[0])} goes")
    if table is not None:
        out.print(table)
    for line in profile_tables.notes(rows):
        out.print(line, style="dim", markup=False)  # names of kernels hold brackets


def _bench_document(configs: Sequence[BenchConfig], environment: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    kind = "profile" if any(config.profile for config in configs) else "end_to_end"
    return end_to_end.document(kind, environment, end_to_end.describe(configs), rows)


def run_bench(
    configs: Sequence[BenchConfig],
    variants: Sequence[Variant],
    *,
    json: Path | None = None,
    plot: Path | None = None,
    out: Console | None = None,
) -> int:
    """Measures, prints and writes; returns the exit code: 0, or 1 where an output was wrong or no variant ran at all.

    The JSON is written after each row, so that a run which is cut off leaves what it has measured.
    """
    out = out or console()
    environment = end_to_end.current_environment(torch.device(configs[0].device), configs)
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if json is not None:
            end_to_end.write_json(json, _bench_document(configs, environment, rows))

    with _progress() as progress:
        task = progress.add_task("building", total=len(configs) * len(variants))
        for config in configs:

            def on_variant(name: str, part: str = config.part) -> None:
                progress.update(task, description=f"{part}: {name}", advance=0 if name == variants[0].name else 1)

            part_rows = end_to_end.run(config, variants, on_variant=on_variant, on_row=on_row)
            progress.advance(task)
            _print_part(out, config, part_rows)
    out.print(_where(environment), style="dim")
    if plot is not None and any(row.profile for row in rows):
        plots.breakdown(rows, plot, markdown.source_line(_bench_document(configs, environment, rows)))
        out.print(f"wrote {plot}", style="dim")
    if json is not None:
        out.print(f"wrote {json}", style="dim")
    return 1 if any(row.status == WRONG for row in rows) or not any(row.status == OK for row in rows) else 0


def _print_inference(
    out: Console, config: KernelConfig, rows: Sequence[KernelRow], plot: Path | None, where: str
) -> None:
    title = f"GroupNorm({kernels.GROUPS}) + SiLU, {config.dtype} on {config.device}"
    out.print(tables.kernels_table(rows, title))
    producers_table = tables.producers_table(rows)
    if producers_table is not None:
        out.print(producers_table)
    if plot is not None:
        plots.roofline(rows, plot, f"{title}, {where}")
        out.print(f"wrote {plot}", style="dim")


def _print_left_out(out: Console, config: KernelConfig, rows: Sequence[KernelRow], names: Sequence[str]) -> None:
    for line in markdown.missing_cells(rows):
        out.print(line, style="dim")
    left_out = [name for name in names if name not in (*config.providers, providers.YARDSTICK)]
    if left_out:
        out.print(f"not run (name them in --providers): {', '.join(left_out)}", style="dim")


def _write_kernels(
    out: Console,
    path: Path | None,
    kind: str,
    environment: dict[str, Any],
    config: KernelConfig,
    rows: Sequence[KernelRow],
    summary: dict[str, Any],
) -> None:
    out.print(_where(environment), style="dim")
    if path is not None:
        content = end_to_end.document(kind, environment, asdict(config), rows)
        end_to_end.write_json(path, {**content, "summary": summary})
        out.print(f"wrote {path}", style="dim")


def run_kernels(
    config: KernelConfig, *, json: Path | None = None, plot: Path | None = None, out: Console | None = None
) -> int:
    """Times the kernels, prints and writes; returns the exit code: 0, or 1 where some output was wrong."""
    out = out or console()
    environment = end_to_end.current_environment(config.torch_device)
    with _progress() as progress:
        total = len(config.shapes) * len({providers.YARDSTICK, *config.providers})
        rows = kernels.run(config, on_cell=_counter(progress, total))
    if any(row.status == OK for row in rows):
        _print_inference(out, config, rows, plot, environment["gpu"] or environment["machine"])
    _print_left_out(out, config, rows, providers.NAMES)
    out.print(f"gate: relative error against fp64 at most {kernels.ERROR_BOUNDS[config.dtype]:g}", style="dim")
    _write_kernels(out, json, "kernels", environment, config, rows, kernels.summary(rows))
    return 1 if any(row.status == WRONG for row in rows) else 0


def run_suite(config: SuiteConfig, *, json: Path | None = None, out: Console | None = None) -> int:
    """:func:`run_kernels` for the suite that ``config`` names."""
    out = out or console()
    suite = SUITES[config.suite]
    environment = end_to_end.current_environment(config.torch_device)
    with _progress() as progress:
        total = len(config.shapes) * len(suite.cells_of(config.providers))
        rows = suites.run(suite, config, on_cell=_counter(progress, total))
    if any(row.status == OK for row in rows):
        out.print(suite_tables.suite_table(suite, rows, f"{suite.title}, {config.dtype} on {config.device}"))
    _print_left_out(out, config, rows, suite.provider_names)
    out.print(f"gate: relative error against fp64 at most {suite.gate(config.dtype)}", style="dim")
    _write_kernels(out, json, suite.kind, environment, config, rows, suites.summary(suite, rows))
    return 1 if any(row.status == WRONG for row in rows) else 0
