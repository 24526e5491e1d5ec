"""Results as tables: in the terminal, and in Markdown from committed JSON.

``python -m sdfastgn.bench.tables.pages --write README.md`` renews what lies between ``<!-- table:NAME -->`` and
``<!-- /table:NAME -->``; ``--check README.md`` exits with 1 where that would change the file.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.cells import QUOTED, KernelRow, shape_text
from sdfastgn.bench.kernels.norm_suites import SUITES
from sdfastgn.bench.kernels.providers import BASELINES, NORMS, OURS, PROVIDERS, YARDSTICK
from sdfastgn.bench.kernels.run import baseline_ratios, best_peer, losses, ratio_to_best_peer, summary
from sdfastgn.bench.models import warm_up
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import VARIANTS
from sdfastgn.bench.tables import profile as profile_tables
from sdfastgn.bench.tables import results as result_tables
from sdfastgn.bench.tables import suites as suite_tables
from sdfastgn.bench.tables.markdown import (
    LOSS,
    NO_RESULTS,
    NOTHING,
    documents,
    error_text,
    markdown_table,
    missing_cells,
    number,
    source_line,
)
from sdfastgn.bench.terminal import Blocks

RESULTS = Path("benchmarks")


def _labels() -> dict[str, str]:
    return {variant.name: variant.label for variant in VARIANTS}


# ---- the terminal


def _speed_up(row: Row, eager: Row | None) -> str:
    if eager is None or row.median_ms is None or eager.median_ms is None:
        return NOTHING
    return f"{eager.median_ms / row.median_ms:.2f}x"


def _mebibytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def end_to_end_table(rows: Sequence[Row], title: str) -> Blocks:
    """One part's rows. Columns that no row has a value for are left out. :func:`row_notes` say why a time is missing."""
    labels = _labels()
    eager = next((row for row in rows if row.variant == "eager" and row.status == OK), None)
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("ready s", lambda row: number(row.ready_s)),
        ("median ms", lambda row: number(row.median_ms, 4)),
        (
            "p10-p90 ms",
            lambda row: NOTHING if row.p10_ms is None else f"{number(row.p10_ms)}-{number(row.p90_ms)}",
        ),
        ("speed-up", lambda row: _speed_up(row, eager)),
        ("graph ms", lambda row: number(row.graph_ms, 4)),
        ("it/s", lambda row: number(row.its)),
        ("peak MiB", lambda row: number(row.peak_mib, 5)),
        ("error, eager", lambda row: error_text(row.error_eager)),
        ("error, fp32", lambda row: error_text(row.error_fp32)),
        ("PSNR dB", lambda row: number(row.psnr_db)),
    ]
    columns += [
        ("step MiB", lambda row: _mebibytes(row.step_mib)),
        ("saved MiB", lambda row: _mebibytes(row.saved_mib)),
    ]
    shown = [(name, cell) for name, cell in columns if any(cell(row) != NOTHING for row in rows)]
    body = [[labels.get(row.variant, row.variant), *(cell(row) for _, cell in shown)] for row in rows]
    return Blocks(["variant", *(name for name, _ in shown)], body, title)


def row_notes(rows: Iterable[Row]) -> list[str]:
    """What a variant did to the model, or why there is no time, one line for each that has something to say."""
    texts = [(row.variant, row.note if row.status == OK else f"{row.status}: {row.reason}") for row in rows]
    labels = _labels()
    return [f"{labels.get(name, name)}: {text}" for name, text in texts if text]


def row_line(row: Row) -> str:
    """A row as soon as it is measured."""
    found = f"{number(row.median_ms, 4)} ms" if row.status == OK else f"{row.status}: {row.reason}"
    return f"{row.part}: {row.variant}: {found}"


def cell_line(row: KernelRow, task: str = "") -> str:
    """A cell as soon as it is measured; empty where it cannot be, which is told once for all shapes."""
    if row.status == UNAVAILABLE:
        return ""
    found = (
        f"{number(row.hot_us)} us ({number(row.cold_us)})"
        if row.status == OK
        else f"{row.status}: {row.reason}"
    )
    return f"{shape_text(row.shape)} {row.provider}{f', {task}' if task else ''}: {found}"


def graph_notes(rows: Iterable[Row]) -> list[str]:
    """Why there is no graph time, one line a reason, with the variants that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.graph_reason:
            by_reason.setdefault(row.graph_reason, []).append(row.variant)
    return [f"no graph time for {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _kernel_cell(row: KernelRow | None, lost: bool) -> str:
    if row is None or row.status not in (OK, QUOTED):
        return NOTHING
    return f"{number(row.hot_us)} ({number(row.cold_us)}){LOSS if lost else ''}"


def _kernel_names(rows: Sequence[KernelRow]) -> list[str]:
    """The copy and the providers of GroupNorm+SiLU with at least one time, ours last."""
    timed = {
        row.provider for row in rows if row.status in (OK, QUOTED) and row.provider in (YARDSTICK, *NORMS)
    }
    names = [provider.name for provider in PROVIDERS if provider.name in timed and provider.name != OURS]
    return [*names, *([OURS] if OURS in timed else [])]


def _kernel_cells(rows: Sequence[KernelRow], mark_best: str) -> tuple[list[str], list[list[str]]]:
    """Header and body of the shapes x providers table; ``mark_best`` goes around the best peer's cell."""
    names = _kernel_names(rows)
    cells = {(row.shape, row.provider): row for row in rows}
    lost = {*losses(rows), *losses(rows, cold=True)}
    body = []
    for shape in dict.fromkeys(row.shape for row in rows):
        best = best_peer(rows, shape)
        line = [shape_text(shape)]
        for name in names:
            text = _kernel_cell(cells.get((shape, name)), name == OURS and shape in lost)
            line.append(
                f"{mark_best}{text}{mark_best}" if best is not None and best.provider == name else text
            )
        body.append(line)
    return ["N x C x H x W", *names], body


