"""What the rows of a suite say: ratios, the best peer, lost cells, geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels.suite import COPY, OURS, KernelRow, Shape, Suite, shape_text

# A line of a table: rows of one shape and task by provider, the copy among them.
Line = dict[str, KernelRow]
# Two providers or ratios: with a hot and with a cold L2.
Overs = tuple[str | None, str | None]
Pair = tuple[float | None, float | None]


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
    names = dict.fromkeys(row.provider for row in rows if row.status == OK)
    return sorted(names, key=lambda name: name.startswith(OURS))


def ratio(line: Line, name: str, over: str | Overs) -> Pair:
    """Hot and cold time of ``name`` over that of ``over``; None where one of the two is missing."""
    found: list[float | None] = []
    for index, other in enumerate((over, over) if isinstance(over, str) else over):
        times = [line[key].times[index] if key in line else None for key in (name, other or "")]
        found.append(times[0] / times[1] if times[0] and times[1] else None)
    return found[0], found[1]


def best_peers(line: Line) -> Overs:
    """The fastest correct provider, hot and cold, that is neither the copy nor ours; None without one."""
    peers = [
        row for name, row in line.items() if name != COPY and not name.startswith(OURS) and row.status == OK
    ]
    if not peers:
        return None, None
    hot = min(peers, key=lambda row: row.times[0] or math.inf)
    cold = min(peers, key=lambda row: row.times[1] or math.inf)
    return hot.provider, cold.provider


def lost(line: Line, name: str) -> tuple[bool, bool]:
    """Whether a peer is faster, hot and cold, than our ``name``, or is alone in having a time."""
    peers = best_peers(line)
    hot, cold = (
        name in line and peer is not None and (value is None or value > 1)
        for peer, value in zip(peers, ratio(line, name, peers), strict=True)
    )
    return hot, cold


def means(suite: Suite, rows: Iterable[KernelRow], over: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Geometric means of time over that of ``over``, by set of shapes, task and provider."""
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


def extra_ratios(suite: Suite, rows: Iterable[KernelRow]) -> dict[str, dict[Shape, Pair]]:
    """Time of each extra over its plain op's, hot and cold, by provider and shape."""
    found: dict[str, dict[Shape, Pair]] = {}
    for (shape, task), line in lines(rows).items():
        for operation in suite.extras:
            name = operation.providers[-1].name
            pair = ratio(line, name, operation.baseline)
            if task == operation.label(operation.passes[0]) and all(pair):
                found.setdefault(name, {})[shape] = pair
    return found


def summary(suite: Suite, rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Means, cells in which a peer is faster, and our ratio to the best peer, as JSON-ready data."""
    slower: dict[str, list[list[str]]] = {"hot": [], "cold": []}
    to_peer: dict[str, dict[str, dict[str, Pair]]] = {}
    for (shape, task), line in lines(rows).items():
        for name in line if task in suite.ideals else ():
            if name.startswith(OURS):
                pair = ratio(line, name, best_peers(line))
                if any(pair):
                    to_peer.setdefault(name, {}).setdefault(task, {})[shape_text(shape)] = pair
                for kind, is_lost in zip(slower, lost(line, name), strict=True):
                    slower[kind] += [[shape_text(shape), task, name]] if is_lost else []
    return {
        "ideal_ratio_to_copy": suite.ideals,
        "geometric_mean_of_ratio_to_copy": means(suite, rows, COPY),
        f"geometric_mean_of_ratio_to_{suite.baseline}": means(suite, rows, suite.baseline),
        "slower_than_best_peer": slower,
        "ratio_to_best_peer": to_peer,
        "ratio_to_plain_op": {
            name: {shape_text(shape): pair for shape, pair in by_shape.items()}
            for name, by_shape in extra_ratios(suite, rows).items()
        },
    }
