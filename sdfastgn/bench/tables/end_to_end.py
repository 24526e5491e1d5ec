"""End-to-end times as tables: in the terminal, and in Markdown from committed runs and sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import PARTS, VARIANTS, label
from sdfastgn.bench.tables.markdown import (
    NOTHING,
    documents,
    error_text,
    markdown,
    number,
    source_line,
    without_empty_columns,
)
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.terminal import Blocks

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


# Parts and dtype of the front page.
HEADLINE_PARTS = ("unet", "vae", "pipeline")
HEADLINE_DTYPE = "fp16"
# What a comparison with one peer shows, by title: a field of ``Row``.
COMPARED = {
    "milliseconds": "median_ms",
    "seconds until ready": "ready_s",
    "error against fp32": "error_fp32",
    "peak MiB": "peak_mib",
}


# ---- the terminal


def end_to_end_table(rows: Sequence[Row], title: str) -> Blocks:
    """One part's rows, without empty columns. :func:`row_notes` say why a time is missing."""
    eager = next((row.median_ms for row in rows if row.variant == "eager" and row.status == OK), None)
    cells = [
        {
            "variant": label(row.variant),
            "ready s": number(row.ready_s),
            "median ms": number(row.median_ms, 4),
            "p10-p90 ms": NOTHING if row.p10_ms is None else f"{number(row.p10_ms)}-{number(row.p90_ms)}",
            "p99 ms": number(row.p99_ms),
            "speed-up": f"{eager / row.median_ms:.2f}x" if eager and row.median_ms else NOTHING,
            "graph ms": number(row.graph_ms, 4),
            "graphs ms": number(row.graphs_ms, 4),
            "it/s": number(row.its),
            "images/s": number(row.images_s),
            "peak MiB": number(row.peak_mib, 5),
            "reserved MiB": number(row.reserved_mib, 5),
            "error, eager": error_text(row.error_eager),
            "error, fp32": error_text(row.error_fp32),
            "PSNR dB": number(row.psnr_db),
            "PSNR dB, fp32": number(row.psnr_fp32_db),
            "SSIM, fp32": number(row.ssim_fp32, 4),
            "step MiB": number(row.step_mib),
            "saved MiB": number(row.saved_mib),
        }
        for row in rows
    ]
    return Blocks(*without_empty_columns(cells), title)


def row_notes(rows: Iterable[Row]) -> list[str]:
    """What variants did to the model, each process's images/s, or why there is no time."""
    texts = []
    for row in rows:
        texts.append((row.variant, row.note if row.status == OK else f"{row.status}: {row.reason}"))
        each = ", ".join(map(number, row.process_images_s or ()))
        texts.append((row.variant, each and f"images/s of each process, all at the same time: {each}"))
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


# What a line is about: part, model, size, batch, dtype, and in a sweep steps.
_Group = tuple[int, str, int, int, str, int]
# Rows of each line by variant, in the order of the lines.
_Groups = dict[_Group, dict[str, Row]]
# The lines that name a group's runs, in order.
_Sources = dict[_Group, list[str]]


def rows_of_runs(results: Path, kind: str) -> list[tuple[Row, str]]:
    """The rows of all runs of a kind, each with the line that names its run."""
    found = documents(results, kind)
    return [(Row(**values), source_line(content)) for content in found for values in content["rows"]]


def _read(results: Path, kind: str = "end_to_end") -> tuple[_Groups, _Sources]:
    """The lines of a table of all runs of a kind."""
    groups: _Groups = {}
    sources: _Sources = {}
    for row, source in rows_of_runs(results, kind):
        steps = row.steps if kind == "sweep" and row.steps else 0
        group = PARTS.index(row.part), row.model, row.size, row.batch, row.dtype, steps
        groups.setdefault(group, {})[row.variant] = row
        sources.setdefault(group, []).append(source)
    return dict(sorted(groups.items())), sources


def _lines_of(sources: _Sources, groups: Iterable[_Group]) -> list[str]:
    return [line for group in groups for line in sources[group]]


def milliseconds(rows: Mapping[str, Row], *choices: tuple[str, bool]) -> float | None:
    """The first time that there is, of (variant, in the harness's graph)."""
    found = [(rows[name], graph) for name, graph in choices if name in rows]
    times = (row.graph_ms if graph else row.median_ms for row, graph in found)
    return next((time for time in times if time is not None), None)


def _cell(rows: Mapping[str, Row], *choices: tuple[str, bool]) -> str:
    """Milliseconds of a variant, and how many times eager's speed that is where both ran together."""
    value, eager = milliseconds(rows, *choices), milliseconds(rows, ("eager", False))
    if value is None:
        return NOTHING
    return f"{number(value)} ({eager / value:.2f}x)" if eager else number(value)


def _title(rows: Mapping[str, Row]) -> str:
    return row_title(next(iter(rows.values())))


def _times(header: Iterable[str], body: list[list[str]], lines: Iterable[str]) -> str:
    return markdown(["milliseconds (speed-up over eager)", *header], body, lines)


