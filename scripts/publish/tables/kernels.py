"""Markdown tables of kernel suites: the times of single operations from ``sdfastgn kernels``.

For each *shape* of a tensor several *tasks* are timed, such as the forward and the backward. A *provider* is
an implementation: sdfastgn's (``OURS``), a competitor's (also called a peer) or a plain copy.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, run_apart
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
    lines,
    missing_cells,
    ratio,
    spaced,
    timed_names,
    times_table,
)

# Kind of the results of separate runs of the suite ``inference``, which time competitors ("peers") that users
# must build by hand. ``sdfastgn kernels`` does not write this kind: it was set in the committed file.
PEERS = "kernel_peers"


def with_peers(results: Path, content: dict[str, Any]) -> list[KernelRow]:
    """Returns the rows of ``content``, and the rows of competitors from other runs (kind ``PEERS``).

    ``content``: the JSON of a run of the suite ``inference``.
    """
    suite = SUITES[INFERENCE]
    rows = [row for each in documents(results, PEERS) for row in rows_of(suite, each)]
    return [*rows_of(suite, content), *rows]


def inference_markdown(results: Path) -> str:
    """Returns a table for each committed run of the suite ``inference``.

    A table has a line for each shape and a column for each provider.
    """
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
    """Returns (header, body) of ``table`` with fewer columns and lines.

    Left out are the column of tasks, the columns of ratios to the copy and to the baseline, and the rows with
    the mean ratios to the baseline. ``table``: a result of ``times_table``, for a suite with one task and one
    provider of sdfastgn.
    """
    axes, *names = table.header
    rows = [
        [name.replace("mean /", "mean of time /"), *cells]
        for name, *cells in table.body
        if name.startswith(f"mean / {COPY},") or not name.startswith("mean")
    ]
    header, *body = ([row[0], *row[2:-3], row[-1]] for row in ([spaced(axes), *names], *rows))
    return header, body


def suite_markdown(suite: Suite, results: Path) -> str:
    """Returns a table for each committed run of ``suite``: a line for each shape, a column for each task.

    If sdfastgn was timed in several memory layouts, a task has a column for each of them. A cell has
    sdfastgn's time and its ratio to the time of the fastest peer.
    """
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
    """Returns a column's title: the task, and the layout if the provider's name contains a layout."""
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
