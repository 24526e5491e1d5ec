"""The terminal's table of ``sdfastgn bench``: times, memory and errors of each variant.

A variant is a way to run a model, such as eager (the unchanged model) or with torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdfastgn.bench.documents import OK
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, without_empty_columns
from sdfastgn.bench.tables.speed_up import eager_of, speed_up, uncertain_notes
from sdfastgn.bench.variants import label
from sdfastgn.reports import grouped

GATE = "correctness gate, before any time"


def end_to_end_table(rows: Sequence[Row], title: str, gate: str = "") -> Blocks:
    """A table of the rows of one measured part, without empty columns, and with notes below the table.

    ``gate``: the correctness gate in words; empty if the run's JSON does not contain it.
    """
    eager = eager_of(rows)
    cells = [
        {
            "variant": label(row.variant),
            "ready s": number(row.ready_s),
            "median ms": number(row.median_ms, 4),
            "p10-p90 ms": NOTHING if row.p10_ms is None else f"{number(row.p10_ms)}-{number(row.p90_ms)}",
            "p99 ms": number(row.p99_ms),
            "speed-up": str(speed_up(row, eager) or NOTHING),
            "graph ms": number(row.graph_ms, 4),
            "graphs ms": number(row.graphs_ms, 4),
            "it/s": number(row.its),
            "images/s": number(row.images_s),
            "peak MiB": number(row.peak_mib, 5),
            "reserved MiB": number(row.reserved_mib, 5),
            "error, eager": error_text(row.error_eager),
            "error, fp32": error_text(row.error_fp32),
            "row error: median": error_text(row.row_error_fp32),
            "95 %": error_text(row.high_row_error_fp32),
            "PSNR dB": number(row.psnr_db),
            "PSNR dB, fp32": number(row.psnr_fp32_db),
            "SSIM, fp32": number(row.ssim_fp32, 4),
            "step MiB": number(row.step_mib),
            "saved MiB": number(row.saved_mib),
        }
        for row in rows
    ]
    gates = [f"{GATE}: {gate}"] if gate else []
    notes = [*row_notes(rows), *uncertain_notes(rows), *gates, *graph_notes(rows)]
    return Blocks(*without_empty_columns(cells), title, notes=notes)


def row_notes(rows: Iterable[Row]) -> list[str]:
    """Lines of text about each row: what the variant (way to run a model) did, or why it has no time.

    Further lines have the images/s of each process, and the reason for a missing breakdown.
    """
    texts = []
    for row in rows:
        texts.append((row.variant, row.note if row.status == OK else f"{row.status}: {row.reason}"))
        each = ", ".join(map(number, row.process_images_s or ()))
        texts.append((row.variant, each and f"images/s of each process, all at the same time: {each}"))
        texts.append((row.variant, row.profile_reason and f"no breakdown: {row.profile_reason}"))
    return [f"{label(name)}: {text}" for name, text in texts if text]


def row_line(row: Row) -> str:
    """A line of text about a row. It is shown as soon as the row is measured."""
    found = f"{number(row.median_ms, 4)} ms" if row.status == OK else f"{row.status}: {row.reason}"
    return f"{row.part}: {row.variant}: {found}"


def graph_notes(rows: Iterable[Row]) -> list[str]:
    """A line for each reason why variants (ways to run a model) have no time of a CUDA graph."""
    variants = grouped((row.graph_reason, row.variant) for row in rows if row.graph_reason)
    return [f"no graph time for {', '.join(names)}: {reason}" for reason, names in variants.items()]
