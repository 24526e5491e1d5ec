"""Tables of the suites, in the terminal and in Markdown."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from sdfastgn.bench.documents import OK, UNAVAILABLE
from sdfastgn.bench.kernels.cells import Shape
from sdfastgn.bench.kernels.norm_suites import SUITES
from sdfastgn.bench.kernels.suites import BOTH, TRAINING, SuiteRow
from sdfastgn.bench.tables import pages as tables
from sdfastgn.bench.tables import suites as suite_tables
from sdfastgn.bench.tables.markdown import LOSS

TRAIN = SUITES["training"]
UNET: Shape = (2, 320, 64, 64)
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "packages": {"torch": "2.11.0"},
    "git": {"commit": "0123456789abcdef"},
    "date": "2026-11-21T06:00:00+00:00",
}


def row(name: str, hot: float | None, task: str = BOTH, shape: Shape = UNET) -> SuiteRow:
    if hot is None:
        return SuiteRow(shape, name, UNAVAILABLE, "not installed", task=task)
    return SuiteRow(
        shape, name, OK, hot_us=hot, cold_us=hot + 1, error=1e-4, task=task, errors={"y": 1e-4, "dx": 1e-5}
    )


ROWS = [
    row("copy", 1, "copy"),
    row("eager_nchw", 9, TRAINING),
    row("eager_nchw", 19),
    row("sdfastgn", 3, TRAINING),
    row("sdfastgn", 4),
    row("apex", None, TRAINING),
    row("apex", None),
]


def save(folder: Path, rows: Sequence[SuiteRow], dtype: str = "fp16", suite: str = "training") -> None:
    content = {
        "kind": f"kernels_{suite}",
        "environment": ENVIRONMENT,
        "config": {"dtype": dtype, "suite": suite},
    }
    rows_as_data = [asdict(one) for one in rows]
    (folder / f"kernels_{suite}_{dtype}.json").write_text(json.dumps({**content, "rows": rows_as_data}))


def printed(rows: Sequence[SuiteRow]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(suite_tables.suite_table(TRAIN, rows, "title"))
    return out.getvalue()


def test_a_line_for_each_task_with_ours_last(tmp_path: Path) -> None:
    save(tmp_path, ROWS)
    text = tables.TABLES["training"](tmp_path)
    lines = text.splitlines()
    assert lines[0] == (
        "| NxCxHxW | what | copy | eager_nchw | sdfastgn | sdfastgn / copy | sdfastgn / eager_nchw | sdfastgn / best peer |"
    )
    assert lines[2] == (
        "| 2x320x64x64 | forward in training | 1 (2) | **9 (10)** | 3 (4) | 3 (2) | 0.333 (0.4) | 0.333 (0.4) |"
    )
    assert lines[3].startswith("| 2x320x64x64 | forward + backward | 1 (2) | **19 (20)** | 4 (5) | 4 (2.5) |")
    assert (
        "| mean / copy, unet | forward + backward | 1.00 (1.00) on 1 | 19.00 (10.00) on 1 | 4.00 (2.50) on 1 |"
        in text
    )
    assert "| mean / eager_nchw, all | forward in training | 0.11 (0.20) on 1 | 1.00 (1.00) on 1 | 0.33 (0.40) on 1 |" in text  # fmt: skip
    assert (
        "least time over the copy's where memory is the limit: 1 for forward in training, 2.5 for forward"
        in text
    )
    assert "apex: unavailable: not installed (2x320x64x64)." in text
    assert "fp16, NVIDIA H200, torch 2.11.0, commit 0123456789, 2026-11-21." in text


def test_every_run_of_the_suite_and_no_other_is_shown(tmp_path: Path) -> None:
    save(tmp_path, ROWS)
    save(tmp_path, ROWS, "fp32")
    save(tmp_path, ROWS, suite="issue_28201")
    text = tables.TABLES["training"](tmp_path)
    assert ("\nfp16, " in text, "\nfp32, " in text, text.count("| NxCxHxW |")) == (True, True, 2)
    assert tables.TABLES["kernels"](tmp_path) == "No results are committed yet."


@pytest.mark.parametrize(("ours", "marked"), [(4, False), (25, True)], ids=["won", "lost"])
def test_lost_cells_are_marked(ours: float, marked: bool, tmp_path: Path) -> None:
    rows = [*ROWS[:4], row("sdfastgn", ours)]
    assert (LOSS in printed(rows).split("microseconds")[0]) == marked
    save(tmp_path, rows)
    assert (LOSS in tables.TABLES["training"](tmp_path).split("Microseconds")[0]) == marked


def test_the_terminal_has_our_ratios_and_the_means() -> None:
    text = printed(ROWS)
    assert "4, 0.211, 0.211" in text
    assert "mean / eager_nchw, unet" in text
    assert "apex" not in text


def test_two_layouts_of_ours_are_two_columns(tmp_path: Path) -> None:
    shape: Shape = (128, 256, 28, 28)
    times = {"copy": 1, "eager_nchw": 9, "eager_nhwc": 12, "sdfastgn_nchw": 6, "sdfastgn_nhwc": 3}
    rows = [row(name, hot, "copy" if name == "copy" else BOTH, shape) for name, hot in times.items()]
    save(tmp_path, rows, "fp32", "issue_28201")
    lines = tables.TABLES["issue_28201"](tmp_path).splitlines()
    assert "| sdfastgn_nchw | sdfastgn_nhwc | sdfastgn_nchw / copy | sdfastgn_nchw / eager_nchw |" in lines[0]
    assert lines[2].startswith(
        "| 128x256x28x28 | forward + backward | 1 (2) | **9 (10)** | 12 (13) | 6 (7) | 3 (4) |"
    )
