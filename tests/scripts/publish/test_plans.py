"""Networks with fused blocks and as plans: what is timed, what fails, and what the table shows."""

import json

import pytest
import torch
from diffusers import AutoencoderKL

from scripts.publish import plans
from scripts.publish.networks import Case, decode_of
from scripts.publish.pages import TABLES
from scripts.publish.tables.plans import Cost, PlanRow
from tests.bench.tables.cases import save

ROW = PlanRow("a VAE", "bfloat16", Cost(12, 5, 11, 4.5), Cost(9, 2, 8.25, 3), 1e-3, 2e-3, 3e-3, 0.5)


def autoencoder():
    kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, **kinds)


def run(monkeypatch, tmp_path, *cases):
    monkeypatch.setattr(plans, "CASES", list(cases))
    monkeypatch.setattr(plans, "ENCODES", [])
    monkeypatch.setattr(plans, "TRANSFORMERS", [])
    path = tmp_path / "plans.json"
    code = plans.main(["--json", str(path), "--device", "cpu"])
    return code, json.loads(path.read_text())


@pytest.mark.fused_on_cpu
def test_a_network_is_timed_both_ways(monkeypatch, tmp_path):
    case = Case("a VAE", autoencoder, decode_of(1, 4, 4, 4), torch.float32)
    code, written = run(monkeypatch, tmp_path, case)
    (row,) = written["rows"]
    assert (code, written["kind"], row["status"]) == (0, "plans", "ok")
    assert min(row[name][key] for name in ("fused", "plan") for key in ("ms", "cpu_ms")) > 0
    assert row["difference"] < 1e-5
    assert max(row["fused_error"], row["plan_error"]) < 1e-5


def test_a_network_without_plans_fails(monkeypatch, tmp_path):
    """No kernels run on a CPU."""
    case = Case("a VAE", autoencoder, decode_of(1, 4, 4, 4), torch.float32)
    code, written = run(monkeypatch, tmp_path, case)
    (row,) = written["rows"]
    assert (code, row["status"]) == (1, "failed")
    assert "no kernels run for torch.float32 on cpu" in row["reason"]


def test_table(tmp_path):
    rows = [ROW, PlanRow.failed("another", "float16", "it is too large")]
    save(tmp_path, "plans.json", plans.KIND, rows)
    table = TABLES["plans"](tmp_path)
    assert "| a VAE | bfloat16 | 11 / 8.25 | 12 / 9 | 5 / 2 | 4.5 / 3 | 1.0e-03 / 2.0e-03 | 0.5 |" in table
    assert "| another | float16 | failed it is too large | - |" in table
