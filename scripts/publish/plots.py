"""Pictures of committed results: the times of whole models, the roofline of kernels, a breakdown.

``python -m scripts.publish.plots RESULT.json PICTURE.png`` draws a committed run again, and
``... FOLDER PICTURE.png`` the times of all runs in a folder. Needs matplotlib (the extra ``plot``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.publish.tables.end_to_end import headline_times
from sdfastgn.bench.documents import read_json
from sdfastgn.bench.kernels.suite import INFERENCE, OURS, rows_of
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import number, source_line
from sdfastgn.bench.tables.plots import COLORS, breakdown, plot_reason, roofline, save
from sdfastgn.cli.checks import file_path
from sdfastgn.program import OptionError


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
        colors = [COLORS[0] if name == OURS else COLORS[-1] for name in names]
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, list(map(number, values)), padding=3, fontsize="small")
        axes.set_title(title, fontsize="small")
        axes.tick_params(labelsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("milliseconds", fontsize="small")
    save(figure, path)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or plot_reason() is not None:
        usage = "usage: python -m scripts.publish.plots RESULT.json|FOLDER PICTURE.png"
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
