"""One run of the harness as a user sees it: progress, tables, the gate in words, JSON, exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sdfastgn.bench import documents
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.kernels import providers, suites
from sdfastgn.bench.kernels import run as kernels
from sdfastgn.bench.kernels.cells import KernelConfig, KernelRow, shape_text
from sdfastgn.bench.kernels.norm_suites import SUITES
from sdfastgn.bench.kernels.suites import SuiteConfig
from sdfastgn.bench.models import run as end_to_end
from sdfastgn.bench.models import workload as workloads
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import Variant
from sdfastgn.bench.models.workload import BenchConfig
from sdfastgn.bench.tables import markdown, plots
from sdfastgn.bench.tables import pages as tables
from sdfastgn.bench.tables import profile as profile_tables
from sdfastgn.bench.tables import suites as suite_tables
from sdfastgn.bench.terminal import console, print_lines, watched

NO_GPU = "no GPU: sdfastgn runs stock's own code here, so its times should be about eager's (1x)"


def _where(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton", "diffusers") if packages[name]
    )
    switches = ", ".join(f"{name}={value}" for name, value in environment["switches"].items())
    return f"{environment['gpu'] or environment['machine']}, {versions}; for every variant {switches}"


def _print_part(out: Console, config: BenchConfig, rows: Sequence[Row]) -> None:
    steps = f", {config.steps} steps" if config.part == "pipeline" else ""
    what = f"{config.model} {config.part}, {config.size}x{config.size}, batch {config.batch}{steps}"
    out.print(
        tables.end_to_end_table(rows, f"{what}, {config.dtype} on {config.device}, {config.weights} weights")
    )
    notes = [*tables.row_notes(rows), f"correctness gate, before any time: {workloads.gate_text(config)}"]
    if config.fp32_reference and config.part == "pipeline":
        notes.append("no fp32 reference: a full pipeline is compared with eager only")
    print_lines(out, [*notes, *tables.graph_notes(rows)])
    if config.profile:
        _print_profile(out, rows)


def _print_profile(out: Console, rows: Sequence[Row]) -> None:
    table = profile_tables.profile_table(rows, f"where the time of {profile_tables.row_title(rows[0])} goes")
    if table is not None:
        out.print(table)
    print_lines(out, profile_tables.notes(rows))


def _bench_document(
    configs: Sequence[BenchConfig], environment: dict[str, Any], rows: Sequence[Row]
) -> dict[str, Any]:
    kind = "profile" if any(config.profile for config in configs) else "end_to_end"
    return documents.document(kind, environment, end_to_end.describe(configs), rows)


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

    if configs[0].torch_device.type == "cpu":
        print_lines(out, [NO_GPU])
    with watched(len(configs) * len(variants)) as (on_start, on_done):

        def on_row(row: Row) -> None:
            rows.append(row)
            if json is not None:
                documents.write_json(json, _bench_document(configs, environment, rows))
            on_done(tables.row_line(row))

        for config in configs:

            def on_variant(name: str, part: str = config.part) -> None:
                on_start(f"{part}: {name}")

            _print_part(out, config, end_to_end.run(config, variants, on_variant=on_variant, on_row=on_row))
    print_lines(out, [_where(environment)])
    if plot is not None and any(row.profile for row in rows):
        plots.breakdown(rows, plot, markdown.source_line(_bench_document(configs, environment, rows)))
        print_lines(out, [f"wrote {plot}"])
    if json is not None:
        print_lines(out, [f"wrote {json}"])
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
        print_lines(out, [f"wrote {plot}"])


def _print_left_out(
    out: Console, config: KernelConfig, rows: Sequence[KernelRow], names: Sequence[str]
) -> None:
    print_lines(out, markdown.missing_cells(rows))
    left_out = [name for name in names if name not in (*config.providers, providers.YARDSTICK)]
    if left_out:
        print_lines(out, [f"not run (name them in --providers): {', '.join(left_out)}"])


def _finish_kernels(
    out: Console, path: Path | None, kind: str, environment: dict[str, Any], config: KernelConfig, rows: Sequence[KernelRow],
    summary: dict[str, Any],
) -> int:  # fmt: skip
    """Writes what was measured; returns the exit code: 0, or 1 where an output was wrong or nothing at all was timed."""
    timed = any(row.status == OK for row in rows)
    if timed:
        print_lines(out, [_where(environment)])
    if path is not None:
        content = documents.document(kind, environment, asdict(config), rows)
        documents.write_json(path, {**content, "summary": summary})
        print_lines(out, [f"wrote {path}"])
    if not timed and not any(row.status == WRONG for row in rows):
        # A copy can be timed wherever anything can, so its reason is everyone's.
        reason = next(row.reason for row in rows if row.provider == providers.YARDSTICK)
        out.print(f"nothing was timed: {reason}", markup=False)
    return 0 if timed and not any(row.status == WRONG for row in rows) else 1


def run_kernels(
    config: KernelConfig, *, json: Path | None = None, plot: Path | None = None, out: Console | None = None
) -> int:
    """Times the kernels, prints and writes; returns the exit code: 0, or 1 where an output was wrong or nothing was timed."""
    out = out or console()
    environment = end_to_end.current_environment(config.torch_device)
    with watched(len(config.shapes) * len({providers.YARDSTICK, *config.providers})) as (on_start, on_done):
        rows = kernels.run(
            config,
            on_cell=lambda shape, name: on_start(f"{shape_text(shape)} {name}"),
            on_row=lambda row: on_done(tables.cell_line(row)),
        )
    if any(row.status in (OK, WRONG) for row in rows):
        _print_inference(out, config, rows, plot, environment["gpu"] or environment["machine"])
        _print_left_out(out, config, rows, providers.NAMES)
        print_lines(
            out, [f"gate: relative error against fp64 at most {kernels.ERROR_BOUNDS[config.dtype]:g}"]
        )
    return _finish_kernels(out, json, "kernels", environment, config, rows, kernels.summary(rows))


def run_suite(config: SuiteConfig, *, json: Path | None = None, out: Console | None = None) -> int:
    """:func:`run_kernels` for the suite that ``config`` names."""
    out = out or console()
    suite = SUITES[config.suite]
    environment = end_to_end.current_environment(config.torch_device)
    with watched(len(config.shapes) * len(suite.cells_of(config.providers))) as (on_start, on_done):
        rows = suites.run(
            suite,
            config,
            on_cell=lambda shape, name: on_start(f"{shape_text(shape)} {name}"),
            on_row=lambda row: on_done(tables.cell_line(row, row.task)),
        )
    if any(row.status in (OK, WRONG) for row in rows):
        out.print(suite_tables.suite_table(suite, rows, f"{suite.title}, {config.dtype} on {config.device}"))
        _print_left_out(out, config, rows, suite.provider_names)
        print_lines(out, [f"gate: relative error against fp64 at most {suite.gate(config.dtype)}"])
    return _finish_kernels(out, json, suite.kind, environment, config, rows, suites.summary(suite, rows))
