"""The Markdown table of ``scripts.publish.tiled_decode``: decodes of large images, in tiles or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS

KIND = "tiled_decode"
_HEADER = (
    "image, decode", "seconds", "speed-up", "peak GiB", "difference from stock without tiles",
    "error against fp32",
)  # fmt: skip


@dataclass(frozen=True)
class DecodeRow:
    """The time and memory of one way to decode a square image.

    Attributes:
        size: pixels along a side of the image.
        is_optimized: True if the autoencoder is optimized.
        tile: pixels along a side of a tile; None for a decode without tiles.
        seconds: seconds of one call; None unless the row is ``OK``.
        peak_gib: peak memory in GiB of the tensors that the decode makes. None on the CPU, and unless the row
            is ``OK``.
        difference: relative error of the image against stock's image without tiles in the same dtype. None if
            the row is about stock's image itself, if stock could not make this image, or if the difference is
            not finite.
        error: relative error of the image against stock's image without tiles in fp32. None if no image was
            made in fp32, or if the error is not finite.
        status: ``OK``, ``FAILED``, or ``WRONG`` if an optimized image differs too much.
        reason: why the row is ``FAILED``.
    """

    size: int
    is_optimized: bool
    tile: int | None
    seconds: float | None = None
    peak_gib: float | None = None
    difference: float | None = None
    error: float | None = None
    status: str = OK
    reason: str = ""


def tiled_decode_markdown(results: Path) -> str:
    """Returns a table for each committed result, with a line for each image size and way to decode.

    A line below each table names the autoencoder and the run. Speed-ups of decodes without tiles are over
    stock without tiles. Speed-ups of decodes in tiles are over stock in tiles of the autoencoder's own size.
    A dagger marks speed-ups that round to less than 1.00.
    """
    blocks = []
    for content in documents(results, KIND):
        rows, config = [DecodeRow(**values) for values in content["rows"]], content["config"]
        model = MODEL_LABELS.get(config["model"], config["model"])
        what = f"The autoencoder of {model}, {config['dtype']}, without CUDA graphs"
        body = [_cells(row, rows) for row in rows]
        blocks.append(markdown(_HEADER, body, [f"{what}. {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS


def _cells(row: DecodeRow, rows: Sequence[DecodeRow]) -> list[str]:
    tiles = "without tiles" if row.tile is None else f"tiles of {row.tile}²"
    name = f"{row.size}², {'sdfastgn' if row.is_optimized else 'stock'}, {tiles}"
    return [
        name,
        number(row.seconds) if row.status == OK else f"{row.status} {row.reason}".strip(),
        _speed_up(row, rows),
        number(row.peak_gib),
        error_text(row.difference),
        error_text(row.error),
    ]


def _speed_up(row: DecodeRow, rows: Sequence[DecodeRow]) -> str:
    stock = [
        other.seconds
        for other in rows
        if not other.is_optimized and (other.size, other.tile is None) == (row.size, row.tile is None)
    ]
    if not row.is_optimized or row.seconds is None or stock[0] is None:
        return NOTHING
    return speed_up(stock[0], row.seconds)
