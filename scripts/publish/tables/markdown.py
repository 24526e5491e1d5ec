"""Functions for all Markdown tables: they find the committed JSON files, and make a table's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import checked, load
from sdfastgn.bench.tables.cells import LOSS, NOTHING

NO_RESULTS = "No results are committed yet."


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], lines: Iterable[str]) -> str:
    """Returns a Markdown table, and below it ``lines``, each once. ``NO_RESULTS`` if ``body`` is empty."""
    if not body:
        return NO_RESULTS
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([table, *(f"{line}." for line in dict.fromkeys(lines))])


def speed_up(stock_ms: float, ours_ms: float) -> str:
    """Returns a cell with the speed-up over stock. A dagger marks a value that rounds to less than 1.00."""
    times = stock_ms / ours_ms
    return f"{times:.2f}x{LOSS if round(times, 2) < 1 else ''}"


def documents(results: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the content of each JSON file below ``results`` whose kind is ``kind``, sorted by path.

    Raises OptionError, which names the file, if a file is damaged.
    """
    found = [(path, load(path)) for path in sorted(results.rglob("*.json"))]
    return [
        checked(path, each) for path, each in found if isinstance(each, dict) and each.get("kind") == kind
    ]


def latest_rows(results: Path, kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns (row, run) for each model in the results of the kind ``kind``, with the oldest run first.

    If several runs have measured a model, the row is of the latest of them. A run is the content of its file.
    """
    runs = sorted(documents(results, kind), key=_date)
    latest = {row["model"]: (row, run) for run in runs for row in run["rows"]}
    return sorted(latest.values(), key=lambda pair: _date(pair[1]))


def _date(run: dict[str, Any]) -> str:
    return str(run["environment"]["date"])


def failed_cells(first: Sequence[str], status: str, reason: str, columns: int) -> list[str]:
    """Returns the cells of a row without times: ``first``, status and reason, then cells with no value."""
    return [*first, f"{status} {reason}".strip(), *[NOTHING] * (columns - len(first) - 1)]


def run_apart(what: str, content: dict[str, Any]) -> str:
    """Returns a line for below a table. It says that competitors in the table were measured in another run.

    ``what``: the names of these competitors, which users must build by hand. ``content``: the JSON of the
    other run. The line names the run's GPU and date. It names no commit of sdfastgn, because sdfastgn's times
    in the table are not from that run.
    """
    where = content["environment"]
    return f"{what}: built by hand and measured in another run, {where['gpu']}, {str(where['date'])[:10]}"