def _kernel_means(rows: Sequence[KernelRow]) -> list[tuple[str, list[str]]]:
    """Geometric means of time over copy by set of shapes: a label, and a cell for each of :func:`_kernel_names`."""
    means = summary(rows)["geometric_mean_of_ratio_to_copy"]
    lines = []
    for set_name, by_provider in means.items():
        cells = []
        for name in _kernel_names(rows):
            entry = by_provider.get(name)
            cells.append(
                f"{entry['hot']:.2f} ({entry['cold']:.2f}) on {entry['shapes']}" if entry else NOTHING
            )
        lines.append((set_name, cells))
    return lines


def _ratio_lines(rows: Sequence[KernelRow]) -> tuple[list[str], list[list[str]]]:
    """Header and body of shapes x ops that take or give statistics: microseconds hot, and their ratio to the plain op's."""
    ratios = baseline_ratios(rows)
    cells = {(row.provider, row.shape): row for row in rows}
    names = [name for name in BASELINES if name in ratios]
    body = []
    for shape in dict.fromkeys(row.shape for row in rows):
        line = [shape_text(shape)]
        for name in names:
            hot, cold = ratios[name].get(shape, (None, None))
            row = cells.get((name, shape))
            line.append(f"{number(row.hot_us)}: {hot:.2f} ({cold:.2f})" if row and hot and cold else NOTHING)
        body.append(line)
    return ["N x C x H x W", *(f"{name} / {BASELINES[name]}" for name in names)], body


def producers_table(rows: Sequence[KernelRow]) -> Blocks | None:
    """The ops that take or give statistics beside the plain ones; None where none was timed."""
    header, body = _ratio_lines(rows)
    if len(header) == 1:
        return None
    return Blocks(header, body, caption="microseconds: time over the plain op's, hot L2 (cold L2)")


def kernels_table(rows: Sequence[KernelRow], title: str) -> Blocks:
    """Shapes x providers, microseconds hot (cold), our GB/s and ratio to copy, geometric means at the end."""
    header, body = _kernel_cells(rows, "")
    ours = {shape_text(row.shape): row for row in rows if row.provider == OURS}
    for line in body:
        row = ours.get(line[0])
        if row is None:
            continue
        to_peer = ratio_to_best_peer(rows, row.shape)
        line += [number(row.hot_gbps, 4), number(row.hot_ratio), number(to_peer), number(row.cpu_us)]
    means = [[f"mean / copy, {set_name}", *cells] for set_name, cells in _kernel_means(rows)]
    header += [f"{OURS} {what}" for what in ("GB/s", "/ copy", "/ best peer", "CPU us")] if ours else []
    return Blocks(
        header, body, title, f"microseconds, hot L2 (cold L2); {LOSS} a peer is faster", means=means
    )


# ---- Markdown


def kernel_rows(content: dict[str, Any]) -> list[KernelRow]:
    return [KernelRow(**{**values, "shape": tuple(values["shape"])}) for values in content["rows"]]


def _with_quoted(rows: list[KernelRow], results: Path, dtype: str) -> tuple[list[KernelRow], list[str]]:
    """``rows`` with others' published times where a provider could not run, and where those come from."""
    ran = {(row.provider, row.shape) for row in rows if row.status == OK}
    shapes = {row.shape for row in rows}
    sources = []
    for content in documents(results, "kernels_quoted"):
        quoted = [
            row
            for row in kernel_rows(content)
            if row.shape in shapes and (row.provider, row.shape) not in ran
        ]
        if content["dtype"] != dtype or not quoted:
            continue
        replaced = {(row.provider, row.shape) for row in quoted}
        rows = [row for row in rows if (row.provider, row.shape) not in replaced] + quoted
        sources.append(
            f"Quoted, not run here: {', '.join(dict.fromkeys(r.provider for r in quoted))}: {content['source']}"
        )
    return rows, sources


