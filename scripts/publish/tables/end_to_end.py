"""Markdown tables of the times of whole models and pipelines, from committed results.

The results are the JSON files of ``sdfastgn bench``: runs (kind ``end_to_end`` or ``stable_fast``) and
sweeps over several batches or numbers of steps (kind ``sweep``). A variant is a way to run a model, such as
eager (diffusers' own code). A variant can have two times: the time of its call, and the time of the same call
as a CUDA graph that ``sdfastgn bench`` has captured (``Row.graph_ms``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown, run_apart, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line, without_empty_columns
from sdfastgn.bench.tables.end_to_end import row_notes
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.variants import EVERY_PART, PARTS, VARIANTS, label
from sdfastgn.program import counted

# Variants that also have a column with their time as a CUDA graph.
GRAPHED = ("eager", "compile", "sdfastgn_eager", "sdfastgn_compile")
_Choices = Sequence[tuple[str, bool]]
_Columns = Sequence[tuple[str, _Choices]]
# Kind of the results with stable-fast. These are separate runs, because stable-fast must be built by hand.
# ``sdfastgn bench`` does not write this kind: it was set in the committed file.
STABLE_FAST = "stable_fast"
# Title of the front page's column of stable-fast.
OF_ANOTHER_RUN = f"{label(STABLE_FAST)}, another run"
# Columns of the front page's table: (title, choices). A choice is (variant, True for its time as a CUDA
# graph). A column shows the first of its choices that has a time.
HEADLINE = (
    ("eager", (("eager", False),)),
    ("eager + graph", (("eager", True),)),
    (OF_ANOTHER_RUN, ((STABLE_FAST, False),)),
    ("torch.compile", (("compile", False),)),
    ("torch.compile + graph", (("compile", True), ("compile_graphs", False))),
    ("**sdfastgn**", (("sdfastgn", False),)),
)
# Columns of the table of transformers: (title, choices). A choice is (variant, True for its time as a CUDA
# graph). A column shows the first of its choices that has a time. torch.compile compiles the repeated blocks
# of a transformer, as diffusers recommends.
TRANSFORMERS = (
    *HEADLINE[:2],
    ("torch.compile, repeated blocks", (("compile_blocks", False),)),
    ("torch.compile + graph", (("compile_blocks", True),)),
    ("**sdfastgn**", (("sdfastgn", False),)),
    ("**sdfastgn, FP8**", (("sdfastgn_fp8", False),)),
)
# Title of the first column in tables of times.
TIMES = "milliseconds (speed-up over eager)"
# Title of the first column in the front page's table.
HEADLINE_TIMES = "milliseconds (speed-up over eager + graph, over eager)"
# Times of diffusers' own code that the front page's speed-ups compare with: (variant, True for its time as a
# CUDA graph). The first of the two times does not depend on the CPU.
REFERENCES = (("eager", True), ("eager", False))
# The list of speed-ups on the front page: (part, its name). The speed-ups are over eager's CUDA graph,
# because a speed-up over eager without a graph is larger on a slow CPU. The list leaves out whole images,
# because a pipeline is not one CUDA graph.
CLAIMS = (("vae", "VAE decodes"), ("unet", "UNet steps"), ("transformer", "transformer steps"))
# Columns of the front page's table of transformers: title -> (other variants, sdfastgn's variant). A cell
# says how many times as fast sdfastgn's variant is as the fastest of the other variants.
TRANSFORMER_CLAIMS: dict[str, tuple[_Choices, str]] = {
    "over eager + graph": ((("eager", True),), "sdfastgn"),
    "over torch.compile of repeated blocks": (
        (("compile_blocks", False), ("compile_blocks", True)),
        "sdfastgn",
    ),
    "in FP8, over eager + graph": ((("eager", True),), "sdfastgn_fp8"),
}
# Parts of a model, and dtype, of the measurements that the front page (README.md) shows.
HEADLINE_PARTS = ("unet", "vae", "pipeline")
HEADLINE_DTYPE = "fp16"
# Columns of the tables that compare eager, one competitor and sdfastgn: title -> function. A cell has three
# texts, and the function makes each of them from one variant's row.
COMPARED: dict[str, Callable[[Row], str]] = {
    "milliseconds": lambda row: number(row.median_ms),
    "seconds until ready": lambda row: number(row.ready_s),
    "error against fp32": lambda row: error_text(row.error_fp32),
    "PSNR dB": lambda row: number(row.psnr_db),
    "peak MiB": lambda row: number(row.peak_mib),
}
# Columns of the table that compares variants of transformers: title -> function. The function makes a text
# from one variant's row, and a cell has a text for each variant.
TRANSFORMERS_COMPARED: dict[str, Callable[[Row], str]] = {
    "seconds until ready": COMPARED["seconds until ready"],
    "error against fp32": COMPARED["error against fp32"],
    "of a row: median": lambda row: error_text(row.row_error_fp32),
    "of a row: 95 %": lambda row: error_text(row.high_row_error_fp32),
    "peak MiB": COMPARED["peak MiB"],
}


def rows_of_runs(results: Path, kind: str) -> list[tuple[Row, str]]:
    """Returns (row, source) for each row of all results of the kind ``kind``.

    The source is a line of text that names the row's run.
    """
    found = documents(results, kind)
    return [(Row(**values), source_line(content)) for content in found for values in content["rows"]]


@dataclass
class _Line:
    """The data for one line of a table.

    Attributes:
        rows: name of a variant -> its row.
        sources: for each row, a text that names the run in which the row was measured.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))


