"""Tables of all kinds of results: of one run, of several runs side by side, or with published numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK, images_path, load, read_json
from sdfastgn.bench.kernels.suite import KernelRow, Suite, rows_of, shape_text
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.presets import PRESETS
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables import warm_up
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import NOTHING, number, source_line
from sdfastgn.bench.tables.end_to_end import end_to_end_table
from sdfastgn.bench.tables.kernels import suite_tables
from sdfastgn.bench.tables.profile import profile_table, row_title
from sdfastgn.bench.variants import VARIANTS, label
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.program import OptionError, counted

# The kinds of runs that ``sdfastgn bench`` makes: values of the field ``kind`` of their JSON.
BENCH_KINDS = ("end_to_end", "profile", "preset", "processes", "sweep")
OTHER_MACHINE = "other machine"
NO_GPU = "no GPU: sdfastgn runs stock's own code here, so its times should be about eager's (1x)"
# Settings in which a run may differ from its preset (a benchmark that another project publishes) and still be
# compared with the preset's published numbers.
_FREE_SETTINGS = ("repeats",)
# Settings of a pipeline that a preset (a benchmark that another project publishes) may leave out -> the
# values that they then have.
_DEFAULTS = {name: getattr(BenchConfig, name) for name in ("scheduler", "guidance", "prompt", "seed")}


@dataclass(frozen=True)
class Result:
    """The results of one run.

    Attributes:
        name: the run's name in tables.
        content: the content of the run's JSON file.
        figures: title of a measured pipeline (see ``case_title``) -> its images, as ``page.figures`` returns
            them.
    """

    name: str
    content: dict[str, Any]
    figures: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        environment = self.content["environment"]
        return str(environment.get("gpu") or environment.get("machine"))

    @property
    def warnings(self) -> list[str]:
        """Lines to show above the tables, such as that there was no GPU."""
        on_cpu = self.content["environment"].get("device") == "cpu"
        return [NO_GPU] if on_cpu and self.content["kind"] in BENCH_KINDS else []


def read_result(path: Path, name: str) -> Result:
    """Read the run at ``path``, and its images.

    Raises OptionError, which names the file, if the file of the run or of the images is damaged.
    """
    result, images = Result(name, read_json(path)), images_path(path)
    damaged = path
    try:
        for table in tables_of(result):
            # In a damaged file a cell may be no text. Then ``join`` raises an error.
            "".join(cell for row in table.body for cell in row)
        times_of(result), source_line(result.content)
        damaged = images
        for title, shown in (load(images) if images.exists() else {}).items():
            result.figures[title] = [(caption, note, source) for caption, note, source in shown]
    except OptionError:
        raise
    except Exception as error:  # a damaged file may have wrong values anywhere, so any error may occur
        why = "a field is missing, unknown or of another type"
        raise OptionError(f"{str(damaged)!r} holds no whole result of sdfastgn: {why}") from error
    return result


def _config_of(row: Row, content: dict[str, Any]) -> dict[str, Any]:
    """The config with which a row was measured; empty if the run's JSON does not contain it."""
    names = ("model", "part", "size", "batch", "dtype")
    parts = content["config"].get("parts", [])
    found = [each for each in parts if all(each[name] == getattr(row, name) for name in names)]
    return next((each for each in found if row.steps in (None, each["steps"])), {})


def case_title(row: Row, content: dict[str, Any]) -> str:
    """Describes in words what a row measures. Rows of two runs are compared if they have the same title."""
    part = _config_of(row, content)
    count = len(row.process_images_s or ())
    processes = f", {counted(count, 'process', 'processes')}" if count else ""
    if row.part != "pipeline" or not part:
        return row_title(row)
    scheduler = f", {part['scheduler']}" if part.get("scheduler") else ""
    return f"{row_title(row)}, {counted(part['steps'], 'step')}{scheduler}{processes}"


def _without_slowed_times(rows: Sequence[Row]) -> list[Row]:
    """Return ``rows`` of a run, without the times that PyTorch's profiler may have made longer.

    After the profiler has recorded something, every later kernel launch takes more CPU time. So times of rows
    after the first row with a profile are removed. Rows of variants that replay graphs keep their times,
    because replays do not launch kernels one by one. So does the first row of each part, which was timed
    before its part was recorded: recordings of other parts hardly change its times.
    """
    replays = {variant.name for variant in VARIANTS.values() if variant.replays_graph}
    first = {row.part: row for row in reversed(rows)}
    recorded = next((i for i, row in enumerate(rows) if row.profile is not None), len(rows))
    return [
        row
        if i <= recorded or row is first[row.part] or row.variant in replays
        else replace(row, median_ms=None, p10_ms=None, p90_ms=None, p99_ms=None, its=None)
        for i, row in enumerate(rows)
    ]


