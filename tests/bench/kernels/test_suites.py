"""Suites of the kernel benchmark, on the CPU: every one end to end, wrong gradients, layouts, lazy ops, what rows say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.bench.documents import OK, UNAVAILABLE, WRONG
from sdfastgn.bench.kernels import norm_suites, providers, suites
from sdfastgn.bench.kernels import run as kernels
from sdfastgn.bench.kernels.cells import Shape
from sdfastgn.bench.kernels.norm_suites import SUITES
from sdfastgn.bench.kernels.providers import Provider
from sdfastgn.bench.kernels.suites import BACKWARD, BOTH, FORWARD, TRAINING, Suite, SuiteConfig, SuiteRow
from sdfastgn.kernels.upsample import conv as upsample_conv

CPU = torch.device("cpu")
TINY: dict[str, Shape] = {
    "training": (2, 64, 5, 3),
    "issue_28201": (2, 64, 3, 5),
    "instance_norm": (2, 3, 5, 2, 7),
    "layer_norm": (7, 33),
    "upsample": (2, 6, 5, 3),
    "attention": (2, 1, 6, 264),
}
GRADIENTS = {"y", "dx", "dweight", "dbias"}
TRAIN = SUITES["training"]


def run(suite: Suite, names: tuple[str, ...] = (), **changes: Any) -> list[SuiteRow]:
    values = {
        "dtype": "fp32",
        "device": "cpu",
        "repeats": 1,
        "wall_clock": True,
        "suite": suite.name,
        **changes,
    }
    shapes = values.pop("shapes", (TINY[suite.name],))
    return suites.run(suite, SuiteConfig(shapes=shapes, providers=names or suite.provider_names, **values))


def with_provider(suite: Suite, call: Callable[..., Any], **changes: Any) -> Suite:
    """``suite`` with the copy and one provider, ``sdfastgn``, that is ``call``."""
    ours = Provider("sdfastgn", lambda device: None, lambda *operands: call, task=norm_suites.NORM)
    return replace(suite, providers=(suite.providers[0], ours), ours=("sdfastgn",), **changes)


def only(suite: Suite, *passes: str) -> Suite:
    return replace(suite, operations=(suite.operations[0], replace(suite.operations[1], passes=passes)))


def group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, kernels.GROUPS, weight, bias, kernels.EPS))


# ---- every suite


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_checked_and_timed(name: str, dtype: str) -> None:
    suite = SUITES[name]
    names = tuple(provider.name for provider in suite.providers if provider.by_default)
    rows = run(suite, names, dtype=dtype)
    assert rows[0].provider == "copy"
    cells = [(row.provider, row.task) for row in rows]
    assert len(set(cells)) == len(cells) == len(suite.cells_of(names))
    for row in rows:
        if row.status != OK:
            assert row.status == UNAVAILABLE
            assert row.provider in ("gnnhwc", "apex", *suite.ours)
            assert row.reason
            continue
        expected = (
            {"y", "total"} if row.task.startswith("add") else GRADIENTS if BACKWARD in row.task else {"y"}
        )
        assert set(row.errors) == expected
        assert row.error == max(row.errors.values())
        assert row.hot_ratio == pytest.approx((row.hot_us or 0) / (rows[0].hot_us or 1))
        itemsize = (
            torch.finfo({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).bits
            // 8
        )
        moved = 2 * suite.ideals.get(row.task, 1) * torch.Size(row.shape).numel() * itemsize
        assert row.hot_gbps == pytest.approx(moved / 1e3 / (row.hot_us or 0))
    assert {row.provider for row in rows if row.status == OK} >= {"copy", suite.baseline}


def test_shapes_are_those_of_the_targets() -> None:
    assert len(TRAIN.shape_sets["all"]) == 23
    assert SUITES["issue_28201"].shape_sets["all"] == ((128, 256, 28, 28), (256, 512, 56, 56))
    assert SUITES["issue_28201"].dtype == "fp32"
    rows = SUITES["layer_norm"].shape_sets["rows"]
    assert (rows[0], rows[-1]) == ((10, 10**7), (10**7, 10))
    assert all(N * D == 10**8 for N, D in rows)
    for suite in SUITES.values():
        rank = len(suite.axes.split("x"))
        assert all(len(shape) == rank and suite.fits(shape) for shape in suite.shape_sets["all"])


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_reasons_are_one_line_and_names_are_known(suite: Suite) -> None:
    assert {*suite.ours, suite.baseline, "copy"} <= set(suite.provider_names)
    tasks = [operation.task for operation in suite.operations]
    for provider in suite.providers:
        assert provider.task in tasks
        reason = provider.reason(CPU)
        assert reason is None or (reason.strip() and "\n" not in reason)


def test_without_a_gpu_every_cell_says_why() -> None:
    rows = run(TRAIN, ("eager_nchw",), wall_clock=False)
    assert {row.status for row in rows} == {UNAVAILABLE}
    assert all("NVIDIA GPU" in row.reason and row.hot_us is None for row in rows)


# ---- the gate


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dx", "dweight", "dbias"])
def test_a_wrong_gradient_gets_no_time(which: int) -> None:
    def call(*operands: torch.Tensor) -> torch.Tensor:
        wrong = operands[which]
        nothing = wrong - wrong.detach()  # zeros, and a gradient that does not belong there
        return group_norm_silu(*operands) + nothing.reshape(nothing.shape if which == 0 else (1, -1, 1, 1))

    rows = {row.task: row for row in run(with_provider(TRAIN, call)) if row.provider == "sdfastgn"}
    assert rows[TRAINING].status == OK
    judged = rows[BOTH]
    assert judged.status == WRONG
    assert ("dx", "dweight", "dbias")[which] in judged.reason
    assert "fp64" in judged.reason
    times = (judged.hot_us, judged.cold_us, judged.hot_gbps, judged.hot_ratio, judged.cold_ratio)
    assert times == (None,) * 5


def test_a_wrong_output_fails_every_pass() -> None:
    rows = run(with_provider(TRAIN, lambda x, weight, bias: group_norm_silu(x, weight, bias) * 1.01))
    assert [row.status for row in rows] == [OK, WRONG, WRONG]
    assert "relative error of y" in rows[-1].reason


def test_an_output_that_is_not_finite_leaves_json_ready_values() -> None:
    rows = run(with_provider(TRAIN, lambda x, weight, bias: group_norm_silu(x, weight, bias) * float("nan")))
    assert [row.status for row in rows] == [OK, WRONG, WRONG]
    assert (rows[1].error, rows[1].errors) == (None, {})


def test_the_gate_in_words() -> None:
    assert TRAIN.gate("fp16") == "0.005, of gradients 0.01"
    assert SUITES["upsample"].gate("fp32") == "0.0001, of upsample + conv 0.002, of gradients 0.001"


# ---- what is called


def test_the_gradient_of_the_output_has_its_layout() -> None:
    strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = group_norm_silu(x, weight, bias)
        y = y.contiguous(memory_format=torch.channels_last)
        if y.requires_grad:
            y.register_hook(lambda grad: strides.append((grad.stride(), x.stride())))
        return y

    rows = run(with_provider(only(TRAIN, BOTH), call))
    assert rows[-1].status == OK
    channels_last = torch.empty(TINY["training"]).contiguous(memory_format=torch.channels_last).stride()
    assert strides
    assert set(strides) == {(channels_last, channels_last)}


def test_a_backward_alone_runs_no_forward_each_time() -> None:
    counts = {"forward": 0, "backward": 0}

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        counts["forward"] += 1
        y = F.group_norm(x, kernels.GROUPS, weight, bias, kernels.EPS)
        y.register_hook(lambda grad: counts.__setitem__("backward", counts["backward"] + 1))
        return y

    rows = run(with_provider(only(SUITES["issue_28201"], BACKWARD), call))
    assert rows[-1].status == OK
    assert set(rows[-1].errors) == GRADIENTS
    # One for the layout of y, one for the gate's y, one for each of the two sets of inputs.
    assert counts["forward"] == 4
    assert counts["backward"] > 8


def test_a_forward_without_training_records_nothing() -> None:
    seen: list[bool] = []

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = group_norm_silu(x, weight, bias)
        seen.append(y.requires_grad)
        return y

    run(with_provider(only(TRAIN, FORWARD), call))
    assert set(seen) == {False}
    seen.clear()
    run(with_provider(only(TRAIN, TRAINING), call))
    assert set(seen) == {True}


@pytest.mark.parametrize(
    "name", ["layer_norm", "add_layer_norm", "instance_norm", "upsample_nearest_2x", "upsample_conv2d"]
)
def test_an_op_that_does_not_exist_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(sdfastgn), "_LAZY", {})
    monkeypatch.delitem(vars(sdfastgn), name, raising=False)
    suite = SUITES[
        "instance_norm" if name == "instance_norm" else "upsample" if "upsample" in name else "layer_norm"
    ]
    missing = [row for row in run(suite, suite.ours) if row.status == UNAVAILABLE]
    assert f"this sdfastgn has no {name}" in {row.reason for row in missing}


def test_our_layer_norm_is_called_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_layer_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *,
        add_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual if add_bias is None else x + residual + add_bias
        return layer_norm(total, weight, bias, eps), total

    monkeypatch.setattr(sdfastgn, "layer_norm", layer_norm, raising=False)
    monkeypatch.setattr(sdfastgn, "add_layer_norm", add_layer_norm, raising=False)
    rows = [row for row in run(SUITES["layer_norm"], ("sdfastgn",)) if row.provider == "sdfastgn"]
    assert [(row.task, row.status) for row in rows] == [(FORWARD, OK), (BOTH, OK), ("add, forward", OK)]


def test_the_upsample_suite_forces_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named after a way is timed on it, whatever the sizes; without a GPU the phases have a reason."""
    suite = SUITES["upsample"]
    calls: list[Any] = []

    def convolve_phases(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, with_statistics: bool
    ) -> Any:
        calls.append(with_statistics)
        return upsample_conv.reference_upsample_conv2d(x, weight, bias), None

    monkeypatch.setattr(upsample_conv, "convolve_phases", convolve_phases)
    names = ("sdfastgn_high", "sdfastgn_phases", "sdfastgn_phases_statistics")
    assert {row.status for row in run(suite, names[1:]) if row.provider != "copy"} == {UNAVAILABLE}
    ready = tuple(replace(provider, reason=lambda device: None) for provider in suite.providers)
    rows = [row for row in run(replace(suite, providers=ready), names) if row.provider != "copy"]
    assert [(row.provider, row.status) for row in rows] == [(name, OK) for name in names]
    assert set(calls) == {False, True}
    assert {row.task for row in rows} == {"upsample + conv, forward"}


