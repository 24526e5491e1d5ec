"""The Markdown table of ``scripts.publish.real_sizes``: networks at usual sizes, stock and optimized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.publish.tables.markdown import failed_cells, latest_rows, markdown, speed_up
from sdfastgn.bench.documents import FAILED, OK
from sdfastgn.bench.tables.cells import error_text, number, source_line

_HEADER = (
    "model", "GPU", "dtype", "stock ms", "optimized ms", "speed-up", "graph", "CPU ms", "peak MiB, stock",
    "peak MiB", "error, stock", "error",
)  # fmt: skip


@dataclass(frozen=True)
class SizeRow:
    """The times of one call of one model, stock and optimized.

    Attributes:
        stock_ms, optimized_ms: median milliseconds of a call, until the GPU has finished its work.
        stock_mib, optimized_mib: peak memory of tensors in MiB, including weights; None on the CPU.
        has_graph: True if optimized calls replayed a CUDA graph.
        error: relative error of the optimized output against stock's; None if it is not finite.
        stock_error, optimized_error: relative error of an output against stock's output in fp32 with the
            same weights. It is measured for models in bf16 and models of video, except for long videos. None
            if it is not measured or not finite.
        cpu_ms: median milliseconds until an optimized call has launched all of its work.
        is_video: True if the model makes videos.
        reason: why the model failed.
    """

    model: str
    dtype: str
    stock_ms: float | None
    optimized_ms: float | None
    stock_mib: float | None
    optimized_mib: float | None
    has_graph: bool = False
    error: float | None = None
    stock_error: float | None = None
    optimized_error: float | None = None
    cpu_ms: float | None = None
    is_video: bool = False
    status: str = OK
    reason: str = ""

    @classmethod
    def failed(cls, model: str, dtype: str, reason: str) -> SizeRow:
        return cls(model, dtype, None, None, None, None, status=FAILED, reason=reason)


def real_sizes_markdown(results: Path) -> str:
    """Returns a table with a line for each model. A dagger marks speed-ups that round to less than 1.00.

    If several runs have timed a model, its line shows the latest run.
    """
    return _table(results, lambda row: True)


def video_markdown(results: Path) -> str:
    """Returns the table of ``real_sizes_markdown``, but only with models that make videos.

    Only results in the folder ``renewal`` are shown.
    """
    return _table(results / "renewal", lambda row: row.is_video)


def _table(results: Path, is_shown: Callable[[SizeRow], bool]) -> str:
    latest = [(SizeRow(**values), run) for values, run in latest_rows(results, "real_sizes")]
    shown = [(row, run) for row, run in latest if is_shown(row)]
    body = sorted(_cells(row, str(run["environment"].get("gpu"))) for row, run in shown)
    return markdown(_HEADER, body, [source_line(run) for _, run in shown])


def _cells(row: SizeRow, gpu: str) -> list[str]:
    first = [row.model, _short(gpu), row.dtype]
    if row.status != OK or row.stock_ms is None or row.optimized_ms is None:
        return failed_cells(first, row.status, row.reason, len(_HEADER))
    return [
        *first,
        number(row.stock_ms),
        number(row.optimized_ms),
        speed_up(row.stock_ms, row.optimized_ms),
        "yes" if row.has_graph else "no",
        number(row.cpu_ms),
        number(row.stock_mib),
        number(row.optimized_mib),
        error_text(row.stock_error),
        error_text(row.optimized_error),
    ]


def _short(gpu: str) -> str:
    """Returns the name of a GPU without its maker and its memory, such as H100."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]
