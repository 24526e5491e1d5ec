"""Texts that all tables of results use: numbers, marks, and a line about the machine and the versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# ``NOTHING``: the text of a cell without a value. ``LOSS``: the mark of a result in which sdfastgn is slower
# than stock or than the fastest competitor.
NOTHING = "-"
LOSS = "†"


def number(value: float | None, digits: int = 3) -> str:
    """Returns ``value`` as a text with ``digits`` significant digits and no exponent."""
    if value is None:
        return NOTHING
    if value == 0 or abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def error_text(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def extent(size: int, width: int | None = None, frames: int | None = None) -> str:
    """The size of an image or video as text: ``512²`` for a square image, ``17 x 480 x 832`` for a video.

    The numbers of a video are frames, height and width.
    """
    side = f"{size}²" if width in (None, size) else f"{size} x {width}"
    return side if frames in (None, 1) else f"{frames} x {side}"


def without_empty_columns(rows: Sequence[dict[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, body) of a table, without columns in which all cells are ``NOTHING``.

    ``rows``: a dict for each row: title of a column -> text of the cell.
    """
    header = [name for name in (rows[0] if rows else ()) if any(row[name] != NOTHING for row in rows)]
    return header, [[row[name] for name in header] for row in rows]


def source_line(content: dict[str, Any]) -> str:
    """A line of text with the machine, the versions, the commit and the date of a run."""
    env = content["environment"]
    packages = env.get("packages", {})
    names = ("torch", "triton", "diffusers")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if packages.get(name))
    commit = (env.get("git") or {}).get("commit")
    source = f"commit {commit[:10]}" if commit else f"source {str(env.get('source_sha256'))[:10]}"
    driver = f", driver {env['driver']}" if env.get("driver") else ""
    machine = env.get("gpu") or env.get("machine")
    return f"{machine}{driver}, {versions}, {source}, {str(env.get('date'))[:10]}"
