"""What all tables in Markdown share, and the committed JSON that they are made from."""

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
    """A table and the ``lines`` below it, each once; without a body that there are no results."""
    if not body:
        return NO_RESULTS
    return "\n\n".join([markdown_table(header, body), *(f"{line}." for line in dict.fromkeys(lines))])


def documents(results: Path, kind: str) -> list[dict[str, Any]]:
    """The runs of a kind in a folder. Raises OptionError, which names a damaged file."""
    found = [(path, load(path)) for path in sorted(results.rglob("*.json"))]
    return [
        checked(path, each) for path, each in found if isinstance(each, dict) and each.get("kind") == kind
    ]


def run_apart(what: str, content: dict[str, Any]) -> str:
    """Says that ``what`` was not measured in the run of the rest of its table, but where and when.

    No commit is named, because what was measured is not this project's code.
    """
    where = content["environment"]
    return f"{what}: built by hand and measured in another run, {where['gpu']}, {str(where['date'])[:10]}"