def _lines(results: Path, kind: str = "end_to_end", parts: Sequence[str] = PARTS) -> list[_Line]:
    """Returns the lines of a table of all results of the kind ``kind`` that measure one of ``parts``.

    There is a line for each part, model, size, batch, dtype and rank of a LoRA, and if the kind is ``sweep``,
    also for each number of steps. The lines are sorted in this order, with the steps before the rank.
    """
    found: dict[tuple[Any, ...], _Line] = defaultdict(_Line)
    shown = ((row, source) for row, source in rows_of_runs(results, kind) if row.part in parts)
    for row, source in shown:
        steps = row.steps or 0 if kind == "sweep" else 0
        key = (
            EVERY_PART.index(row.part),
            row.model,
            row.size,
            row.batch,
            row.dtype,
            steps,
            row.lora_rank or 0,
        )
        line = found[key]
        line.rows[row.variant] = row
        line.sources.append(source)
    return [line for _, line in sorted(found.items())]


def _markdown(
    header: Sequence[str], body: Sequence[Sequence[str]], reasons: Iterable[str], lines: Iterable[_Line]
) -> str:
    return markdown(header, body, [*reasons, *(source for line in lines for source in line.sources)])


def milliseconds(rows: Mapping[str, Row], *choices: tuple[str, bool]) -> float | None:
    """Returns the time of the first of ``choices`` that has a time; None if none has.

    ``choices``: (name of a variant, True for its time as a CUDA graph).
    """
    found = [(rows[name], graph) for name, graph in choices if name in rows]
    times = (row.graph_ms if graph else row.median_ms for row, graph in found)
    return next((time for time in times if time is not None), None)


def _cell(rows: Mapping[str, Row], *choices: tuple[str, bool]) -> str:
    """Returns a cell's text: the milliseconds, and the speed-up over eager if ``rows`` has eager's time."""
    value, eager = milliseconds(rows, *choices), milliseconds(rows, ("eager", False))
    if value is None:
        return NOTHING
    return f"{number(value)} ({eager / value:.2f}x)" if eager else number(value)


def results_markdown(results: Path) -> str:
    """Returns a table with a column for each variant that was run, and a line for each measured part."""
    lines = _lines(results)
    rows = [row for line in lines for row in line.rows.values()]
    shown = {row.variant for row in rows}
    every = [*((name, False) for name in VARIANTS), *((name, True) for name in GRAPHED)]
    columns = [(name, graph) for name, graph in every if name in shown]
    header = [TIMES, *(label(name) + " + graph" * graph for name, graph in columns)]
    body = [[row_title(line.first), *(_cell(line.rows, column) for column in columns)] for line in lines]
    reasons = [f"{label(row.variant)} {row.status}: {row.reason}" for row in rows if row.status != OK]
    return _markdown(header, body, reasons, lines)


def _headline(results: Path) -> list[_Line]:
    """Returns the lines of the front page's table."""
    return [
        line
        for line in _lines(results)
        if line.first.part in HEADLINE_PARTS
        and line.first.dtype == HEADLINE_DTYPE
        and milliseconds(line.rows, ("sdfastgn", False)) is not None
    ]


