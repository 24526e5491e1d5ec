"""The suites of ``kernels/norm_suites.py`` as tables: in the terminal, and in Markdown from committed JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernels.cells import shape_text
from sdfastgn.bench.kernels.providers import YARDSTICK
from sdfastgn.bench.kernels.suites import Suite, SuiteRow, best_peer, is_lost, lines, means, ratio
from sdfastgn.bench.tables.markdown import (
    LOSS,
    NO_RESULTS,
    NOTHING,
    documents,
    markdown_table,
    missing_cells,
    number,
    source_line,
)
from sdfastgn.bench.terminal import Blocks


def _names(suite: Suite, rows: Sequence[SuiteRow]) -> list[str]:
    """Providers with at least one time, ours last."""
    timed = {row.provider for row in rows if row.status == OK}
    return [name for name in (YARDSTICK, *suite.peers, *suite.ours) if name in timed]


def _cell(suite: Suite, line: dict[str, SuiteRow], name: str) -> str:
    row = line.get(name)
    if row is None or row.status != OK:
        return NOTHING
    lost = name in suite.ours and any(is_lost(suite, line, name, cold=cold) for cold in (False, True))
    return f"{number(row.hot_us)} ({number(row.cold_us)}){LOSS if lost else ''}"


def _ratios(suite: Suite, line: dict[str, SuiteRow], name: str) -> list[tuple[float | None, float | None]]:
    """Hot and cold times of ``name`` over those of the copy, of the baseline and of the best peer."""
    peers = [best_peer(suite, line, cold=cold) for cold in (False, True)]
    overs = [(YARDSTICK, YARDSTICK), (suite.baseline, suite.baseline), (peers[0], peers[1])]
    return [(ratio(line, name, hot), ratio(line, name, cold, cold=True)) for hot, cold in overs]


def _ratio_names(suite: Suite) -> list[str]:
    return [YARDSTICK, suite.baseline, "best peer"]


def _cells(suite: Suite, rows: Sequence[SuiteRow], mark_best: str) -> tuple[list[str], list[list[str]]]:
    """Header and body; ``mark_best`` goes around the best peer's cell."""
    names = _names(suite, rows)
    body = []
    for (shape, task), line in lines(rows).items():
        best = best_peer(suite, line)
        marks = {best: mark_best}
        texts = [f"{marks.get(name, '')}{_cell(suite, line, name)}{marks.get(name, '')}" for name in names]
        body.append([shape_text(shape), task, *texts])
    return [suite.axes, "what", *names], body


def _means(suite: Suite, rows: Sequence[SuiteRow]) -> list[list[str]]:
    """Geometric means of time over the copy's and over the baseline's, a line for each set of shapes and task."""
    found = []
    for over in (YARDSTICK, suite.baseline):
        for set_name, by_task in means(suite, rows, over).items():
            for task, by_name in by_task.items():
                entries: list[dict[str, Any] | None] = [by_name.get(name) for name in _names(suite, rows)]
                texts = [
                    f"{e['hot']:.2f} ({e['cold']:.2f}) on {e['shapes']}" if e else NOTHING for e in entries
                ]
                found.append([f"mean / {over}, {set_name}", task, *texts])
    return found


def _legend(suite: Suite) -> str:
    ideals = ", ".join(f"{ideal:g} for {task}" for task, ideal in suite.ideals.items())
    return f"{LOSS}: a peer is faster; least time over the copy's where memory is the limit: {ideals}"


def suite_table(suite: Suite, rows: Sequence[SuiteRow], title: str) -> Blocks:
    """Shapes and tasks x providers, microseconds hot (cold), our ratios with a hot L2, geometric means at the end."""
    header, body = _cells(suite, rows, "")
    ours = [name for name in _names(suite, rows) if name in suite.ours]
    header += [f"{name} / {', '.join(_ratio_names(suite))}" for name in ours]
    for texts, line in zip(body, lines(rows).values(), strict=True):
        texts += [", ".join(number(hot) for hot, _ in _ratios(suite, line, name)) for name in ours]
    caption = f"microseconds, hot L2 (cold L2); {_legend(suite)}"
    return Blocks(header, body, title, caption, left=2, means=_means(suite, rows))


def suite_rows(content: dict[str, Any]) -> list[SuiteRow]:
    return [SuiteRow(**{**values, "shape": tuple(values["shape"])}) for values in content["rows"]]


def suite_markdown(suite: Suite, results: Path) -> str:
    """The table of each committed run of ``sdfastgn kernels --suite``."""
    blocks = []
    for content in documents(results, suite.kind):
        rows = suite_rows(content)
        header, body = _cells(suite, rows, "**")
        for name in (name for name in _names(suite, rows) if name in suite.ours):
            header += [f"{name} / {over}" for over in _ratio_names(suite)]
            for texts, line in zip(body, lines(rows).values(), strict=True):
                pairs = _ratios(suite, line, name)
                texts += [
                    f"{number(hot)} ({number(cold)})" if hot and cold else NOTHING for hot, cold in pairs
                ]
        body += [[*texts, *[""] * (len(header) - len(texts))] for texts in _means(suite, rows)]
        legend = f"Microseconds, hot L2 (cold L2); bold: the best peer; {_legend(suite)}."
        blocks += [markdown_table(header, body), legend, *(f"{line}." for line in missing_cells(rows))]
        blocks.append(f"{content['config']['dtype']}, {source_line(content)}.")
    return "\n\n".join(blocks) or NO_RESULTS
