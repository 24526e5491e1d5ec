"""The harness on the CPU: rows, references, and no time without a correct output."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from sdfastgn.bench import documents, environment, gate
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench import workload as workloads
from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.end_to_end import end_to_end_table, row_notes
from sdfastgn.bench.variants import PARTS, VARIANTS, Variant
from sdfastgn.bench.workload import BenchConfig, Workload
from sdfastgn.cli import session
from tests.bench.cases import SMALL, broken_variant, failing, scaled

TIMES = ("ready_s", "median_ms", "p10_ms", "p90_ms", "graph_ms", "its", "peak_mib")


def config(part: str, **changes: Any) -> BenchConfig:
    base = BenchConfig("tiny", part, 64, 2 if part == "unet" else 1, "fp32", "cpu", repeats=2, steps=2)
    return dataclasses.replace(base, **changes)


def times_of(row: Row) -> list[Any]:
    return [getattr(row, name) for name in TIMES]


# ---- rows


@pytest.mark.drawn(1)
@pytest.mark.parametrize("part", ["unet", "vae"])
def test_rows_of_a_part(part):
    names = ("eager", "channels_last", "sdfastgn", "stable_fast")
    started: list[str] = []
    rows = end_to_end.run(
        config(part, fp32_reference=True), [VARIANTS[name] for name in names], on_variant=started.append
    )
    assert [row.variant for row in rows] == list(names)
    assert started == [f"{part}: {name}" for name in names]
    assert [row.status for row in rows] == [OK, OK, OK, UNAVAILABLE]
    for row in rows[:3]:
        p10, median, p90, p99 = (getattr(row, f"{name}_ms") for name in ("p10", "median", "p90", "p99"))
        assert 0 < p10 <= median <= p90 <= p99
        assert row.its == pytest.approx(1e3 / median)
        assert (row.ready_s or 0) > 0
        assert max(getattr(row, name) for name in ("error_eager", "error_fp32")) < 1e-4
        assert "CUDA" in row.graph_reason
    assert rows[0].error_eager == 0.0
    assert [len(row.eager_ms or ()) for row in rows] == [0, 2, 2, 0]  # eager is timed again after each
    first, second = rows[1].eager_ms or [], rows[2].eager_ms or []
    assert (first[0], first[1]) == (rows[0].median_ms, second[0])
    assert second[1] > 0
    assert "fused" in rows[2].note
    assert rows[3].reason
    assert times_of(rows[3]) == [None] * len(TIMES)


def test_eager_is_not_timed_again_after_the_profiler_has_run(monkeypatch):
    """The profiler makes eager's later calls slower, which would make a variant look faster."""
    monkeypatch.setattr(end_to_end, "_profile", lambda *_: None)
    rows = end_to_end.run(
        config("vae", profile=True), [VARIANTS[name] for name in ("eager", "channels_last")]
    )
    assert [(row.status, row.eager_ms) for row in rows] == [(OK, None), (OK, None)]


def test_stock_errors_in_half_precision_are_measured_against_fp32():
    rows = end_to_end.run(config("vae", dtype="bf16", fp32_reference=True), [VARIANTS["eager"]])
    assert rows[0].status == OK
    assert rows[0].error_fp32 is not None
    assert 1e-4 < rows[0].error_fp32 < 0.1


def test_pipeline_rows_have_images():
    images = np.linspace(0, 1, 192).reshape(1, 8, 8, 3)
    workload = Workload(torch.nn.Identity(), lambda: images, None)
    rows = end_to_end.run(config("pipeline"), [VARIANTS["eager"]], workload=workload)
    assert (rows[0].status, rows[0].reason) == (OK, "")
    assert rows[0].steps == 2
    assert rows[0].psnr_db is None  # identical images: infinite, which JSON cannot say
    assert rows[0].median_ms is not None
    assert rows[0].its == pytest.approx(2 * 1e3 / rows[0].median_ms)
    assert gate.judge(config("pipeline"), images + 1e-4, gate.Reference(images)).psnr_db == pytest.approx(80)


