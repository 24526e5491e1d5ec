"""Kernel suites as tables, in the terminal, in Markdown and as a picture."""

from __future__ import annotations

import sys

import pytest

from scripts.publish import pages, plots
from scripts.publish.pages import TABLES
from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.suite import BOTH, COPY, FORWARD, TRAINING, KernelRow, Shape, rows_of
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.bench.tables import kernels as kernel_tables
from sdfastgn.bench.tables.cells import LOSS
from tests.bench.tables.cases import SOURCE, is_png, save, text_of

INFER, TRAIN = SUITES["inference"], SUITES["training"]
UNET: Shape = (2, 320, 64, 64)


def row(name: str, hot: float | None, task: str = FORWARD, shape: Shape = UNET) -> KernelRow:
    if hot is None:
        return KernelRow(shape, name, UNAVAILABLE, "not installed", task=task)
    return KernelRow(shape, name, OK, "", hot, hot + 1, hot_gbps=1e3, cold_gbps=9e2, task=task)


INFERENCE = [
    row("copy", 2, COPY),
    row("eager_nhwc", 54),
    row("gnnhwc", 13),
    row("sdfastgn", 8),
    row("apex", None),
]
TRAINING_ROWS = [
    row("copy", 1, COPY),
    row("eager_nchw", 9, TRAINING),
    row("eager_nchw", 19, BOTH),
    row("sdfastgn", 3, TRAINING),
    row("sdfastgn", 4, BOTH),
    row("apex", None, TRAINING),
    row("apex", None, BOTH),
]


def test_inference_marks_the_best_peer_and_gives_means(tmp_path):
    save(tmp_path, "kernels.json", "kernels", INFERENCE)
    lines = TABLES["kernels"](tmp_path).splitlines()
    assert lines[0] == "| N x C x H x W | copy | eager_nhwc | gnnhwc | sdfastgn | sdfastgn / best peer |"
    assert lines[2] == "| 2x320x64x64 | 2 (3) | 54 (55) | **13 (14)** | 8 (9) | 0.615 (0.643) |"
    assert lines[3].startswith("| mean of time / copy, unet | 1.00 (1.00) on 1 | 27.00 (18.33) on 1 |")
    assert lines[-3:] == ["apex: unavailable: not installed (2x320x64x64).", "", f"fp16, {SOURCE}"]


def test_peers_that_are_built_by_hand_are_in_the_table_and_said_to_be(tmp_path):
    save(tmp_path, "kernels.json", "kernels", [*INFERENCE[:2], INFERENCE[3]])
    save(tmp_path, "peers.json", "kernel_peers", [INFERENCE[2]])
    text = TABLES["kernels"](tmp_path)
    assert "| 2x320x64x64 | 2 (3) | 54 (55) | **13 (14)** | 8 (9) | 0.615 (0.643) |" in text
    assert "gnnhwc: built by hand and measured in another run, NVIDIA H200, 2026-11-21." in text
    assert text.count("commit") == 1


def test_a_column_for_each_task_with_ours_over_the_best_peer(tmp_path):
    save(tmp_path, "kernels.json", "kernels_training", TRAINING_ROWS)
    lines = TABLES["training"](tmp_path).splitlines()
    assert lines[0] == "| N x C x H x W | forward in training | forward + backward |"
    assert lines[2] == "| 2x320x64x64 | 3: 0.33 (0.40) | 4: 0.21 (0.25) |"
    assert lines[3] == "| mean | 0.33 (0.40) | 0.21 (0.25) |"
    assert "peers: eager_nchw." in lines[5]
    assert "apex: unavailable: not installed (2x320x64x64)." in lines