def test_our_instance_norm_gets_both_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: set[bool] = set()

    def instance_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        activation: str = "identity",
    ) -> torch.Tensor:
        assert tuple(x.shape) == (
            2,
            7,
            3,
            5,
            2,
        )  # (N, C, D, H, W) of a shape that is written N x D x H x W x C
        layouts.add(x.is_contiguous(memory_format=torch.channels_last_3d))
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)

    monkeypatch.setattr(sdfastgn, "instance_norm", instance_norm, raising=False)
    rows = run(SUITES["instance_norm"], ("sdfastgn_ncdhw", "sdfastgn_ndhwc"))
    assert {row.status for row in rows} == {OK}
    assert layouts == {True, False}


def test_modules_of_peers_give_gradients_of_the_given_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(torch.nn.GroupNorm):
        def __init__(self, groups: int, channels: int, eps: float, activation: str) -> None:
            super().__init__(groups, channels, eps=eps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(super().forward(x))

    module = ModuleType("gnNHWC.custom_gn")
    module.GN_NHWC = Norm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gnNHWC", ModuleType("gnNHWC"))
    monkeypatch.setitem(sys.modules, "gnNHWC.custom_gn", module)
    gnnhwc = next(provider for provider in TRAIN.providers if provider.name == "gnnhwc")
    suite = replace(TRAIN, providers=(TRAIN.providers[0], replace(gnnhwc, reason=lambda device: None)))
    assert [row.status for row in run(suite)] == [OK, OK, OK]


def test_compiled_calls_keep_what_a_second_backward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as config

    seen: list[bool] = []

    def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> Any:
            seen.append(config.donated_buffer)
            return call(*tensors)

        return run

    monkeypatch.setattr(providers, "compiled", compiled)
    inductor = next(provider for provider in TRAIN.providers if provider.name == "inductor")
    inductor = replace(inductor, reason=lambda device: None)
    assert [row.status for row in run(replace(TRAIN, providers=(TRAIN.providers[0], inductor)))] == [
        OK,
        OK,
        OK,
    ]
    assert set(seen) == {False}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_on_the_gpu(name: str) -> None:
    suite = SUITES[name]
    rows = run(suite, device="cuda", dtype="fp16", repeats=3)
    assert {row.status for row in rows} <= {OK, UNAVAILABLE}
    assert {row.task for row in rows if row.provider == suite.baseline and row.status == OK} == set(
        suite.ideals
    )
    assert all((row.hot_us or 1) > 0.5 for row in rows)


# ---- what rows say


def row(name: str, hot: float, cold: float, task: str = BOTH, shape: Shape = (2, 320, 64, 64)) -> SuiteRow:
    return SuiteRow(shape, name, OK, hot_us=hot, cold_us=cold, hot_ratio=hot, cold_ratio=cold, task=task)


ROWS = [row("copy", 1, 2, "copy"), row("eager_nchw", 10, 10), row("apex", 5, 8), row("sdfastgn", 4, 9)]


def test_a_line_has_one_task_and_the_copy() -> None:
    found = suites.lines([*ROWS, row("sdfastgn", 2, 2, TRAINING)])
    assert {task: list(line) for (_, task), line in found.items()} == {
        BOTH: ["copy", "eager_nchw", "apex", "sdfastgn"],
        TRAINING: ["copy", "sdfastgn"],
    }


def test_lost_cells_and_ratios_hot_and_cold() -> None:
    line = suites.lines(ROWS)[(2, 320, 64, 64), BOTH]
    assert (suites.best_peer(TRAIN, line), suites.is_lost(TRAIN, line, "sdfastgn")) == ("apex", False)
    assert suites.is_lost(TRAIN, line, "sdfastgn", cold=True)
    found = suites.summary(TRAIN, ROWS)
    assert found["slower_than_best_peer"] == {"hot": [], "cold": [["2x320x64x64", BOTH, "sdfastgn"]]}
    assert found["ratio_to_best_peer"] == {"sdfastgn": {BOTH: {"2x320x64x64": [0.8, 1.125]}}}
    assert found["ideal_ratio_to_copy"] == {TRAINING: 1, BOTH: 2.5}


def test_ours_without_a_time_is_lost_and_without_a_peer_is_not() -> None:
    wrong = SuiteRow((2, 320, 64, 64), "sdfastgn", WRONG, task=BOTH)
    line = suites.lines([*ROWS[:3], wrong])[(2, 320, 64, 64), BOTH]
    assert suites.is_lost(TRAIN, line, "sdfastgn")
    assert not suites.is_lost(TRAIN, suites.lines(ROWS[3:])[(2, 320, 64, 64), BOTH], "sdfastgn")


def test_means_over_the_copy_and_over_the_baseline() -> None:
    large: Shape = (1, 512, 512, 512)
    rows = [*ROWS, row("copy", 2, 2, "copy", large), row("eager_nchw", 8, 8, BOTH, large), row("sdfastgn", 2, 2, BOTH, large)]  # fmt: skip
    found = suites.summary(TRAIN, rows)
    to_copy = found["geometric_mean_of_ratio_to_copy"]
    assert to_copy["unet"][BOTH]["sdfastgn"] == {
        "hot": pytest.approx(4),
        "cold": pytest.approx(4.5),
        "shapes": 1,
    }
    assert to_copy["all"][BOTH]["sdfastgn"]["hot"] == pytest.approx(2)
    to_eager = found["geometric_mean_of_ratio_to_eager_nchw"]["all"][BOTH]
    assert to_eager["sdfastgn"]["hot"] == pytest.approx((0.4 * 0.25) ** 0.5)
    assert to_eager["apex"]["shapes"] == 1
