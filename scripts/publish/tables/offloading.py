"""The Markdown table of ``scripts.publish.offloading``: calls of offloaded pipelines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from scripts.publish.tables.markdown import documents, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, number, source_line

KIND = "offloading"
# Pipeline -> its name in the table.
_LABELS = {
    "flux": "Flux.1 schnell, 1024²",
    "wan": "Wan 2.1 1.3B, 81 frames of 480 x 832",
}
_HEADER = (
    "pipeline", "weights, GiB", "stock: first call, s", "third", "sdfastgn: first call, s", "third",
    "third, speed-up", "stock: reserved GiB", "sdfastgn",
)  # fmt: skip


@dataclass(frozen=True)
class OffloadingRow:
    """The calls of one offloaded pipeline, stock or optimized.

    Attributes:
        pipeline: a key of ``scripts.publish.offloading.PIPELINES``.
        is_optimized: True if the pipeline is optimized.
        weights_gib: size of the weights of all its models, in GiB.
        call_s: seconds of each call. Empty unless the row is ``OK``.
        reserved_gib: peak memory that PyTorch has reserved on the GPU, in GiB. None on the CPU, or if a call
            failed.
        status: ``OK``; ``FAILED`` if a call failed; ``WRONG`` if the result is not finite, is constant, or
            differs too much from stock's.
        reason: why the row is not ``OK``.
    """

    pipeline: str
    is_optimized: bool
    weights_gib: float
    call_s: list[float] = field(default_factory=list)
    reserved_gib: float | None = None
    status: str = OK
    reason: str = ""


def offloading_markdown(results: Path) -> str:
    """Returns the table of all committed results. Lines below the table name the runs."""
    body, lines = [], []
    for content in documents(results, KIND):
        rows = [OffloadingRow(**values) for values in content["rows"]]
        stock, ours = (
            {row.pipeline: row for row in rows if row.is_optimized is way} for way in (False, True)
        )
        body += [_cells(stock[name], ours[name]) for name in stock if name in ours]
        config = content["config"]
        lines.append(f"{config['dtype']}, {config['steps']} steps. {source_line(content)}")
    return markdown(_HEADER, body, lines)


def _cells(stock: OffloadingRow, ours: OffloadingRow) -> list[str]:
    both = stock.status == ours.status == OK
    return [
        _LABELS.get(stock.pipeline, stock.pipeline),
        number(stock.weights_gib),
        *_times(stock),
        *_times(ours),
        speed_up(stock.call_s[2], ours.call_s[2]) if both else NOTHING,
        *(number(row.reserved_gib) for row in (stock, ours)),
    ]


def _times(row: OffloadingRow) -> list[str]:
    return [number(row.call_s[0]), number(row.call_s[2])] if row.status == OK else [row.status, NOTHING]
