"""The Markdown table of ``scripts.publish.serving_load``: requests per second of the example server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.program import counted

KIND = "serving"
_HEADER = (
    "clients", "stock: requests/s", "p50, s", "p99, s", "sdfastgn: requests/s", "p50, s", "p99, s",
    "requests/s, speed-up",
)  # fmt: skip


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
        config = content["config"]
        (part,) = config["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} {part['size']}², {counted(part['steps'], 'step')}, {part['dtype']}"
        what += f"; {config['requests']} requests for each number of clients"
        blocks.append(markdown(_HEADER, body, [f"{what}. {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS


def _cells(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    is_right = ours["status"] == OK
    return [
        str(stock["clients"]),
        *_figures(stock),
        *(_figures(ours) if is_right else [ours["status"], NOTHING, NOTHING]),
        # ``speed_up`` divides stock's time of a request by ours.
        speed_up(1 / stock["requests_s"], 1 / ours["requests_s"]) if is_right else NOTHING,
    ]


def _figures(row: dict[str, Any]) -> list[str]:
    return [number(row[name]) for name in ("requests_s", "p50_s", "p99_s")]