@pytest.mark.gpu
def test_only_graphs_that_stand_alone_are_replayed_alone():
    ours = VARIANTS["sdfastgn"]
    others = dataclasses.replace(ours, name="others", graphs_stand_alone=False)
    rows = end_to_end.run(config("pipeline", device="cuda", dtype="fp16"), [ours, others])
    assert [row.status for row in rows] == [OK, OK]
    assert [row.graphs_ms is None for row in rows] == [False, True]


# ---- the gate


@pytest.mark.parametrize(
    ("broken", "status", "words"),
    [
        pytest.param(scaled(1.5), WRONG, "is above 0.001", id="wrong"),
        pytest.param(scaled(math.nan), WRONG, "relative error nan", id="not-finite"),
        pytest.param(broken_variant(failing), FAILED, "RuntimeError: no such", id="raises"),
    ],
)
def test_a_red_gate_gives_no_time(broken, status, words):
    variants = [VARIANTS["eager"], broken, VARIANTS["channels_last"]]
    rows = end_to_end.run(config("unet"), variants, workload=SMALL)
    # The next variant starts from the stock model.
    assert [row.status for row in rows] == [OK, status, OK]
    assert words in rows[1].reason
    assert times_of(rows[1]) == [None] * len(TIMES)
    table = end_to_end_table(rows, "title")
    cells = dict(zip(table.header, table.body[1], strict=True))
    assert {cells[name] for name in ("ready s", "median ms", "p10-p90 ms", "speed-up")} == {"-"}
    (note,) = row_notes(rows)
    assert f": {status}: " in note
    assert words in note


def test_a_gpu_that_a_peer_has_broken_keeps_no_row_from_being_written(monkeypatch):
    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    end_to_end._free(torch.device("cuda"))


@pytest.mark.parametrize(
    ("broken", "status", "words"),
    [
        pytest.param(lambda: torch.full((1, 1, 2, 2), math.inf), WRONG, "not finite", id="not-finite"),
        pytest.param(lambda: failing(None), FAILED, "stock eager fails: RuntimeError: no such", id="fails"),
    ],
)
def test_what_stock_cannot_do_is_no_reference(broken, status, words):
    workload = Workload(torch.nn.Conv2d(1, 1, 1), broken, None)
    (row,) = end_to_end.run(config("unet"), [VARIANTS["eager"]], workload=workload)
    assert row.status == status
    assert words in row.reason
    assert times_of(row) == [None] * len(TIMES)


def test_a_model_that_does_not_fit_is_a_row(monkeypatch):
    def build(config: BenchConfig) -> Workload:
        raise torch.OutOfMemoryError("tried to allocate\n80 GiB")

    monkeypatch.setitem(workloads.BUILDERS, "unet", build)
    rows = end_to_end.run(config("unet"), [VARIANTS["eager"], VARIANTS["sdfastgn"]])
    assert [(row.variant, row.status, row.median_ms) for row in rows] == [
        ("eager", FAILED, None),
        ("sdfastgn", FAILED, None),
    ]
    assert rows[0].reason == "stock eager fails: OutOfMemoryError: tried to allocate"


@pytest.mark.parametrize(
    ("part", "output", "reason"),
    [
        pytest.param("unet", torch.ones(2, 2), "", id="same"),
        pytest.param("unet", torch.ones(2, 3), "shape", id="shape"),
        pytest.param("vae", torch.full((2, 2), 1.01), "above", id="too-far"),
        pytest.param("pipeline", torch.full((2, 2), 1.001), "", id="close-image"),
        pytest.param("pipeline", torch.full((2, 2), 1.1), "PSNR", id="far-image"),
    ],
)
def test_judgement(part, output, reason):
    judged = gate.judge(config(part), output, gate.Reference(torch.ones(2, 2)))
    assert (reason in judged.reason) if reason else not judged.reason


@pytest.mark.parametrize(("part", "factor"), [("unet", 1.004), ("pipeline", 1.03)])
def test_a_variant_with_slack_may_be_further_off(part, factor):
    output, stock = torch.full((2, 2), factor), gate.Reference(torch.ones(2, 2))
    assert gate.judge(config(part), output, stock).reason
    assert not gate.judge(config(part), output, stock, slack=5.0).reason
    assert gate.judge(config(part), output * 1.1, stock, slack=5.0).reason


