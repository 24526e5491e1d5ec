"""Markdown tables of ``sdfastgn bench --profile``: where the time of a call goes."""

from __future__ import annotations

from pathlib import Path

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import source_line
from sdfastgn.bench.tables.profile import floor_line, profile_table, row_title
from sdfastgn.bench.variants import PARTS


def profile_markdown(results: Path) -> str:
    """Returns a table for each part and size of each model, from all committed runs with ``--profile``.

    If several runs have profiled the same part and size, the run whose file comes last by path is shown.
    """
    blocks: dict[tuple[int, str, int], str] = {}
    for content in documents(results, "profile"):
        parts: dict[tuple[int, str, int], list[Row]] = {}
        for row in (Row(**values) for values in content["rows"]):
            parts.setdefault((PARTS.index(row.part), row.model, row.size), []).append(row)
        for key, rows in parts.items():
            if table := profile_table(rows, row_title(rows[0])):
                shown = markdown(table.header, table.body, [*floor_line(rows), source_line(content)])
                blocks[key] = f"{table.title}: {table.caption}.\n\n{shown}"
    return "\n\n".join(blocks[key] for key in sorted(blocks)) or NO_RESULTS
