"""What the rows of a suite say: ratios, the best peer, lost cells, geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdfastgn.bench.documents import OK, QUOTED
from sdfastgn.bench.kernels.suite import COPY, OURS, KernelRow, Shape, Suite, shape_text

# A line of a table: rows of one shape and task by provider, the copy among them.
Line = dict[str, KernelRow]


def lines(rows: Iterable[KernelRow]) -> dict[tuple[Shape, str], Line]:
    """Rows of each shape and task by provider, the copy of the shape among them."""
    rows = list(rows)
    copies = {row.shape: row for row in rows if row.provider == COPY}
    found: dict[tuple[Shape, str], Line] = {}
    for row in rows:
        if row.provider != COPY:
            start = {COPY: copies[row.shape]} if row.shape in copies else {}
            found.setdefault((row.shape, row.task), start)[row.provider] = row
    return found


def timed_names(rows: Iterable[KernelRow]) -> list[str]:
    """Providers with at least one time, ours last."""
    names = dict.fromkeys(row.provider for row in rows if row.status in (OK, QUOTED))
    return sorted(names, key=lambda name: name.startswith(OURS))


def ratio(line: Line, name: str, over: str | None, *, cold: bool = False) -> float | None:
    """Time of ``name`` over that of ``over``; None where one of the two is missing."""
    times = [line[key].microseconds(cold) if key in line else None for key in (name, over or "")]
    return times[0] / times[1] if times[0] and times[1] else None


def best_peer(line: Line, *, cold: bool = False) -> str | None:
    """The fastest correct provider that is neither the copy nor ours; None where there is none."""
    peers = [
        row
        for name, row in line.items()
        if name != COPY and not name.startswith(OURS) and row.status in (OK, QUOTED)
    ]
    best = min(peers, key=lambda row: row.microseconds(cold) or math.inf, default=None)
    return best.provider if best else None


def is_lost(line: Line, name: str, *, cold: bool = False) -> bool:
    """Whether a peer is faster than our ``name``, or is alone in having a time."""
    peer = best_peer(line, cold=cold)
    if peer is None or name not in line:
        return False
    to_peer = ratio(line, name, peer, cold=cold)
    return to_peer is None or to_peer > 1


def means(suite: Suite, rows: Iterable[KernelRow], over: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Geometric means of time over that of ``over``, by set of shapes, task and provider."""
    by_line = lines(rows)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for set_name, shapes in suite.shape_sets.items():
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for (shape, task), line in by_line.items():
            for name in line if shape in shapes else ():
                hot, cold = ratio(line, name, over), ratio(line, name, over, cold=True)
                if hot and cold:
                    pairs.setdefault((task, name), []).append((hot, cold))
        for (task, name), each in pairs.items():
            hot_mean, cold_mean = map(statistics.geometric_mean, zip(*each, strict=True))
            entry = {"hot": hot_mean, "cold": cold_mean, "shapes": len(each)}
            found.setdefault(set_name, {}).setdefault(task, {})[name] = entry
    return found


def extra_ratios(suite: Suite, rows: Iterable[KernelRow]) -> dict[str, dict[Shape, tuple[float, float]]]:
    """Time of each extra over its plain op's, hot and cold, by provider and shape."""
    found: dict[str, dict[Shape, tuple[float, float]]] = {}
    for (shape, task), line in lines(rows).items():
        for operation in suite.extras:
            name = operation.providers[-1].name
            pair = [ratio(line, name, operation.baseline, cold=cold) for cold in (False, True)]
            if task == operation.label(operation.passes[0]) and pair[0] and pair[1]:
                found.setdefault(name, {})[shape] = (pair[0], pair[1])
    return found


def summary(suite: Suite, rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Means, cells in which a peer is faster, and our ratio to the best peer, as JSON-ready data."""
    competing = {op.label(what) for op in suite.operations for what in op.passes}
    found = {key: line for key, line in lines(rows).items() if key[1] in competing}
    lost: dict[str, list[list[str]]] = {"hot": [], "cold": []}
    to_peer: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for (shape, task), line in found.items():
        for name in (name for name in line if name.startswith(OURS)):
            pair = [ratio(line, name, best_peer(line, cold=cold), cold=cold) for cold in (False, True)]
            if any(pair):
                to_peer.setdefault(name, {}).setdefault(task, {})[shape_text(shape)] = pair
            for label, cold in (("hot", False), ("cold", True)):
                if is_lost(line, name, cold=cold):
                    lost[label].append([shape_text(shape), task, name])
    return {
        "ideal_ratio_to_copy": suite.ideals,
        "geometric_mean_of_ratio_to_copy": means(suite, rows, COPY),
        f"geometric_mean_of_ratio_to_{suite.baseline}": means(suite, rows, suite.baseline),
        "slower_than_best_peer": lost,
        "ratio_to_best_peer": to_peer,
        "ratio_to_plain_op": {
            name: {shape_text(shape): list(pair) for shape, pair in by_shape.items()}
            for name, by_shape in extra_ratios(suite, rows).items()
        },
    }
