"""Writes results as one HTML page. This file collects the data for the template ``report.html``."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernel_categories import CATEGORIES, GAPS
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import number, source_line
from sdfastgn.bench.tables.plots import CATEGORY_COLORS
from sdfastgn.bench.tables.profile import breakdown_of
from sdfastgn.bench.tables.results import Result, cases_of, comparison, tables_of
from sdfastgn.bench.tables.speed_up import eager_of, speed_up
from sdfastgn.bench.variants import FP8, VARIANTS, is_ours, label
from sdfastgn.program import writing

# Maximum number of pixels along a side of an image on the page. Larger images are shrunk, because a PNG of
# 1024x1024 has several MB. PSNR and SSIM are computed from the original images.
SHOWN = 512


@dataclass(frozen=True)
class Bar:
    """A time, shown as a bar.

    Attributes:
        name: what was timed: the label of the variant (way to run a model) and, if several runs are shown,
            the run's name.
        ms: the time in milliseconds, as text; empty if nothing was timed.
        width: the length of the bar in percent of the longest bar.
        note: the speed-up, or the reason why there is no time.
        is_ours: True if the variant uses sdfastgn.
        is_uncertain: True if the speed-up is uncertain.
    """

    name: str
    ms: str
    width: float
    note: str
    is_ours: bool
    is_uncertain: bool = False


def write_page(path: Path, results: Sequence[Result]) -> None:
    """Write one HTML file that shows ``results``. It contains all images and needs no other file."""
    found = [cases_of(result) for result in results]
    cases = []
    for title in dict.fromkeys(title for each in found for title in each):
        part = _by_variant([(i, row) for i, each in enumerate(found) for row in each.get(title, [])])
        # If several runs have measured the same call, the page shows the run's name beside each of their
        # rows.
        names = [f" ({result.name})" * (len({i for i, _ in part}) > 1) for result in results]
        bars, stacks = list(_bars(part, names)), list(_stacks(part, names))
        images = [figure for result in results for figure in result.figures.get(title, [])]
        cases.append({"title": title, "bars": bars, "stacks": stacks, "figures": images})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = environment.get_template("report.html").render(
        results=[(result, source_line(result.content), tables_of(result)) for result in results],
        cases=cases,
        colors=CATEGORY_COLORS,
        comparison=comparison(results),
    )
    with writing(path):
        path.write_text(shown, encoding="utf-8")


def _by_variant(part: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """Sort ``part``, pairs (index of the run, row), so that rows of the same variant are adjacent.

    A variant is a way to run a model.
    """
    variants = list(dict.fromkeys(row.variant for _, row in part))
    return sorted(part, key=lambda pair: variants.index(pair[1].variant))


def _bars(part: Sequence[tuple[int, Row]], names: Sequence[str]) -> Iterator[Bar]:
    times = [time for _, row in part for time in (row.median_ms, row.graph_ms) if time is not None]
    for index, row in part:
        name, ours = label(row.variant) + names[index], is_ours(row.variant)
        eager = eager_of(each for i, each in part if i == index)
        if row.status != OK:
            yield Bar(name, "", 0.0, f"{row.status}: {row.reason}", ours)
        for suffix, time in (("", row.median_ms), (" + graph", row.graph_ms)):
            if time is not None:
                ratio = speed_up(row, eager, as_graph=bool(suffix))
                is_uncertain = ratio is not None and ratio.is_uncertain
                width = 100 * time / max(times)
                yield Bar(name + suffix, number(time, 4), width, str(ratio or ""), ours, is_uncertain)


def _stacks(
    part: Sequence[tuple[int, Row]], names: Sequence[str]
) -> Iterator[tuple[str, str, list[tuple[str, str, float]]]]:
    """Yields a stacked bar for each row with a breakdown: (name, total ms, [(category, ms, length)]).

    ``length`` is the length of the category's piece of the bar, in percent of the longest bar.
    """
    found = [
        (label(row.variant) + names[i], one) for i, row in part if (one := breakdown_of(row)) is not None
    ]
    for name, one in found:
        scale = 100 / max(each.total_ms for _, each in found)
        lengths = [(each, one.categories[each]) for each in (*CATEGORIES, GAPS)]
        yield name, number(one.total_ms, 4), [(each, number(ms), ms * scale) for each, ms in lengths if ms]


def figures(rows: Sequence[Row], images: Mapping[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Returns (caption, note, data URI) for each image to show: of stock, sdfastgn, fp32, and differences.

    A difference is the absolute difference of stock's or sdfastgn's image from the fp32 image. Without an
    fp32 image, it is the difference of sdfastgn's image from stock's. All differences are multiplied by the
    same factor, so that the eye can see them.
    """
    of_variant = {row.variant: row for row in rows}
    names = {"eager": f"stock {rows[0].dtype}"}
    # Of the variants (ways to run a model) with sdfastgn, the page shows two: the first variant in the
    # model's dtype, and the FP8 variant.
    ours = next((name for name in VARIANTS if is_ours(name) and name != FP8 and name in images), None)
    if ours is not None:
        names[ours] = f"optimized {rows[0].dtype}"
    names[FP8] = "optimized FP8"
    names = {name: text for name, text in names.items() if name in images}
    truth = "fp32" if "fp32" in images else "eager"
    found = []
    for name, text in names.items():
        row, note = of_variant.get(name), ""
        if row is not None and row.psnr_fp32_db is not None:
            note = f"against fp32: PSNR {row.psnr_fp32_db:.1f} dB, SSIM {number(row.ssim_fp32, 5)}"
        elif row is not None and name != truth and row.psnr_db is not None:
            note = f"against stock: PSNR {row.psnr_db:.1f} dB"
        elif name != truth and np.array_equal(images[name], images[truth]):
            note = "the same to the last bit"
        found.append((text, note, _png(images[name])))
    if "fp32" in images:
        found.append(("fp32 reference", "same weights, without TF32", _png(images["fp32"])))
    difference_of = {
        text: np.abs(images[name] - images[truth]) for name, text in names.items() if name != truth
    }
    largest = max((float(each.max()) for each in difference_of.values()), default=0.0)
    factor = 2 ** math.floor(-math.log2(largest)) if largest else 1
    for text, difference in difference_of.items():
        other = "fp32" if truth == "fp32" else names["eager"]
        found.append((f"|{text} - {other}| x {factor:g}", "difference, amplified", _png(difference * factor)))
    return found


def _png(image: np.ndarray) -> str:
    """A float image in [0, 1] as a PNG in a data URI."""
    picture = Image.fromarray((image.clip(0, 1) * 255).round().astype(np.uint8))
    picture.thumbnail((SHOWN, SHOWN), Image.Resampling.BOX)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
