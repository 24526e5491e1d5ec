"""Suites as tables: in the terminal, and in Markdown from committed JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.ratios import (
    Line,
    best_peer,
    extra_ratios,
    is_lost,
    lines,
    means,
    ratio,
    timed_names,
)
from sdfastgn.bench.kernels.suite import COPY, OURS, QUOTED, KernelRow, Shape, Suite, rows_of, shape_text
from sdfastgn.bench.tables.markdown import (
    LOSS,
    NO_RESULTS,
    NOTHING,
    documents,
    markdown_table,
    number,
    source_line,
)
from sdfastgn.bench.terminal import Blocks

# One launch, and three: small enough that the CPU never waits for the GPU.
_HOST_SHAPES: tuple[Shape, ...] = ((2, 1280, 8, 8), (2, 1280, 16, 16), (2, 640, 32, 32), (2, 320, 64, 64))
_COLD = (False, True)


def cell_line(row: KernelRow) -> str:
    """A cell as soon as it is measured; empty where it cannot be."""
    if row.status == UNAVAILABLE:
        return ""
    times = f"{number(row.hot_us)} us ({number(row.cold_us)})"
    found = times if row.status == OK else f"{row.status}: {row.reason}"
    return f"{shape_text(row.shape)} {row.provider}, {row.task}: {found}"


def missing_cells(rows: Iterable[KernelRow]) -> list[str]:
    """Why cells are empty, one line for each provider and reason."""
    # Keys of a dict: a shape may have several rows, one for each task.
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status not in (OK, QUOTED):
            shapes = by_reason.setdefault((row.provider, f"{row.status}: {row.reason}"), {})
            shapes[shape_text(row.shape)] = None
    return [
        f"{name}: {reason} ({f'{len(shapes)} shapes' if len(shapes) > 3 else ', '.join(shapes)})"
        for (name, reason), shapes in by_reason.items()
    ]


# ---- what both kinds of tables show


def _competing(suite: Suite, rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The copy's rows and those of the suite's operations, without its extras."""
    tasks = {COPY, *(op.label(what) for op in suite.operations for what in op.passes)}
    return [row for row in rows if row.task in tasks]


def _cell(line: Line, name: str) -> str:
    row = line.get(name)
    if row is None or row.status not in (OK, QUOTED):
        return NOTHING
    lost = name.startswith(OURS) and any(is_lost(line, name, cold=cold) for cold in _COLD)
    return f"{number(row.hot_us)} ({number(row.cold_us)}){LOSS if lost else ''}"


def _ratios(suite: Suite, line: Line, name: str) -> dict[str, tuple[float | None, float | None]]:
    """Hot and cold times of ``name`` over those of the copy, of the baseline and of the best peer."""
    peers = [best_peer(line, cold=cold) for cold in _COLD]
    overs: dict[str, list[str | None]] = {
        COPY: [COPY, COPY],
        suite.baseline: [suite.baseline, suite.baseline],
        "best peer": peers,
    }
    return {
        label: (ratio(line, name, hot), ratio(line, name, cold, cold=True))
        for label, (hot, cold) in overs.items()
    }


def _mean_lines(suite: Suite, rows: Sequence[KernelRow], over: str) -> list[tuple[str, str, list[str]]]:
    """Geometric means over ``over``: set of shapes, task, and a cell for each provider."""
    found = []
    for set_name, by_task in means(suite, rows, over).items():
        for task, by_name in by_task.items():
            entries = [by_name.get(name) for name in timed_names(rows)]
            texts = [f"{e['hot']:.2f} ({e['cold']:.2f}) on {e['shapes']}" if e else NOTHING for e in entries]
            found.append((set_name, task, texts))
    return found


def _legend(suite: Suite) -> str:
    ideals = ", ".join(f"{ideal:g} for {task}" for task, ideal in suite.ideals.items())
    return f"{LOSS}: a peer is faster; least time over the copy's where memory is the limit: {ideals}"


