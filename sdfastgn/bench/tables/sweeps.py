"""Runs over several batches or steps as tables in Markdown: samples a second, and a pipeline's latency."""

from __future__ import annotations

from pathlib import Path

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import PARTS, label
from sdfastgn.bench.tables.end_to_end import HEADLINE, milliseconds, rows_of_runs
from sdfastgn.bench.tables.markdown import NOTHING, markdown, number, without_empty_columns
from sdfastgn.bench.tables.profile import row_title

# Rows and the lines that name their runs.
_Found = list[tuple[Row, str]]


def _read(results: Path) -> list[dict[int, dict[str, tuple[Row, str]]]]:
    """Rows of all sweeps by batch and variant, in order, for each part, model, size, dtype and steps."""
    groups: dict[tuple[int, str, int, str, int], dict[int, dict[str, tuple[Row, str]]]] = {}
    for row, source in rows_of_runs(results, "sweep"):
        key = (PARTS.index(row.part), row.model, row.size, row.dtype, row.steps or 0)
        groups.setdefault(key, {}).setdefault(row.batch, {})[row.variant] = row, source
    return [batches for _, batches in sorted(groups.items())]


def _title(row: Row) -> str:
    return row_title(row) + (f", {row.steps} steps" if row.steps else "")


def _table(cells: list[dict[str, str]], found: _Found) -> str:
    """The table of ``cells``, why a time is missing, and the lines that name the runs."""
    missing = [
        f"{_title(row)}, {label(row.variant)} {row.status}: {row.reason}"
        for row, _ in found
        if row.status != OK
    ]
    return markdown(*without_empty_columns(cells), [*missing, *(source for _, source in found)])


def batches_markdown(results: Path) -> str:
    """Milliseconds a sample, samples a second and memory, of what was timed at several batches."""
    cells: list[dict[str, str]] = []
    shown: _Found = []
    for batches in (each for each in _read(results) if len(each) > 1):
        for batch, found in sorted(batches.items()):
            rows = {name: row for name, (row, _) in found.items()}
            cell = {"": _title(next(iter(rows.values())))}
            for title, choices in HEADLINE:
                cell[f"{title} ms a sample (samples/s)"] = _rate(milliseconds(rows, *choices), batch)
            for name in ("eager", "sdfastgn"):
                cell[f"{label(name)} MiB"] = number(rows[name].reserved_mib, 6) if name in rows else NOTHING
            cells.append(cell)
            shown += found.values()
    return _table(cells, shown)


def _rate(ms: float | None, batch: int) -> str:
    return NOTHING if ms is None else f"{number(ms / batch, 4)} ({number(1e3 * batch / ms)})"


def latency_markdown(results: Path) -> str:
    """Median and 99th percentile of pipelines at one batch, beside the time of their CUDA graphs alone."""
    alone = [found for batches in _read(results) if len(batches) == 1 for found in batches.values()]
    shown = [pair for found in alone for pair in found.values() if pair[0].part == "pipeline"]
    cells = [
        {
            "": _title(row),
            "variant": label(row.variant),
            "p50 ms": number(row.median_ms, 4),
            "p99 ms": number(row.p99_ms, 4),
            "its graphs alone, ms": number(row.graphs_ms, 4),
            "p50 over that": number(row.median_ms / row.graphs_ms if row.graphs_ms else None),
        }
        for row, _ in shown
        if row.median_ms is not None
    ]
    return _table(cells, shown)
