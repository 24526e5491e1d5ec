"""Kernel suites on the CPU: every one, the gate, layouts, what rows say, a new provider."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.bench.documents import FAILED, OK, UNAVAILABLE, WRONG
from sdfastgn.bench.kernels import run as kernel_run
from sdfastgn.bench.kernels.run import calls_a_round, run
from sdfastgn.bench.kernels.suite import (
    BACKWARD,
    BOTH,
    ERROR_BOUNDS,
    FORWARD,
    TRAINING,
    KernelConfig,
    KernelRow,
    Provider,
    Shape,
    Suite,
    fixed,
)
from sdfastgn.bench.kernels.suites import EPS, GROUPS, SUITES
from sdfastgn.bench.tables import kernels as tables
from sdfastgn.models.architectures import DTYPES
from tests.command_line import invoke

TINY: dict[str, Shape] = {
    "inference": (1, 64, 5, 3),
    "training": (2, 64, 5, 3),
    "instance_norm": (2, 3, 5, 2, 7),
    "layer_norm": (7, 33),
    "batch_norm": (2, 6, 5, 3),
    "upsample": (2, 6, 5, 3),
    "attention": (2, 1, 6, 264),
}
GRADIENTS = {"y", "dx", "dweight", "dbias"}
INFER, TRAIN = SUITES["inference"], SUITES["training"]


def rows_of(suite: Suite, names: tuple[str, ...] = (), **changes: Any) -> list[KernelRow]:
    values = {"dtype": "fp32", "device": "cpu", "repeats": 1, "wall_clock": True, **changes}
    shapes = values.pop("shapes", (TINY[suite.name],))
    config = KernelConfig(suite.name, shapes=shapes, providers=names or tuple(suite.providers), **values)
    return run(suite, config)


def with_call(suite: Suite, call: Callable[..., Any], *passes: str) -> Suite:
    """``suite`` with one operation, in these passes, and ``call`` as its only provider."""
    operation = suite.operations[0]
    ours = fixed("sdfastgn", call)
    passes = passes or operation.passes
    return replace(suite, operations=(replace(operation, providers=(ours,), passes=passes),), extras=())


def group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, GROUPS, weight, bias, EPS))


# ---- every suite


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_suite_is_checked_and_timed(suite, dtype):
    names = tuple(name for name, provider in suite.providers.items() if provider.by_default)
    rows = rows_of(suite, names, dtype=dtype)
    cells = [(row.provider, row.task) for row in rows]
    assert cells[0] == ("copy", "copy")
    assert len(set(cells)) == len(cells) == len(suite.cells_of(names))
    for row, (operation, _, what) in zip(rows, suite.cells_of(names), strict=True):
        if row.provider == "stable_fast":
            assert (row.status, row.reason) == (UNAVAILABLE, "package sfast (stable-fast) is not installed")
            continue
        assert row.status == OK, row.reason
        gradients = {f"d{name}" for name in operation.sizes(row.shape)} if BACKWARD in what else set()
        assert set(row.errors) == {*operation.outputs, *gradients}
        assert row.error == max(row.errors.values())
        assert row.hot_us is not None
        assert row.hot_ratio == pytest.approx(row.hot_us / (rows[0].hot_us or 1))
        size = operation.moved_tensors(what) * torch.Size(row.shape).numel() * DTYPES[dtype].itemsize
        assert row.hot_gbps == pytest.approx(size / 1e3 / row.hot_us)


def test_a_pass_moves_each_tensor_once():
    passes = ((op, op.passes[-1]) for suite in (INFER, TRAIN) for op in (*suite.operations, *suite.extras))
    assert [op.moved_tensors(what) for op, what in passes] == [2, 2, 3, 2, 5]
    assert SUITES["batch_norm"].operations[0].moved_tensors(BACKWARD) == 3


def test_a_measurement_on_the_cpu_leaves_frozen_objects_frozen():
    """A program may have called ``gc.freeze`` itself, and so do these tests."""
    gc.freeze()
    rows_of(SUITES["upsample"], (SUITES["upsample"].baseline,))
    assert gc.get_freeze_count() > 0


def test_shapes_are_those_of_stable_diffusion():
    assert (len(INFER.shape_sets["unet"]), len(set(INFER.shape_sets["all"]))) == (19, 23)
    assert all(rows * D == 10**8 for rows, D in SUITES["layer_norm"].shape_sets["rows"])
    for suite in SUITES.values():
        rank = len(suite.axes.split("x"))
        assert all(len(shape) == rank and shape[1] % suite.divisor == 0 for shape in suite.shape_sets["all"])


def test_reasons_are_one_line_and_baselines_are_known():
    for suite in SUITES.values():
        assert {suite.baseline, *(op.baseline for op in suite.extras)} <= set(suite.providers)
        for provider in suite.providers.values():
            reason = provider.reason(torch.device("cpu"))
            assert reason is None or (reason.strip() and "\n" not in reason)


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
def test_rounds_are_short(moved, seconds, calls):
    assert calls_a_round(moved, seconds, INFER.round_seconds) == calls


# ---- the gate


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dx", "dweight", "dbias"])
def test_a_wrong_gradient_gets_no_time(which):
    def call(*operands: torch.Tensor) -> torch.Tensor:
        wrong = operands[which]
        nothing = wrong - wrong.detach()  # zeros, and a gradient that does not belong there
        return group_norm_silu(*operands) + nothing.reshape(nothing.shape if which == 0 else (1, -1, 1, 1))

    _, forward, judged = rows_of(with_call(TRAIN, call))
    assert (forward.status, judged.status) == (OK, WRONG)
    assert f"relative error of {('dx', 'dweight', 'dbias')[which]} " in judged.reason
    times = (judged.hot_us, judged.cold_us, judged.hot_gbps, judged.hot_ratio, judged.cold_ratio)
    assert times == (None,) * 5


@pytest.mark.parametrize("factor", [1.01, float("nan")], ids=["off", "nan"])
def test_a_wrong_output_fails_every_pass_and_leaves_json_ready_values(factor):
    rows = rows_of(with_call(TRAIN, lambda *operands: group_norm_silu(*operands) * factor))
    assert [row.status for row in rows] == [OK, WRONG, WRONG]
    assert "relative error of y" in rows[-1].reason
    assert "fp64" in rows[-1].reason
    if factor != factor:
        assert (rows[1].error, rows[1].errors) == (None, {})


@pytest.mark.parametrize("index", range(3), ids=["given", "add", "cat"])
def test_a_wrong_op_with_statistics_gets_no_time(index):
    extra = INFER.extras[index]
    wrong = fixed(extra.providers[-1].name, lambda *operands: torch.zeros(TINY["inference"]))
    suite = replace(INFER, extras=(replace(extra, providers=(wrong,)),))
    assert [row.status for row in rows_of(suite, (wrong.name,))] == [OK, WRONG]


def test_a_kernel_that_raises_is_a_row():
    def call(*operands: torch.Tensor) -> torch.Tensor:
        raise ValueError("not these channels")

    row = rows_of(with_call(INFER, call))[1]
    assert (row.status, row.reason, row.hot_us) == (FAILED, "ValueError: not these channels", None)


def test_the_gate_in_words():
    assert INFER.gate("fp16") == "0.005"
    assert TRAIN.gate("fp16") == "0.005, of gradients 0.01"
    assert SUITES["upsample"].gate("fp32") == "0.0001, of upsample + conv 0.002"


# ---- what is called


def test_the_gradient_of_the_output_has_its_layout():
    strides: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = group_norm_silu(x, weight, bias).contiguous(memory_format=torch.channels_last)
        if y.requires_grad:
            y.register_hook(lambda grad: strides.add((grad.stride(), x.stride())))
        return y

    assert rows_of(with_call(TRAIN, call, BOTH))[-1].status == OK
    channels_last = torch.empty(TINY["training"]).contiguous(memory_format=torch.channels_last).stride()
    assert strides == {(channels_last, channels_last)}


def test_a_backward_alone_runs_no_forward_each_time():
    counts = {"forward": 0, "backward": 0}

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        counts["forward"] += 1
        y = group_norm_silu(x, weight, bias)
        y.register_hook(lambda grad: counts.__setitem__("backward", counts["backward"] + 1))
        return y

    last = rows_of(with_call(TRAIN, call, BACKWARD))[-1]
    assert (last.status, set(last.errors)) == (OK, GRADIENTS)
    # One for the layout of y, one for the gate's y, one for each of the two sets of inputs.
    assert counts["forward"] == 4
    assert counts["backward"] > 8


@pytest.mark.parametrize(("what", "records"), [(FORWARD, False), (TRAINING, True)])
def test_only_training_records(what, records):
    seen: set[bool] = set()

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = group_norm_silu(x, weight, bias)
        seen.add(y.requires_grad)
        return y

    rows_of(with_call(TRAIN, call, what))
    assert seen == {records}


def test_each_provider_gets_its_layout():
    layouts: dict[str, set[bool]] = {"nchw": set(), "nhwc": set()}

    def noting(name: str) -> Provider:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            layouts[name].add(x.is_contiguous(memory_format=torch.channels_last))
            return group_norm_silu(x, weight, bias)

        return fixed(name, call, channels_last=name == "nhwc")

    operation = replace(INFER.operations[0], providers=(noting("nchw"), noting("nhwc")))
    rows_of(replace(INFER, operations=(operation,)), ("nchw", "nhwc"))
    assert layouts == {"nchw": {False}, "nhwc": {True}}


def test_compiled_calls_keep_what_a_second_backward_needs(monkeypatch):
    import torch._functorch.config as config

    seen: set[bool] = set()

    def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *tensors: (seen.add(config.donated_buffer), call(*tensors))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    assert [row.status for row in rows_of(TRAIN, ("inductor",))] == [OK, OK, OK]
    assert seen == {False}


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_suite_on_the_gpu(suite):
    rows = rows_of(suite, device="cuda", dtype="fp16", repeats=3)
    assert not [row for row in rows if row.status not in (OK, UNAVAILABLE)]
    timed = {row.task for row in rows if row.provider == suite.baseline and row.status == OK}
    assert timed == set(suite.ideals)
    assert all((row.hot_us or 1) > 0.5 for row in rows)


# ---- what rows say

UNET: Shape = (2, 320, 64, 64)


def row(name: str, hot: float, cold: float, task: str = BOTH, shape: Shape = UNET) -> KernelRow:
    return KernelRow(shape, name, OK, hot_us=hot, cold_us=cold, task=task)


ROWS = [row("copy", 1, 2, "copy"), row("eager_nchw", 10, 10), row("apex", 5, 8), row("sdfastgn", 4, 9)]


def line_of(rows: list[KernelRow]) -> tables.Line:
    return tables.lines(rows)[UNET, BOTH]


def test_a_line_has_one_task_and_the_copy():
    found = tables.lines([*ROWS, row("sdfastgn", 2, 2, TRAINING)])
    assert {task: list(line) for (_, task), line in found.items()} == {
        BOTH: ["copy", "eager_nchw", "apex", "sdfastgn"],
        TRAINING: ["copy", "sdfastgn"],
    }


def test_the_best_peer_is_neither_the_copy_nor_ours():
    other = KernelRow(UNET, "gnnhwc", OK, hot_us=3.0, cold_us=30.0, task=BOTH)
    line = line_of([*ROWS, other])
    assert tables.best_peers(line) == ("gnnhwc", "apex")
    assert tables.best_peers(line_of([ROWS[0], ROWS[3]])) == (None, None)


def test_means_over_the_copy_and_over_the_baseline():
    large: Shape = (1, 512, 512, 512)
    names = {"copy": ("copy", 2), "eager_nchw": (BOTH, 8), "sdfastgn": (BOTH, 2)}
    rows = [*ROWS, *(row(name, time, time, task, large) for name, (task, time) in names.items())]
    to_copy, to_eager = tables.summary(TRAIN, rows).values()
    expected = {"hot": pytest.approx(4), "cold": pytest.approx(4.5), "shapes": 1}
    assert to_copy["unet"][BOTH]["sdfastgn"] == expected
    assert to_copy["all"][BOTH]["sdfastgn"]["hot"] == pytest.approx(2)
    assert to_eager["all"][BOTH]["sdfastgn"]["hot"] == pytest.approx((0.4 * 0.25) ** 0.5)
    assert to_eager["all"][BOTH]["apex"]["shapes"] == 1


# ---- a new provider is one entry


def test_a_new_provider_is_in_help_table_and_json(tmp_path, monkeypatch):
    operation = INFER.operations[0]
    new = fixed("thrown_away", group_norm_silu)
    suite = replace(INFER, operations=(replace(operation, providers=(*operation.providers, new)),))
    monkeypatch.setitem(SUITES, "inference", suite)
    path = tmp_path / "out.json"
    chosen = ("--device", "cpu", "--shapes", "1x64x4x4", "--repeats", "1", "--providers", new.name)
    done = invoke("kernels", *chosen, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert new.name in invoke("kernels", "-h").stdout
    assert new.name in done.stdout.split("not run")[0]
    rows = json.loads(path.read_text())["rows"]
    assert [(one["provider"], one["status"]) for one in rows] == [("copy", OK), (new.name, OK)]
    assert ERROR_BOUNDS["fp16"] >= rows[1]["error"]


def test_plain_pytorch_gets_no_time(monkeypatch):
    def plain(device: torch.device) -> None:
        raise RuntimeError("plain PyTorch ran")

    monkeypatch.setattr(kernel_run, "check_kernels_ran", plain)
    names = tuple(name for name, provider in INFER.providers.items() if provider.by_default)
    for row in rows_of(INFER, names):
        ours = row.provider.startswith("sdfastgn") or row.provider.endswith("_with_statistics")
        assert row.reason.endswith("plain PyTorch ran") is ours
        assert not (ours and row.hot_us)
