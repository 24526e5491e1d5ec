"""Breakdowns as tables, Markdown and pictures, and from the command line to all three."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.kernel_categories import CATEGORIES, CONVOLUTION, GAPS, GEMM, NORMALISATION, OTHER
from sdfastgn.bench.models.profiling import CALL, CPU, REPLAY, Breakdown
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.tables import pages as tables
from sdfastgn.bench.tables import plots
from sdfastgn.bench.tables import profile as profile_tables
from sdfastgn.bench.tables import results as result_tables
from sdfastgn.cli_commands import app

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "packages": {"torch": "2.11.0"},
    "git": {"commit": "0123456789"},
    "date": "2026-11-21",
}
MYSTERY = "void some_library::mystery<[a]>" + "x" * 200
SLOT = "<!-- table:profile -->\n<!-- /table:profile -->\n"


def breakdown(
    convolution: float, *, norms: float = 1.0, other: float = 0.0, source: str = REPLAY
) -> Breakdown:
    values = {CONVOLUTION: convolution, GEMM: 2.0, NORMALISATION: norms, OTHER: other, GAPS: 0.5}
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


def row(variant: str, found: Breakdown | None, *, part: str = "unet", status: str = OK, **values: Any) -> Row:
    profile = None if found is None else asdict(found)
    return Row("sd15", part, 512, 2, "fp16", variant, status, profile=profile, **values)


def text_of(rows: list[Row]) -> str:
    table = profile_tables.profile_table(rows, "title")
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def cells_of(rows: list[Row], variant: str) -> list[str]:
    line = next(line for line in text_of(rows).splitlines() if variant in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def save(folder: Path, name: str, rows: list[Row], kind: str = "profile") -> Path:
    content = {
        "schema": 1,
        "kind": kind,
        "environment": ENVIRONMENT,
        "config": {},
        "rows": [asdict(one) for one in rows],
    }
    (folder / name).write_text(json.dumps(content))
    return folder / name


ROWS = [
    row("eager", breakdown(5.0, norms=4.0)),
    row("sdfastgn", breakdown(4.0)),
    row("compile", None, status=WRONG),
]


# ---- tables


def test_a_row_has_milliseconds_by_category_total_and_floor() -> None:
    expected = ["eager", REPLAY, "5", "2", "0", "4", "0", "0", "0.5", "11.5", "7", "7", "61 %", "4.25"]
    assert cells_of(ROWS, "eager") == expected
    assert "compile" not in text_of(ROWS)


def test_a_red_gate_shows_no_breakdown_even_where_there_is_one() -> None:
    wrong = row("sdfastgn", breakdown(4.0), status=WRONG)
    assert profile_tables.breakdown_of(wrong) is None
    assert "sdfastgn" not in text_of([ROWS[0], wrong])
    assert profile_tables.profile_table([wrong], "title") is None
    assert profile_tables.lowest_floor([wrong]) is None


def test_the_lowest_floor_is_named() -> None:
    assert profile_tables.lowest_floor(ROWS) == ("sdfastgn", 6.0)
    assert profile_tables.notes(ROWS) == ["lowest floor: 6 ms, of sdfastgn"]


def test_what_no_category_has_is_a_column_and_a_line() -> None:
    assert "other" not in text_of(ROWS)
    rows = [*ROWS, row("channels_last", breakdown(4.0, other=2.5))]
    assert "other" in text_of(rows)
    assert "2.5" in cells_of(rows, "channels_last")
    line = profile_tables.notes(rows)[-1]
    assert line.startswith("other, channels_last: 2.5 ms (25.0 %) in 3 of void some_library::mystery<[a]>")
    assert len(line) < 200


def test_many_unknown_names_are_summed_up() -> None:
    entries = [{"name": f"mystery_{index}", "category": OTHER, "calls": 1, "ms": 1.0} for index in range(8)]
    found = Breakdown(**{**asdict(breakdown(4.0, other=8.0)), "other": entries})
    lines = profile_tables.notes([row("eager", found)])
    assert len(lines) == 7
    assert lines[-1] == "other, eager: 3 ms in 3 more names"


def test_why_a_breakdown_is_missing_is_a_line() -> None:
    rows = [row("eager", None, profile_reason="RuntimeError: CUPTI does not work here")]
    assert profile_tables.notes(rows) == ["no breakdown of eager: RuntimeError: CUPTI does not work here"]


def test_operators_of_the_cpu_are_called_so() -> None:
    shown = text_of([row("eager", breakdown(5.0, source=CPU))])
    assert CPU in shown
    assert "CPU operator time, not kernels" in shown
    assert "call's" not in shown  # there is no plain call beside


# ---- Markdown


def test_the_slot_says_that_nothing_is_measured(tmp_path: Path) -> None:
    save(tmp_path, "unet.json", [row("eager", None)], kind="end_to_end")
    assert "No results are committed yet." in tables.filled(SLOT, tmp_path)


def test_the_slot_holds_every_part_of_every_committed_run(tmp_path: Path) -> None:
    save(tmp_path, "b.json", [*ROWS, row("eager", breakdown(9.0, source=CALL), part="vae")])
    save(tmp_path, "a.json", [row("eager", breakdown(3.0), part="pipeline")])
    text = tables.filled(SLOT, tmp_path)
    headings = [line.split(":")[0] for line in text.splitlines() if "floor: " in line and "²" in line]
    assert [heading.split(" 512")[0] for heading in headings] == [
        "SD1.5 UNet step",
        "VAE decode, SD1.5",
        "SD1.5 pipeline",
    ]
    assert "| eager | replay | 5 | 2 | 0 | 4 | 0 | 0 | 0.5 | 11.5 | 7 | 7 | 61 % | 4.25 |" in text
    assert "lowest floor: 6 ms, of sdfastgn." in text
    assert text.count("NVIDIA H200, torch 2.11.0, commit 0123456789, 2026-11-21.") == 3
    assert tables.filled(text, tmp_path) == text


def test_runs_with_a_profiler_give_the_results_table_no_time_that_it_may_have_changed(tmp_path: Path) -> None:
    rows = [
        row("eager", breakdown(3.0), median_ms=99.0),
        row("channels_last", breakdown(3.0), median_ms=88.0, graph_ms=44.0),
        row("sdfastgn", breakdown(3.0), median_ms=33.0),
        row("compile", breakdown(3.0), median_ms=77.0, graph_ms=55.0),
    ]
    save(tmp_path, "a.json", rows)
    text = result_tables.results_markdown(tmp_path)
    # Nothing was recorded before the first, a graph has no launches that could be slowed down.
    assert "99 (1.00x)" in text
    assert "33 (0.33x)" in text
    assert "55 (0.56x)" in text
    assert "88" not in text
    assert "77" not in text


def test_a_run_without_a_profiler_stands_for_its_part(tmp_path: Path) -> None:
    save(
        tmp_path,
        "a.json",
        [row("eager", None, median_ms=20.0), row("sdfastgn", None, median_ms=5.0)],
        "end_to_end",
    )
    profiled = [
        row(name, breakdown(3.0), median_ms=90.0, graph_ms=80.0) for name in ("eager", "sdfastgn", "compile")
    ]
    save(tmp_path, "b.json", [*profiled, row("sdfastgn", breakdown(3.0), part="vae", median_ms=7.0)])
    text = result_tables.results_markdown(tmp_path)
    assert "5 (0.25x)" in text
    assert "90" not in text
    assert "80" not in text
    assert "| VAE decode, SD1.5 512², batch 2, fp16 | - | - | 7 |" in text


# ---- pictures


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_breakdown_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.png"
    plots.breakdown([*ROWS, row("eager", breakdown(9.0), part="vae")], path, "title")
    assert is_png(path)


def test_a_picture_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has a breakdown"):
        plots.breakdown([ROWS[2]], tmp_path / "profile.png", "title")


def test_a_picture_of_a_committed_run(tmp_path: Path) -> None:
    result = save(tmp_path, "profile.json", ROWS)
    assert plots.main([str(result), str(tmp_path / "out.png")]) == 0
    assert is_png(tmp_path / "out.png")


# ---- the command line


def test_from_the_command_line_to_table_json_and_picture(tmp_path: Path) -> None:
    result, picture = tmp_path / "profile.json", tmp_path / "profile.png"
    chosen = [
        "--model",
        "tiny",
        "--part",
        "unet",
        "--part",
        "vae",
        "--variants",
        "eager,sdfastgn",
        "--repeats",
        "1",
    ]
    written = ["--json", str(result), "--plot", str(picture)]
    done = CliRunner().invoke(app, ["bench", *chosen, "--device", "cpu", "--profile", *written])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("CPU operator time, not kernels") == done.stdout.count("lowest floor: ") == 2
    assert is_png(picture)
    content = json.loads(result.read_text())
    assert content["kind"] == "profile"
    assert [part["profile"] for part in content["config"]["parts"]] == [True, True]
    assert [(one["part"], one["variant"]) for one in content["rows"]] == [
        ("unet", "eager"),
        ("unet", "sdfastgn"),
        ("vae", "eager"),
        ("vae", "sdfastgn"),
    ]
    for one in content["rows"]:
        found = Breakdown(**one["profile"])
        assert sum(found.categories.values()) == pytest.approx(found.total_ms)
        assert 0 < len(found.top) <= 10
        assert {"name", "category", "calls", "ms"} == set(found.top[0])
    assert "CPU operators" in profile_tables.profile_markdown(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--plot", "out.png"], ["--plot", "--profile", "'out.png'"], id="without-profile"),
        pytest.param(["--profile", "--plot", "out.svg"], ["--plot", "'out.svg'", ".png"], id="not-a-png"),
    ],
)
def test_bad_options(arguments: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words)