# ---- the terminal


def suite_table(suite: Suite, rows: Sequence[KernelRow], title: str) -> Blocks:
    """Shapes and tasks x providers: microseconds hot (cold), our ratios, geometric means."""
    rows = _competing(suite, rows)
    names = timed_names(rows)
    ours = [name for name in names if name.startswith(OURS)]
    header = [suite.axes, "what", *names]
    for name in ours:
        header += [f"{name} / {', '.join((COPY, suite.baseline, 'best peer'))}", f"{name} GB/s"]
        header += [f"{name} CPU us"] * suite.times_cpu
    body = []
    for (shape, task), line in lines(rows).items():
        texts = [shape_text(shape), task, *(_cell(line, name) for name in names)]
        for name in ours:
            row = line.get(name)
            texts.append(", ".join(number(hot) for hot, _ in _ratios(suite, line, name).values()))
            texts.append(number(row.hot_gbps if row else None, 4))
            texts += [number(row.cpu_us if row else None)] * suite.times_cpu
        body.append(texts)
    mean_rows = [
        [f"mean / {over}, {set_name}", task, *texts]
        for over in (COPY, suite.baseline)
        for set_name, task, texts in _mean_lines(suite, rows, over)
    ]
    caption = f"microseconds, hot L2 (cold L2); {_legend(suite)}"
    return Blocks(header, body, title, caption, left=2, means=mean_rows)


def extras_table(suite: Suite, rows: Sequence[KernelRow]) -> Blocks | None:
    """The suite's extras beside the plain ops; None where none was timed."""
    header, body = _extras(suite, rows)
    caption = "microseconds: time over the plain op's, hot L2 (cold L2)"
    return Blocks(header, body, caption=caption) if len(header) > 1 else None


def _extras(suite: Suite, rows: Sequence[KernelRow]) -> tuple[list[str], list[list[str]]]:
    """Header and body of shapes x extras: microseconds hot, and their ratio to the plain op's."""
    ratios = extra_ratios(suite, rows)
    baselines = {op.providers[-1].name: op.baseline for op in suite.extras}
    hot = {(row.provider, row.shape): row.hot_us for row in rows}
    names = [name for name in baselines if name in ratios]
    body = []
    for shape in dict.fromkeys(row.shape for row in rows):
        line = [shape_text(shape)]
        for name in names:
            pair = ratios[name].get(shape)
            times = f"{number(hot[name, shape])}: {pair[0]:.2f} ({pair[1]:.2f})" if pair else NOTHING
            line.append(times)
        body.append(line)
    return [_spaced(suite.axes), *(f"{name} / {baselines[name]}" for name in names)], body


def _spaced(axes: str) -> str:
    return axes.replace("x", " x ")


# ---- Markdown


def _with_quoted(
    suite: Suite, rows: list[KernelRow], results: Path, dtype: str
) -> tuple[list[KernelRow], list[str]]:
    """``rows`` with published times where a provider did not run, and their sources."""
    ran = {(row.provider, row.shape) for row in rows if row.status == OK}
    shapes = {row.shape for row in rows}
    sources = []
    for content in documents(results, f"{suite.kind}_quoted"):
        quoted = [
            row
            for row in rows_of(suite, content)
            if row.shape in shapes and (row.provider, row.shape) not in ran
        ]
        if content["dtype"] != dtype or not quoted:
            continue
        replaced = {(row.provider, row.shape) for row in quoted}
        rows = [row for row in rows if (row.provider, row.shape) not in replaced] + quoted
        names = ", ".join(dict.fromkeys(row.provider for row in quoted))
        sources.append(f"Quoted, not run here: {names}: {content['source']}")
    return rows, sources


