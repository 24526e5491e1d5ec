"""What every benchmark result has: how a row ended, and the JSON document that rows are written as."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = [
    "FAILED",
    "OK",
    "SCHEMA",
    "UNAVAILABLE",
    "WRONG",
    "document",
    "first_line",
    "one_line",
    "write_json",
]

SCHEMA = 1
OK, UNAVAILABLE, FAILED, WRONG = "ok", "unavailable", "failed", "wrong output"


def first_line(error: BaseException) -> str:
    """What ``error`` says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as one line for a table's cell: its type and the first line that says something."""
    return f"{type(error).__name__}: {first_line(error)}"[:limit]


def document(
    kind: str, environment: dict[str, Any], config: dict[str, Any], rows: Iterable[Any]
) -> dict[str, Any]:
    """A run as the JSON that ``--json`` writes and :mod:`sdfastgn.bench.tables.pages` reads."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "environment": environment,
        "config": config,
        "rows": [asdict(row) for row in rows],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` as strict JSON, and makes the folder that it goes to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
