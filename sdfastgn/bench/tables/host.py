"""Runs of ``scripts/profile_host.py`` as tables, in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdfastgn.bench.models.host import HostRow
from sdfastgn.bench.models.variants import label
from sdfastgn.bench.tables.markdown import NO_RESULTS, documents, markdown_table, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.bench.terminal import Blocks

# Milliseconds below which a function is in no line of its own, whoever calls it.
_LEAST_MS = 0.1


def host_table(rows: Sequence[HostRow]) -> Blocks:
    """A line for each function that takes long enough in one way; first the image, then all functions."""
    names = dict.fromkeys(name for row in rows for name, ms in row.functions.items() if ms >= _LEAST_MS)
    body = [
        ["the image", *(number(row.total_ms) for row in rows)],
        *([f"`{name}`", *(number(row.functions.get(name)) for row in rows)] for name in names),
    ]
    return Blocks(["ms an image", *(label(row.variant) for row in rows)], body)


def host_calls_markdown(results: Path) -> str:
    """The table of each committed run."""
    blocks = []
    for content in documents(results, "host"):
        table = host_table([HostRow(**values) for values in content["rows"]])
        (part,) = content["config"]["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {part['steps']} steps, {part['dtype']}"
        blocks += [markdown_table(table.header, table.body), f"{what}. {source_line(content)}."]
    return "\n\n".join(blocks) or NO_RESULTS
