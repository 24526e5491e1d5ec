"""Kernel suites in Markdown."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, markdown_table, run_apart
from sdfastgn.bench.kernels.suite import (
    COPY,
    INFERENCE,
    OURS,
    KernelRow,
    Shape,
    Suite,
    rows_of,
    shape_text,
)
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import LOSS, NOTHING, number, source_line
from sdfastgn.bench.tables.kernels import (
    Line,
    best_peers,
    competing,
    extras_tables,
    lines,
    missing_cells,
    ratio,
    spaced,
    timed_names,
    times_table,
)

# The JSON's kind of peers of the suite inference that are built by hand, and not in the other runs.
PEERS = "kernel_peers"

# One launch, and three: small enough that the CPU never waits for the GPU.
_HOST_SHAPES: tuple[Shape, ...] = ((2, 1280, 8, 8), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 320, 64, 64))


def with_peers(results: Path, content: dict[str, Any]) -> list[KernelRow]:
    """The rows of a run of the suite inference, and of the peers that are built by hand."""
    suite = SUITES[INFERENCE]
    rows = [row for each in documents(results, PEERS) for row in rows_of(suite, each)]
    return [*rows_of(suite, content), *rows]


def inference_markdown(results: Path) -> str:
    """Shapes x providers: the table of each committed run of the suite inference."""
    suite, blocks = SUITES[INFERENCE], []
    for content in documents(results, suite.kind):
        rows = with_peers(results, content)
        header, body = _brief(times_table(suite, competing(suite, rows), bold=True))
        legend = (
            f"Microseconds, hot L2 (cold L2); bold: the best peer; {LOSS}: a peer is faster than sdfastgn"
        )
        apart = [
            run_apart(", ".join(dict.fromkeys(row["provider"] for row in each["rows"])), each)
            for each in documents(results, PEERS)
        ]
        notes = [*missing_cells(rows), *apart, f"{content['config']['dtype']}, {source_line(content)}"]
        blocks.append(markdown(header, body, [legend, *notes]))
    return "\n\n".join(blocks) or NO_RESULTS


def _brief(table: Blocks) -> tuple[list[str], list[list[str]]]:
    """Header and body of a suite with one task and one of ours, with no ratio but to the best peer."""
    axes, *names = table.header
    rows = [
        [name.replace("mean /", "mean of time /"), *cells]
        for name, *cells in table.body
        if name.startswith(f"mean / {COPY},") or not name.startswith("mean")
    ]
    header, *body = ([row[0], *row[2:-3], row[-1]] for row in ([spaced(axes), *names], *rows))
    return header, body


def suite_markdown(suite: Suite, results: Path) -> str:
    """Shapes x tasks: our time and its ratio to the best peer's, of each committed run of the suite."""
    blocks = []
    for content in documents(results, suite.kind):
        rows = competing(suite, rows_of(suite, content))
        names = [name for name in timed_names(rows) if name.startswith(OURS)]
        found = lines(rows)
        columns = [
            (task, name)
            for task in suite.ideals
            for name in names
            if any(name in line for (_, each), line in found.items() if each == task)
        ]
        shapes = dict.fromkeys(shape for shape, _ in found)
        body = [
            [shape_text(shape), *(_over_best(found.get((shape, task), {}), name) for task, name in columns)]
            for shape in shapes
        ]
        body.append(["mean", *(_mean_over_best(found, task, name) for task, name in columns)])
        header = [spaced(suite.axes), *(_column(task, name) for task, name in columns)]
        peers = ", ".join(name for name in timed_names(rows) if name != COPY and not name.startswith(OURS))
        legend = (
            "Microseconds with a hot L2: ratio to the time of the best peer, hot L2 (cold L2); mean: "
            f"geometric, of the ratios; {LOSS}: a peer is faster; peers: {peers}"
        )
        notes = [legend, *missing_cells(rows), f"{content['config']['dtype']}, {source_line(content)}"]
        blocks.append(markdown(header, body if shapes else [], notes))
    return "\n\n".join(blocks) or NO_RESULTS


def _column(task: str, name: str) -> str:
    """The task, and the layout where ours has several."""
    return f"{task}{name.removeprefix(OURS).replace('_', ', ')}"


def _over_best(line: Line, name: str) -> str:
    hot, cold = ratio(line, name, best_peers(line))
    if hot is None or cold is None:
        return NOTHING
    return f"{number(line[name].hot_us)}: {hot:.2f} ({cold:.2f}){LOSS * (max(hot, cold) > 1)}"


def _mean_over_best(found: dict[tuple[Shape, str], Line], task: str, name: str) -> str:
    each = [ratio(line, name, best_peers(line)) for (_, of), line in found.items() if of == task]
    pairs = [(hot, cold) for hot, cold in each if hot and cold]
    if not pairs:
        return NOTHING
    hot, cold = map(statistics.geometric_mean, zip(*pairs, strict=True))
    return f"{hot:.2f} ({cold:.2f})"


def producers_markdown(results: Path) -> str:
    """What ops cost that leave statistics behind or take them, in each committed run."""
    suite = SUITES[INFERENCE]
    blocks = [
        markdown(table.header, table.body, [f"{content['config']['dtype']}, {source_line(content)}"])
        for content in documents(results, suite.kind)
        for table in extras_tables(suite, rows_of(suite, content))
    ]
    return "\n\n".join(blocks) or NO_RESULTS


def host_markdown(results: Path) -> str:
    """What a call costs the CPU, by provider and number of launches, of the committed fp16 run."""
    suite = SUITES[INFERENCE]
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
