"""The Markdown tables of ``scripts.publish.serving_load`` and ``serving_replicas``: requests per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, failed_cells, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.program import counted

KIND = "serving"
_HEADER = (
    "clients", "stock: requests/s", "p50, s", "p99, s", "sdfastgn: requests/s", "p50, s", "p99, s",
    "requests/s, speed-up",
)  # fmt: skip
REPLICAS_KIND = "serving_replicas"
_REPLICAS_HEADER = (
    "replicas",
    "clients",
    "requests/s",
    "p50, s",
    "p99, s",
    "requests/s, against one replica",
)


def serving_load_markdown(results: Path) -> str:
    """Returns a table for each committed result, with a line for each number of clients.

    A line below each table names the pipeline and the run. A dagger marks fewer requests per second than
    stock's.
    """
    blocks = []
    for content in documents(results, KIND):
        rows = {(row["variant"], row["clients"]): row for row in content["rows"]}
        clients = sorted({row["clients"] for row in content["rows"] if row["variant"] == "sdfastgn"})
        body = [_cells(rows["eager", count], rows["sdfastgn", count]) for count in clients]
        blocks.append(markdown(_HEADER, body, [_what(content)]))
    return "\n\n".join(blocks) or NO_RESULTS


def serving_replicas_markdown(results: Path) -> str:
    """Returns a table for each committed result, with a line for each number of replicas and of clients.

    Lines below each table say what happened when a replica was killed, and name the pipeline and the run.
    """
    blocks = []
    for content in documents(results, REPLICAS_KIND):
        rows = [row for row in content["rows"] if not row["killed"]]
        alone = {row["clients"]: row["requests_s"] for row in rows if row["replicas"] == 1}
        body = [_replicas_cells(row, alone) for row in rows]
        lines = [_killed_line(row) for row in content["rows"] if row["killed"]]
        blocks.append(markdown(_REPLICAS_HEADER, body, [*lines, _what(content)]))
    return "\n\n".join(blocks) or NO_RESULTS


def _replicas_cells(row: dict[str, Any], alone: dict[int, float | None]) -> list[str]:
    first = [str(row["replicas"]), str(row["clients"])]
    one = alone.get(row["clients"])
    if row["status"] != OK or not one:
        return failed_cells(first, row["status"], row["reason"], len(_REPLICAS_HEADER))
    return [*first, *_figures(row), f"{row['requests_s'] / one:.2f}x"]


def _killed_line(row: dict[str, Any]) -> str:
    return (
        f"With {row['replicas']} replicas and {row['clients']} clients a replica was killed:"
        f" {row['lost']} of {row['requests']} requests were lost, 99 % took at most {number(row['p99_s'])} s,"
        f" and all replicas ran again after {number(row['back_s'])} s"
    )


def _what(content: dict[str, Any]) -> str:
    """Returns a line that names the pipeline, the number of requests and the run."""
    config = content["config"]
    (part,) = config["parts"]
    model = MODEL_LABELS.get(part["model"], part["model"])
    what = f"{model} {part['size']}², {counted(part['steps'], 'step')}, {part['dtype']}"
    what += f"; {config['requests']} requests for each number of clients"
    return f"{what}. {source_line(content)}"


def _cells(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    is_right = ours["status"] == OK
    return [
        str(stock["clients"]),
        *_figures(stock),
        *(_figures(ours) if is_right else [ours["status"], NOTHING, NOTHING]),
        # ``speed_up`` divides times. The time of a request is taken as 1 / (requests per second).
        speed_up(1 / stock["requests_s"], 1 / ours["requests_s"]) if is_right else NOTHING,
    ]


def _figures(row: dict[str, Any]) -> list[str]:
    return [number(row[name]) for name in ("requests_s", "p50_s", "p99_s")]