def _headline_rows(results: Path, line: _Line) -> dict[str, dict[str, Row]]:
    """Returns the rows in which the front page's table finds the times of each column of ``HEADLINE``.

    The result is a dict: title of the column -> variant -> row. For the column ``OF_ANOTHER_RUN`` the rows
    are from the separate run with stable-fast. For all other columns they are ``line.rows``.
    """
    apart = {row_title(one.first): one.rows for one in _lines(results, STABLE_FAST)}
    return {
        title: apart.get(row_title(line.first), {}) if title == OF_ANOTHER_RUN else line.rows
        for title, _ in HEADLINE
    }


@dataclass(frozen=True)
class Times:
    """The data of a picture of times.

    Attributes:
        panels: {what was timed: [(title of a column, milliseconds)]}, without columns that have no time.
        sources: for each run, a text that names it.
    """

    panels: dict[str, list[tuple[str, float]]]
    sources: list[str]


def headline_times(results: Path) -> Times:
    """Returns the times of the front page's table."""
    lines = _headline(results)
    found = _times([(line, _headline_rows(results, line)) for line in lines], HEADLINE)
    return replace(found, sources=[*found.sources, *_other_runs(results)])


def _other_runs(results: Path) -> list[str]:
    return [run_apart(label(STABLE_FAST), content) for content in documents(results, STABLE_FAST)]


def _transformers(results: Path) -> list[_Line]:
    return _lines(results, parts=("transformer",))


def transformer_claims_markdown(results: Path) -> str:
    """Returns the front page's table of transformers, with the columns ``TRANSFORMER_CLAIMS``."""
    lines = _transformers(results)
    body = []
    for line in lines:
        times = [
            ([milliseconds(line.rows, one) for one in others], milliseconds(line.rows, (ours, False)))
            for others, ours in TRANSFORMER_CLAIMS.values()
        ]
        best = [(min((time for time in found if time), default=None), ours) for found, ours in times]
        cells = [speed_up(theirs, ours) if theirs and ours else NOTHING for theirs, ours in best]
        body.append([row_title(line.first), *cells])
    return _markdown(["times as fast as others", *TRANSFORMER_CLAIMS], body, [], lines)


def transformer_times(results: Path) -> Times:
    lines = _transformers(results)
    return _times([(line, {title: line.rows for title, _ in TRANSFORMERS}) for line in lines], TRANSFORMERS)


def _times(lines: Sequence[tuple[_Line, Mapping[str, Mapping[str, Row]]]], columns: _Columns) -> Times:
    panels = {}
    for line, rows in lines:
        times = [(title.strip("*"), milliseconds(rows[title], *choices)) for title, choices in columns]
        panels[row_title(line.first)] = [(title, time) for title, time in times if time is not None]
    return Times(panels, [*dict.fromkeys(source for line, _ in lines for source in line.sources)])


def transformers_markdown(results: Path) -> str:
    """Returns a table of the times of transformers, with speed-ups over eager's CUDA graph."""
    lines = _transformers(results)
    rows = [row for line in lines for row in line.rows.values()]
    body = [
        [row_title(line.first), *(_over_graph(line.rows, choices) for _, choices in TRANSFORMERS)]
        for line in lines
    ]
    reasons = [f"{row_title(row)}: {note}" for row in rows if row.status != OK for note in row_notes([row])]
    header = ["milliseconds (speed-up over eager + graph)", *(title for title, _ in TRANSFORMERS)]
    return _markdown(header, body, reasons, lines)


def _over_graph(rows: Mapping[str, Row], choices: _Choices) -> str:
    value, graph = milliseconds(rows, *choices), milliseconds(rows, ("eager", True))
    if value is None or graph is None or choices[0] in REFERENCES:
        return number(value)
    return f"{number(value)} ({speed_up(graph, value)})"


def transformers_compared_markdown(results: Path) -> str:
    """Returns a table that compares variants on transformers: seconds until ready, errors and memory."""
    lines = _transformers(results)
    ours = ("sdfastgn", "sdfastgn_fp8")
    return _peer_table(lines, ("compile_blocks",), TRANSFORMERS_COMPARED, ours)


