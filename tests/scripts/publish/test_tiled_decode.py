"""Large images in tiles and in one piece: what is compared, and which decodes get no time."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from scripts.publish import tiled_decode
from scripts.publish.pages import TABLES
from scripts.publish.tables.tiled_decode import DecodeRow
from sdfastgn.bench.documents import FAILED, OK, WRONG
from tests.bench.tables.cases import SOURCE, save

CPU = torch.device("cpu")
SIZE = 128  # four tiles of the tiny autoencoder and more
ROW = DecodeRow(2048, True, 1024, 0.25, 1.9, 1e-3, 2e-3)
CONFIG = {"model": "sdxl", "dtype": "fp16"}


def measured() -> list[DecodeRow]:
    return list(tiled_decode.measured("tiny", SIZE, torch.float32, CPU))


@pytest.mark.slow
@pytest.mark.fused_on_cpu
def test_stock_differs_in_tiles_and_ours_does_not():
    rows = measured()
    assert [(row.is_optimized, row.tile) for row in rows] == [
        (False, None), (True, None), (False, 64), (True, 64), (True, 96),
    ]  # fmt: skip
    reference, whole, stock_tiled, *ours = rows
    assert (reference.difference, reference.error) == (None, 0)
    assert stock_tiled.difference > 0.05
    assert all(0 < row.difference < 1e-5 for row in (whole, *ours))
    assert all(row.status == OK and row.seconds > 0 for row in rows)


@pytest.mark.slow
def test_a_wrong_image_has_no_time_of_ours():
    """Without kernels the optimized autoencoder decodes in stock's tiles."""
    rows = measured()
    assert [row.status for row in rows] == [OK, OK, OK, WRONG, WRONG]
    assert [row.seconds is None for row in rows] == [False, False, False, True, True]


def test_what_does_not_fit_is_a_row_and_ours_is_then_not_compared(monkeypatch):
    def timed(vae, z, tile):
        if tile is None:
            raise torch.OutOfMemoryError("no memory\nmore")
        return torch.zeros(1), 1.0, 2.0

    monkeypatch.setattr(tiled_decode, "timed", timed)
    monkeypatch.setattr(tiled_decode, "MAX_FP32_SIZE", 0)
    rows = measured()
    assert [row.status for row in rows] == [FAILED, FAILED, OK, FAILED, FAILED]
    assert rows[0].reason == "OutOfMemoryError: no memory"
    assert rows[3].reason == "stock made no image to compare with"
    assert all(row.error is None for row in rows)


def test_the_file_has_the_rows_of_all_sizes(tmp_path):
    path = tmp_path / "tiled.json"
    sizes = ("--size", "32", "--size", "64")
    assert tiled_decode.main(["--model", "tiny", "--device", "cpu", *sizes, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert [row["size"] for row in content["rows"]] == [32] * 5 + [64] * 5
    assert content["config"] == {"model": "tiny", "dtype": "fp32"}
    assert content["environment"]["switches"]["cudnn.benchmark"] is False


def test_latents_of_each_autoencoder():
    assert [tuple(tiled_decode.latents(model, 64, CPU).shape) for model in ("sd15", "Flux")] == [
        (1, 4, 8, 8), (1, 16, 8, 8),
    ]  # fmt: skip


def test_speed_ups_are_over_stock_with_or_without_tiles(tmp_path):
    rows = [
        DecodeRow(2048, False, None, 0.4, 9.5, None, 1.9e-2),
        dataclasses.replace(ROW, tile=None, seconds=0.1),
        DecodeRow(2048, False, 1024, 1.0, 2.4, 0.3, 0.3),
        ROW,
        dataclasses.replace(ROW, tile=1536, seconds=1.2),
        DecodeRow(4096, False, None, status=FAILED, reason="OutOfMemoryError: no"),
        dataclasses.replace(ROW, size=4096, tile=None),
        dataclasses.replace(ROW, size=4096, status=WRONG, seconds=None, peak_gib=None),
    ]
    save(tmp_path, "a.json", "tiled_decode", rows, config=CONFIG)
    lines = TABLES["tiled_decode"](tmp_path).splitlines()[2:]
    assert lines[:8] == [
        "| 2048², stock, without tiles | 0.4 | - | 9.5 | - | 1.9e-02 |",
        "| 2048², sdfastgn, without tiles | 0.1 | 4.00x | 1.9 | 1.0e-03 | 2.0e-03 |",
        "| 2048², stock, tiles of 1024² | 1 | - | 2.4 | 3.0e-01 | 3.0e-01 |",
        "| 2048², sdfastgn, tiles of 1024² | 0.25 | 4.00x | 1.9 | 1.0e-03 | 2.0e-03 |",
        "| 2048², sdfastgn, tiles of 1536² | 1.2 | 0.83x† | 1.9 | 1.0e-03 | 2.0e-03 |",
        "| 4096², stock, without tiles | failed OutOfMemoryError: no | - | - | - | - |",
        "| 4096², sdfastgn, without tiles | 0.25 | - | 1.9 | 1.0e-03 | 2.0e-03 |",
        f"| 4096², sdfastgn, tiles of 1024² | {WRONG} | - | - | 1.0e-03 | 2.0e-03 |",
    ]
    assert lines[-1] == f"The autoencoder of SDXL, fp16, without CUDA graphs. {SOURCE}"
