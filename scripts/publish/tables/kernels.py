"""Kernel suites in Markdown."""

from __future__ import annotations

from pathlib import Path

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, markdown_table
from sdfastgn.bench.kernels.suite import COPY, Shape, Suite, rows_of, shape_text
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import LOSS, number, source_line
from sdfastgn.bench.tables.kernels import (
    competing,
    extras_tables,
    missing_cells,
    spaced,
    suite_legend,
    times_table,
)

# One launch, and three: small enough that the CPU never waits for the GPU.
_HOST_SHAPES: tuple[Shape, ...] = ((2, 1280, 8, 8), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 320, 64, 64))


def suite_markdown(suite: Suite, results: Path) -> str:
    """The table of each committed run of the suite."""
    blocks = []
    for content in documents(results, suite.kind):
        dtype = content["config"]["dtype"]
        rows = rows_of(suite, content)
        missing = missing_cells(rows)
        rows = competing(suite, rows)
        table = times_table(suite, rows, bold=True)
        who = f"{LOSS}: a peer is faster than sdfastgn" if suite.is_inference else suite_legend(suite)
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
    header, *body = ([row[0], *row[2:-3], row[-1]] for row in ([spaced(axes), *names], *rows))
    return header, body


def extras_markdown(suite: Suite, results: Path) -> str:
    """The suite's extras in each committed run."""
    blocks = [
        markdown(table.header, table.body, [f"{content['config']['dtype']}, {source_line(content)}"])
        for content in documents(results, suite.kind)
        for table in extras_tables(suite, rows_of(suite, content))
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
