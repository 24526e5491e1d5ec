"""Quality in FP8: what is trained and measured, and what the table shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.publish.pages import TABLES
from scripts.publish.tables.fp8 import ONE_SCALE, QUALITY, TRAINED, QualityRow
from sdfastgn.bench.documents import read_json
from sdfastgn.cli import digits_pipeline
from sdfastgn.models.architectures import randomize
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.patches.fp8 import models as products
from sdfastgn.patches.fp8 import product as fp8_product
from sdfastgn.plans import install
from sdfastgn.plans.rewrite import e4m3
from tests.bench.tables.cases import SOURCE, save

pytest.importorskip("sklearn")

from scripts.publish import digits_transformer as flow
from scripts.publish import fp8_quality as quality

VARIANTS = ["fp32", "half", "sdfastgn", "sdfastgn_fp8"]
FEW = quality.TINY._replace(images=2, steps=2, training=1, lora=1, held_out=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has E4M3, small products count as large, and few calls learn scales."""
    monkeypatch.setattr(products, "device_reason", lambda device: None)
    monkeypatch.setattr(fp8_product, "CALLS", 2)
    monkeypatch.setattr(quality, "OTHERS", range(1000, 1001))
    for module in (e4m3, install):
        monkeypatch.setattr(module, "FEWEST_COLUMNS", 32)
    for module in (e4m3, quality):
        monkeypatch.setattr(module, "FEWEST_ROWS", 32)


@pytest.mark.slow
@pytest.mark.fused_on_cpu
def test_every_model_and_variant(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "TINY", FEW)
    path, png = tmp_path / "quality.json", tmp_path / "quality.png"
    assert quality.main(["--tiny", "--device", "cpu", "--json", str(path), "--png", str(png)]) == 0
    rows = [QualityRow(**row) for row in read_json(path)["rows"]]
    found = [(row.model, row.variant, row.in_e4m3 > 0) for row in rows]
    assert png.exists()
    assert found == [
        (model, variant, variant == "sdfastgn_fp8")
        for model in TRAINED
        for variant in [*VARIANTS, *[ONE_SCALE] * (model != "unet")]
    ]


@pytest.fixture
def network() -> Any:
    return randomize(flow.SD3Transformer2DModel(**flow.CONFIG | FEW.changes | {"num_layers": 2}), 0).eval()


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load_pipeline("digits", str(digits_pipeline.FOLDER), torch.float32, "cpu")


@pytest.mark.slow
@pytest.mark.fused_on_cpu
def test_what_one_scale_and_large_rows_do(network: Any, pipe: Any, small: None) -> None:
    """Large rows in weights spoil products with one scale, and not those with a scale for each row."""
    network.requires_grad_(False)
    step = quality.Step(torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8), torch.rand(4), torch.arange(4))
    found: dict[tuple[bool, str], QualityRow] = {}
    for has_outliers in (False, True):
        if has_outliers:
            flow.add_outliers(network)

        def make(dtype: torch.dtype) -> quality.Model:
            return quality.transformer(network, pipe, flow.every_prompt(pipe), step, dtype, mirrored=False)

        for row, images in quality.measured("transformer", make, FEW):
            found[has_outliers, row.variant] = row
            assert images.shape == (2, 64, 64, 3)
    for has_outliers in (False, True):
        half, ours, rows, one = (found[has_outliers, name] for name in [*VARIANTS[1:], ONE_SCALE])
        assert 0 < half.row_error < rows.row_error < 0.1
        assert 0 < ours.row_error < rows.row_error
        assert half.low_psnr_db > rows.low_psnr_db >= rows.least_psnr_db
        assert half.median_psnr_db > rows.median_psnr_db >= rows.low_psnr_db
        assert half.loss == pytest.approx(found[has_outliers, "fp32"].loss, rel=1e-2)
        assert one.row_error > (2 if has_outliers else 0.5) * rows.row_error


def test_table_of_quality(tmp_path: Path) -> None:
    rows = [
        QualityRow("fp32", 200, 198),
        QualityRow("sdfastgn_fp8", 200, 196, 30.25, 20.0, 0.9876, 16, 15, 0.04, 3),
    ]
    save(tmp_path, "quality.json", QUALITY, rows, config={"steps": 30})
    lines = TABLES["fp8_quality"](tmp_path).splitlines()
    assert lines[2] == "| UNet: stock, fp32 | - | - | - | 198 ± 1.4 | - |"
    cells = "30.2 | - / - / 20 | 0.9876 | 196 ± 2.0 | 3"
    assert lines[3] == f"| UNet: sdfastgn, FP8: 15 of 16 products | {cells} |"
    assert lines[-1] == f"200 images of 64², 30 steps. {SOURCE}"


def test_table_of_several_models(tmp_path: Path) -> None:
    more = {"model": "lora", "median_psnr_db": 31.5, "low_psnr_db": 25.0, "loss": 0.5, "row_error": 0.01}
    rows = [
        QualityRow("half", 200, 200, 33.0, 21.0, 0.99, **more, high_row_error=0.02),
        QualityRow(ONE_SCALE, 200, 200, model="lora"),
    ]
    save(tmp_path, "quality.json", QUALITY, rows, config={"steps": 30})
    lines = TABLES["fp8_quality"](tmp_path).splitlines()
    cells = "33 | 31.5 / 25 / 21 | 0.99 | 200 ± 0.0 | 0.5 | 1.0e-02 / 2.0e-02"
    assert lines[2] == f"| transformer with a LoRA: stock, bf16 | {cells} |"
    name = "FP8, one scale for each tensor"
    assert lines[3] == f"| transformer with a LoRA: {name} | - | - | - | 200 ± 0.0 | - | - |"
