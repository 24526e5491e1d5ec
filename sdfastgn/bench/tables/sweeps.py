"""Runs over several batches or steps as tables in Markdown: samples a second, and a pipeline's latency."""

from __future__ import annotations

from pathlib import Path

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import PARTS, label
from sdfastgn.bench.tables.end_to_end import HEADLINE
from sdfastgn.bench.tables.markdown import (
    NO_RESULTS,
    NOTHING,
    documents,
    markdown_table,
    number,
    source_line,
    without_empty_columns,
)
from sdfastgn.bench.tables.profile import row_title

# (part, model, size, dtype, steps) -> batch -> variant -> row
_Groups = dict[tuple[int, str, int, str, int], dict[int, dict[str, Row]]]


def _read(results: Path) -> tuple[_Groups, dict[int, str]]:
    """Rows of all sweeps, and by the id of a row the line that names its run."""
    groups: _Groups = {}
    sources = {}
    for content in documents(results, "sweep"):
        for row in (Row(**values) for values in content["rows"]):
            key = (PARTS.index(row.part), row.model, row.size, row.dtype, row.steps or 0)
            groups.setdefault(key, {}).setdefault(row.batch, {})[row.variant] = row
            sources[id(row)] = source_line(content)
    return dict(sorted(groups.items())), sources


def _title(row: Row) -> str:
    return row_title(row) + (f", {row.steps} steps" if row.steps else "")


def _table(cells: list[dict[str, str]], rows: list[Row], sources: dict[int, str]) -> str:
    """The table of ``cells``, why a time is missing, and the lines that name the runs of ``rows``."""
    if not cells:
        return NO_RESULTS
    header, body = without_empty_columns(cells)
    missing = [
        f"{_title(row)}, {label(row.variant)} {row.status}: {row.reason}" for row in rows if row.status != OK
    ]
    lines = dict.fromkeys([*missing, *(sources[id(row)] for row in rows)])
    return "\n\n".join([markdown_table(header, body), *(f"{line}." for line in lines)])


def batches_markdown(results: Path) -> str:
    """Milliseconds a sample, samples a second and memory, of what was timed at several batches."""
    groups, sources = _read(results)
    cells: list[dict[str, str]] = []
    shown: list[Row] = []
    for batches in (each for each in groups.values() if len(each) > 1):
        for batch, rows in sorted(batches.items()):
            found = {"": _title(next(iter(rows.values())))}
            for title, choices in HEADLINE:
                times = [_milliseconds(rows.get(name), graph) for name, graph in choices]
                found[f"{title} ms a sample (samples/s)"] = _rate(next(filter(None, times), None), batch)
            for name in ("eager", "sdfastgn"):
                row = rows.get(name)
                found[f"{label(name)} MiB"] = number(row.reserved_mib, 6) if row is not None else NOTHING
            cells.append(found)
            shown += rows.values()
    return _table(cells, shown, sources)


def _milliseconds(row: Row | None, graph: bool) -> float | None:
    return None if row is None else row.graph_ms if graph else row.median_ms


def _rate(ms: float | None, batch: int) -> str:
    return NOTHING if ms is None else f"{number(ms / batch, 4)} ({number(1e3 * batch / ms)})"


def latency_markdown(results: Path) -> str:
    """Median and 99th percentile of pipelines at one batch, beside the time of their CUDA graphs alone."""
    groups, sources = _read(results)
    cells: list[dict[str, str]] = []
    shown: list[Row] = []
    for batches in (each for each in groups.values() if len(each) == 1):
        for row in (row for rows in batches.values() for row in rows.values() if row.part == "pipeline"):
            shown.append(row)
            if row.median_ms is not None:
                over = row.median_ms / row.graphs_ms if row.graphs_ms else None
                cells.append(
                    {
                        "": _title(row),
                        "variant": label(row.variant),
                        "p50 ms": number(row.median_ms, 4),
                        "p99 ms": number(row.p99_ms, 4),
                        "its graphs alone, ms": number(row.graphs_ms, 4),
                        "p50 over that": number(over),
                    }
                )
    return _table(cells, shown, sources)
