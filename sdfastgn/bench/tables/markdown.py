"""What every table of results shares: numbers, marks, why cells are empty, Markdown, and the JSON that it is made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels.cells import QUOTED, KernelRow, shape_text

NOTHING = "-"
LOSS = "†"
NO_RESULTS = "No results are committed yet."


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent."""
    if value is None:
        return NOTHING
    if value == 0 or abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def error_text(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def missing_cells(rows: Iterable[KernelRow]) -> list[str]:
    """Why cells are empty, one line for each provider and reason."""
    # Keys of a dict: a shape may have several rows, one for each task.
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status not in (OK, QUOTED):
            by_reason.setdefault((row.provider, f"{row.status}: {row.reason}"), {})[shape_text(row.shape)] = (
                None
            )
    return [
        f"{name}: {reason}" + (f" ({len(shapes)} shapes)" if len(shapes) > 3 else f" ({', '.join(shapes)})")
        for (name, reason), shapes in by_reason.items()
    ]


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def documents(results: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.rglob("*.json"))]
    return [content for content in found if isinstance(content, dict) and content.get("kind") == kind]


def source_line(content: dict[str, Any]) -> str:
    """Where and with what a run was made."""
    env = content["environment"]
    packages = env.get("packages", {})
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton", "diffusers") if packages.get(name)
    )
    commit = (env.get("git") or {}).get("commit")
    source = f"commit {commit[:10]}" if commit else f"source {str(env.get('source_sha256'))[:10]}"
    driver = f", driver {env['driver']}" if env.get("driver") else ""
    return f"{env.get('gpu') or env.get('device')}{driver}, {versions}, {source}, {str(env.get('date'))[:10]}"
