"""End-to-end times as tables: in the terminal, and in Markdown from committed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import PARTS, VARIANTS, label
from sdfastgn.bench.tables.markdown import (
    NO_RESULTS,
    NOTHING,
    documents,
    error_text,
    markdown_table,
    number,
    source_line,
)
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.terminal import Blocks

QUOTATION = "‡"
_Group = tuple[int, str, int, int, str]
# Variants with a column for their time in the harness's CUDA graph; sdfastgn in old runs.
GRAPHED = ("eager", "compile", "sdfastgn", "sdfastgn_eager", "sdfastgn_compile")
# (title, choices of (variant, in the harness's graph), of which the first with a time is shown)
HEADLINE = (
    ("eager", (("eager", False),)),
    ("eager + graph", (("eager", True),)),
    ("stable-fast", (("stable_fast", False),)),
    ("torch.compile", (("compile", False),)),
    ("torch.compile + graph", (("compile", True), ("compile_graphs", False))),
    ("**sdfastgn**", (("sdfastgn", False),)),
)


# ---- the terminal


def _speed_up(row: Row, eager: Row | None) -> str:
    if eager is None or row.median_ms is None or eager.median_ms is None:
        return NOTHING
    return f"{eager.median_ms / row.median_ms:.2f}x"


def _mebibytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def end_to_end_table(rows: Sequence[Row], title: str) -> Blocks:
    """One part's rows, without empty columns. :func:`row_notes` say why a time is missing."""
    eager = next((row for row in rows if row.variant == "eager" and row.status == OK), None)
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("ready s", lambda row: number(row.ready_s)),
        ("median ms", lambda row: number(row.median_ms, 4)),
        (
            "p10-p90 ms",
            lambda row: NOTHING if row.p10_ms is None else f"{number(row.p10_ms)}-{number(row.p90_ms)}",
        ),
        ("speed-up", lambda row: _speed_up(row, eager)),
        ("graph ms", lambda row: number(row.graph_ms, 4)),
        ("it/s", lambda row: number(row.its)),
        ("peak MiB", lambda row: number(row.peak_mib, 5)),
        ("error, eager", lambda row: error_text(row.error_eager)),
        ("error, fp32", lambda row: error_text(row.error_fp32)),
        ("PSNR dB", lambda row: number(row.psnr_db)),
    ]
    columns += [
        ("step MiB", lambda row: _mebibytes(row.step_mib)),
        ("saved MiB", lambda row: _mebibytes(row.saved_mib)),
    ]
    shown = [(name, cell) for name, cell in columns if any(cell(row) != NOTHING for row in rows)]
    body = [[label(row.variant), *(cell(row) for _, cell in shown)] for row in rows]
    return Blocks(["variant", *(name for name, _ in shown)], body, title)


def row_notes(rows: Iterable[Row]) -> list[str]:
    """What variants did to the model, or why there is no time."""
    texts = [(row.variant, row.note if row.status == OK else f"{row.status}: {row.reason}") for row in rows]
    return [f"{label(name)}: {text}" for name, text in texts if text]


def row_line(row: Row) -> str:
    """A row as soon as it is measured."""
    found = f"{number(row.median_ms, 4)} ms" if row.status == OK else f"{row.status}: {row.reason}"
    return f"{row.part}: {row.variant}: {found}"


def graph_notes(rows: Iterable[Row]) -> list[str]:
    """Why there is no graph time, one line a reason, with the variants that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.graph_reason:
            by_reason.setdefault(row.graph_reason, []).append(row.variant)
    return [f"no graph time for {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


# ---- Markdown


@dataclass(frozen=True)
class _Results:
    """All rows of all runs by what was timed, others' times where nothing ran, and the sources."""

    groups: dict[_Group, dict[str, Row]]
    quoted: dict[_Group, dict[str, float]]
    quotations: list[str]
    sources: list[str]

    def milliseconds(self, group: _Group, name: str, *, graph: bool = False) -> tuple[float | None, bool]:
        """(the time of a variant, whether it is quoted)"""
        row = self.groups[group].get(name)
        value = None if row is None else row.graph_ms if graph else row.median_ms
        if value is None and not graph and name in self.quoted[group]:
            return self.quoted[group][name], True
        return value, False

    def cell(self, group: _Group, name: str, *, graph: bool = False) -> str:
        """Milliseconds of a variant, and how many times eager's they are where both ran together."""
        value, is_quoted = self.milliseconds(group, name, graph=graph)
        eager = self.groups[group].get("eager")
        if is_quoted:
            return f"{number(value)}{QUOTATION}"
        return _milliseconds(value, eager.median_ms if eager is not None else None)


