"""Draws pictures of committed results: times of whole models, a roofline of kernels, a profile's breakdown.

``PICTURES`` maps the name of a file in docs/images to the function that draws this picture. The functions
need matplotlib (the extra ``plot``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from scripts.publish.tables.end_to_end import Times, headline_times, transformer_times
from scripts.publish.tables.kernels import with_peers
from scripts.publish.tables.markdown import documents
from sdfastgn.bench.kernels.suite import OURS
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import number, source_line
from sdfastgn.bench.tables.plots import COLORS, breakdown, roofline, save


def times(found: Times, picture: Path) -> None:
    """Draws the times of eager, sdfastgn and its competitors, with a panel for each part that was timed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.75 * math.ceil(len(found.panels) / 2)), layout="constrained")
    every = list(figure.subplots(math.ceil(len(found.panels) / 2), 2, squeeze=False).flat)
    for axes in every[len(found.panels) :]:
        axes.set_visible(False)
    for axes, (title, bars) in zip(every, found.panels.items(), strict=False):
        names, values = zip(*bars, strict=True)
        colors = [COLORS[0] if name.startswith(OURS) else COLORS[-1] for name in names]
        drawn = axes.barh(names, values, color=colors)
        axes.bar_label(drawn, list(map(number, values)), padding=3, fontsize="small")
        axes.set_title(title, fontsize="small")
        axes.tick_params(labelsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("\n".join(["milliseconds", *found.sources]), fontsize="small")
    save(figure, picture)


def headline(results: Path, picture: Path) -> None:
    """Draws the times of the front page's table."""
    times(headline_times(results), picture)


def transformers(results: Path, picture: Path) -> None:
    """Draws the times of the table of transformers."""
    times(transformer_times(results), picture)


def kernels(results: Path, picture: Path) -> None:
    """Draws the GB/s of kernels against the bytes that they move, from the suite ``inference``'s results."""
    (content,) = documents(results, "kernels")
    roofline(with_peers(results, content), picture, f"{content['config']['dtype']}, {source_line(content)}")


def profile(results: Path, picture: Path) -> None:
    """Draws the breakdown of a call's time, from the committed run of ``bench`` with ``--profile``."""
    (content,) = documents(results, "profile")
    breakdown([Row(**values) for values in content["rows"]], picture, source_line(content))


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "times.png": headline,
    "times_transformers.png": transformers,
    "roofline_fp16.png": kernels,
    "profile_sdxl.png": profile,
}
