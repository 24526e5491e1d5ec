"""Pictures of a run: the roofline of kernels, and the breakdown of ``--profile``.

Drawing needs matplotlib, which the extra ``plot`` installs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernel_categories import CATEGORIES, GAPS, OTHER
from sdfastgn.bench.kernels.suite import COPY, FORWARD, OURS, KernelRow
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.profile import breakdown_of, lowest_floor, row_title
from sdfastgn.program import writing

# Colors that can be told apart in print and by the color-blind (Okabe and Ito).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
# Category of kernels, such as convolutions -> its color in every picture. Unknown kernels, and gaps without a
# kernel, are gray.
CATEGORY_COLORS = {**dict(zip(CATEGORIES, COLORS, strict=False)), OTHER: "#555555", GAPS: "#DDDDDD"}


def plot_reason() -> str | None:
    """Why pictures cannot be drawn; None if they can."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return "pictures need matplotlib, which is not installed (pip install matplotlib)"
    return None


def save(figure: Any, path: Path) -> None:
    with writing(path):
        figure.savefig(path, dpi=110)


def roofline(rows: Sequence[KernelRow], path: Path, title: str) -> None:
    """Write a PNG: each implementation's GB/s (vertical axis) over the MB that a call must move (horizontal).

    There are two diagrams, for a hot and a cold L2. The line of the copy, which reads x once and writes y
    once, is the roof: the highest GB/s to expect.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rows = [row for row in rows if row.status == OK and row.task in (COPY, FORWARD)]
    timed = dict.fromkeys(row.provider for row in rows)
    names = sorted(timed, key=lambda name: (name != COPY, name != OURS))
    every = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(every, ("hot", "cold"), strict=True):
        for color, name in zip(itertools.cycle(COLORS), names, strict=False):
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
    save(figure, path)


def _megabytes(row: KernelRow) -> float:
    """Megabytes that the timed call of ``row`` must at least read and write.

    A row has GB/s and microseconds. Their product is in kilobytes, so it is divided by 1000.
    """
    return (row.hot_gbps or 0) * (row.hot_us or 0) / 1e3


def breakdown(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG of where a call's time goes: a panel for each measured part, a stacked bar for each
    variant.

    The floor of a variant is its time in convolutions, GEMMs and attention. A mark in each bar shows the
    variant's floor. A dashed line shows the lowest floor in a panel. Rows without a breakdown are left out.
    Raises ValueError if no row has a breakdown.
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
    save(figure, path)


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
