"""Runs measurements for a user: shows progress and tables, writes files, and returns the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sdfastgn.bench import page
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.documents import OK, WRONG, document, images_path, write_json
from sdfastgn.bench.gate import gate_text
from sdfastgn.bench.kernels import run as kernels
from sdfastgn.bench.kernels.suite import COPY, KernelConfig, KernelRow
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables import end_to_end as end_to_end_tables
from sdfastgn.bench.tables import kernels as kernel_tables
from sdfastgn.bench.tables import plots
from sdfastgn.bench.tables import profile as profile_tables
from sdfastgn.bench.tables.cells import extent, source_line
from sdfastgn.bench.tables.results import (
    Result,
    case_title,
    comparison,
    preset_tables,
    read_result,
    tables_of,
    times_of,
)
from sdfastgn.bench.variants import Variant
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.cli import processes
from sdfastgn.cli.terminal import console, print_lines, watched
from sdfastgn.program import OptionError, counted, is_main, launched, writing


def _environment_line(environment: dict[str, Any]) -> str:
    switches = ", ".join(f"{name}={value}" for name, value in environment["switches"].items())
    return f"{source_line({'environment': environment})}; for every variant {switches}"


def _print_part(out: Console, config: BenchConfig, rows: Sequence[Row]) -> None:
    steps = f", {counted(config.steps, 'step')}" if config.part == "pipeline" else ""
    size = extent(config.size, config.width, config.frames)
    what = f"{config.model} {config.part}, {size}, batch {config.batch}{steps}"
    title = f"{what}, {config.dtype} on {config.device}, {config.weights} weights"
    out.print(end_to_end_tables.end_to_end_table(rows, title, gate_text(config)))
    title = f"where the time of {profile_tables.row_title(rows[0])} goes"
    if (table := profile_tables.profile_table(rows, title)) is not None:
        out.print(table)


def run_bench(
    configs: Sequence[BenchConfig],
    variants: Sequence[Variant],
    *,
    json: Path | None = None,
    plot: Path | None = None,
    html: Path | None = None,
) -> int:
    """Measure all configs, print and write the results.

    Returns the exit code: 0 if at least one row has times and no output was wrong, else 1.

    The JSON file and the HTML page are written after each row, so the rows of an interrupted run are kept. If
    a launcher started several processes, they all time a pipeline at the same time. In this case a config
    whose ``part`` is not "pipeline" raises OptionError. Only the main process prints, and only the main
    process may pass paths of files.
    """
    if not launched():
        return _run_bench(configs, variants, json, plot, html)
    others = [config.part for config in configs if config.part != "pipeline"]
    if others:
        raise OptionError(f"--part: several processes can only time 'pipeline', got {others[0]!r}")
    with processes.joined(configs[0].device) as (_, device):
        here = [replace(config, device=device) for config in configs]
        return _run_bench(here, variants, json, plot, html)


def _kind(configs: Sequence[BenchConfig]) -> str:
    if launched():
        # not "end_to_end": launched processes share a host, so their times differ from those of one process
        return "processes"
    if configs[0].preset:
        return "preset"
    if any(config.profile for config in configs):
        return "profile"
    return "sweep" if len(configs) > len({config.part for config in configs}) else "end_to_end"


def _run_bench(
    configs: Sequence[BenchConfig],
    variants: Sequence[Variant],
    json: Path | None,
    plot: Path | None,
    html: Path | None,
) -> int:
    quiet = not is_main()
    out = Console(quiet=True) if quiet else console()
    where = end_to_end.current_environment(torch.device(configs[0].device), configs)
    content = document(_kind(configs), where, end_to_end.describe(configs), [])
    result = Result(where["gpu"] or where["machine"], content)
    rows: list[Row] = []
    if json is not None:
        # Images that an earlier run has written beside its JSON are deleted, because they are not this run's.
        with writing(images_path(json)):
            images_path(json).unlink(missing_ok=True)
    print_lines(out, result.warnings)
    with watched(len(configs) * len(variants), quiet=quiet) as (on_start, on_done):
        for config in configs:
            images: dict[str, Any] = {}
            found: list[Row] = []

            def on_row(row: Row, found: list[Row] = found, images: dict[str, Any] = images) -> None:
                found.append(row)
                content["rows"].append(asdict(row))
                if html is not None and images:
                    result.figures[case_title(row, content)] = page.figures(found, images)
                # The row's line is shown before the run's files are written, because writing may fail.
                on_done(end_to_end_tables.row_line(row))
                _write(result, json, html)

            end_to_end.run(config, variants, on_variant=on_start, on_row=on_row, images=images)
            _print_part(out, config, found)
            rows += found
    for table in preset_tables(result):
        out.print(table)
    print_lines(out, [_environment_line(where)])
    if plot is not None and any(row.profile for row in rows):
        plots.breakdown(rows, plot, source_line(content))
        print_lines(out, [f"wrote {plot}"])
    print_lines(out, [f"wrote {path}" for path in (json, html) if path is not None])
    return exit_code(rows)


def _write(result: Result, json: Path | None, html: Path | None) -> None:
    """Write the files of a run, with the rows that were measured so far."""
    if json is not None:
        write_json(json, result.content)
    if html is not None:
        page.write_page(html, [result])
        if json is not None and result.figures:
            write_json(images_path(json), result.figures)


def show_results(paths: Sequence[Path], *, html: Path | None = None) -> None:
    """Print the results in JSON files, and write an HTML page if ``html`` is given.

    If two of the results have timed the same call or kernel, one table compares the times of all results.
    Results that have no times for this table are printed with their own tables, and so are all results if
    nothing can be compared.
    """
    out = console()
    same_names = len({path.name for path in paths}) < len(paths)
    results = [read_result(path, str(path) if same_names else path.name) for path in paths]
    compared = comparison(results)
    if compared.body:
        out.print(compared)
    for result in results:
        if not (compared.body and times_of(result)):
            for table in tables_of(result):
                out.print(table)
    print_lines(out, [f"{result.name}: {source_line(result.content)}" for result in results])
    print_lines(out, [f"{result.name}: {line}" for result in results for line in result.warnings])
    if html is not None:
        page.write_page(html, results)
        print_lines(out, [f"wrote {html}"])


def exit_code(rows: Sequence[Any]) -> int:
    """Return the exit code: 0 if at least one row is OK and no row has a wrong output, else 1."""
    statuses = {row.status for row in rows}
    return 0 if OK in statuses and WRONG not in statuses else 1


def run_kernels(config: KernelConfig, *, json: Path | None = None, plot: Path | None = None) -> int:
    """Time the kernels of a suite, print and write the results.

    Returns the exit code: 0 if at least one row has times and no output was wrong, else 1. The JSON is
    written after each shape, so the rows of an interrupted run are kept.
    """
    out, suite = console(), SUITES[config.suite]
    where = end_to_end.current_environment(config.torch_device)

    def write(rows: Sequence[KernelRow]) -> None:
        if json is not None:
            content = document(suite.kind, where, asdict(config), rows)
            write_json(json, {**content, "summary": kernel_tables.summary(suite, rows)})

    with watched(len(config.shapes) * len(suite.cells_of(config.providers))) as (on_start, on_done):
        rows = kernels.run(
            suite,
            config,
            on_cell=on_start,
            on_row=lambda row: on_done(kernel_tables.cell_line(row)),
            on_shape=write,
        )
    if any(row.status in (OK, WRONG) for row in rows):
        title = f"{suite.title}, {config.dtype} on {config.device}"
        for table in kernel_tables.suite_tables(suite, rows, title, config.dtype):
            out.print(table)
        left_out = [name for name in suite.providers if name not in (COPY, *config.providers)]
        if left_out:
            print_lines(out, [f"not run (name them in --providers): {', '.join(left_out)}"])
        print_lines(out, [_environment_line(where)])
        if plot is not None:
            plots.roofline(rows, plot, f"{title}, {where['gpu'] or where['machine']}")
            print_lines(out, [f"wrote {plot}"])
    else:
        # The provider COPY, a plain copy, is always measured first. If nothing was timed, its reason is the
        # reason for all providers.
        reason = next(row.reason for row in rows if row.provider == COPY)
        out.print(f"nothing was timed: {reason}", markup=False)
    if json is not None:
        print_lines(out, [f"wrote {json}"])
    return exit_code(rows)