def test_the_mean_is_geometric_and_of_the_ratios(tmp_path):
    other = [row(name, hot, task, (2, 640, 32, 32)) for name, hot, task in
             (("copy", 1, COPY), ("eager_nchw", 4, BOTH), ("sdfastgn", 9, BOTH))]  # fmt: skip
    rows = [row("copy", 1, COPY), row("eager_nchw", 9, BOTH), row("sdfastgn", 4, BOTH), *other]
    save(tmp_path, "kernels.json", "kernels_training", rows)
    lines = TABLES["training"](tmp_path).splitlines()
    assert lines[3:5] == ["| 2x640x32x32 | 9: 2.25 (2.00)† |", "| mean | 1.00 (1.00) |"]


def test_every_run_of_the_suite_and_no_other_is_shown(tmp_path):
    for name, kind in (("fp16", "training"), ("fp32", "training"), ("other", "layer_norm")):
        dtype = "fp32" if name == "fp32" else "fp16"
        save(tmp_path, f"{name}.json", f"kernels_{kind}", TRAINING_ROWS, config={"dtype": dtype})
    text = TABLES["training"](tmp_path)
    assert ("\nfp16, " in text, "\nfp32, " in text, text.count("| N x C")) == (True, True, 2)
    assert TABLES["kernels"](tmp_path) == "No results are committed yet."


@pytest.mark.parametrize(("ours", "marked"), [(4, False), (25, True)], ids=["won", "lost"])
def test_lost_cells_are_marked(ours, marked, tmp_path):
    rows = [*TRAINING_ROWS[:4], row("sdfastgn", ours, BOTH)]
    shown = text_of(kernel_tables.suite_tables(TRAIN, rows, "t", "fp16")[0])
    assert (LOSS in shown.split("microseconds")[0]) == marked
    save(tmp_path, "kernels.json", "kernels_training", rows)
    assert (LOSS in TABLES["training"](tmp_path).split("Microseconds")[0]) == marked


def test_the_terminal_has_our_ratios_the_means_and_no_column_without_a_time():
    table = kernel_tables.suite_tables(TRAIN, TRAINING_ROWS, "t", "fp16")[0]
    text = text_of(table)
    assert "│ 4 (2.5) │ 0.211 (0.25) │ 0.211 (0.25) │" in " ".join(text.split())
    assert "mean / eager_nchw, unet" in text
    assert "apex" not in table.header


def test_extras_have_a_table_of_their_own(tmp_path):
    # Rows of old runs name no task.
    times = {"copy": 2.0, "sdfastgn_given": 2.5, "add": 4.0, "add_with_statistics": 5.0}
    rows = [row(name, hot, "") for name, hot in times.items()]
    data = [{key: value for key, value in vars(one).items() if key != "task"} for one in rows]
    save(tmp_path, "kernels.json", "kernels", data)
    (table,) = kernel_tables.extras_tables(SUITES["inference"], rows_of(SUITES["inference"], {"rows": data}))
    assert table.header == ["N x C x H x W", "sdfastgn_given / copy", "add_with_statistics / add"]
    assert table.body == [["2x320x64x64", "2.5: 1.25 (1.17)", "5: 1.25 (1.20)"]]
    assert "add" not in TABLES["kernels"](tmp_path)


@pytest.mark.slow
def test_the_roofline_of_a_committed_result_is_a_picture(tmp_path):
    rows = [*INFERENCE, row("sdfastgn", 9.0, shape=(2, 640, 64, 64)), row("add", 3.0, "add, forward")]
    save(tmp_path, "kernels.json", "kernels", rows)
    plots.PICTURES["roofline_fp16.png"](tmp_path, tmp_path / "out.png")
    assert is_png(tmp_path / "out.png")


def test_without_matplotlib_the_tables_are_written_and_the_reason_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ("a.md",))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "a.md").write_text("<!-- table:kernels --><!-- /table:kernels -->")
    save(tmp_path / "benchmarks", "kernels.json", "kernels", INFERENCE)
    assert pages.main(["--results", str(tmp_path / "benchmarks")]) == 2
    assert "gnnhwc" in (tmp_path / "a.md").read_text()
    assert "the pictures are not: pictures need matplotlib" in capsys.readouterr().err
