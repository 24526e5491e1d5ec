"""Suites as tables: in the terminal, and in Markdown from committed JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.ratios import (
    Line,
    Pair,
    best_peers,
    extra_ratios,
    lines,
    lost,
    means,
    ratio,
    timed_names,
)
from sdfastgn.bench.kernels.suite import COPY, OURS, KernelRow, Shape, Suite, rows_of, shape_text
from sdfastgn.bench.tables.markdown import (
    LOSS,
    NO_RESULTS,
    NOTHING,
    documents,
    markdown,
    markdown_table,
    number,
    source_line,
)
from sdfastgn.bench.terminal import Blocks

# One launch, and three: small enough that the CPU never waits for the GPU.
_HOST_SHAPES: tuple[Shape, ...] = ((2, 1280, 8, 8), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 320, 64, 64))


def cell_line(row: KernelRow) -> str:
    """A cell as soon as it is measured; empty where it cannot be."""
    if row.status == UNAVAILABLE:
        return ""
    found = f"{_pair(row.times)} us" if row.status == OK else f"{row.status}: {row.reason}"
    return f"{shape_text(row.shape)} {row.provider}, {row.task}: {found}"


def missing_cells(rows: Iterable[KernelRow]) -> list[str]:
    """Why cells are empty, one line for each provider and reason."""
    # Keys of a dict: a shape may have several rows, one for each task.
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status != OK:
            shapes = by_reason.setdefault((row.provider, f"{row.status}: {row.reason}"), {})
            shapes[shape_text(row.shape)] = None
    return [
        f"{name}: {reason} ({f'{len(shapes)} shapes' if len(shapes) > 3 else ', '.join(shapes)})"
        for (name, reason), shapes in by_reason.items()
    ]


# ---- what both kinds of tables show


def _competing(suite: Suite, rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The copy's rows and those of the suite's operations, without its extras."""
    return [row for row in rows if row.task in (COPY, *suite.ideals)]


def _cell(line: Line, name: str) -> str:
    row = line.get(name)
    if row is None or row.status != OK:
        return NOTHING
    mark = LOSS if name.startswith(OURS) and any(lost(line, name)) else ""
    return _pair(row.times) + mark


def _pair(pair: Pair) -> str:
    """``hot (cold)``"""
    return f"{number(pair[0])} ({number(pair[1])})" if all(pair) else NOTHING


def _table(suite: Suite, rows: Sequence[KernelRow], *, bold: bool = False) -> Blocks:
    """Shapes and tasks x providers: microseconds hot (cold), ratios of ours, geometric means."""
    names = timed_names(rows)
    ours = [name for name in names if name.startswith(OURS)]
    header = [suite.axes, "what", *names]
    header += [f"{name} / {over}" for name in ours for over in (COPY, suite.baseline, "best peer")]
    body = []
    for (shape, task), line in lines(rows).items():
        peers = best_peers(line)
        best = peers[0] if bold else None
        cells = [f"**{_cell(line, name)}**" if name == best else _cell(line, name) for name in names]
        cells += [_pair(ratio(line, name, over)) for name in ours for over in (COPY, suite.baseline, peers)]
        body.append([shape_text(shape), task, *cells])
    for over in (COPY, suite.baseline):
        for set_name, by_task in means(suite, rows, over).items():
            for task, by_name in by_task.items():
                mean = {
                    name: f"{e['hot']:.2f} ({e['cold']:.2f}) on {e['shapes']}" for name, e in by_name.items()
                }
                cells = [mean.get(name, NOTHING) for name in names]
                body.append([f"mean / {over}, {set_name}", task, *cells, *[""] * 3 * len(ours)])
    return Blocks(header, body, left=2)


def _legend(suite: Suite) -> str:
    ideals = ", ".join(f"{ideal:g} for {task}" for task, ideal in suite.ideals.items())
    return f"{LOSS}: a peer is faster; least time over the copy's where memory is the limit: {ideals}"


# ---- the terminal


