"""Times of offloaded pipelines: what is measured, what fails, and what the table shows."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from scripts.publish import offloading
from scripts.publish.pages import TABLES
from scripts.publish.tables.offloading import OffloadingRow
from sdfastgn.bench.documents import FAILED, OK, WRONG
from sdfastgn.bench.gate import Reference
from sdfastgn.bench.workload import BenchConfig
from tests.bench.tables.cases import SOURCE, save

CPU = torch.device("cpu")
CONFIG = BenchConfig("flux", "pipeline", 8, 1, "bf16", "cpu", repeats=1)
ROW = OffloadingRow("flux", False, 31.6, [30.0, 29.0, 25.0], 23.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", offloading.PIPELINES)
def test_a_pipeline_is_called_stock_and_optimized(name: str) -> None:
    rows = list(offloading.rows(name, CPU, tiny=True))
    assert [(row.pipeline, row.is_optimized, row.status) for row in rows] == [
        (name, False, OK), (name, True, OK),
    ]  # fmt: skip
    assert all(len(row.call_s) == offloading.CALLS and row.weights_gib > 0 for row in rows)


@pytest.mark.slow
def test_every_model_is_offloaded_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    built = offloading.flux(CPU, True)
    monkeypatch.setitem(offloading.PIPELINES, "flux", lambda device, tiny: built)
    called = set()
    names = ("text_encoder", "text_encoder_2", "transformer")
    for name in names:
        getattr(built.pipe, name).register_forward_hook(lambda *_, name=name: called.add(name))
    assert [row.status for row in offloading.rows("flux", CPU, tiny=True)] == [OK, OK]
    assert called == set(names)
    assert not any(hasattr(getattr(built.pipe, name), "_hf_hook") for name in names)


def test_an_error_is_a_row_without_times() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    row, made = offloading._called(dataclasses.replace(ROW, call_s=[]), fail, CPU)
    assert (row.status, row.reason, row.call_s) == (FAILED, "OutOfMemoryError: CUDA out of memory", [])
    assert made is None


@pytest.mark.parametrize("made", [torch.zeros(1, 8, 8, 3), torch.full((1, 8, 8, 3), torch.nan)])
def test_images_without_content_are_wrong(made: torch.Tensor) -> None:
    row = offloading._checked(ROW, CONFIG, made, Reference(made))
    assert (row.status, row.call_s) == (WRONG, [])


def test_other_images_are_wrong() -> None:
    image = torch.linspace(0, 1, 192).view(1, 8, 8, 3)
    assert offloading._checked(ROW, CONFIG, image, Reference(image)) == ROW
    assert offloading._checked(ROW, CONFIG, 1 - image, Reference(image)).status == WRONG


def test_the_file_has_all_rows(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "rows", lambda name, device, tiny: iter([ROW]))
    path = tmp_path / "offloading.json"
    assert offloading.main(["--only", "flux", "--tiny", "--device", "cpu", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["rows"] == [dataclasses.asdict(ROW)]
    assert content["config"] == {"dtype": "bf16", "steps": 4}


def test_the_table_pairs_stock_with_ours(tmp_path) -> None:
    ours = dataclasses.replace(ROW, is_optimized=True, call_s=[20.0, 3.0, 2.5])
    wan = dataclasses.replace(ROW, pipeline="wan")
    failed = dataclasses.replace(wan, is_optimized=True, status=FAILED, call_s=[], reserved_gib=None)
    save(tmp_path, "a.json", "offloading", [ROW, ours, wan, failed], config={"dtype": "bf16", "steps": 4})
    lines = TABLES["offloading"](tmp_path).splitlines()
    assert lines[2:] == [
        "| Flux.1 schnell, 1024² | 31.6 | 30 | 25 | 20 | 2.5 | 10.00x | 23.2 | 23.2 |",
        "| Wan 2.1 1.3B, 81 frames of 480 x 832 | 31.6 | 30 | 25 | failed | - | - | 23.2 | - |",
        "",
        f"bf16, 4 steps. {SOURCE}",
    ]
