"""Evaluates the times of a suite of kernels: ratios to competitors, means, and tables for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.suite import COPY, OURS, KernelRow, Shape, Suite, shape_text
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import LOSS, NOTHING, number, without_empty_columns

# The rows of one shape and one task (such as a forward): name of a provider (an implementation) -> its row.
# A plain copy (``COPY``) is one of the providers.
Line = dict[str, KernelRow]
# ``Overs``: names of the two providers (implementations) that times are divided by. Times with a hot L2 cache
# are divided by the time of the first provider, times with a cold L2 cache by the time of the second.
# ``Pair``: two times or two ratios of times. The first is with a hot L2 cache, the second with a cold one.
Overs = tuple[str | None, str | None]
Pair = tuple[float | None, float | None]


# ---- ratios and means


def lines(rows: Iterable[KernelRow]) -> dict[tuple[Shape, str], Line]:
    """Group rows by shape and task: (shape, task) -> ``Line``, a dict with the row of each provider.

    Each line also has the row of the provider ``COPY`` for the same shape.
    """
    rows = list(rows)
    copies = {row.shape: row for row in rows if row.provider == COPY}
    found: dict[tuple[Shape, str], Line] = {}
    for row in rows:
        if row.provider != COPY:
            start = {COPY: copies[row.shape]} if row.shape in copies else {}
            found.setdefault((row.shape, row.task), start)[row.provider] = row
    return found


def timed_names(rows: Iterable[KernelRow]) -> list[str]:
    """Names of the providers (implementations) with at least one time. sdfastgn's names come last."""
    names = dict.fromkeys(row.provider for row in rows if row.status == OK)
    return sorted(names, key=lambda name: name.startswith(OURS))


def ratio(line: Line, name: str, over: str | Overs) -> Pair:
    """Returns two ratios, for a hot and a cold L2: the time of ``name`` divided by the time of ``over``.

    ``name``: a provider (an implementation). ``over``: a provider, or a pair of providers: one for the hot
    ratio and one for the cold ratio. A ratio is None if one of its two times is missing.
    """
    found: list[float | None] = []
    for index, other in enumerate((over, over) if isinstance(over, str) else over):
        times = [line[key].times[index] if key in line else None for key in (name, other or "")]
        found.append(times[0] / times[1] if times[0] and times[1] else None)
    return found[0], found[1]


def best_peers(line: Line) -> Overs:
    """Names of the fastest competitors: (the fastest with a hot L2, the fastest with a cold L2).

    Competitors with a wrong output do not count. (None, None) if there is no competitor.
    """
    peers = [
        row for name, row in line.items() if name != COPY and not name.startswith(OURS) and row.status == OK
    ]
    if not peers:
        return None, None
    hot = min(peers, key=lambda row: row.times[0] or math.inf)
    cold = min(peers, key=lambda row: row.times[1] or math.inf)
    return hot.provider, cold.provider


def means(suite: Suite, rows: Iterable[KernelRow], over: str) -> dict[str, dict[str, dict[str, Any]]]:
    """For each provider, the geometric mean of its time divided by the time of the provider ``over``.

    A provider is an implementation. The mean is taken over all shapes of a set of shapes
    (``Suite.shape_sets``). Returns name of a set -> task -> provider -> means: the keys "hot" and "cold" (L2)
    have the means, and "shapes" the number of shapes.
    """
    by_line = lines(rows)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for set_name, shapes in suite.shape_sets.items():
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for (shape, task), line in by_line.items():
            for name in line if shape in shapes else ():
                hot, cold = ratio(line, name, over)
                if hot and cold:
                    pairs.setdefault((task, name), []).append((hot, cold))
        for (task, name), each in pairs.items():
            hot, cold = map(statistics.geometric_mean, zip(*each, strict=True))
            entry = {"hot": hot, "cold": cold, "shapes": len(each)}
            found.setdefault(set_name, {}).setdefault(task, {})[name] = entry
    return found


def summary(suite: Suite, rows: Iterable[KernelRow]) -> dict[str, Any]:
    """The mean ratios of each provider's time to a plain copy's time, and to the baseline's time.

    A provider is an implementation, and the baseline is the provider ``suite.baseline``.

    Returns a dict for JSON.
    """
    rows = list(rows)
    return {f"geometric_mean_of_ratio_to_{over}": means(suite, rows, over) for over in (COPY, suite.baseline)}


# ---- lines of text


def cell_line(row: KernelRow) -> str:
    """The line of text that is shown after a measurement: its times, or why it failed.

    The line is empty if the provider (implementation) cannot run on this machine.
    """
    if row.status == UNAVAILABLE:
        return ""
    found = f"{_pair(row.times)} us" if row.status == OK else f"{row.status}: {row.reason}"
    return f"{shape_text(row.shape)} {row.provider}, {row.task}: {found}"


