"""Breakdowns as tables, Markdown and pictures, and from the command line to all three."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from scripts.publish import pages
from scripts.publish import plots as published_plots
from scripts.publish.tables import end_to_end as published
from scripts.publish.tables.profile import profile_markdown
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.kernel_categories import CATEGORIES, CONVOLUTION, GAPS, GEMM, NORMALIZATION, OTHER
from sdfastgn.bench.profiling import CALL, CPU, REPLAY, Breakdown
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables import end_to_end, plots
from sdfastgn.bench.tables import profile as profile_tables
from tests.bench.tables.cases import SOURCE, cells_of, is_png, row, save, text_of
from tests.command_line import invoke

MYSTERY = "void some_library::mystery<[a]>" + "x" * 200
SLOT = "<!-- table:profile -->\n<!-- /table:profile -->\n"


def breakdown(
    convolution: float, *, norms: float = 1.0, other: float = 0.0, source: str = REPLAY
) -> Breakdown:
    values = {CONVOLUTION: convolution, GEMM: 2.0, NORMALIZATION: norms, OTHER: other, GAPS: 0.5}
    unknown = [{"name": MYSTERY, "category": OTHER, "calls": 3, "ms": other}] if other else []
    return Breakdown(
        source=source,
        categories={**dict.fromkeys(CATEGORIES, 0.0), **values},
        total_ms=sum(values.values()),
        timed_ms=7.0,
        floor_ms=convolution + 2.0,
        call_gaps_ms=None if source == CPU else 4.25,
        kernels=900,
        top=unknown,
        other=unknown,
    )


def profiled(
    variant: str, found: Breakdown, median: float | None = None, *, part: str = "unet", status: str = OK
) -> Row:
    return row(variant, median, part=part, status=status, profile=asdict(found))


def shown(rows: list[Row]) -> str:
    return text_of(profile_tables.profile_table(rows, "title"))


def notes(rows: list[Row]) -> list[str]:
    table = profile_tables.profile_table(rows, "title")
    assert table is not None
    return list(table.notes)


ROWS = [
    profiled("eager", breakdown(5.0, norms=4.0)),
    profiled("sdfastgn", breakdown(4.0)),
    row("compile", status=WRONG),
]


# ---- tables


def test_a_row_has_milliseconds_by_category_total_and_floor():
    expected = ["eager", REPLAY, "5", "2", "0", "4", "0", "0", "0.5", "11.5", "7", "7", "61 %", "4.25"]
    line = next(line for line in shown(ROWS).splitlines() if "eager" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == expected
    assert "compile" not in shown(ROWS)


def test_a_red_gate_shows_no_breakdown_even_where_there_is_one():
    wrong = profiled("sdfastgn", breakdown(4.0), status=WRONG)
    assert profile_tables.breakdown_of(wrong) is None
    assert "sdfastgn" not in shown([ROWS[0], wrong])
    assert profile_tables.profile_table([wrong], "title") is None
    assert profile_tables.lowest_floor([wrong]) is None


def test_the_lowest_floor_is_named():
    assert profile_tables.lowest_floor(ROWS) == ("sdfastgn", 6.0)
    assert notes(ROWS) == ["lowest floor: 6 ms, of sdfastgn"]


def test_what_no_category_has_is_a_column_and_a_line():
    assert "other" not in shown(ROWS)
    rows = [*ROWS, profiled("channels_last", breakdown(4.0, other=2.5))]
    assert "other" in shown(rows)
    assert " 2.5 " in next(line for line in shown(rows).splitlines() if "channels_last" in line)
    line = notes(rows)[-1]
    assert line.startswith("other, channels_last: 2.5 ms (25.0 %) in 3 of void some_library::mystery<[a]>")
    assert len(line) < 200


def test_many_unknown_names_are_summed_up():
    entries = [{"name": f"mystery_{index}", "category": OTHER, "calls": 1, "ms": 1.0} for index in range(8)]
    found = Breakdown(**{**asdict(breakdown(4.0, other=8.0)), "other": entries})
    lines = notes([profiled("eager", found)])
    assert len(lines) == 7
    assert lines[-1] == "other, eager: 3 ms in 3 more names"


def test_why_a_breakdown_is_missing_is_a_line_below_the_times():
    rows = [row("eager", 5.0, profile_reason="RuntimeError: CUPTI does not work here")]
    assert profile_tables.profile_table(rows, "title") is None
    table = end_to_end.end_to_end_table(rows, "title")
    assert table.notes == ["eager: no breakdown: RuntimeError: CUPTI does not work here"]


def test_operators_of_the_cpu_are_called_so():
    text = shown([profiled("eager", breakdown(5.0, source=CPU))])
    assert "CPU operator time, not kernels" in text
    assert "call's" not in text  # there is no plain call beside


# ---- Markdown


def test_the_slot_holds_every_part_of_every_committed_run(tmp_path):
    save(tmp_path, "c.json", "end_to_end", [row("eager", 1.0)])
    assert "No results are committed yet." in pages.filled(SLOT, tmp_path)
    save(tmp_path, "b.json", "profile", [*ROWS, profiled("eager", breakdown(9.0, source=CALL), part="vae")])
    save(tmp_path, "a.json", "profile", [profiled("eager", breakdown(3.0), part="pipeline")])
    text = pages.filled(SLOT, tmp_path)
    headings = [line.split(":")[0] for line in text.splitlines() if "floor: " in line and "²" in line]
    parts = ["SD1.5 UNet step", "VAE decode, SD1.5", "SD1.5 pipeline"]
    assert [heading.split(" 512")[0] for heading in headings] == parts
    assert "| eager | replay | 5 | 2 | 0 | 4 | 0 | 0 | 0.5 | 11.5 | 7 | 7 | 61 % | 4.25 |" in text
    assert "lowest floor: 6 ms, of sdfastgn." in text
    assert text.count(SOURCE) == 3
    assert pages.filled(text, tmp_path) == text


def test_runs_with_a_profiler_give_the_results_table_no_time_that_it_may_have_changed(tmp_path):
    save(tmp_path, "a.json", "end_to_end", [row("eager", 20.0), row("sdfastgn", 5.0)])
    rows = [profiled(name, breakdown(3.0), 90.0) for name in ("eager", "sdfastgn", "compile")]
    save(tmp_path, "b.json", "profile", rows)
    text = published.results_markdown(tmp_path)
    assert cells_of(text, "| SD1.5")[0][:2] == ["20 (1.00x)", "5 (4.00x)"]
    assert "90" not in text


# ---- pictures


@pytest.mark.slow
def test_breakdowns_of_a_committed_run_are_a_picture(tmp_path):
    rows = [*ROWS, profiled("eager", breakdown(9.0), part="vae")]
    save(tmp_path, "profile.json", "profile", rows)
    path = tmp_path / "profile.png"
    published_plots.PICTURES["profile_sdxl.png"](tmp_path, path)
    assert is_png(path)


def test_a_picture_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no row has a breakdown"):
        plots.breakdown([ROWS[2]], tmp_path / "profile.png", "title")


# ---- the command line


@pytest.mark.slow
def test_from_the_command_line_to_table_json_and_picture(tmp_path):
    result, picture = tmp_path / "profile.json", tmp_path / "profile.png"
    chosen = ("--part", "unet", "--part", "vae", "--variants", "eager", "--repeats", "1")
    written = ("--json", str(result), "--plot", str(picture))
    done = invoke("bench", *chosen, "--device", "cpu", "--profile", *written)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("CPU operator time, not kernels") == done.stdout.count("lowest floor: ") == 2
    assert is_png(picture)
    content = json.loads(result.read_text())
    assert content["kind"] == "profile"
    assert [part["profile"] for part in content["config"]["parts"]] == [True, True]
    assert [(one["part"], one["variant"]) for one in content["rows"]] == [("unet", "eager"), ("vae", "eager")]
    for one in content["rows"]:
        found = Breakdown(**one["profile"])
        assert sum(found.categories.values()) == pytest.approx(found.total_ms)
        assert 0 < len(found.top) <= 10
        assert {"name", "category", "calls", "ms"} == set(found.top[0])
    assert "CPU operators" in profile_markdown(tmp_path)
