"""The Markdown table of ``scripts.publish.adapters``: what a change between two images costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.publish.tables.markdown import documents, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS

KIND = "adapters"
_HEADER = (
    "UNet step, batch 2, fp16; transformer step, bf16", "stock: first call", "second", "later",
    "sdfastgn: first call", "second", "later", "later, speed-up", "difference", "MiB, stock", "MiB",
)  # fmt: skip


@dataclass(frozen=True)
class ChangeRow:
    """The times of a model's calls after one change, stock and optimized.

    Attributes:
        model: the UNet or transformer, a key of ``UNETS`` or ``VIDEO_NETWORKS``.
        change: what was changed before these calls.
        stock_ms, ours_ms: milliseconds of the first call, of the second, and the mean of the later calls.
            If the change is made again before each call, the times include the change.
        stock_mib, ours_mib: memory that tensors occupy after these calls, in MiB; None on the CPU.
        error: relative error of the optimized output against stock's.
        status: ``OK``, or ``WRONG`` if the error is too large. The table shows no ``ours_ms`` of a wrong row.
    """

    model: str
    change: str
    stock_ms: list[float]
    ours_ms: list[float]
    stock_mib: float | None
    ours_mib: float | None
    error: float
    status: str = OK


def adapters_markdown(results: Path) -> str:
    """Returns a table with a line for each change. A dagger marks later calls slower than stock's."""
    body, sources = [], []
    for content in documents(results, KIND):
        body += [_cells(ChangeRow(**values)) for values in content["rows"]]
        sources.append(source_line(content))
    return markdown(_HEADER, body, sources)


def _cells(row: ChangeRow) -> list[str]:
    ours = [number(each) for each in row.ours_ms] if row.status == OK else [row.status, NOTHING, NOTHING]
    return [
        f"{MODEL_LABELS.get(row.model, row.model)}, {row.change}",
        *(number(each) for each in row.stock_ms),
        *ours,
        speed_up(row.stock_ms[-1], row.ours_ms[-1]) if row.status == OK else NOTHING,
        error_text(row.error),
        number(row.stock_mib),
        number(row.ours_mib),
    ]
