"""Made-up results on disk, and tables as text."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.blocks import Blocks

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "device": "cuda",
    "packages": {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "date": "2026-11-21T06:00:00+00:00",
}
SOURCE = (
    "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, diffusers 0.42.1, commit 0123456789, 2026-11-21."
)


def save(folder: Path, name: str, kind: str, rows: Iterable[Any], **values: Any) -> Path:
    """A result's JSON; ``values`` stand in for what a run has besides its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema": 1, "kind": kind, "environment": ENVIRONMENT, "config": {"dtype": "fp16"}, **values}
    data = [one if isinstance(one, dict) else asdict(one) for one in rows]
    (folder / name).write_text(json.dumps({**content, "rows": data}))
    return folder / name


def row(
    variant: str, median: float | None = None, *, part: str = "unet", status: str = OK, **values: Any
) -> Row:
    times = dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), median)
    return Row("sd15", part, 512, 2, "fp16", variant, status, **{**times, **values})


def text_of(table: Blocks | None, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def cells_of(text: str, start: str) -> list[list[str]]:
    """Cells behind the first of each Markdown line that begins with ``start``."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# A part of a model, by each kind of variant.
UNET = [
    row("eager", 20.0, graph_ms=10.0),
    row("sdfastgn", 16.0, graph_ms=8.0),
    row("compile", 15.0, graph_ms=6.0),
    row("stable_fast", status=UNAVAILABLE, reason="package sfast is not installed"),
]