def suite_markdown(suite: Suite, results: Path) -> str:
    """The table of each committed run of the suite."""
    blocks = []
    for content in documents(results, suite.kind):
        dtype = content["config"]["dtype"]
        rows, quoted = _with_quoted(suite, rows_of(suite, content), results, dtype)
        missing = missing_cells(rows)
        rows = _competing(suite, rows)
        table = _brief_table(suite, rows) if suite.in_brief else _full_table(suite, rows)
        who = f"{LOSS}: a peer is faster than sdfastgn" if suite.in_brief else _legend(suite)
        notes = (*quoted, *missing, f"{dtype}, {source_line(content)}")
        legend = f"Microseconds, hot L2 (cold L2); bold: the best peer; {who}."
        blocks += [table, legend, *(f"{note}." for note in notes)]
    return "\n\n".join(blocks) or NO_RESULTS


def _marked(line: Line, names: Sequence[str]) -> list[str]:
    """A cell for each provider, the best peer's in bold."""
    best = best_peer(line)
    return [f"**{_cell(line, name)}**" if name == best else _cell(line, name) for name in names]


def _pair(pair: tuple[float | None, float | None]) -> str:
    return f"{number(pair[0])} ({number(pair[1])})" if all(pair) else NOTHING


def _full_table(suite: Suite, rows: Sequence[KernelRow]) -> str:
    names = timed_names(rows)
    ours = [name for name in names if name.startswith(OURS)]
    header = [suite.axes, "what", *names]
    header += [f"{name} / {over}" for name in ours for over in (COPY, suite.baseline, "best peer")]
    body = []
    for (shape, task), line in lines(rows).items():
        pairs = [_pair(pair) for name in ours for pair in _ratios(suite, line, name).values()]
        body.append([shape_text(shape), task, *_marked(line, names), *pairs])
    for over in (COPY, suite.baseline):
        for set_name, task, texts in _mean_lines(suite, rows, over):
            body.append([f"mean / {over}, {set_name}", task, *texts, *[""] * (len(header) - len(texts) - 2)])
    return markdown_table(header, body)


def _brief_table(suite: Suite, rows: Sequence[KernelRow]) -> str:
    names = timed_names(rows)
    body = [
        [shape_text(shape), *_marked(line, names), _pair(_ratios(suite, line, OURS)["best peer"])]
        for (shape, _), line in lines(rows).items()
    ]
    for set_name, _, texts in _mean_lines(suite, [row for row in rows if row.status == OK], COPY):
        # Others' published times have another run's copy.
        by_name = dict(zip(timed_names([row for row in rows if row.status == OK]), texts, strict=True))
        body.append([f"mean of time / copy, {set_name}", *(by_name.get(name, NOTHING) for name in names), ""])
    return markdown_table([_spaced(suite.axes), *names, f"{OURS} / best peer"], body)


def extras_markdown(suite: Suite, results: Path) -> str:
    """The suite's extras in each committed run."""
    blocks = []
    for content in documents(results, suite.kind):
        header, body = _extras(suite, rows_of(suite, content))
        if len(header) > 1:
            blocks += [markdown_table(header, body), f"{content['config']['dtype']}, {source_line(content)}."]
    return "\n\n".join(blocks) or NO_RESULTS


def host_markdown(suite: Suite, results: Path) -> str:
    """What a call costs the CPU, by provider and number of launches, of the committed fp16 run."""
    for content in documents(results, suite.kind):
        rows = [row for row in rows_of(suite, content) if row.cpu_us is not None]
        if content["config"]["dtype"] == "fp16" and rows:
            times = {(row.provider, row.shape): row.cpu_us for row in rows}
            shapes = [shape for shape in _HOST_SHAPES if any(row.shape == shape for row in rows)]
            body = [
                [name, *(number(times.get((name, shape))) for shape in shapes)]
                for name in dict.fromkeys(row.provider for row in rows)
            ]
            return markdown_table(["microseconds of CPU time", *map(shape_text, shapes)], body)
    return NO_RESULTS
