"""Times and quality in FP8: what is measured, and what the tables show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.publish import fp8
from scripts.publish.pages import TABLES
from scripts.publish.tables.fp8 import MLPERF, QUALITY, TIMES, TORCHAO, QualityRow
from sdfastgn.bench.documents import OK, UNAVAILABLE, read_json
from sdfastgn.bench.run import Row
from sdfastgn.patches.fp8 import models as products
from sdfastgn.patches.fp8 import product as fp8_product
from tests.bench.tables.cases import SOURCE, save

ROW = Row("sdxl", "unet", 1024, 2, "fp16", "sdfastgn", OK, median_ms=20.0, error_fp32=0.002)


@pytest.mark.slow
@pytest.mark.fused_on_cpu
def test_images_of_every_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_product, "CALLS", 2)
    monkeypatch.setattr(products, "device_reason", lambda device: None)
    monkeypatch.setattr(fp8, "OTHERS", range(1000, 1002))
    files = tmp_path / "quality.json", tmp_path / "digits.png"
    assert (
        fp8.main(["quality", "--tiny", "--device", "cpu", "--json", str(files[0]), "--png", str(files[1])])
        == 0
    )
    assert files[1].exists()
    rows = [QualityRow(**row) for row in read_json(files[0])["rows"]]
    assert [row.variant for row in rows] == ["fp32", "fp16", "sdfastgn", "sdfastgn_fp8"]
    assert rows[0].psnr_db is None
    half, ours, quick = rows[1:]
    assert (ours.products, quick.products) == (0, 16)
    assert quick.in_e4m3 > 0
    for row in (half, ours):
        assert row.psnr_db > 40
        assert row.psnr_db > quick.psnr_db > 15
        assert row.least_psnr_db < row.psnr_db


def test_times_of_a_gpu_without_fp8(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert fp8.main(["times", "--tiny", "--device", "cpu", "--json", str(path)]) == 0
    rows = read_json(path)["rows"]
    assert [(row["variant"], row["status"]) for row in rows] == [
        ("sdfastgn", OK),
        ("sdfastgn_fp8", UNAVAILABLE),
        (TORCHAO, UNAVAILABLE),
    ]


@pytest.mark.fused_on_cpu
def test_images_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_product, "CALLS", 2)
    monkeypatch.setattr(products, "device_reason", lambda device: None)
    monkeypatch.setattr(products, "_HALVES", (torch.float32,))
    path = tmp_path / "mlperf.json"
    assert fp8.main(["mlperf", "--tiny", "--device", "cpu", "--json", str(path)]) == 0
    ours, quick = (Row(**row) for row in read_json(path)["rows"])
    assert (ours.variant, quick.variant) == ("sdfastgn", "sdfastgn_fp8")
    assert ours.median_ms > 0
    assert quick.median_ms > 0
    assert ours.error_eager < quick.error_eager < 0.1


def test_table_of_times(tmp_path: Path) -> None:
    quick = dataclasses.replace(ROW, variant="sdfastgn_fp8", median_ms=15.0, error_fp32=0.1, ready_s=9.0)
    large = dataclasses.replace(ROW, batch=64)
    missing = dataclasses.replace(
        quick, batch=64, status=UNAVAILABLE, median_ms=None, error_fp32=None, ready_s=None
    )
    peer = dataclasses.replace(
        quick, variant=TORCHAO, median_ms=18.0, graph_ms=17.0, error_fp32=0.05, ready_s=60.0
    )
    save(tmp_path, "times.json", TIMES, [ROW, quick, peer, large, missing])
    lines = TABLES["fp8_times"](tmp_path).splitlines()
    step = "| SDXL UNet step 1024², batch"
    assert lines[2] == f"{step} 2, fp16 | 20 | 15 | 0.75 | 2.0e-03 | 1.0e-01 | 9 | 17 | 5.0e-02 | 60 |"
    assert lines[3] == f"{step} 64, fp16 | 20 | unavailable | - | 2.0e-03 | - | - | - | - | - |"
    assert lines[-1] == SOURCE


def test_table_of_images_per_second(tmp_path: Path) -> None:
    ours = dataclasses.replace(ROW, part="pipeline", batch=32, median_ms=16000.0)
    quick = dataclasses.replace(ours, variant="sdfastgn_fp8", median_ms=12800.0)
    save(tmp_path, "mlperf.json", MLPERF, [ours, quick])
    lines = TABLES["fp8_mlperf"](tmp_path).splitlines()
    assert lines[2] == "| sdfastgn, fp16, H200 | measured | 2.00 |"
    assert lines[3] == "| sdfastgn, FP8, H200 | measured | 2.50 |"
    assert lines[4] == "| TensorRT, one of 8 H200, v5.1 | published | 2.39 |"
    assert SOURCE in lines


def test_table_of_quality(tmp_path: Path) -> None:
    rows = [
        QualityRow("fp32", 200, 198),
        QualityRow("sdfastgn_fp8", 200, 196, 30.25, 20.0, 0.9876, 16, 15, 0.04, 3),
    ]
    save(tmp_path, "quality.json", QUALITY, rows, config={"steps": 30})
    lines = TABLES["fp8_quality"](tmp_path).splitlines()
    assert lines[2] == "| stock, fp32 | - | - | - | 198 ± 1.4 | - |"
    assert lines[3] == "| sdfastgn, FP8: 15 of 16 products | 30.2 | 20 | 0.9876 | 196 ± 2.0 | 3 |"
    assert lines[-1] == f"200 images of 64², 30 steps. {SOURCE}"