def headline_markdown(results: Path) -> str:
    """Returns the front page's table of eager, sdfastgn and its competitors.

    Each speed-up is over a time of the same run. So stable-fast, which was measured in another run, has none.
    """
    lines, body = _headline(results), []
    for line in lines:
        rows = _headline_rows(results, line)
        cells = (_headline_cell(title, rows[title], choices) for title, choices in HEADLINE)
        body.append([row_title(line.first), *cells])
    notes = _other_runs(results) if body else []
    return _markdown([HEADLINE_TIMES, *(title for title, _ in HEADLINE)], body, notes, lines)


def _headline_cell(title: str, rows: Mapping[str, Row], choices: _Choices) -> str:
    """Returns a cell's text: milliseconds, and the speed-ups over eager with and without a CUDA graph.

    Eager's times (``REFERENCES``) are from the same run.
    """
    value = milliseconds(rows, *choices)
    if value is None or title == OF_ANOTHER_RUN or choices[0] in REFERENCES:
        return number(value)
    found = (milliseconds(rows, reference) for reference in REFERENCES)
    return f"{number(value)} ({', '.join(f'{time / value:.2f}x' if time else NOTHING for time in found)})"


def claims_markdown(results: Path) -> str:
    """Returns lists, one for each GPU, with the smallest and the largest speed-up of each part.

    The parts are those of ``CLAIMS``. The speed-ups are over eager's CUDA graph, as in the front page's
    tables.
    """
    claims: dict[str, list[str]] = defaultdict(list)
    for part, name in CLAIMS:
        lines = _transformers(results) if part == "transformer" else _headline(results)
        lines = [line for line in lines if line.first.part == part]
        ours = ("sdfastgn", False)
        times = [(milliseconds(x.rows, ("eager", True)), milliseconds(x.rows, ours)) for x in lines]
        if ratios := sorted(theirs / ours for theirs, ours in times if theirs and ours):
            ends = dict.fromkeys(f"{ratio:.1f}x" for ratio in (ratios[0], ratios[-1]))
            gpus = dict.fromkeys(source.partition(",")[0] for line in lines for source in line.sources)
            speed_ups = f"{' to '.join(ends)} as fast as diffusers' own code in a CUDA graph"
            claims[" and ".join(gpus)].append(f"- {name}: {speed_ups}")
    lists = ["\n".join([f"Measured on {gpus}:\n", *found]) for gpus, found in claims.items()]
    return "\n\n".join(lists) or NO_RESULTS


def compared_markdown(results: Path) -> str:
    """Returns a table that compares eager, torch.compile and sdfastgn.

    It has all columns of ``COMPARED`` except milliseconds, which another table shows.
    """
    shown = {name: text for name, text in COMPARED.items() if name != "milliseconds"}
    return _peer_table(_lines(results), ("compile", "compile_graphs"), shown)


def stable_fast_markdown(results: Path) -> str:
    """Returns a table that compares eager, stable-fast and sdfastgn, from runs that timed all three."""
    return _peer_table(_lines(results, STABLE_FAST), (STABLE_FAST,), COMPARED)


def _peer_table(
    every: Sequence[_Line],
    peers: Sequence[str],
    shown: Mapping[str, Callable[[Row], str]],
    ours: Sequence[str] = ("sdfastgn",),
) -> str:
    """Returns a table that compares eager, one competitor and ``ours``. A cell has a value for each of them.

    ``every``: the data for the lines. ``peers``: names of variants. A line's competitor is the first of them
    for which the line has a row. Lines that lack a row of a competitor, of eager or of ``ours`` are left out.
    ``shown``: title of a column -> function, as in ``COMPARED``.
    """
    body, notes, lines = [], [], []
    for line in every:
        peer = next((name for name in peers if name in line.rows), None)
        if peer and {"eager", *ours} <= set(line.rows):
            rows = [line.rows[name] for name in ("eager", peer, *ours)]
            body.append([row_title(line.first), *(_side_by_side(map(text, rows)) for text in shown.values())])
            notes += [f"{row_title(line.first)}: {note}" for note in row_notes([line.rows[peer]])]
            lines.append(line)
    names = ("eager", peers[0], *ours)
    return _markdown([" / ".join(map(label, names)), *shown], body, notes, lines)


