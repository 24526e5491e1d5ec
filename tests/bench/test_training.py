"""The training step as a workload: rows, memory, and the gate over gradients."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from sdfastgn.bench import gate
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.documents import OK, WRONG
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.profile import row_title
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.bench.workload import BenchConfig, build_workload, saved_bytes
from tests.bench.cases import broken_variant

pytestmark = pytest.mark.fused_on_cpu

CONFIG = BenchConfig("tiny", "train", 64, 1, "fp32", "cpu", repeats=1)
OURS = [VARIANTS[name] for name in ("eager", "channels_last", "sdfastgn")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows(dtype):
    # In bf16 stock's own channels-last convolutions may be less exact on some processors.
    variants = OURS if dtype == "fp32" else [VARIANTS["eager"], VARIANTS["sdfastgn"]]
    rows = end_to_end.run(dataclasses.replace(CONFIG, dtype=dtype), variants)
    assert [(row.status, row.reason) for row in rows] == [(OK, "")] * len(variants)
    eager, *_, ours = rows
    assert eager.error_fp32 is not None
    for row in rows:
        assert row.median_ms is not None
        assert row.error_fp32 is not None
        assert row.error_fp32 <= max(1.05 * eager.error_fp32, 1e-5 if dtype == "fp32" else 0)
        assert row.step_mib is None  # PyTorch counts memory on CUDA only
        assert row.saved_mib is not None
    assert ours.saved_mib is not None
    assert eager.saved_mib is not None
    assert 0 < ours.saved_mib < eager.saved_mib  # one tensor less for each normalization and activation
    assert eager.error_eager == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lora_alone_is_trained(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype, lora_rank=2)
    workload = build_workload(config)
    gradients = workload.call()
    assert all(".lora_" in name and grad.dtype == torch.float32 for name, grad in gradients.items())
    assert len(gradients) == sum(".lora_" in name for name, _ in workload.target.named_parameters())
    variants = [VARIANTS[name] for name in ("eager", "sdfastgn", "sdfastgn_eager")]
    rows = end_to_end.run(config, variants, workload=workload)
    assert [(row.status, row.reason) for row in rows] == [(OK, "")] * 3
    assert rows[0].lora_rank == 2
    assert "training step of a LoRA of rank 2" in row_title(rows[0])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "factor"), [("fp32", math.nan), ("bf16", 0.9)], ids=["nan", "scaled"])
def test_wrong_gradients_get_no_time(dtype, factor):
    def attach(unet: Any) -> Any:
        """The right output, and the gradient of what enters the last convolution scaled."""
        return unet.conv_out.register_full_backward_hook(lambda module, dx, dy: (dx[0] * factor,))

    config = dataclasses.replace(CONFIG, dtype=dtype)
    rows = end_to_end.run(config, [broken_variant(attach), VARIANTS["eager"]])
    assert [row.status for row in rows] == [WRONG, OK]
    assert "gradients' relative error" in rows[0].reason
    assert rows[0].median_ms is rows[0].saved_mib is None


def gradients(**tensors: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in tensors.items()}


@pytest.mark.parametrize(
    ("ours", "error"),
    [
        pytest.param(gradients(a=[3.0], b=[4.0]), 0.0, id="same"),
        pytest.param(gradients(a=[3.0], b=[4.5]), 0.1, id="one-off"),
        pytest.param(gradients(a=[3.0]), math.nan, id="one-missing"),
        pytest.param(gradients(a=[3.0], b=[math.nan]), math.nan, id="nan"),
    ],
)
def test_error_over_all_parameters(ours, error):
    reference = gradients(a=[3.0], b=[4.0])
    judged = gate.judge(CONFIG, ours, gate.Reference(reference, fp32=reference, fp32_error=0.05))
    assert judged.error == pytest.approx(error, nan_ok=True)
    assert bool(judged.reason) is not (error <= 0.05)
    # The same without fp32 gradients is no gate at all.
    assert gate.judge(CONFIG, ours, gate.Reference(reference)).reason


@pytest.mark.parametrize(
    ("stock", "words"),
    [
        pytest.param(gradients(a=[1.0], b=[0.0]), "", id="usable"),
        pytest.param(gradients(a=[1.0], b=[math.inf]), "not finite", id="infinite"),
        pytest.param(gradients(a=[0.0]), "constant", id="zero"),
    ],
)
def test_stock_gradients_that_are_no_reference(stock, words):
    problem = gate.problem(CONFIG, stock)
    assert (words in problem) if words else not problem


def test_saved_bytes_count_shared_memory_once_and_no_parameter():
    linear = nn.Linear(4, 4, bias=False)
    x = torch.randn(8, 4)
    # linear keeps x, exp its result, which the product keeps on both sides.
    assert saved_bytes(lambda: (y := linear(x).exp()) * y, linear) == 2 * 8 * 4 * 4


def test_saved_bytes_leaves_no_graph_behind():
    """``exp`` keeps its own result, and a graph that refers to itself is never freed."""

    class Held:
        pass

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, held: Any) -> Any:
            ctx.held = held
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise AssertionError

    linear, x, held = nn.Linear(4, 4), torch.randn(8, 4), Held()
    seen = weakref.ref(held)
    operands = [held]
    del held
    saved_bytes(lambda: Noted.apply(linear(x), operands.pop()).exp(), linear)
    gc.collect()
    assert seen() is None


@pytest.mark.gpu
def test_memory_on_the_gpu():
    rows: list[Row] = end_to_end.run(dataclasses.replace(CONFIG, dtype="bf16", device="cuda"), OURS)
    for row in rows:
        assert row.peak_mib is not None
        assert row.step_mib is not None
        assert row.saved_mib is not None
        assert 0 < row.saved_mib < row.step_mib < row.peak_mib


def test_training_is_measured_without_the_workspaces_that_cudnn_tries():
    """They would be the peak memory."""
    train, unet = (dataclasses.replace(CONFIG, part=part) for part in ("train", "unet"))
    assert [part["cudnn_benchmark"] for part in end_to_end.describe([train, unet])["parts"]] == [False, True]
    assert (
        end_to_end.current_environment(torch.device("cpu"), [train])["switches"]["cudnn.benchmark"] is False
    )
    assert end_to_end.current_environment(torch.device("cpu"), [unet])["switches"]["cudnn.benchmark"] is True