def results_markdown(results: Path) -> str:
    """Every variant of every part."""
    groups, sources = _read(results)
    rows = [row for group in groups.values() for row in group.values()]
    shown = {row.variant for row in rows}
    labels = {name: variant.label for name, variant in VARIANTS.items() if name in shown}
    with_graph = {row.variant for row in rows if row.graph_ms is not None}
    graphed = [name for name in GRAPHED if name in labels and (name != "sdfastgn" or name in with_graph)]
    columns = [*((name, False) for name in labels), *((name, True) for name in graphed)]
    header = [labels[name] + " + graph" * graph for name, graph in columns]
    body = [[_title(group), *(_cell(group, column) for column in columns)] for group in groups.values()]
    reasons = [f"{label(row.variant)} {row.status}: {row.reason}" for row in rows if row.status != OK]
    return _times(header, body, [*reasons, *_lines_of(sources, groups)])


def _headline(groups: _Groups) -> _Groups:
    """What the front page shows."""
    return {
        group: rows
        for group, rows in groups.items()
        if PARTS[group[0]] in HEADLINE_PARTS
        and group[4] == HEADLINE_DTYPE
        and milliseconds(rows, ("sdfastgn", False)) is not None
    }


def headline_times(results: Path) -> dict[str, list[tuple[str, float]]]:
    """{what is timed: [(column, milliseconds)]} of the columns with a time."""
    return {
        _title(rows): [
            (column.strip("*"), value)
            for column, choices in HEADLINE
            if (value := milliseconds(rows, *choices)) is not None
        ]
        for rows in _headline(_read(results)[0]).values()
    }


def headline_markdown(results: Path) -> str:
    """What sdfastgn is there for beside its peers, in few columns."""
    groups, sources = _read(results)
    shown = _headline(groups)
    body = [[_title(rows), *(_cell(rows, *choices) for _, choices in HEADLINE)] for rows in shown.values()]
    return _times((title for title, _ in HEADLINE), body, _lines_of(sources, shown))


def peer_markdown(results: Path, peer: str) -> str:
    """Eager, one peer and sdfastgn side by side in all that was measured, where the peer was tried."""
    groups, sources = _read(results)
    names = ("eager", peer, "sdfastgn")
    tried = {group: rows for group, rows in groups.items() if set(names) <= set(rows)}
    body = [
        [
            _title(rows),
            *(" / ".join(_measured(rows[name], field) for name in names) for field in COMPARED.values()),
        ]
        for rows in tried.values()
    ]
    order = " / ".join(map(label, names))
    reasons = [f"{_title(rows)}: {note}" for rows in tried.values() for note in row_notes([rows[peer]])]
    return markdown([order, *COMPARED], body, [*reasons, *_lines_of(sources, tried)])


def _measured(row: Row, field: str) -> str:
    value = getattr(row, field)
    return error_text(value) if field.startswith("error") else number(value)


# ---- sweeps over batches or steps


def _sweeps(results: Path, *, over_batches: bool) -> tuple[_Groups, _Sources]:
    """The lines of sweeps over several batches, or of those at one."""
    groups, sources = _read(results, "sweep")
    batches = Counter(group[:3] + group[4:] for group in groups)
    shown = {g: rows for g, rows in groups.items() if (batches[g[:3] + g[4:]] > 1) == over_batches}
    return shown, sources


def _sweep_title(row: Row) -> str:
    return row_title(row) + (f", {row.steps} steps" if row.steps else "")


def _sweep_table(cells: list[dict[str, str]], shown: _Groups, sources: _Sources) -> str:
    """The table of ``cells``, why a time is missing, and the lines that name the runs."""
    missing = [
        f"{_sweep_title(row)}, {label(row.variant)} {row.status}: {row.reason}"
        for rows in shown.values()
        for row in rows.values()
        if row.status != OK
    ]
    return markdown(*without_empty_columns(cells), [*missing, *_lines_of(sources, shown)])


def batches_markdown(results: Path) -> str:
    """Milliseconds a sample, samples a second and memory, of what was timed at several batches."""
    shown, sources = _sweeps(results, over_batches=True)
    cells: list[dict[str, str]] = []
    for rows in shown.values():
        first = next(iter(rows.values()))
        cell = {"": _sweep_title(first)}
        for title, choices in HEADLINE:
            cell[f"{title} ms a sample (samples/s)"] = _rate(milliseconds(rows, *choices), first.batch)
        for name in ("eager", "sdfastgn"):
            cell[f"{label(name)} MiB"] = number(rows[name].reserved_mib, 6) if name in rows else NOTHING
        cells.append(cell)
    return _sweep_table(cells, shown, sources)


def _rate(ms: float | None, batch: int) -> str:
    return NOTHING if ms is None else f"{number(ms / batch, 4)} ({number(1e3 * batch / ms)})"


def latency_markdown(results: Path) -> str:
    """Median and 99th percentile of pipelines at one batch, beside the time of their CUDA graphs alone."""
    groups, sources = _sweeps(results, over_batches=False)
    shown = {group: rows for group, rows in groups.items() if PARTS[group[0]] == "pipeline"}
    cells = [
        {
            "": _sweep_title(row),
            "variant": label(row.variant),
            "p50 ms": number(row.median_ms, 4),
            "p99 ms": number(row.p99_ms, 4),
            "its graphs alone, ms": number(row.graphs_ms, 4),
            "p50 over that": number(row.median_ms / row.graphs_ms if row.graphs_ms else None),
        }
        for rows in shown.values()
        for row in rows.values()
        if row.median_ms is not None
    ]
    return _sweep_table(cells, shown, sources)