def _side_by_side(cells: Iterable[str]) -> str:
    text = " / ".join(cells)
    return text if text.strip(f"/ {NOTHING}") else NOTHING


# ---- sweeps over batches or steps


def _sweeps(results: Path, *, over_batches: bool) -> list[_Line]:
    """Returns lines of results of the kind ``sweep``.

    ``over_batches``: if True, the lines of what was measured at several batch sizes; if False, the lines of
    what was measured at only one batch size.
    """
    lines = _lines(results, "sweep")
    kinds = [(r.part, r.model, r.size, r.dtype, r.steps) for r in (line.first for line in lines)]
    several = [kinds.count(kind) > 1 for kind in kinds]
    return [line for line, swept in zip(lines, several, strict=True) if swept == over_batches]


def _sweep_title(row: Row) -> str:
    return row_title(row) + (f", {counted(row.steps, 'step')}" if row.steps else "")


def _sweep_table(cells: list[dict[str, str]], lines: list[_Line]) -> str:
    """Returns a table with a line for each of ``cells``, which are dicts: title of a column -> text.

    Texts below the table say why times of ``lines`` are missing, and name the runs.
    """
    missing = _missing((row for line in lines for row in line.rows.values()), _sweep_title)
    return _markdown(*without_empty_columns(cells), missing, lines)


def _missing(rows: Iterable[Row], title: Callable[[Row], str]) -> list[str]:
    """Returns a text for each row without a time, which says why. ``title``: names what a row should time."""
    return [
        f"{title(row)}, {label(row.variant)} {row.status}: {row.reason}" for row in rows if row.status != OK
    ]


def batches_markdown(results: Path) -> str:
    """Returns a table of sweeps over batches: milliseconds per sample, samples per second and memory."""
    lines = _sweeps(results, over_batches=True)
    cells: list[dict[str, str]] = []
    for rows, first in ((line.rows, line.first) for line in lines):
        cell = {"": _sweep_title(first)}
        for title, choices in HEADLINE:
            cell[f"{title} ms a sample (samples/s)"] = _rate(milliseconds(rows, *choices), first.batch)
        for name in ("eager", "sdfastgn"):
            cell[f"{label(name)} MiB"] = number(rows[name].reserved_mib, 6) if name in rows else NOTHING
        cells.append(cell)
    return _sweep_table(cells, lines)


def _rate(ms: float | None, batch: int) -> str:
    return NOTHING if ms is None else f"{number(ms / batch, 4)} ({number(1e3 * batch / ms)})"


def latency_markdown(results: Path) -> str:
    """Returns a table of pipelines at several numbers of steps: median and 90th percentile of the time.

    A further column has the sum of the times of the pipeline's CUDA graphs, replayed without the pipeline.
    """
    lines = [line for line in _sweeps(results, over_batches=False) if line.first.part == "pipeline"]
    cells = [
        {
            "": _sweep_title(row),
            "variant": label(row.variant),
            "p50 ms": number(row.median_ms, 4),
            "p90 ms": number(row.p90_ms, 4),
            "its graphs alone, ms": number(row.graphs_ms, 4),
            "p50 over that": number(row.median_ms / row.graphs_ms if row.graphs_ms else None),
        }
        for line in lines
        for row in line.rows.values()
        if row.median_ms is not None
    ]
    return _sweep_table(cells, lines)


def several_gpus_markdown(results: Path) -> str:
    """Returns a table of pipelines on several GPUs at once, one process for each: images per second.

    The last column is the rate of the largest number of GPUs divided by the rate of one GPU.
    """
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    runs = rows_of_runs(results, "processes")
    missing = _missing((row for row, _ in runs), row_title)
    for row, _ in runs:
        if row.images_s is not None:
            found[row_title(row), label(row.variant)][len(row.process_images_s or ())] = row.images_s
    counts = sorted({count for rates in found.values() for count in rates})
    header = ["images per second", "variant", *(counted(count, "GPU") for count in counts), "over one GPU"]
    body = []
    for key, rates in found.items():
        more = rates[counts[-1]] / rates[1] if {1, counts[-1]} <= rates.keys() else None
        cells = [number(rates.get(count)) for count in counts]
        body.append([*key, *cells, NOTHING if more is None else f"{more:.2f}x"])
    return markdown(header, body, [*missing, *dict.fromkeys(source for _, source in runs)])
