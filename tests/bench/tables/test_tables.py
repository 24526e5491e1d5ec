"""Tables of end-to-end times, widths of all tables, and Markdown files whose tables are stale."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.publish import pages, plots
from scripts.publish.tables import end_to_end as published
from scripts.publish.tables.markdown import NO_RESULTS
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.kernels.suite import COPY, FORWARD, KernelRow
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables import end_to_end, kernels
from sdfastgn.bench.variants import VARIANTS
from tests.bench.tables.cases import SOURCE, cells_of, is_png, row, save, text_of

SLOT = "before\n<!-- table:results -->\nold\n<!-- /table:results -->\nafter\n"
UNET = [
    row("eager", 20.0, graph_ms=10.0),
    row("sdfastgn", 16.0, graph_ms=8.0),
    row("compile", 15.0, graph_ms=6.0),
    row("stable_fast", status=UNAVAILABLE, reason="package sfast is not installed"),
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
def test_numbers_have_three_digits_and_empty_columns_are_left_out(value, expected):
    cells = text_of(
        end_to_end.end_to_end_table(
            [row("eager", 1.0, peak_mib=1.0, ready_s=value), row("sdfastgn", 2.0)], "t"
        )
    )
    if value is None:
        assert "ready s" not in cells  # a column that nothing has a value for
    else:
        assert expected in cells.replace("│", " ").split()


def test_rows_that_are_not_ok_give_their_reason_and_no_speed_up():
    wrong = row("channels_last", None, status=WRONG, reason="relative error 0.5 is above 0.02")
    rows = [UNET[0], wrong, UNET[1]]
    shown = text_of(end_to_end.end_to_end_table(rows, "t"))
    line = next(line for line in shown.splitlines() if "channels_last" in line)
    assert "x" not in line
    assert "1.25x" in shown
    assert end_to_end.row_notes(rows) == ["channels_last: wrong output: relative error 0.5 is above 0.02"]


@pytest.mark.parametrize(
    ("eager", "ours", "marked"),
    [
        pytest.param((424.0, 1426.0, 2428.0), (67.0, 68.0, 69.0), "20.97x?", id="eager's times differ"),
        pytest.param((1400.0, 1426.0, 1500.0), (30.0, 68.0, 90.0), "20.97x?", id="ours differ"),
        pytest.param((1400.0, 1426.0, 1500.0), (60.0, 68.0, 75.0), "20.97x", id="they agree"),
        pytest.param((9.0, 10.0, 11.0), (9.0, 10.0, 11.0), "1.00x", id="no speed-up, and that is certain"),
    ],
)
def test_a_speed_up_whose_range_is_wider_than_itself_is_marked(eager, ours, marked):
    names = ("p10_ms", "median_ms", "p90_ms")
    times = {"eager": eager, "sdfastgn": ours}
    rows = [replace(row(name, 1.0), **dict(zip(names, found, strict=True))) for name, found in times.items()]
    table = end_to_end.end_to_end_table(rows, "t")
    assert [line[table.header.index("speed-up")] for line in table.body] == ["1.00x", marked]
    expected = marked.endswith("?")
    assert [note.partition(" is uncertain: ")[0] for note in table.notes] == ["sdfastgn: 20.97x?"] * expected
    if eager[0] == 424.0:
        assert "6.14x to 36.24x" in text_of(table)  # 424 / 69, 2428 / 67


# What a GPU's run has: every column, and long labels.
WIDE = [
    row(
        name, 1234.5 + i, ready_s=123.4, graph_ms=1234.5, its=0.123, peak_mib=12345.0, error_eager=1e-3,
        error_fp32=1e-3, psnr_db=45.67, step_mib=12345.0, saved_mib=12345.0,
    )
    for i, name in enumerate(VARIANTS)
]  # fmt: skip
LONG_CELLS = [
    KernelRow((16, 1280, 128, 128), name, OK, "", 123.4, 124.5, task=COPY if name == COPY else FORWARD)
    for name in SUITES["inference"].providers
]
NARROW_TABLES = {
    "bench": end_to_end.end_to_end_table(WIDE, "t"),
    "kernels": kernels.suite_tables(SUITES["inference"], LONG_CELLS, "t", "fp16")[0],
}


@pytest.mark.parametrize("width", [60, 80, 120, 400])
@pytest.mark.parametrize("table", NARROW_TABLES.values(), ids=NARROW_TABLES)
def test_no_word_is_cut_at_any_width(table, width):
    shown = text_of(table, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    words = set(re.split(r"[\s┃│]+", shown))
    for text in (*table.header, *(cell for line in table.body for cell in line)):
        assert set(text.split()) <= words
    # Each row is in each block, under the columns that name it.
    blocks = shown.count("┏")
    assert (blocks == 1) == (width == 400)
    assert len(re.findall(r"^│ (?=\S)", shown, re.MULTILINE)) >= blocks * len(table.body)


def test_graph_notes_join_the_variants_of_one_reason():
    rows = [
        row("eager", 1.0, graph_reason="no"),
        row("compile", 1.0, graph_reason="no"),
        row("sdfastgn", 1.0),
    ]
    assert end_to_end.graph_notes(rows) == ["no graph time for eager, compile: no"]


# ---- Markdown


def test_results_hold_times_ratios_reasons_and_sources(tmp_path):
    save(tmp_path / "h200", "unet_sd15.json", "end_to_end", UNET)
    vae = [row("eager", 22.0, part="vae"), row("sdfastgn", 8.8, part="vae")]
    save(tmp_path / "h200", "vae_512.json", "end_to_end", vae)
    text = published.results_markdown(tmp_path)
    columns = ("eager", "sdfastgn", "torch.compile", "stable-fast")
    graphs = ("eager + graph", "torch.compile + graph")
    assert cells_of(text, "| milliseconds") == [[*columns, *graphs]]
    times = ["20 (1.00x)", "16 (1.25x)", "15 (1.33x)", "-", "10 (2.00x)", "6 (3.33x)"]
    assert cells_of(text, "| SD1.5") == [times]
    assert cells_of(text, "| VAE")[0][:2] == ["22 (1.00x)", "8.8 (2.50x)"]
    assert "stable-fast unavailable: package sfast is not installed." in text
    assert text.endswith(SOURCE)


def test_one_size_in_two_dtypes_is_two_lines(tmp_path):
    rows = [row("eager", 20.0), row("sdfastgn", 5.0)]
    save(tmp_path, "fp16.json", "end_to_end", rows)
    save(tmp_path, "fp32.json", "end_to_end", [replace(one, dtype="fp32", median_ms=90.0) for one in rows])
    lines = cells_of(published.results_markdown(tmp_path), "| SD1.5")
    assert [line[0] for line in lines] == ["20 (1.00x)", "90 (1.00x)"]


def test_one_peer_is_compared_in_all_that_was_measured(tmp_path):
    unet = [
        row("eager", 20.0, ready_s=1.0, error_fp32=2e-3, peak_mib=900.0),
        row("stable_fast", 12.0, ready_s=15.0, error_fp32=1.1e-2, peak_mib=800.0, note="traced"),
        row("sdfastgn", 5.0, ready_s=3.0, error_fp32=1.7e-3, peak_mib=700.0),
    ]
    wrong = row("stable_fast", part="vae", status=WRONG, reason="off by 3")
    vae = [row("eager", 9.0, part="vae"), wrong, row("sdfastgn", 4.0, part="vae")]
    pipeline = [row("eager", 9.0, part="pipeline"), row("sdfastgn", 4.0, part="pipeline")]  # not tried
    save(tmp_path, "a.json", "end_to_end", [*unet, *vae, *pipeline])
    text = published.peer_markdown(tmp_path, "stable_fast")
    assert "| eager / stable-fast / sdfastgn | milliseconds | seconds until ready |" in text
    assert cells_of(text, "| SD1.5") == [
        ["20 / 12 / 5", "1 / 15 / 3", "2.0e-03 / 1.1e-02 / 1.7e-03", "900 / 800 / 700"]
    ]
    assert cells_of(text, "| VAE")[0][0] == "9 / - / 4"
    assert "fp16: stable-fast: traced." in text
    assert "fp16: stable-fast: wrong output: off by 3." in text
    assert "No results" in published.peer_markdown(tmp_path, "compile")


def test_the_headline_has_the_peers_at_their_best(tmp_path):
    save(tmp_path, "a.json", "end_to_end", UNET)
    save(tmp_path, "b.json", "end_to_end", [row("eager", 60.0, part="vae"), row("compile", 50.0, part="vae")])
    times = {"eager": 600.0, "compile_graphs": 206.0, "sdfastgn": 150.0}
    pipeline = [row(name, time, part="pipeline") for name, time in times.items()]
    save(tmp_path, "c.json", "end_to_end", pipeline)
    others = [row("sdfastgn", 7.0, part="train"), replace(row("sdfastgn", 9.0), dtype="fp32")]
    save(tmp_path, "d.json", "end_to_end", others, environment={"gpu": "another GPU"})
    text = published.headline_markdown(tmp_path)
    assert "training" not in text
    assert "fp32" not in text
    assert "another GPU" not in text  # the lines below are those of the runs above
    assert cells_of(text, "| SD1.5") == [
        ["20 (1.00x)", "10 (2.00x)", "-", "15 (1.33x)", "6 (3.33x)", "16 (1.25x)"],
        ["600 (1.00x)", "-", "-", "-", "206 (2.91x)", "150 (4.00x)"],
    ]
    assert "VAE" not in text  # sdfastgn did not run
    unet, whole = published.headline_times(tmp_path).items()
    ours = ("sdfastgn", 16.0)
    assert unet[1] == [
        ("eager", 20.0),
        ("eager + graph", 10.0),
        ("torch.compile", 15.0),
        ("torch.compile + graph", 6.0),
        ours,
    ]
    assert whole[1][1:] == [("torch.compile + graph", 206.0), ("sdfastgn", 150.0)]
    assert plots.main([str(tmp_path), str(tmp_path / "times.png")]) == 0
    assert is_png(tmp_path / "times.png")


# ---- sweeps


def of_batch(batch: int, *rows: Row) -> list[Row]:
    return [replace(each, batch=batch) for each in rows]


BATCHES = [
    *of_batch(
        8, row("eager", 30.0, graph_ms=16.0, reserved_mib=4000.0), row("sdfastgn", 8.0, reserved_mib=3000.0)
    ),
    *of_batch(
        1, row("eager", 25.0, graph_ms=5.0, reserved_mib=2500.0), row("sdfastgn", 2.0, reserved_mib=2400.0)
    ),
    *of_batch(64, row("eager", status=FAILED, reason="OutOfMemoryError: no"), row("sdfastgn", status=FAILED)),
]
STEPS = [
    row("eager", 500.0, part="pipeline", steps=4, p99_ms=520.0),
    row("sdfastgn", 12.0, part="pipeline", steps=1, p99_ms=13.0, graphs_ms=10.0),
    row("sdfastgn", 24.0, part="pipeline", steps=4, p99_ms=30.0, graphs_ms=20.0),
]


def test_samples_a_second_by_batch(tmp_path):
    save(tmp_path, "batches.json", "sweep", BATCHES)
    save(tmp_path, "steps.json", "sweep", STEPS)
    text = published.batches_markdown(tmp_path)
    (header,) = cells_of(text, "|  |")
    assert header == [
        "eager ms a sample (samples/s)",
        "eager + graph ms a sample (samples/s)",
        "**sdfastgn** ms a sample (samples/s)",
        "eager MiB",
        "sdfastgn MiB",
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 1,") == [
        ["25 (40)", "5 (200)", "2 (500)", "2500", "2400"]
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 8,") == [
        ["3.75 (267)", "2 (500)", "1 (1000)", "4000", "3000"]
    ]
    assert cells_of(text, "| SD1.5 UNet step 512², batch 64,") == [["-"] * 5]
    assert "SD1.5 UNet step 512², batch 64, fp16, eager failed: OutOfMemoryError: no." in text
    assert text.endswith(SOURCE)
    assert "pipeline" not in text


def test_latency_beside_the_time_of_the_graphs(tmp_path):
    save(tmp_path, "batches.json", "sweep", BATCHES)
    save(tmp_path, "steps.json", "sweep", STEPS)
    text = published.latency_markdown(tmp_path)
    assert cells_of(text, "| SD1.5 pipeline 512², batch 2, fp16, 1 step |") == [
        ["sdfastgn", "12", "13", "10", "1.2"]
    ]
    assert cells_of(text, "| SD1.5 pipeline 512², batch 2, fp16, 4 steps") == [
        ["eager", "500", "520", "-", "-"],
        ["sdfastgn", "24", "30", "20", "1.2"],
    ]


def test_a_sweep_is_in_no_other_table(tmp_path):
    save(tmp_path, "batches.json", "sweep", BATCHES)
    assert published.results_markdown(tmp_path) == NO_RESULTS
    assert published.headline_markdown(tmp_path) == NO_RESULTS


@pytest.mark.parametrize("name", pages.TABLES)
def test_without_results_a_table_says_so(name, tmp_path):
    assert pages.TABLES[name](tmp_path) == "No results are committed yet."


# ---- README files


def test_the_tables_of_a_file_are_renewed(tmp_path):
    save(tmp_path / "benchmarks", "a.json", "end_to_end", UNET)
    readme = tmp_path / "README.md"
    readme.write_text(SLOT)
    assert pages.main(["--write", str(readme), "--results", str(tmp_path / "benchmarks")]) == 0
    written = readme.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "1.25x" in written
    assert "old" not in written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("<!-- table:other --><!-- /table:other -->", "other", id="unknown-name"),
        pytest.param("<!-- table:results -->", "closed", id="not-closed"),
    ],
)
def test_slots_that_cannot_be_filled(text, words, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert pages.main(["--write", str(readme), "--results", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert readme.read_text() == text


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert pages.main(["--write", str(tmp_path / "none.md"), "--results", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["--results", "no"]], ids=["elsewhere", "misspelt"])
def test_a_missing_folder_of_results_empties_no_table(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(SLOT)
    assert pages.main(["--write", str(readme), *arguments]) == 2
    folder = arguments[-1] if arguments else "benchmarks"
    assert capsys.readouterr().err == f"tables: --results: there is no folder {folder!r} here\n"
    assert readme.read_text() == SLOT


@pytest.mark.parametrize(("name", "slot"), [("README.md", "headline"), ("docs/benchmarks.md", "results")])
def test_the_tables_of_this_repository_are_fresh(name, slot):
    root = Path(__file__).resolve().parents[3]
    text = (root / name).read_text(encoding="utf-8")
    assert f"<!-- table:{slot} -->" in text
    assert pages.filled(text, root / "benchmarks") == text
