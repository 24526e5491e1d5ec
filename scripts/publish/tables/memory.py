"""The Markdown tables of ``scripts.publish.memory``: peak memory of pipelines, and images under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, speed_up
from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.tables.cells import NOTHING, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS

KIND = "memory"
# If an image needed more memory than there was, the row's ``reason`` begins with this text.
NO_MEMORY = "OutOfMemoryError"
_PEAKS = (
    "pipeline", "stock: reserved GiB", "allocated", "sdfastgn: reserved GiB", "allocated",
    "reserved, of stock's",
)  # fmt: skip
_LIMITS = (
    "pipeline", "limit", "stock: second image, s", "third", "sdfastgn: second image, s", "third",
    "third, speed-up", "graphs captured", "dropped",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryRow:
    """The images of one pipeline, stock or optimized, without or under a limit of the GPU's memory.

    Attributes:
        model: the pipeline, a key of ``UNETS``.
        upcasts: True if the pipeline converts its fp16 autoencoder to fp32 for each decode.
        size: pixels along a side of an image.
        batch: number of images in a call.
        is_optimized: True if the pipeline is optimized.
        limit_gib: limit of the memory that PyTorch may reserve, in GiB; None without a limit.
        offloads: True after ``enable_model_cpu_offload``.
        reserved_mib, allocated_mib: peak memory that PyTorch has reserved on the GPU, and peak memory of
            tensors, in MiB. They include the weights. None on the CPU, and if the row is ``FAILED``.
        image_s: seconds of each call. Empty unless the row is ``OK``.
        captured, dropped: number of CUDA graphs that were captured and dropped in these calls.
        status: ``OK``, ``FAILED``, or ``WRONG`` if an optimized image differs too much from stock's.
        reason: why the row is not ``OK``.
    """

    model: str
    upcasts: bool
    size: int
    batch: int
    is_optimized: bool
    limit_gib: float | None = None
    offloads: bool = False
    reserved_mib: float | None = None
    allocated_mib: float | None = None
    image_s: list[float] = field(default_factory=list)
    captured: int = 0
    dropped: int = 0
    status: str = OK
    reason: str = ""


def memory_markdown(results: Path) -> str:
    """Returns the tables of all committed results. A line below each table names its run.

    One table has the peak memory without a limit. Another has the times under each limit.
    """
    blocks = []
    for content in documents(results, KIND):
        pairs = _pairs([MemoryRow(**values) for values in content["rows"]])
        peaks = [_peak_cells(*pair) for pair in pairs if pair[0].limit_gib is None]
        limits = [_limit_cells(*pair) for pair in pairs if pair[0].limit_gib is not None]
        config = content["config"]
        what = f"{config['dtype']}, {config['steps']} steps. {source_line(content)}"
        for head, rows in ((_PEAKS, peaks), (_LIMITS, limits)):
            blocks += [markdown(head, rows, [what])] if rows else []
    return "\n\n".join(blocks) or NO_RESULTS


def _pairs(rows: Sequence[MemoryRow]) -> list[tuple[MemoryRow, MemoryRow]]:
    """Returns a pair (row of stock, optimized row) for each setting, such as a limit, sorted by the setting.

    If only stock was measured, the optimized row has the status ``UNAVAILABLE``.
    """
    stock, ours = ({_setting(row): row for row in rows if row.is_optimized is way} for way in (False, True))
    missing = {each: replace(row, status=UNAVAILABLE) for each, row in stock.items()}
    return [(stock[each], (missing | ours)[each]) for each in sorted(stock)]


def _setting(row: MemoryRow) -> tuple[Any, ...]:
    return row.model, row.upcasts, row.size, row.batch, row.offloads, row.limit_gib or 0.0


def _name(row: MemoryRow) -> str:
    upcasts = ", VAE in fp32" if row.upcasts else ""
    offloads = ", offloaded" if row.offloads else ""
    return f"{MODEL_LABELS.get(row.model, row.model)} {row.size}²{upcasts}, batch {row.batch}{offloads}"


def _peak_cells(stock: MemoryRow, ours: MemoryRow) -> list[str]:
    share = NOTHING
    if stock.reserved_mib and ours.reserved_mib and ours.status == OK:
        share = f"{ours.reserved_mib / stock.reserved_mib:.0%}"
    memory = [[_gib(row, row.reserved_mib), _gib(row, row.allocated_mib)] for row in (stock, ours)]
    return [_name(stock), *memory[0], *memory[1], share]


def _gib(row: MemoryRow, mib: float | None) -> str:
    return number(None if mib is None else mib / 1024) if row.status == OK else _status(row)


def _limit_cells(stock: MemoryRow, ours: MemoryRow) -> list[str]:
    drawn = stock.status == ours.status == OK
    return [
        _name(stock),
        f"{number(stock.limit_gib)} GiB",
        *_times(stock),
        *_times(ours),
        speed_up(stock.image_s[2], ours.image_s[2]) if drawn else NOTHING,
        *(map(str, (ours.captured, ours.dropped)) if ours.status == OK else (NOTHING, NOTHING)),
    ]


def _times(row: MemoryRow) -> list[str]:
    return [number(each) for each in row.image_s[1:3]] if row.status == OK else [_status(row), NOTHING]


def _status(row: MemoryRow) -> str:
    if row.status == UNAVAILABLE:
        return "not measured"
    return "no memory" if row.reason.startswith(NO_MEMORY) else row.status
