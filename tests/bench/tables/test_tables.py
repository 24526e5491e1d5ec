"""Tables in the terminal and in Markdown: what they show, what they never show, and README files that are stale."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sdfastgn.bench.documents import OK, UNAVAILABLE, WRONG
from sdfastgn.bench.kernels.cells import QUOTED, KernelRow
from sdfastgn.bench.kernels.providers import NAMES as PROVIDERS
from sdfastgn.bench.models.run import Row
from sdfastgn.bench.models.variants import VARIANTS
from sdfastgn.bench.tables import markdown
from sdfastgn.bench.tables import pages as tables
from sdfastgn.bench.tables import results as result_tables
from sdfastgn.bench.terminal import Blocks

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "device": "cuda",
    "packages": {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "source_sha256": "f" * 64,
    "date": "2026-11-21T06:00:00+00:00",
}
SLOT = "before\n<!-- table:results -->\nold\n<!-- /table:results -->\nafter\n"


def row(variant: str, median: float | None, *, part: str = "unet", status: str = OK, **values: Any) -> Row:
    return Row(
        "sd15",
        part,
        512,
        2,
        "fp16",
        variant,
        status,
        median_ms=median,
        p10_ms=median,
        p90_ms=median,
        **values,
    )


def kernel(
    name: str, hot: float | None, shape: tuple[int, int, int, int] = (2, 320, 64, 64), copy: float = 2
) -> KernelRow:
    if hot is None:
        return KernelRow(shape, name, UNAVAILABLE, "not installed")
    return KernelRow(
        shape, name, OK, "", hot, hot + 1, hot_gbps=1.0, hot_ratio=hot / copy, cold_ratio=hot / copy
    )


def save(folder: Path, name: str, kind: str, rows: Iterable[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema": 1, "kind": kind, "environment": ENVIRONMENT, "config": {"dtype": "fp16"}}
    (folder / name).write_text(json.dumps({**content, "rows": [asdict(one) for one in rows]}))


def text_of(table: Blocks, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


UNET = [
    row("eager", 20.0, graph_ms=10.0),
    row("sdfastgn", 16.0, graph_ms=8.0),
    row("compile", 15.0, graph_ms=6.0),
    row("stable_fast", None, status=UNAVAILABLE, reason="package sfast is not installed"),
]
KERNELS = [
    kernel("copy", 2.0),
    kernel("eager_nhwc", 54.0),
    kernel("gnnhwc", 13.0),
    kernel("sdfastgn", 8.0),
    kernel("apex", None),
]


# ---- numbers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, "-", id="none"),
        pytest.param(0.0, "0", id="zero"),
        pytest.param(0.012345, "0.0123", id="small"),
        pytest.param(22.767, "22.8", id="tens"),
        pytest.param(1569.2, "1569", id="thousands"),
        pytest.param(20.0, "20", id="no-trailing-zeros"),
    ],
)
def test_numbers_have_three_digits_and_empty_columns_are_left_out(value: float | None, expected: str) -> None:
    cells = text_of(
        tables.end_to_end_table([row("eager", 1.0, peak_mib=1.0, ready_s=value), row("sdfastgn", 2.0)], "t")
    )
    if value is None:
        assert "ready s" not in cells  # a column that nothing has a value for
    else:
        assert expected in cells.replace("│", " ").split()


def test_rows_that_are_not_ok_give_their_reason_and_no_speed_up() -> None:
    wrong = row("channels_last", None, status=WRONG, reason="relative error 0.5 is above 0.02")
    rows = [UNET[0], wrong, UNET[1]]
    shown = text_of(tables.end_to_end_table(rows, "t"))
    line = next(line for line in shown.splitlines() if "channels_last" in line)
    assert "x" not in line
    assert "1.25x" in shown
    assert tables.row_notes(rows) == ["channels_last: wrong output: relative error 0.5 is above 0.02"]


# What a GPU's run has: every column, and long labels.
WIDE = [
    row(
        variant.name, 1234.5 + i, ready_s=123.4, graph_ms=1234.5, its=0.123, peak_mib=12345.0, error_eager=1e-3,
        error_fp32=1e-3, psnr_db=45.67, step_mib=12345.0, saved_mib=12345.0,
    )
    for i, variant in enumerate(VARIANTS)
]  # fmt: skip
NARROW_TABLES = {
    "bench": tables.end_to_end_table(WIDE, "t"),
    "kernels": tables.kernels_table(
        [
            kernel(name, 123.4, shape)
            for shape in ((2, 320, 64, 64), (16, 1280, 128, 128))
            for name in PROVIDERS
        ],
        "t",
    ),
}


@pytest.mark.parametrize("width", [60, 80, 120, 400])
@pytest.mark.parametrize("table", NARROW_TABLES.values(), ids=NARROW_TABLES)
def test_no_word_is_cut_at_any_width(table: Blocks, width: int) -> None:
    shown = text_of(table, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    words = set(re.split(r"[\s┃│]+", shown))
    for text in (*table.header, *(cell for line in (*table.body, *table.means) for cell in line)):
        assert set(text.split()) <= words
    # Each row is in each block, under the columns that name it.
    blocks = shown.count("┏")
    assert (blocks == 1) == (width == 400)
    assert len(re.findall(r"^│ (?=\S)", shown, re.MULTILINE)) >= blocks * len(table.body)


def test_graph_notes_join_the_variants_of_one_reason() -> None:
    rows = [
        row("eager", 1.0, graph_reason="no"),
        row("compile", 1.0, graph_reason="no"),
        row("sdfastgn", 1.0),
    ]
    assert tables.graph_notes(rows) == ["no graph time for eager, compile: no"]


@pytest.mark.parametrize(("ours", "marked"), [(8.0, False), (14.0, True)], ids=["won", "lost"])
def test_lost_cells_are_marked(ours: float, marked: bool) -> None:
    rows = [*KERNELS[:3], kernel("sdfastgn", ours)]
    assert (markdown.LOSS in text_of(tables.kernels_table(rows, "t")).split("microseconds")[0]) == marked


def test_missing_kernel_cells_say_why() -> None:
    quoted = KernelRow((2, 320, 64, 64), "gnnhwc", QUOTED, hot_us=3.0, cold_us=3.0)  # its cell is not empty
    assert markdown.missing_cells([*KERNELS, quoted]) == ["apex: unavailable: not installed (2x320x64x64)"]


# ---- Markdown


def test_results_hold_times_ratios_reasons_and_sources(tmp_path: Path) -> None:
    save(tmp_path / "h200", "unet_sd15.json", "end_to_end", UNET)
    save(
        tmp_path / "h200",
        "vae_512.json",
        "end_to_end",
        [row("eager", 22.0, part="vae"), row("sdfastgn", 8.8, part="vae")],
    )
    text = result_tables.results_markdown(tmp_path)
    unet, vae = (line for line in text.splitlines() if line.startswith(("| SD1.5", "| VAE")))
    assert [cell.strip() for cell in unet.split("|")[2:-1]] == [
        "20 (1.00x)", "-", "16 (0.80x)", "15 (0.75x)", "-", "10 (0.50x)", "6 (0.30x)", "8 (0.40x)",
    ]  # fmt: skip
    assert "8.8 (0.40x)" in vae
    assert "stable-fast unavailable: package sfast is not installed." in text
    assert "NVIDIA H200, driver 580.1, torch 2.11.0" in text
    assert "commit 0123456789" in text


def test_one_size_in_two_dtypes_is_two_lines(tmp_path: Path) -> None:
    rows = [row("eager", 20.0), row("sdfastgn", 5.0)]
    save(tmp_path, "fp16.json", "end_to_end", rows)
    save(tmp_path, "fp32.json", "end_to_end", [replace(one, dtype="fp32", median_ms=90.0) for one in rows])
    text = result_tables.results_markdown(tmp_path)
    assert [line.count("90 (1.00x)") for line in text.splitlines() if line.startswith("| SD1.5")] == [0, 2]


def test_quoted_peers_stand_where_nothing_ran(tmp_path: Path) -> None:
    save(tmp_path, "unet_sd15.json", "end_to_end", UNET)
    where = {"model": "sd15", "part": "unet", "size": 512, "batch": 2, "dtype": "fp16"}
    rows = [
        {**where, "variant": "stable_fast", "median_ms": 8.44},
        {**where, "variant": "compile", "median_ms": 1.0},
        {**where, "part": "pipeline", "variant": "compile", "median_ms": 2.0},
    ]
    content = {"kind": "end_to_end_quoted", "source": "a paper", "rows": rows}
    (tmp_path / "quoted.json").write_text(json.dumps(content))
    text = result_tables.results_markdown(tmp_path)
    (line,) = (line for line in text.splitlines() if line.startswith("| SD1.5"))
    assert [cell.strip() for cell in line.split("|")[5:7]] == ["15 (0.75x)", "8.44‡"]
    assert "‡: quoted, not run here: a paper." in text


def test_the_headline_has_the_peers_at_their_best(tmp_path: Path) -> None:
    save(tmp_path, "a.json", "end_to_end", UNET)
    save(tmp_path, "b.json", "end_to_end", [row("eager", 60.0, part="vae"), row("compile", 50.0, part="vae")])
    where = {"model": "sd15", "part": "pipeline", "size": 512, "batch": 2, "dtype": "fp16"}
    pipeline = [row("eager", 600.0, part="pipeline"), row("sdfastgn", 150.0, part="pipeline")]
    save(tmp_path, "c.json", "end_to_end", pipeline)
    quoted = [{**where, "variant": "compile_graphs", "median_ms": 206.0}]
    (tmp_path / "quoted.json").write_text(
        json.dumps({"kind": "end_to_end_quoted", "source": "a paper", "rows": quoted})
    )
    text = result_tables.headline_markdown(tmp_path)
    lines = [
        [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("| SD1.5")
    ]
    assert lines == [
        ["20 (1.00x)", "-", "15 (0.75x)", "6 (0.30x)", "16 (0.80x)"],
        ["600 (1.00x)", "-", "-", "206‡", "150 (0.25x)"],
    ]
    assert "VAE" not in text  # sdfastgn did not run


def test_two_variants_at_once_have_a_column_where_some_run_has_them(tmp_path: Path) -> None:
    save(tmp_path, "unet_sd15.json", "end_to_end", UNET)
    assert "sdfastgn + torch.compile" not in result_tables.results_markdown(tmp_path)
    save(tmp_path, "unet_sd15.json", "end_to_end", [*UNET, row("sdfastgn_compile", 14.0, graph_ms=5.0)])
    header, _, line = result_tables.results_markdown(tmp_path).splitlines()[:3]
    assert "| torch.compile | sdfastgn + torch.compile | stable-fast |" in header
    assert header.endswith("| sdfastgn + graph | sdfastgn + torch.compile + graph |")
    assert line.endswith("| 8 (0.40x) | 5 (0.25x) |")


def test_kernels_mark_best_peer_and_give_means(tmp_path: Path) -> None:
    save(tmp_path, "kernels.json", "kernels", KERNELS)
    text = tables.kernels_markdown(tmp_path)
    assert "| 2x320x64x64 | 2 (3) | 54 (55) | **13 (14)** | 8 (9) |" in text
    assert "4.00 (4.00) on 1" in text
    assert "apex: unavailable: not installed" in text


@pytest.mark.parametrize("name", tables.TABLES)
def test_without_results_a_table_says_so(name: str, tmp_path: Path) -> None:
    assert tables.TABLES[name](tmp_path) == "No results are committed yet."


# ---- README files


def test_write_then_check(tmp_path: Path) -> None:
    save(tmp_path / "benchmarks", "a.json", "end_to_end", UNET)
    readme = tmp_path / "README.md"
    readme.write_text(SLOT)
    results = ["--results", str(tmp_path / "benchmarks")]
    assert tables.main(["--check", str(readme), *results]) == 1
    assert tables.main(["--write", str(readme), *results]) == 0
    assert tables.main(["--check", str(readme), *results]) == 0
    written = readme.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "0.80x" in written
    assert "old" not in written
    save(tmp_path / "benchmarks", "a.json", "end_to_end", [row("eager", 30.0)])
    assert tables.main(["--check", str(readme), *results]) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("<!-- table:other --><!-- /table:other -->", "other", id="unknown-name"),
        pytest.param("<!-- table:results -->", "closed", id="not-closed"),
    ],
)
def test_slots_that_cannot_be_filled(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert tables.main(["--write", str(readme), "--results", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert readme.read_text() == text


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check", str(tmp_path / "none.md"), "--results", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["--results", "no"]], ids=["elsewhere", "misspelt"])
@pytest.mark.parametrize("mode", ["--write", "--check"])
def test_a_missing_folder_of_results_empties_no_table(
    mode: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(SLOT)
    assert tables.main([mode, str(readme), *arguments]) == 2
    folder = arguments[-1] if arguments else "benchmarks"
    assert capsys.readouterr().err == f"tables: --results: there is no folder {folder!r} here\n"
    assert readme.read_text() == SLOT


@pytest.mark.parametrize(("name", "slot"), [("README.md", "headline"), ("docs/benchmarks.md", "results")])
def test_the_tables_of_this_repository_are_fresh(name: str, slot: str) -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / name).read_text(encoding="utf-8")
    assert f"<!-- table:{slot} -->" in text
    assert tables.filled(text, root / "benchmarks") == text


PRODUCERS = [
    kernel("copy", 2.0),
    kernel("sdfastgn_given", 2.5),
    kernel("add", 4.0),
    kernel("add_with_statistics", 5.0),
]


def test_ops_with_statistics_have_a_table_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, "kernels.json", "kernels", PRODUCERS)
    text = tables.producers_markdown(tmp_path)
    assert "| N x C x H x W | sdfastgn_given / copy | add_with_statistics / add |" in text
    assert "| 2x320x64x64 | 2.5: 1.25 (1.17) | 5: 1.25 (1.20) |" in text
    assert "add" not in tables.kernels_markdown(tmp_path)


def test_quoted_times_fill_what_did_not_run_and_say_so(tmp_path: Path) -> None:
    rows = [kernel("copy", 2.0), kernel("apex", None), kernel("gnnhwc", 9.0), kernel("sdfastgn", 6.0)]
    save(tmp_path, "kernels.json", "kernels", rows)
    quoted = [KernelRow((2, 320, 64, 64), name, "quoted", "", 5.0, 5.5) for name in ("apex", "gnnhwc")]
    content = {
        "kind": "kernels_quoted",
        "dtype": "fp16",
        "source": "a paper",
        "rows": [asdict(one) for one in quoted],
    }
    (tmp_path / "quoted.json").write_text(json.dumps(content))
    text = tables.kernels_markdown(tmp_path)
    assert "| 2x320x64x64 | 2 (3) | 9 (10) | **5 (5.5)** | 6 (7)† | 1.2 (1.27) |" in text
    assert "Quoted, not run here: apex: a paper." in text


def test_cpu_time_of_a_call(tmp_path: Path) -> None:
    one = kernel("sdfastgn", 6.0)
    one.cpu_us = 12.34
    save(tmp_path, "kernels.json", "kernels", [one])
    assert "| sdfastgn | 12.3 |" in tables.host_markdown(tmp_path)