def cases_of(result: Result) -> dict[str, list[Row]]:
    """Returns title (``case_title``) -> rows with this title, for a run of ``sdfastgn bench``.

    Times that the profiler may have made longer are removed. Returns an empty dict for another kind of run.
    """
    if result.content["kind"] not in BENCH_KINDS:
        return {}
    rows = _without_slowed_times([Row(**values) for values in result.content["rows"]])
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(case_title(row, result.content), []).append(row)
    return cases


def _kernels_of(result: Result) -> tuple[Suite, list[KernelRow]] | None:
    suite = next((each for each in SUITES.values() if each.kind == result.content["kind"]), None)
    return None if suite is None else (suite, rows_of(suite, result.content))


def tables_of(result: Result) -> list[Blocks]:
    """All tables of a run. Raises OptionError if there are no tables for the run's kind."""
    kind, config = result.content["kind"], result.content.get("config", {})
    if kind in BENCH_KINDS:
        tables = []
        for title, rows in cases_of(result).items():
            gate = _config_of(rows[0], result.content).get("gate", "")
            profile = profile_table(rows, f"where the time of {title} goes")
            tables += [end_to_end_table(rows, title, gate), *([profile] if profile else [])]
        return tables + preset_tables(result)
    if kind == warm_up.KIND:
        return [warm_up.result_table(result.content)]
    if found := _kernels_of(result):
        return suite_tables(*found, f"{found[0].title}, {config['dtype']}", config["dtype"])
    raise OptionError(f"{result.name!r} has results of the kind {kind!r}, which has no report")


def preset_tables(result: Result) -> list[Blocks]:
    """A table for each measured case of a preset, which is a benchmark that another project publishes.

    It has the numbers of this run and the published numbers, in the same unit.
    """
    tables = []
    cases = cases_of(result) if result.content["kind"] == "preset" else {}
    for title, rows in cases.items():
        part = _config_of(rows[0], result.content)
        preset = PRESETS.get(part.get("preset", ""))
        if preset is None:
            continue
        times = {label(row.variant): row.median_ms for row in rows if row.status == OK and row.median_ms}
        body = [[name, result.machine, number(preset.value(ms, part), 4)] for name, ms in times.items()]
        note = "published numbers are left out: other settings than the preset's"
        for case in preset.cases:
            own = {**_DEFAULTS, **case.settings}
            fixed = {key: value for key, value in own.items() if key not in _FREE_SETTINGS}
            if fixed.items() <= {**_DEFAULTS, **part}.items():
                body += [[name, OTHER_MACHINE, number(value, 4)] for name, value in case.published.items()]
                note = f"published: {preset.source}, {preset.date}" if case.published else "not published"
        header = ("what ran", "machine", preset.unit)
        title = f"preset {preset.name}: {title}"
        tables.append(Blocks(header, body, title, f"{note}; {preset.differs}", left=2))
    return tables


def times_of(result: Result) -> dict[tuple[str, str], float]:
    """Returns (what was timed, variant or provider) -> time.

    The time is in milliseconds. For kernels it is in microseconds, with a hot L2 cache.
    """
    if found := _kernels_of(result):
        rows = [row for row in found[1] if row.status == OK]
        return {(f"{shape_text(row.shape)} {row.task}", row.provider): row.times[0] or 0.0 for row in rows}
    return {
        (title, label(row.variant)): row.median_ms
        for title, rows in cases_of(result).items()
        for row in rows
        if row.status == OK and row.median_ms is not None
    }


def comparison(results: Sequence[Result]) -> Blocks:
    """A table of the times of all runs side by side, and of their ratios to the times of the first run.

    It has no rows if no call or kernel was timed in more than one run. Otherwise it also shows what only one
    run has timed.
    """
    first, *others = results
    times = [times_of(result) for result in results]
    marks = [result.name + f", {OTHER_MACHINE}" * (result.machine != first.machine) for result in results]
    header = ["what", "variant", *marks, *(f"{result.name} / {first.name}" for result in others)]
    keys = dict.fromkeys(key for each in times for key in each)
    owners = Counter(title for each in times for title in dict.fromkeys(title for title, _ in each))
    titles = list(owners) if max(owners.values(), default=0) > 1 else []
    body = []
    for key in (key for title in titles for key in keys if key[0] == title):
        values = [each.get(key) for each in times]
        ratios = [_ratio_text(value / values[0]) if value and values[0] else NOTHING for value in values[1:]]
        body.append([*key, *(number(value, 4) for value in values), *ratios])
    caption = f"milliseconds (kernels: microseconds with a hot L2); slower or faster than {first.name}"
    if any(result.machine != first.machine for result in results):
        caption += f"; {OTHER_MACHINE}: another GPU than in {first.name}"
    return Blocks(header, body, "comparison", caption, left=2)


def _ratio_text(ratio: float) -> str:
    """The ratio of two times with a word for it, such as ``1.20, slower``."""
    text = f"{ratio:.2f}"
    return f"{text}, {'equal' if text == '1.00' else 'slower' if ratio > 1 else 'faster'}"
