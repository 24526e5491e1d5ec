"""The Markdown table of ``scripts.publish.compiled_videos``: stock, torch.compile and sdfastgn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.publish.tables.markdown import failed_cells, latest_rows, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import number, source_line

KIND = "compiled_videos"
_HEADER = (
    "model", "dtype", "stock ms", "torch.compile ms", "compiling, s", "sdfastgn ms", "first call, s",
    "speed-up", "floor ms",
)  # fmt: skip


@dataclass(frozen=True)
class CompiledRow:
    """The times of one call of one network: stock, compiled, and optimized.

    Attributes:
        stock_ms, compiled_ms, optimized_ms: median milliseconds of a call, until the GPU has finished its
            work. ``compiled_ms`` is with torch.compile and channels-last weights. None if it was not
            measured.
        compile_s, first_call_s: seconds of the first call of the compiled and of the optimized network. A
            first call also compiles kernels. None if it was not measured.
        floor_ms: time of the kernels of convolutions, matrix products and attention in an optimized call.
            None on the CPU.
        compiled_error, error: relative error of the compiled and of the optimized output against stock's.
        reason: why the network failed, or why it was not compiled.
    """

    model: str
    dtype: str
    stock_ms: float | None = None
    optimized_ms: float | None = None
    first_call_s: float | None = None
    floor_ms: float | None = None
    error: float | None = None
    compiled_ms: float | None = None
    compile_s: float | None = None
    compiled_error: float | None = None
    status: str = OK
    reason: str = ""


def compiled_videos_markdown(results: Path) -> str:
    """Returns a table with a line for each network.

    If several runs have timed a network, its line shows the latest run.
    """
    latest = latest_rows(results, KIND)
    body = sorted(_cells(CompiledRow(**values)) for values, _ in latest)
    return markdown(_HEADER, body, [source_line(run) for _, run in latest])


def _cells(row: CompiledRow) -> list[str]:
    first = [row.model, row.dtype]
    if row.status != OK or row.stock_ms is None or row.optimized_ms is None:
        return failed_cells(first, row.status, row.reason, len(_HEADER))
    return [
        *first,
        number(row.stock_ms),
        "failed" if row.reason else number(row.compiled_ms),
        number(row.compile_s),
        number(row.optimized_ms),
        number(row.first_call_s),
        speed_up(row.stock_ms, row.optimized_ms),
        number(row.floor_ms),
    ]
