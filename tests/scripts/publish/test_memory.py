"""Memory of whole pipelines: what is measured, what fails, and what the tables show."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from scripts.publish import memory
from scripts.publish.memory import Limited, empty_row
from scripts.publish.pages import TABLES
from scripts.publish.tables.memory import MemoryRow
from sdfastgn.bench.documents import FAILED, OK, WRONG
from tests.bench.tables.cases import SOURCE, save

IMAGE = np.linspace(0, 1, 192, dtype=np.float32).reshape(1, 8, 8, 3)
NO_MEMORY = "OutOfMemoryError: CUDA out of memory"
ROW = MemoryRow("sdxl", False, 1024, 1, False, None, False, 12288.0, 9216.0, [1.0, 0.5, 0.4])


def never() -> bool:
    return False


def held(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Limited:
    """A small pipeline whose call is ``call``, and two limits."""
    monkeypatch.setattr(memory, "LIMITS_GIB", (6.0, 8.0))
    monkeypatch.setattr(memory, "release_memory", lambda: None)
    limited = Limited("tiny", "cpu", never)
    monkeypatch.setattr(limited.workload, "call", call)
    return limited


def test_a_pipeline_draws_three_times() -> None:
    row = memory.peak(empty_row("tiny_xl", True, 1, False), "cpu")
    assert (row.status, row.upcasts, row.size, len(row.image_s)) == (OK, True, 64, 3)
    assert (row.reserved_mib, row.captured, row.dropped) == (None, 0, 0)


@pytest.mark.slow
def test_images_are_drawn_under_each_limit_and_offloaded_under_the_smallest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooked: list[bool] = []
    limited = held(monkeypatch, lambda: hooked.append(hasattr(limited.pipe.unet, "_hf_hook")) or IMAGE)
    rows = list(limited.rows(upcasts=False))
    ways = [(8.0, False), (6.0, False), (6.0, True)]
    assert [(row.is_optimized, row.limit_gib, row.offloads) for row in rows] == [
        (way, *each) for way in (False, True) for each in ways
    ]
    assert all(row.status == OK for row in rows)
    assert hooked[::3] == [row.offloads for row in rows]
    assert not hasattr(limited.pipe.unet, "_hf_hook")


@pytest.mark.slow
def test_where_stock_has_no_memory_both_are_tried_with_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def call() -> np.ndarray:
        if limits[-1] == 8 and not hasattr(limited.pipe.unet, "_hf_hook"):
            limited.pipe.vae.double()  # as a decode that fails half way
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return IMAGE

    limited = held(monkeypatch, call)
    monkeypatch.setattr(memory, "set_limit", lambda gib, device: limits.append(gib))
    rows = [row for row in limited.rows(upcasts=False) if row.limit_gib == 8]
    assert [(row.is_optimized, row.offloads, row.status) for row in rows] == [
        (False, False, FAILED), (False, True, OK), (True, False, FAILED), (True, True, OK),
    ]  # fmt: skip
    assert (rows[0].reason, rows[0].image_s) == (NO_MEMORY, [])
    assert limits[-1] is None
    assert limited.pipe.vae.dtype == torch.float32


@pytest.mark.slow
def test_a_wrong_image_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    limited = held(monkeypatch, lambda: IMAGE if next(calls) < 9 else 1 - IMAGE)  # 3 rows of stock
    rows = list(limited.rows(upcasts=False))
    assert [row.status for row in rows] == [OK] * 3 + [WRONG] * 3
    assert all(not row.image_s and "below 40 dB" in row.reason for row in rows[3:])


def test_no_row_starts_late_and_the_file_has_those_before(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def peaks(pipelines: Any, device: str, is_late: Callable[[], bool]) -> Iterator[MemoryRow]:
        seen.append((pipelines, device, is_late()))
        yield ROW

    path = tmp_path / "memory.json"
    monkeypatch.setitem(memory.MEASUREMENTS, "peaks", peaks)
    monkeypatch.setitem(memory.MEASUREMENTS, "limits", lambda *_: pytest.fail("--only"))
    options = ["--only", "peaks", "--tiny", "--device", "cpu", "--seconds", "0", "--json", str(path)]
    assert memory.main(options) == 0
    assert seen == [((("tiny_xl", True), ("tiny", False)), "cpu", True)]
    content = json.loads(path.read_text())
    assert content["rows"] == [dataclasses.asdict(ROW)]
    assert content["config"] == {"dtype": "fp32", "steps": 4}
    assert content["environment"]["switches"]["cudnn.benchmark"] is False


def test_each_peak_has_its_process_and_a_dead_one_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_a_process(fn: Any, row: MemoryRow, device: str) -> MemoryRow:
        assert (fn, device) == (memory.peak, "cpu")
        if row.is_optimized:
            raise OSError("it died")
        return row

    monkeypatch.setattr(memory, "in_a_process", in_a_process)
    rows = list(memory.peaks([("tiny", False)], "cpu", never))
    found = {(row.batch, row.is_optimized, row.status) for row in rows}
    assert found == {(1, False, OK), (1, True, FAILED), (4, False, OK), (4, True, FAILED)}
    assert list(memory.peaks([("tiny", False)], "cpu", lambda: True)) == []


def test_the_tables_pair_stock_with_ours(tmp_path) -> None:
    ours = dataclasses.replace(ROW, is_optimized=True, reserved_mib=9216.0, allocated_mib=8192.0)
    under = {"limit_gib": 8.0, "reserved_mib": None, "allocated_mib": None}
    failed = dataclasses.replace(ROW, status=FAILED, reason=NO_MEMORY, image_s=[], **under)
    rows = [
        ours,
        ROW,
        dataclasses.replace(ROW, model="sd15", size=512),  # ours is missing
        failed,
        dataclasses.replace(ours, image_s=[2.0, 0.3, 0.2], captured=4, dropped=1, **under),
        dataclasses.replace(ROW, upcasts=True, offloads=True, **under),
        dataclasses.replace(ours, upcasts=True, offloads=True, image_s=[2.0, 0.6, 0.8], **under),
        dataclasses.replace(failed, limit_gib=6.0),
        dataclasses.replace(ours, status=WRONG, image_s=[], reason="PSNR", **{**under, "limit_gib": 6.0}),
    ]
    save(tmp_path, "a.json", "memory", rows, config={"dtype": "fp16", "steps": 4})
    lines = TABLES["memory"](tmp_path).splitlines()
    assert lines[2:4] == [
        "| SD1.5 512², batch 1 | 12 | 9 | not measured | not measured | - |",
        "| SDXL 1024², batch 1 | 12 | 9 | 9 | 8 | 75% |",
    ]
    assert lines[9:13] == [
        f"| SDXL 1024², batch 1 | 6 GiB | no memory | - | {WRONG} | - | - | - | - |",
        "| SDXL 1024², batch 1 | 8 GiB | no memory | - | 0.3 | 0.2 | - | 4 | 1 |",
        "| SDXL 1024², VAE in fp32, batch 1, offloaded | 8 GiB | 0.5 | 0.4 | 0.6 | 0.8 | 0.50x† | 0 | 0 |",
        "",
    ]
    assert lines.count(f"fp16, 4 steps. {SOURCE}") == 2
    save(tmp_path, "a.json", "memory", rows[:2], config={"dtype": "fp16", "steps": 4})
    assert "limit" not in TABLES["memory"](tmp_path)
