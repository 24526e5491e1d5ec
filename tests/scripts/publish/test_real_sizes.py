"""Networks at real sizes: their errors against fp32, and the lines of videos."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from scripts.publish import real_sizes
from scripts.publish.networks import Case
from scripts.publish.pages import TABLES
from scripts.publish.tables.real_sizes import SizeRow
from sdfastgn.bench.images import relative_error
from tests.bench.tables.cases import ENVIRONMENT, save

CPU = torch.device("cpu")
ROW = SizeRow("a VAE", "bfloat16", 40.0, 20.0, 900.0, 800.0, False, 1e-3, 5e-3, 4e-3, 7.0)


def network(dtype: torch.dtype) -> Case:
    def prepare(model, draw):
        x = draw(1, 8, 6, 5)
        return lambda: model(x)

    layers = lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())  # noqa: E731
    return Case("a network", layers, prepare, dtype)


def test_errors_are_against_fp32_of_the_same_weights_and_inputs():
    row = real_sizes.measured(network(torch.bfloat16), CPU)
    _, call = real_sizes.built(network(torch.bfloat16), CPU)
    exact = real_sizes.exact_output(network(torch.bfloat16), CPU)
    assert exact.dtype == torch.float32
    assert row.stock_error == pytest.approx(relative_error(call(), exact))
    assert 1e-3 < row.stock_error < 2e-2
    assert row.cpu_ms > 0
    assert row.optimized_error == pytest.approx(row.stock_error, rel=0.5)
    assert real_sizes.measured(network(torch.float32), CPU).stock_error is None
    video = dataclasses.replace(network(torch.float32), is_video=True)
    assert real_sizes.measured(video, CPU).stock_error == 0
    assert real_sizes.measured(dataclasses.replace(video, is_long=True), CPU).stock_error is None


def test_videos_have_a_table_of_their_own(tmp_path):
    encode = dataclasses.replace(ROW, model="an encode", is_video=True)
    (tmp_path / "renewal").mkdir()
    save(tmp_path / "renewal", "1.json", "real_sizes", [ROW, dataclasses.replace(encode, model="a video")])
    save(tmp_path, "2.json", "real_sizes", [encode])
    line = "| H200 | bfloat16 | 40 | 20 | 2.00x | no | 7 | 900 | 800 | 5.0e-03 | 4.0e-03 |"
    assert all(f"| {name} {line}" in TABLES["real_sizes"](tmp_path) for name in ("a VAE", "an encode"))
    assert f"| a video {line}" in TABLES["video"](tmp_path)
    assert not any(name in TABLES["video"](tmp_path) for name in ("a VAE", "an encode"))


def test_a_later_run_of_a_model_takes_the_place_of_an_earlier_one(tmp_path):
    where = {**ENVIRONMENT, "gpu": "NVIDIA H100 80GB HBM3", "date": "2026-11-25T06:00:00+00:00"}
    save(tmp_path, "later.json", "real_sizes", [dataclasses.replace(ROW, stock_ms=50.0)], environment=where)
    save(tmp_path, "new.json", "real_sizes", [ROW, dataclasses.replace(ROW, model="another")])
    text = TABLES["real_sizes"](tmp_path)
    assert "| a VAE | H100 | bfloat16 | 50 | 20 | 2.50x |" in text
    assert "| another | H200 | bfloat16 | 40 |" in text
    assert text.count("| a VAE |") == 1
    assert text.count("commit") == 2
    (tmp_path / "new.json").unlink()
    assert TABLES["real_sizes"](tmp_path).count("commit") == 1


def test_encodes_are_timed_only_if_asked_for(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(real_sizes, "measured", lambda case, device: timed.append(case.name) or ROW)
    for options in ([], ["--encodes"]):
        real_sizes.main(["--json", str(tmp_path / "a.json"), "--device", "cpu", "--only", "Flux2", *options])
    assert timed == ["Flux2 VAE decode, 1024²", "Flux2 VAE encode, 1024²"]
