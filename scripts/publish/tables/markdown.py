"""Functions that all Markdown tables use: they find the committed JSON files and make a table's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import checked, load

NO_RESULTS = "No results are committed yet."


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], lines: Iterable[str]) -> str:
    """Returns a table and below it ``lines``, each once. Returns ``NO_RESULTS`` if ``body`` is empty."""
    if not body:
        return NO_RESULTS
    return "\n\n".join([markdown_table(header, body), *(f"{line}." for line in dict.fromkeys(lines))])


def documents(results: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the content of every JSON file of this kind below ``results``, sorted by path.

    Raises OptionError, which names the file, if a file is damaged.
    """
    found = [(path, load(path)) for path in sorted(results.rglob("*.json"))]
    return [
        checked(path, each) for path, each in found if isinstance(each, dict) and each.get("kind") == kind
    ]


def run_apart(what: str, content: dict[str, Any]) -> str:
    """Returns a text to put below a table if ``what``, a part of the table, was measured in another run.

    The text names the GPU and the date of this run. It names no commit, because ``what`` is other software.
    """
    where = content["environment"]
    return f"{what}: built by hand and measured in another run, {where['gpu']}, {str(where['date'])[:10]}"