def test_a_variant_is_called_until_it_is_ready():
    asked = []
    variant = dataclasses.replace(
        VARIANTS["eager"], is_ready=lambda target: asked.append(target) or len(asked) > 3
    )
    calls = []
    workload = Workload(SMALL.target, lambda: calls.append(1) or SMALL.call(), None)
    end_to_end.run(config("unet", repeats=1), [variant], workload=workload)
    ready = len(calls)
    calls.clear()
    end_to_end.run(config("unet", repeats=1), [VARIANTS["eager"]], workload=workload)
    assert (ready - len(calls), asked) == (3, [SMALL.target] * 4)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("unet", "at most 0.001"),
        ("pipeline", "at least 40 dB"),
        ("train", "1.05 times stock eager's, or at most 0.001"),
    ],
)
def test_the_gate_is_stated(part, words):
    (described,) = end_to_end.describe([config(part)])["parts"]
    assert described["gate"] == gate.gate_text(config(part))
    assert words in described["gate"]


# ---- weights, parts, JSON


def test_each_part_has_a_workload():
    assert tuple(workloads.BUILDERS) == PARTS


def test_switches_are_recorded_and_put_back():
    before = torch.backends.cudnn.benchmark
    environment = end_to_end.current_environment(torch.device("cpu"))
    assert environment["switches"]["cudnn.benchmark"] is True
    assert torch.backends.cudnn.benchmark == before
    assert torch.__version__.startswith(
        environment["packages"]["torch"]
    )  # the wheel may leave the CUDA suffix out
    assert len(environment["source_sha256"]) == 64


def test_json_is_strict_and_complete(tmp_path):
    row = Row("tiny", "unet", 64, 2, "fp32", "eager", OK, median_ms=1.0)
    content = documents.document("end_to_end", {"gpu": None}, end_to_end.describe([config("unet")]), [row])
    path = tmp_path / "out.json"
    documents.write_json(path, content)
    read = json.loads(path.read_text())
    assert set(read) == {"schema", "kind", "environment", "config", "rows"}
    assert Row(**read["rows"][0]) == row
    with pytest.raises(ValueError, match="JSON"):
        documents.write_json(path, {"rows": [math.nan]})


def test_the_commit_can_be_told_where_the_checkout_is_of_another(monkeypatch):
    monkeypatch.setenv("SDFASTGN_COMMIT", "0123abc")
    assert environment.environment(torch.device("cpu"))["git"] == {"commit": "0123abc", "dirty": None}


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [("README.md", False), ("sdfastgn/api.py", True), ("scripts/publish/warm_up.py", True)],
)
def test_a_change_of_the_code_that_measures_is_told(changed, dirty, tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name in ("README.md", "sdfastgn/api.py", "scripts/publish/warm_up.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for command in (["init"], ["add", "."], ["commit", "--message", "all"]):
        git(*command)
    monkeypatch.delenv("SDFASTGN_COMMIT", raising=False)
    monkeypatch.setattr(environment, "PACKAGE_ROOT", tmp_path / "sdfastgn")
    assert environment.environment(torch.device("cpu"))["git"]["dirty"] is False
    (tmp_path / changed).write_text("changed")
    assert environment.environment(torch.device("cpu"))["git"]["dirty"] is dirty


@pytest.mark.slow
def test_a_run_that_is_cut_off_has_told_and_written_what_it_has_measured(tmp_path, capsys):
    def apply(*arguments: object) -> None:
        raise KeyboardInterrupt

    path, html = tmp_path / "out.json", tmp_path / "out.html"
    stop = Variant("stop", "stop", lambda device: None, apply)
    variants = [VARIANTS["eager"], stop, VARIANTS["channels_last"]]
    with pytest.raises(KeyboardInterrupt):
        session.run_bench([config("pipeline")], variants, json=path, html=html)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["variant"], row["status"]) for row in rows] == [("eager", OK)]
    assert "data:image/png" in html.read_text()
    assert documents.images_path(path).exists()
    # Without a terminal there are plain lines.
    assert re.fullmatch(r"pipeline: eager: [\d.]+ ms\n", capsys.readouterr().err)
