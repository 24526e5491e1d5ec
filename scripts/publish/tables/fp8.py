"""The Markdown tables of ``scripts.publish.fp8`` (times, MLPerf, image quality)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.publish.tables.end_to_end import rows_of_runs
from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown
from sdfastgn.bench.documents import OK
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.variants import label

TIMES, MLPERF, QUALITY = "fp8_times", "fp8_mlperf", "fp8_quality"
# Name of the variant with torch.compile and torchao's FP8.
TORCHAO = "compile_torchao_fp8"
# The variants of sdfastgn that are compared: in the model's dtype, and in FP8.
VARIANTS = ("sdfastgn", "sdfastgn_fp8")
_TIMES = (
    "", "fp16: ms", "FP8: ms", "FP8's time, of fp16's", "fp16: error against fp32", "FP8: error against fp32",
    "FP8: seconds until ready",
)  # fmt: skip
_PEER = "torch.compile + torchao, FP8: ms", "its error against fp32", "its seconds until ready"
_QUALITY = (
    "pipeline", "PSNR to fp32, dB", "PSNR of the worst image, dB", "SSIM to fp32", "read as the prompt says",
    "values beyond the range",
)  # fmt: skip


@dataclass(frozen=True)
class QualityRow:
    """The images of one variant of the pipeline of digits, compared with stock's images in fp32.

    Attributes:
        variant: ``"fp32"`` or ``"fp16"`` (stock), or one of ``VARIANTS``.
        images: number of images.
        read: number of images in which the classifier reads the digit that the prompt names.
        psnr_db, ssim: of all images. Both are None for stock in fp32. For equal images ``psnr_db`` is None.
        least_psnr_db: the smallest PSNR of one image.
        products: number of matrix products of linear layers in the UNet that may run in E4M3. Layers with the
            same input can share a product.
        in_e4m3: number of these products that run in E4M3.
        error: the largest relative error of such a product. None if no product runs in E4M3.
        beyond: number of values that were beyond the learned range, and so were written with larger scales.
    """

    variant: str
    images: int
    read: int
    psnr_db: float | None = None
    least_psnr_db: float | None = None
    ssim: float | None = None
    products: int = 0
    in_e4m3: int = 0
    error: float | None = None
    beyond: int = 0


def fp8_times_markdown(results: Path) -> str:
    """Returns a table of times in fp16 and in FP8, with a line for each part that was measured in both."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    sources = []
    for row, source in rows_of_runs(results, TIMES):
        lines.setdefault((row.model, row.part, row.size, row.batch), {})[row.variant] = row
        sources.append(source)
    # The peer's columns are left out if it was never measured.
    has_peer = any(TORCHAO in rows for rows in lines.values())
    body = []
    for rows in lines.values():
        if not set(rows) >= set(VARIANTS):
            continue
        ours, quick = (rows[name] for name in VARIANTS)
        ratio = NOTHING
        if ours.median_ms and quick.median_ms:
            ratio = f"{quick.median_ms / ours.median_ms:.2f}"
        errors = [error_text(row.error_fp32) for row in (ours, quick)]
        times = [_time(row) for row in (ours, quick)]
        peer = _peer(rows.get(TORCHAO)) if has_peer else ()
        body.append([row_title(ours), *times, ratio, *errors, number(quick.ready_s), *peer])
    return markdown(_TIMES + (_PEER if has_peer else ()), body, sources)


def _time(row: Row) -> str:
    return number(row.median_ms) if row.status == OK else row.status


def _peer(row: Row | None) -> tuple[str, str, str]:
    """The cells of ``TORCHAO``. Of the times of a call and of its CUDA graph, the shorter is shown."""
    if row is None or row.median_ms is None:
        return NOTHING, NOTHING, NOTHING
    shorter = min(row.median_ms, row.graph_ms or row.median_ms)
    return number(shorter), error_text(row.error_fp32), number(row.ready_s)


def fp8_mlperf_markdown(results: Path) -> str:
    """Returns a table of images per second: measured at MLPerf's settings, and published by others."""
    preset = PRESETS["mlperf"]
    case = preset.cases[0]
    body, sources = [], []
    for row, source in rows_of_runs(results, MLPERF):
        rate = NOTHING
        if row.status == OK and row.median_ms:
            rate = f"{preset.value(row.median_ms, case.settings):.2f}"
        gpu = source.split(",")[0].removeprefix("NVIDIA ")
        name = "sdfastgn, fp16" if row.variant == "sdfastgn" else label(row.variant)
        body.append([f"{name}, {gpu}", "measured", rate])
        sources.append(source)
    if body:
        body += [[name, "published", f"{rate:.2f}"] for name, rate in case.published.items()]
        sources.append(f"Published: {preset.source}; {preset.differs}")
    return markdown(("", "", "images per second and GPU"), body, sources)


def fp8_quality_markdown(results: Path) -> str:
    """Returns a table of the images in fp32, fp16 and FP8 for each committed result.

    A line below it names the run.
    """
    blocks = []
    for content in documents(results, QUALITY):
        rows = [QualityRow(**values) for values in content["rows"]]
        config = content["config"]
        what = f"{rows[0].images} images of 64², {config['steps']} steps. {source_line(content)}"
        blocks.append(markdown(_QUALITY, [_quality_cells(row) for row in rows], [what]))
    return "\n\n".join(blocks) or NO_RESULTS


def _quality_cells(row: QualityRow) -> list[str]:
    names = {"fp32": "stock, fp32", "fp16": "stock, fp16", "sdfastgn": "sdfastgn, fp16"}
    name = names.get(row.variant) or f"{label(row.variant)}: {row.in_e4m3} of {row.products} products"
    share = row.read / row.images
    # The standard deviation of the number of right images, if each is right with the same probability.
    spread = math.sqrt(row.images * share * (1 - share))
    return [
        name,
        number(row.psnr_db),
        number(row.least_psnr_db),
        number(row.ssim, 4),
        f"{row.read} ± {spread:.1f}",
        str(row.beyond) if row.products else NOTHING,
    ]