def kernels_markdown(results: Path) -> str:
    """The shapes x providers table of each committed run of ``sdfastgn kernels``."""
    blocks = []
    for content in documents(results, "kernels"):
        dtype = content["config"]["dtype"]
        rows, quoted = _with_quoted(kernel_rows(content), results, dtype)
        header, body = _kernel_cells(rows, "**")
        shapes = dict.fromkeys(row.shape for row in rows)
        header.append(f"{OURS} / best peer")
        for shape, line in zip(shapes, body, strict=True):
            ratios = [ratio_to_best_peer(rows, shape, cold=cold) for cold in (False, True)]
            line.append(f"{number(ratios[0])} ({number(ratios[1])})" if all(ratios) else NOTHING)
        body += [[f"mean of time / copy, {name}", *cells, ""] for name, cells in _kernel_means(rows)]
        legend = (
            f"Microseconds, hot L2 (cold L2); bold: the best peer; {LOSS}: a peer is faster than sdfastgn."
        )
        blocks += [
            markdown_table(header, body),
            legend,
            *(f"{line}." for line in (*quoted, *missing_cells(rows))),
        ]
        blocks.append(f"{dtype}, {source_line(content)}.")
    return "\n\n".join(blocks) or NO_RESULTS


def producers_markdown(results: Path) -> str:
    """The ops that take or give statistics, of each committed run of ``sdfastgn kernels``."""
    blocks = []
    for content in documents(results, "kernels"):
        header, body = _ratio_lines(kernel_rows(content))
        if len(header) > 1:
            blocks += [markdown_table(header, body), f"{content['config']['dtype']}, {source_line(content)}."]
    return "\n\n".join(blocks) or NO_RESULTS


def host_markdown(results: Path) -> str:
    """What a call costs the CPU, by provider and number of launches, of the committed fp16 run."""
    for content in documents(results, "kernels"):
        rows = [row for row in kernel_rows(content) if row.cpu_us is not None]
        if content["config"]["dtype"] != "fp16" or not rows:
            continue
        names = dict.fromkeys(row.provider for row in rows)
        shapes = [
            shape for shape in dict.fromkeys(row.shape for row in rows) if shape_text(shape) in _HOST_SHAPES
        ]
        cells = {(row.provider, row.shape): row.cpu_us for row in rows}
        body = [[name, *(number(cells.get((name, shape))) for shape in shapes)] for name in names]
        return markdown_table(["microseconds of CPU time", *map(shape_text, shapes)], body)
    return NO_RESULTS


def warm_up_markdown(results: Path) -> str:
    """Each committed run of ``scripts/time_warm_up.py``."""
    blocks = []
    for content in documents(results, "warm_up"):
        rows = [warm_up.WaitRow(**values) for values in content["rows"]]
        (part,) = content["config"]["parts"]
        model = profile_tables.MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {part['steps']} steps, {part['dtype']}"
        body = [warm_up.cells(row, rows[0]) for row in rows]
        what += f"; new size {content['config']['new_size']}²"
        blocks += [markdown_table(list(warm_up.HEADERS), body), f"{what}. {source_line(content)}."]
    return "\n\n".join(blocks) or NO_RESULTS


# One launch, and three: small enough that the CPU never waits for the GPU.
_HOST_SHAPES = ("2x1280x8x8", "2x1280x16x16", "2x640x32x32", "2x320x64x64")

TABLES: dict[str, Callable[[Path], str]] = {
    "headline": result_tables.headline_markdown,
    "results": result_tables.results_markdown,
    "kernels": kernels_markdown,
    "producers": producers_markdown,
    "host": host_markdown,
    "warm_up": warm_up_markdown,
    "profile": profile_tables.profile_markdown,
    **{name: functools.partial(suite_tables.suite_markdown, suite) for name, suite in SUITES.items()},
}

_SLOT = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->)(?P<body>.*?)(<!-- /table:(?P=name) -->)", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """``text`` with every table slot filled from the JSON files under ``results``.

    Raises:
        ValueError: a slot has a name that no table has, or is not closed.
    """
    opened = re.findall(r"<!-- table:([\w-]+) -->", text)
    unknown = sorted(set(opened) - set(TABLES))
    if unknown:
        raise ValueError(f"no table is called {', '.join(unknown)}; there are {', '.join(TABLES)}")
    closed = [match["name"] for match in _SLOT.finditer(text)]
    if closed != opened:
        raise ValueError(f"the slots opened are {opened}, those closed {closed}")
    return _SLOT.sub(lambda match: f"{match[1]}\n{TABLES[match['name']](results)}\n{match[4]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 where a checked file is stale, 2 where it cannot be filled."""
    parser = argparse.ArgumentParser(
        prog="python -m sdfastgn.bench.tables.pages", description=__doc__.splitlines()[0]
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FILE", help="renew the tables in FILE")
    mode.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 where FILE's tables are stale")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the JSON files (default: benchmarks)"
    )
    options = parser.parse_args(arguments)
    path = options.write or options.check
    # An empty folder has no results yet; one that is not there is somewhere else.
    if not options.results.is_dir():
        print(f"tables: --results: there is no folder {str(options.results)!r} here", file=sys.stderr)
        return 2
    try:
        old = path.read_text(encoding="utf-8")
        new = filled(old, options.results)
        if options.write:
            path.write_text(new, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"tables: {path}: {error}", file=sys.stderr)
        return 2
    if options.check and new != old:
        print(
            f"tables: {path} is stale; run: python -m sdfastgn.bench.tables.pages --write {path}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
