"""The kernel benchmark on the CPU: checked cells, reasons, ratios, the best peer, and shapes that are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.kernels import cells, providers
from sdfastgn.bench.kernels import run as kernels
from sdfastgn.bench.kernels.cells import QUOTED, KernelConfig, KernelRow, Shape
from sdfastgn.bench.kernels.providers import Provider

SHAPE: Shape = (1, 64, 5, 3)
CPU = ("eager_nchw", "eager_nhwc", "sdfastgn")


def config(**changes: Any) -> KernelConfig:
    return KernelConfig(**{
        "shapes": (SHAPE,), "providers": CPU, "dtype": "fp32", "device": "cpu", "wall_clock": True, **changes
    })  # fmt: skip


def row(name: str, hot: float, cold: float, shape: Shape = (2, 320, 64, 64), copy: float = 1.0) -> KernelRow:
    return KernelRow(shape, name, OK, hot_us=hot, cold_us=cold, hot_ratio=hot / copy, cold_ratio=cold / copy)


def test_shapes_are_those_of_the_targets_and_more() -> None:
    assert len(kernels.UNET_SHAPES) == 19
    assert len(set(kernels.SHAPE_SETS["all"])) == 23
    assert all(shape[1] % kernels.GROUPS == 0 for shape in kernels.SHAPE_SETS["all"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_cells_are_checked_and_timed(dtype: str) -> None:
    rows = kernels.run(config(dtype=dtype))
    assert [(cell.provider, cell.status) for cell in rows] == [(name, OK) for name in ("copy", *CPU)]
    for cell in rows:
        assert cell.hot_us is not None
        assert cell.hot_us > 0
        assert cell.hot_gbps == pytest.approx(2 * 960 * (4 if dtype == "fp32" else 2) / 1e3 / cell.hot_us)
        assert cell.error is not None
        assert cell.error <= kernels.ERROR_BOUNDS[dtype]
        assert cell.hot_ratio == pytest.approx(cell.hot_us / (rows[0].hot_us or 0))


@pytest.mark.parametrize(
    ("moved", "seconds", "calls"),
    [
        pytest.param(2**20, 1e-5, 100, id="small"),
        pytest.param(2**27, 1e-5, 16, id="by-traffic"),
        pytest.param(2**31, 1e-3, 5, id="large"),
        pytest.param(2**20, 1e-3, 50, id="slow"),
        pytest.param(2**31, 1.0, 2, id="very-slow"),
    ],
)
def test_rounds_are_short(moved: int, seconds: float, calls: int) -> None:
    assert cells.calls_a_round(moved, seconds, KernelConfig.round_seconds) == calls


PRODUCERS = ("sdfastgn_given", "add", "add_with_statistics", "cat", "cat_with_statistics")


def test_ops_with_statistics_are_checked_and_measured_by_the_plain_ones() -> None:
    rows = kernels.run(config(providers=PRODUCERS, shapes=((2, 64, 9, 7),)))
    assert [(cell.provider, cell.status) for cell in rows] == [(name, OK) for name in ("copy", *PRODUCERS)]
    ratios = kernels.baseline_ratios(rows)
    assert set(ratios) == set(providers.BASELINES)
    times = {cell.provider: cell.hot_us for cell in rows}
    hot = ratios["add_with_statistics"][(2, 64, 9, 7)][0]
    assert hot == pytest.approx((times["add_with_statistics"] or 0) / (times["add"] or 1))
    assert kernels.best_peer(rows, (2, 64, 9, 7)) is None


def test_a_sum_moves_three_tensors() -> None:
    rows = kernels.run(config(providers=("add",), dtype="fp32"))
    add = next(cell for cell in rows if cell.provider == "add")
    assert add.hot_gbps == pytest.approx(3 * 960 * 4 / 1e3 / (add.hot_us or 0))


@pytest.mark.parametrize("name", ["add_with_statistics", "cat_with_statistics", "sdfastgn_given"])
def test_a_wrong_op_with_statistics_gets_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = providers.by_name(name).task
    wrong = Provider(name, lambda device: None, lambda *_: lambda a, b: torch.zeros(SHAPE), task=task)
    monkeypatch.setattr(providers, "PROVIDERS", (providers.by_name("copy"), wrong))
    assert [cell.status for cell in kernels.run(config(providers=(name,)))] == [OK, WRONG]


def test_native_groupnorm_waits_for_the_torch_that_has_it() -> None:
    reason = providers.by_name("native_nhwc").reason(torch.device("cuda"))
    assert (reason is None) == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14))


def replaced(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    entries = (providers.by_name("copy"), Provider("sdfastgn", lambda device: None, build))
    monkeypatch.setattr(providers, "PROVIDERS", entries)


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, lambda groups, weight, bias, eps: torch.nn.functional.silu)
    wrong = kernels.run(config())[1]
    assert wrong.status == WRONG
    assert "fp64" in wrong.reason
    assert (wrong.hot_us, wrong.cold_us, wrong.hot_gbps, wrong.hot_ratio, wrong.cold_ratio) == (None,) * 5


def test_a_kernel_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        raise ValueError("not these channels")

    replaced(monkeypatch, build)
    failed = kernels.run(config())[1]
    assert (failed.status, failed.reason, failed.hot_us) == (FAILED, "ValueError: not these channels", None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"wall_clock": False}, "need an NVIDIA GPU", id="no-gpu"),
        pytest.param({"shapes": ((1, 512, 256, 256),)}, "too many for the CPU", id="large"),
        pytest.param({"providers": ("stable_fast",), "wall_clock": False}, "sfast", id="no-package"),
    ],
)
def test_every_cell_without_a_time_says_why(changes: dict[str, Any], reason: str) -> None:
    rows = kernels.run(config(**changes))
    assert {cell.status for cell in rows} == {UNAVAILABLE}
    assert reason in rows[-1].reason
    assert all(cell.reason and cell.hot_us is None for cell in rows)


@pytest.mark.parametrize("provider", providers.PROVIDERS, ids=providers.NAMES)
def test_reason_is_one_line(provider: Provider) -> None:
    reason = provider.reason(torch.device("cpu"))
    assert reason is None or (reason.strip() and "\n" not in reason)


def test_unknown_provider_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'x'.*copy, eager_nchw"):
        providers.by_name("x")


def test_best_peer_is_neither_the_copy_nor_ours() -> None:
    rows = [row("copy", 1, 1), row("apex", 5, 9), row("gnnhwc", 7, 8), row("sdfastgn", 4, 4)]
    hot, cold = (
        kernels.best_peer(rows, (2, 320, 64, 64)),
        kernels.best_peer(rows, (2, 320, 64, 64), cold=True),
    )
    assert hot is rows[1]
    assert cold is rows[2]
    assert kernels.best_peer(rows[:1], (2, 320, 64, 64)) is None


@pytest.mark.parametrize(
    ("ours", "lost_hot", "lost_cold"),
    [
        pytest.param(row("sdfastgn", 4, 4), False, False, id="wins"),
        pytest.param(row("sdfastgn", 6, 4), True, False, id="loses-hot"),
        pytest.param(row("sdfastgn", 4, 10), False, True, id="loses-cold"),
        pytest.param(KernelRow((2, 320, 64, 64), "sdfastgn", WRONG), True, True, id="wrong-is-lost"),
    ],
)
def test_lost_shapes(ours: KernelRow, lost_hot: bool, lost_cold: bool) -> None:
    rows = [row("copy", 1, 1), row("apex", 5, 9), ours]
    assert bool(kernels.losses(rows)) == lost_hot
    assert bool(kernels.losses(rows, cold=True)) == lost_cold


def test_ratio_to_the_best_peer_hot_and_cold() -> None:
    rows = [row("copy", 1, 1), row("apex", 5, 9), row("gnnhwc", 7, 8), row("sdfastgn", 4, 2)]
    shape = (2, 320, 64, 64)
    assert kernels.ratio_to_best_peer(rows, shape) == pytest.approx(0.8)
    assert kernels.ratio_to_best_peer(rows, shape, cold=True) == pytest.approx(0.25)
    assert kernels.ratio_to_best_peer(rows[:1] + rows[3:], shape) is None
    assert kernels.summary(rows)["ratio_to_best_peer"] == {
        "2x320x64x64": [pytest.approx(0.8), pytest.approx(0.25)]
    }


def test_a_quoted_peer_competes() -> None:
    quoted = KernelRow((2, 320, 64, 64), "apex", QUOTED, hot_us=3.0, cold_us=3.0)
    rows = [row("copy", 1, 1), quoted, row("sdfastgn", 4, 4)]
    assert kernels.best_peer(rows, (2, 320, 64, 64)) is quoted
    assert kernels.losses(rows) == [(2, 320, 64, 64)]


def test_summary_says_over_how_many_shapes() -> None:
    rows = [
        row("sdfastgn", 2, 3),
        row("sdfastgn", 8, 3, (2, 640, 64, 64)),
        row("sdfastgn", 5, 5, (1, 512, 512, 512)),
    ]
    means = kernels.summary(rows)["geometric_mean_of_ratio_to_copy"]
    assert means["unet"]["sdfastgn"] == {"hot": pytest.approx(4), "cold": pytest.approx(3), "shapes": 2}
    assert means["all"]["sdfastgn"]["shapes"] == 3
    assert means["large"]["sdfastgn"]["hot"] == pytest.approx(5)


@pytest.mark.gpu
def test_cells_on_the_gpu() -> None:
    names = ("eager_nhwc", "sdfastgn")
    rows = kernels.run(
        config(shapes=((2, 320, 64, 64),), providers=names, device="cuda", dtype="fp16", repeats=3)
    )
    assert [(cell.provider, cell.status) for cell in rows] == [(name, OK) for name in ("copy", *names)]
    assert all((cell.hot_us or 0) > 1 for cell in rows)
