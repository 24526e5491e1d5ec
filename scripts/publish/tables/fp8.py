"""The Markdown tables of ``scripts.publish.fp8`` (times, MLPerf, image quality)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.publish.tables.end_to_end import rows_of_runs
from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown
from sdfastgn.bench.documents import OK
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line, without_empty_columns
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.variants import label

TIMES, MLPERF, QUALITY = "fp8_times", "fp8_mlperf", "fp8_quality"
# Name of the variant with torch.compile and torchao's FP8.
TORCHAO = "compile_torchao_fp8"
# The variants of sdfastgn that are compared: in the model's dtype, and in FP8.
VARIANTS = ("sdfastgn", "sdfastgn_fp8")
# Name of the variant that computes as in E4M3, with one scale for each tensor.
ONE_SCALE = "one_scale"
_TIMES = (
    "", "fp16: ms", "FP8: ms", "FP8's time, of fp16's", "fp16: error against fp32", "FP8: error against fp32",
    "FP8: seconds until ready",
)  # fmt: skip
_PEER = "torch.compile + torchao, FP8: ms", "its error against fp32", "its seconds until ready"


class Trained(NamedTuple):
    """A trained model of digits. ``title``: its name in tables. ``dtype``: its dtype, a key of ``DTYPES``."""

    title: str
    dtype: str


TRAINED = {
    "unet": Trained("UNet", "fp16"),
    "transformer": Trained("transformer", "bf16"),
    "lora": Trained("transformer with a LoRA", "bf16"),
    "outliers": Trained("transformer with large rows", "bf16"),
}


@dataclass(frozen=True)
class QualityRow:
    """The images of one variant of a trained model, compared with stock's images in fp32.

    Attributes:
        variant: ``"fp32"`` or ``"half"`` (stock), one of ``VARIANTS``, or ``ONE_SCALE``.
        images: number of images.
        read: number of images in which the classifier reads the digit that the prompt names.
        psnr_db, ssim: PSNR and SSIM of all images together. Both are None for stock in fp32. If the images
            are equal, ``psnr_db`` is None.
        least_psnr_db: the smallest PSNR of one image.
        products: number of matrix products of linear layers that may run in E4M3. Layers with the same input
            can share a product.
        in_e4m3: number of these products that run in E4M3.
        error: the largest relative error of such a product. None if none was measured.
        beyond: number of values in inputs of these products that were outside of the range of their scales.
            They were written with larger scales.
        model: a key of ``TRAINED``.
        median_psnr_db, low_psnr_db: the median of the images' PSNR, and their 5th percentile.
        loss: the mean squared error of one step with latents of digits that the model was not trained with.
        row_error, high_row_error: the median and the 95th percentile of the relative errors of this step's
            rows, against fp32. A row has the channels of one latent.
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
    model: str = "unet"
    median_psnr_db: float | None = None
    low_psnr_db: float | None = None
    loss: float | None = None
    row_error: float | None = None
    high_row_error: float | None = None


def fp8_times_markdown(results: Path) -> str:
    """Returns a table of times in fp16 and in FP8, with a line for each part that was measured in both."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    sources = []
    for row, source in rows_of_runs(results, TIMES):
        lines.setdefault((row.model, row.part, row.size, row.batch), {})[row.variant] = row
        sources.append(source)
    # The columns of torch.compile with torchao's FP8 are left out if it was never measured.
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
    """The cells of torch.compile with torchao's FP8: milliseconds, error, seconds until ready.

    Of the time of a call and the time of its CUDA graph, the shorter is shown.
    """
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
    """Returns tables of images' quality in fp32, fp16 or bf16, and FP8: one for each committed file.

    A committed file has the results of one run. A line below its table names the run.
    """
    blocks = []
    for content in documents(results, QUALITY):
        rows = [QualityRow(**values) for values in content["rows"]]
        config = content["config"]
        what = f"{rows[0].images} images of 64², {config['steps']} steps. {source_line(content)}"
        header, body = without_empty_columns([_quality_cells(row) for row in rows])
        blocks.append(markdown(header, body, [what]))
    return "\n\n".join(blocks) or NO_RESULTS


def _quality_cells(row: QualityRow) -> dict[str, str]:
    title, dtype = TRAINED[row.model]
    names = {
        "fp32": "stock, fp32",
        "half": f"stock, {dtype}",
        "fp16": "stock, fp16",
        "sdfastgn": f"sdfastgn, {dtype}",
        "sdfastgn_fp8": f"sdfastgn, FP8: {row.in_e4m3} of {row.products} products",
        ONE_SCALE: "FP8, one scale for each tensor",
    }
    share = row.read / row.images
    # The standard deviation of the number of right images, if each is right with the same probability.
    spread = math.sqrt(row.images * share * (1 - share))
    psnr = [row.median_psnr_db, row.low_psnr_db, row.least_psnr_db]
    errors = [row.row_error, row.high_row_error]
    return {
        "model": f"{title}: {names[row.variant]}",
        "PSNR to fp32, dB": number(row.psnr_db),
        "of an image: median / worst 5 % / worst": _several(psnr, number),
        "SSIM to fp32": number(row.ssim, 4),
        "read as the prompt says": f"{row.read} ± {spread:.1f}",
        "loss of a step": number(row.loss, 4),
        "error of a row of a step: median / 95 %": _several(errors, error_text),
        "values beyond the range": str(row.beyond) if row.products and row.model == "unet" else NOTHING,
    }


def _several(values: Sequence[float | None], text: Callable[[float | None], str]) -> str:
    """The text of a cell with several values; ``NOTHING`` if all of them are None."""
    return NOTHING if all(value is None for value in values) else " / ".join(map(text, values))
