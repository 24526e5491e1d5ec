"""Pictures of results: the times of whole models, the roofline of kernels, the breakdown of ``--profile``.

``python -m sdfastgn.bench.tables.plots RESULT.json PICTURE.png`` draws a committed run again, and
``... FOLDER PICTURE.png`` the times of all runs in a folder. Needs matplotlib (the extra ``plot``).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.checks import file_path
from sdfastgn.bench.documents import OK, read_json
from sdfastgn.bench.kernel_categories import CATEGORIES, GAPS, OTHER
from sdfastgn.bench.kernels.suite import COPY, FORWARD, INFERENCE, OURS, KernelRow, rows_of
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.tables.end_to_end import headline_times
from sdfastgn.bench.tables.markdown import number, source_line
from sdfastgn.bench.tables.profile import breakdown_of, lowest_floor, row_title
from sdfastgn.program import OptionError

# Colors that stay apart in print and for the color-blind (Okabe and Ito).
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
# The same color for a category in every picture. What is not in a kernel of known use is pale.
CATEGORY_COLORS = {**dict(zip(CATEGORIES, _COLORS, strict=False)), OTHER: "#555555", GAPS: "#DDDDDD"}


def plot_reason() -> str | None:
    """None where pictures can be drawn, else why not."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return "pictures need matplotlib, which is not installed (pip install matplotlib)"
    return None


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)


def headline(results: Path, path: Path) -> None:
    """Writes a PNG: milliseconds of each way to run a model, a panel for each part of ``headline_times``."""
    from matplotlib.figure import Figure

    panels = headline_times(results)
    figure = Figure(figsize=(11, 1.75 * math.ceil(len(panels) / 2)), layout="constrained")
    every = list(figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flat)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, times) in zip(every, panels.items(), strict=False):
        names, values = zip(*times, strict=True)
        colors = [_COLORS[0] if name == OURS else _COLORS[-1] for name in names]
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, list(map(number, values)), padding=3, fontsize="small")
        axes.set_title(title, fontsize="small")
        axes.tick_params(labelsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("milliseconds", fontsize="small")
    _save(figure, path)


def roofline(rows: Sequence[KernelRow], path: Path, title: str) -> None:
    """Writes a PNG: gigabytes a second of each provider over the bytes that a call has to move.

    The roof is what a copy reaches, which reads x once and writes y once.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rows = [row for row in rows if row.status == OK and row.task in (COPY, FORWARD)]
    timed = dict.fromkeys(row.provider for row in rows)
    names = sorted(timed, key=lambda name: (name != COPY, name != OURS))
    every = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(every, ("hot", "cold"), strict=True):
        for color, name in zip(itertools.cycle(_COLORS), names, strict=False):
            points = sorted(
                (_megabytes(row), getattr(row, f"{kind}_gbps")) for row in rows if row.provider == name
            )
            style = "k--" if name == COPY else "o-" if name == OURS else "."
            options = {} if name == COPY else {"color": color}
            axes.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1.2, label=name, **options)
        axes.set(xscale="log", yscale="log", xlabel="MB read and written at least", title=f"{kind} L2")
        axes.grid(True, which="both", linewidth=0.3)
    every[0].set_ylabel("GB/s")
    every[0].legend(fontsize="small")
    figure.suptitle(title)
    _save(figure, path)


def _megabytes(row: KernelRow) -> float:
    """What the call has to move: GB/s times microseconds is kilobytes."""
    return (row.hot_gbps or 0) * (row.hot_us or 0) / 1e3


def breakdown(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes a PNG: where a call's time goes, a stacked bar a variant, a panel a part.

    A stroke marks the variant's floor, a dashed line the lowest of all.

    Rows without a breakdown are left out. Raises ValueError where no row has one.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in rows:
        if breakdown_of(row) is not None:
            panels.setdefault(row_title(row), []).append(row)
    if not panels:
        raise ValueError("breakdown: no row has a breakdown")
    bars = sum(len(panel) for panel in panels.values())
    figure = Figure(figsize=(11, 1.2 + 0.9 * len(panels) + 0.4 * bars), layout="constrained")
    heights = [len(panel) + 1 for panel in panels.values()]
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, panel) in zip(every, panels.items(), strict=True):
        _stacked_bars(axes, panel)
        axes.set(title=name, xlabel="milliseconds")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.suptitle(title, fontsize="medium")
    _save(figure, path)


def _stacked_bars(axes: Any, rows: Sequence[Row]) -> None:
    found = [one for row in rows if (one := breakdown_of(row)) is not None]
    places = range(len(rows))
    ends = [0.0] * len(rows)
    for name in (*CATEGORIES, GAPS):
        lengths = [one.categories[name] for one in found]
        axes.barh(places, lengths, left=ends, color=CATEGORY_COLORS[name], label=name, height=0.7)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, one in zip(places, found, strict=True):
        axes.vlines(one.floor_ms, place - 0.42, place + 0.42, color="black", linewidth=2)
        axes.text(one.total_ms, place, f" {one.total_ms:.3g}", va="center", fontsize="small")
    lowest = lowest_floor(rows)
    if lowest is not None:
        axes.axvline(lowest[1], color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(places, [f"{row.variant}, {one.source}" for row, one in zip(rows, found, strict=True)])
    axes.invert_yaxis()
    axes.margins(x=0.08)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or plot_reason() is not None:
        usage = "usage: python -m sdfastgn.bench.tables.plots RESULT.json|FOLDER PICTURE.png"
        print(plot_reason() or usage, file=sys.stderr)
        return 2
    source, picture = map(Path, arguments)
    try:
        file_path("PICTURE", picture)
        headline(source, picture) if source.is_dir() else _draw(read_json(source), picture)
    except OptionError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    return 0


def _draw(content: dict[str, Any], picture: Path) -> None:
    if content["kind"] == "profile":
        breakdown([Row(**values) for values in content["rows"]], picture, source_line(content))
    else:
        title = f"{content['config']['dtype']}, {source_line(content)}"
        roofline(rows_of(SUITES[INFERENCE], content), picture, title)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
