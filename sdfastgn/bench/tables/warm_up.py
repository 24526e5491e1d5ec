"""Runs of ``scripts/time_warm_up.py`` as tables, in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.warm_up import WaitRow
from sdfastgn.bench.tables.markdown import NO_RESULTS, documents, markdown_table, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.bench.terminal import Blocks


def warm_up_table(rows: Sequence[WaitRow]) -> Blocks:
    """A line for each way; without times where the image was wrong."""
    seconds = ("second image after s", "over eager s", "third image s", "new size, over replays s")
    header = ("variant", *seconds, "peak MiB", "reserved MiB", "PSNR dB")
    return Blocks(header, [_cells(row, rows[0]) for row in rows])


def _cells(row: WaitRow, eager: WaitRow) -> list[str]:
    if row.status != OK:
        return [row.variant, row.status]
    over = f"{row.second_image_s - eager.second_image_s:+.2f}" if eager.image_s and row is not eager else "-"
    memory = ["-" if value is None else f"{value:.0f}" for value in (row.peak_mib, row.reserved_mib)]
    decibel = "-" if row.psnr_db is None else f"{row.psnr_db:.1f}"
    times = [f"{row.second_image_s:.2f}", over, f"{row.image_s[-1]:.3f}", f"{row.new_size_over_s:.3f}"]
    return [row.variant, *times, *memory, decibel]


def warm_up_markdown(results: Path) -> str:
    """The table of each committed run."""
    blocks = []
    for content in documents(results, "warm_up"):
        table = warm_up_table([WaitRow(**values) for values in content["rows"]])
        (part,) = content["config"]["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {part['steps']} steps, {part['dtype']}"
        what += f"; new size {content['config']['new_size']}²"
        blocks += [markdown_table(table.header, table.body), f"{what}. {source_line(content)}."]
    return "\n\n".join(blocks) or NO_RESULTS