def _read(results: Path) -> _Results:
    runs = [*documents(results, "end_to_end"), *documents(results, "profile")]
    groups: dict[_Group, dict[str, Row]] = {}
    # Timed by a run without a profile, which comes first: two runs' times are not mixed in a line.
    timed: set[_Group] = set()
    for content in runs:
        rows = [Row(**values) for values in content["rows"]]
        if content["kind"] == "profile":
            rows = [row for row in _untouched(rows) if _group(vars(row)) not in timed]
        else:
            timed |= {_group(vars(row)) for row in rows}
        for row in rows:
            groups.setdefault(_group(vars(row)), {})[row.variant] = row
    quoted, quotations = _quoted_times(results, groups)
    return _Results(
        dict(sorted(groups.items())), quoted, quotations, list(dict.fromkeys(map(source_line, runs)))
    )


def _untouched(rows: Sequence[Row]) -> list[Row]:
    """Rows of a run with profiles without the times that these may have changed.

    Once it has recorded, the profiler's library costs the CPU time at each launch. What a graph
    replays has none; before a part's first recording there is nothing to change.
    """
    replays = {variant.name for variant in VARIANTS.values() if variant.replays_graph}
    parts: set[str] = set()
    kept = []
    for row in rows:
        is_first = row.part not in parts
        parts.add(row.part)
        kept.append(row if is_first or row.variant in replays else replace(row, median_ms=None))
    return kept


def _title(by_variant: dict[str, Row]) -> str:
    return row_title(next(iter(by_variant.values())))


def _blocks(header: Sequence[str], body: list[list[str]], lines: Sequence[str]) -> str:
    return "\n\n".join([markdown_table(list(header), body), *(f"{line}." for line in lines)])


def results_markdown(results: Path) -> str:
    """Every variant of every part."""
    read = _read(results)
    if not read.groups:
        return NO_RESULTS
    shown = {name for group in read.groups for name in (*read.groups[group], *read.quoted[group])}
    labels = {name: variant.label for name, variant in VARIANTS.items() if name in shown}
    rows = [row for by_variant in read.groups.values() for row in by_variant.values()]
    with_graph = {row.variant for row in rows if row.graph_ms is not None}
    graphed = [name for name in GRAPHED if name in labels and (name != "sdfastgn" or name in with_graph)]
    header = [
        "milliseconds (time over eager's)",
        *labels.values(),
        *(f"{labels[name]} + graph" for name in graphed),
    ]
    body = [
        [
            _title(by_variant),
            *(read.cell(group, name) for name in labels),
            *(read.cell(group, name, graph=True) for name in graphed),
        ]
        for group, by_variant in read.groups.items()
    ]
    reasons = dict.fromkeys(
        f"{label(row.variant)} {row.status}: {row.reason}" for row in rows if row.status != OK
    )
    return _blocks(header, body, [*reasons, *read.quotations, *read.sources])


def headline_times(results: Path) -> dict[str, list[tuple[str, float, bool]]]:
    """{what is timed: [(column, milliseconds, whether they are quoted)]} of the columns with a time."""
    read = _read(results)
    found: dict[str, list[tuple[str, float, bool]]] = {}
    for group, by_variant in read.groups.items():
        times = found.setdefault(_title(by_variant), []) if _ran(by_variant.get("sdfastgn")) else []
        for title, choices in HEADLINE:
            cells = [read.milliseconds(group, name, graph=graph) for name, graph in choices]
            times += [(title.strip("*"), value, quoted) for value, quoted in cells if value is not None][:1]
    return found


def headline_markdown(results: Path) -> str:
    """What sdfastgn is there for beside its peers, in few columns."""
    read = _read(results)
    groups = {group: rows for group, rows in read.groups.items() if _ran(rows.get("sdfastgn"))}
    if not groups:
        return NO_RESULTS
    body = []
    for group, by_variant in groups.items():
        line = [_title(by_variant)]
        for _, choices in HEADLINE:
            cells = [read.cell(group, name, graph=graph) for name, graph in choices]
            line.append(next((cell for cell in cells if cell != NOTHING), NOTHING))
        body.append(line)
    header = ["milliseconds (time over eager's)", *(title for title, _ in HEADLINE)]
    return _blocks(header, body, [*read.quotations, *read.sources])


def _milliseconds(value: float | None, eager: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{number(value)} ({value / eager:.2f}x)" if eager else number(value)


def _group(values: dict[str, Any]) -> _Group:
    """What one line of the end-to-end table is about, in the order of its lines."""
    return PARTS.index(values["part"]), values["model"], values["size"], values["batch"], values["dtype"]


def _ran(row: Row | None) -> bool:
    return row is not None and row.median_ms is not None


def _quoted_times(
    results: Path, groups: dict[_Group, dict[str, Row]]
) -> tuple[dict[_Group, dict[str, float]], list[str]]:
    """Milliseconds that others measured, by variant, of what was not run; and where they come from."""
    found: dict[_Group, dict[str, float]] = {group: {} for group in groups}
    sources = []
    for content in documents(results, "end_to_end_quoted"):
        rows = [
            v
            for v in content["rows"]
            if _group(v) in groups and not _ran(groups[_group(v)].get(v["variant"]))
        ]
        for values in rows:
            found[_group(values)][values["variant"]] = values["median_ms"]
        if rows:
            sources.append(f"{QUOTATION}: quoted, not run here: {content['source']}")
    return found, sources
