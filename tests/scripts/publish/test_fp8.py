"""Times in FP8: what is measured, and what the tables show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.publish import fp8
from scripts.publish.pages import TABLES
from scripts.publish.tables.fp8 import MLPERF, TIMES, TORCHAO
from sdfastgn.bench.documents import OK, UNAVAILABLE, read_json
from sdfastgn.bench.run import Row
from sdfastgn.patches.fp8 import models as products
from sdfastgn.patches.fp8 import product as fp8_product
from tests.bench.tables.cases import SOURCE, save

ROW = Row("sdxl", "unet", 1024, 2, "fp16", "sdfastgn", OK, median_ms=20.0, error_fp32=0.002)


@pytest.mark.slow
def test_times_of_a_gpu_without_fp8(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert fp8.main(["times", "--tiny", "--device", "cpu", "--json", str(path)]) == 0
    rows = read_json(path)["rows"]
    assert [(row["variant"], row["status"]) for row in rows] == [
        ("sdfastgn", OK),
        ("sdfastgn_fp8", UNAVAILABLE),
        (TORCHAO, UNAVAILABLE),
    ]


@pytest.mark.slow
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