def suite_tables(suite: Suite, rows: Sequence[KernelRow], title: str) -> list[Blocks]:
    """What the suite's operations took, and its extras beside the plain ops where one was timed."""
    caption = f"microseconds, hot L2 (cold L2); {_legend(suite)}"
    tables = [replace(_table(suite, _competing(suite, rows)), title=title, caption=caption)]
    return tables + _extras(suite, rows)


def _extras(suite: Suite, rows: Sequence[KernelRow]) -> list[Blocks]:
    """Shapes x extras: microseconds hot, and their ratio to the plain op's; none if none was timed."""
    ratios = extra_ratios(suite, rows)
    baselines = {op.providers[-1].name: op.baseline for op in suite.extras}
    hot = {(row.provider, row.shape): row.hot_us for row in rows}
    names = [name for name in baselines if name in ratios]

    def cell(name: str, shape: Shape) -> str:
        pair = ratios[name].get(shape)
        return f"{number(hot[name, shape])}: {pair[0]:.2f} ({pair[1]:.2f})" if pair else NOTHING

    shapes = dict.fromkeys(row.shape for row in rows)
    body = [[shape_text(shape), *(cell(name, shape) for name in names)] for shape in shapes]
    header = [_spaced(suite.axes), *(f"{name} / {baselines[name]}" for name in names)]
    caption = "microseconds: time over the plain op's, hot L2 (cold L2)"
    return [Blocks(header, body, caption=caption)] if names else []


def _spaced(axes: str) -> str:
    return axes.replace("x", " x ")


# ---- Markdown


def suite_markdown(suite: Suite, results: Path) -> str:
    """The table of each committed run of the suite."""
    blocks = []
    for content in documents(results, suite.kind):
        dtype = content["config"]["dtype"]
        rows = rows_of(suite, content)
        missing = missing_cells(rows)
        rows = _competing(suite, rows)
        table = _table(suite, rows, bold=True)
        who = f"{LOSS}: a peer is faster than sdfastgn" if suite.is_inference else _legend(suite)
        legend = f"Microseconds, hot L2 (cold L2); bold: the best peer; {who}"
        header, body = _brief(table) if suite.is_inference else (table.header, table.body)
        blocks.append(markdown(header, body, [legend, *missing, f"{dtype}, {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS


def _brief(table: Blocks) -> tuple[list[str], list[list[str]]]:
    """Header and body of a suite with one task and one of ours, with no ratio but to the best peer."""
    axes, *names = table.header
    rows = [
        [name.replace("mean /", "mean of time /"), *cells]
        for name, *cells in table.body
        if name.startswith(f"mean / {COPY},") or not name.startswith("mean")
    ]
    header, *body = ([row[0], *row[2:-3], row[-1]] for row in ([_spaced(axes), *names], *rows))
    return header, body


def extras_markdown(suite: Suite, results: Path) -> str:
    """The suite's extras in each committed run."""
    blocks = [
        markdown(table.header, table.body, [f"{content['config']['dtype']}, {source_line(content)}"])
        for content in documents(results, suite.kind)
        for table in _extras(suite, rows_of(suite, content))
    ]
    return "\n\n".join(blocks) or NO_RESULTS


def host_markdown(suite: Suite, results: Path) -> str:
    """What a call costs the CPU, by provider and number of launches, of the committed fp16 run."""
    for content in documents(results, suite.kind):
        rows = [row for row in rows_of(suite, content) if row.cpu_us is not None]
        if content["config"]["dtype"] == "fp16" and rows:
            times = {(row.provider, row.shape): row.cpu_us for row in rows}
            shapes = [shape for shape in _HOST_SHAPES if any(row.shape == shape for row in rows)]
            body = [
                [name, *(number(times.get((name, shape))) for shape in shapes)]
                for name in dict.fromkeys(row.provider for row in rows)
            ]
            return markdown_table(["microseconds of CPU time", *map(shape_text, shapes)], body)
    return NO_RESULTS