def missing_cells(rows: Iterable[KernelRow]) -> list[str]:
    """Lines that say why cells of a table are empty: a line for each implementation and reason."""
    # (provider, reason) -> texts of shapes. They are a dict's keys, so that a shape with rows for several
    # tasks is named only once.
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status != OK:
            shapes = by_reason.setdefault((row.provider, f"{row.status}: {row.reason}"), {})
            shapes[shape_text(row.shape)] = None
    return [
        f"{name}: {reason} ({f'{len(shapes)} shapes' if len(shapes) > 3 else ', '.join(shapes)})"
        for (name, reason), shapes in by_reason.items()
    ]


# ---- tables for the terminal and for Markdown


def competing(suite: Suite, rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The rows of the suite's first table: rows of the copy (``COPY``) and of the suite's ``operations``.

    Rows of the suite's ``extras`` are left out, because they have a table of their own.
    """
    return [row for row in rows if row.task in (COPY, *suite.ideals)]


def _cell(line: Line, name: str) -> str:
    row = line.get(name)
    if row is None or row.status != OK:
        return NOTHING
    over_peers = ratio(line, name, best_peers(line)) if name.startswith(OURS) else ()
    return _pair(row.times) + LOSS * any(value is not None and value > 1 for value in over_peers)


def _pair(pair: Pair) -> str:
    """Two numbers as the text ``hot (cold)``."""
    return f"{number(pair[0])} ({number(pair[1])})" if all(pair) else NOTHING


def times_table(suite: Suite, rows: Sequence[KernelRow], *, bold: bool = False) -> Blocks:
    """A table of microseconds as ``hot (cold)``: a column for each provider, a row for each shape and task.

    Further columns have the ratios of sdfastgn's time to the copy's, the baseline's and the fastest
    competitor's. Further rows have the geometric means of each provider's ratios to the copy and to the
    baseline.
    ``bold``: True if the fastest competitor is set in bold Markdown.
    """
    names = timed_names(rows)
    ours = [name for name in names if name.startswith(OURS)]
    header = [suite.axes, "what", *names]
    header += [f"{name} / {over}" for name in ours for over in (COPY, suite.baseline, "best peer")]
    body = []
    for (shape, task), line in lines(rows).items():
        peers = best_peers(line)
        best = peers[0] if bold else None
        cells = [f"**{_cell(line, name)}**" if name == best else _cell(line, name) for name in names]
        cells += [_pair(ratio(line, name, over)) for name in ours for over in (COPY, suite.baseline, peers)]
        body.append([shape_text(shape), task, *cells])
    for over in (COPY, suite.baseline):
        for set_name, by_task in means(suite, rows, over).items():
            for task, by_name in by_task.items():
                mean = {
                    name: f"{e['hot']:.2f} ({e['cold']:.2f}) on {e['shapes']}" for name, e in by_name.items()
                }
                cells = [mean.get(name, NOTHING) for name in names]
                body.append([f"mean / {over}, {set_name}", task, *cells, *[""] * 3 * len(ours)])
    return Blocks(header, body, left=2)


def suite_legend(suite: Suite) -> str:
    ideals = ", ".join(f"{ideal:g} for {task}" for task, ideal in suite.ideals.items())
    return f"{LOSS}: a peer is faster; least time over the copy's where memory is the limit: {ideals}"


# ---- tables for the terminal


def suite_tables(suite: Suite, rows: Sequence[KernelRow], title: str, dtype: str) -> list[Blocks]:
    """The table of the suite's operations, and one of ``suite.extras`` (operations without competitors)."""
    caption = f"microseconds, hot L2 (cold L2); {suite_legend(suite)}"
    notes = [*missing_cells(rows), f"gate: relative error against fp64 at most {suite.gate(dtype)}"]
    shown = times_table(suite, competing(suite, rows))
    tables = [replace(shown, title=title, caption=caption, notes=notes)]
    return tables + extras_tables(suite, rows)


def extras_tables(suite: Suite, rows: Sequence[KernelRow]) -> list[Blocks]:
    """A table of ``suite.extras``, the operations without competitors, in a list.

    The list is empty if no extra was timed. The table has a row for each shape and a column for each extra. A
    cell has the extra's microseconds with a hot L2, and the ratios of its time to the time of its baseline
    (``Operation.baseline``), such as a plain add: with a hot L2 (with a cold L2).
    """
    found, cells = lines(rows), []
    for shape in dict.fromkeys(row.shape for row in rows):
        cell = {spaced(suite.axes): shape_text(shape)}
        for op in suite.extras:
            name, line = op.providers[-1].name, found.get((shape, op.label(op.passes[0])), {})
            hot, cold = ratio(line, name, op.baseline)
            shown = f"{number(line[name].hot_us)}: {hot:.2f} ({cold:.2f})" if hot and cold else NOTHING
            cell[f"{name} / {op.baseline}"] = shown
        cells.append(cell)
    header, body = without_empty_columns(cells)
    caption = "microseconds with a hot L2: time over its baseline's (after the /), hot L2 (cold L2)"
    return [Blocks(header, body, caption=caption)] if header[1:] else []


def spaced(axes: str) -> str:
    return axes.replace("x", " x ")
