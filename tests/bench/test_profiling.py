"""Breakdowns of made-up recordings of a GPU and of real ones on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity

from sdfastgn.bench import profiling, timing
from sdfastgn.bench import run as end_to_end
from sdfastgn.bench.documents import FAILED, OK, WRONG
from sdfastgn.bench.kernel_categories import (
    ATTENTION,
    CATEGORIES,
    CONVOLUTION,
    COPIES,
    FLOOR,
    GAPS,
    GEMM,
    NORMALIZATION,
    OTHER,
    POINTWISE,
)
from sdfastgn.bench.profiling import CALL, CPU, REPLAY, Breakdown
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.bench.workload import BenchConfig, Workload
from tests.bench.cases import MODEL, SMALL, scaled

CONV_KERNEL = "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc"
GEMM_KERNEL = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN"
ADD_KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>"
NHWC_KERNEL = "void cudnn::ops::nchwToNhwcKernel<__half, __half>"
UNKNOWN = "void some_library::mystery<float>(float*, int)"


def event(name: str, start: float, end: float, *, on_device: bool = False, **values: Any) -> Any:
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    # mypy: torch's class is not annotated.
    return FunctionEvent(0, name, 1, start, end, device_type=kind, **values)  # type: ignore[no-untyped-call]


def kernels(*launches: tuple[str, float, float]) -> list[Any]:
    return [event(name, start, end, on_device=True) for name, start, end in launches]


def recording(operators: list[Any], launches: list[Any]) -> Any:
    events = EventList([*operators, *launches], use_device="cuda")  # type: ignore[no-untyped-call]
    events._build_tree()  # type: ignore[no-untyped-call]  # what profile.events() does
    return events


def launching(operator: Any, *launched: tuple[str, float]) -> Any:
    for name, duration in launched:
        operator.append_kernel(name, 0, duration)
    return operator


def plain_call() -> Any:
    """Convolution, its layout change and bias, attention as a product, and a foreign kernel."""
    operators = [
        event("aten::convolution", 0, 20),
        launching(
            event("aten::cudnn_convolution", 1, 10),
            (NHWC_KERNEL, 2.0),
            (CONV_KERNEL, 10.0),
            (GEMM_KERNEL, 6.0),
        ),
        launching(event("aten::add_", 11, 19), (ADD_KERNEL, 3.0)),
        event("aten::scaled_dot_product_attention", 30, 50),
        launching(event("aten::bmm", 31, 40), (GEMM_KERNEL, 2.0)),
        event("aten::native_group_norm", 60, 80),
        launching(event("aten::copy_", 61, 62), (UNKNOWN, 4.0)),
        launching(event("aten::add", 63, 64), ("norm_part", 5.0)),
    ]
    return recording(
        operators, kernels((NHWC_KERNEL, 100, 102), (CONV_KERNEL, 110, 120), ("apply_kernel", 130, 137))
    )


def of(*launches: tuple[str, float, float], source: str = REPLAY, call_ms: float = 1.0) -> Breakdown:
    return profiling.of_kernels(
        plain_call(), kernels(*launches), source=source, timed_ms=0.5, call_ms=call_ms
    )


def config(**changes: Any) -> BenchConfig:
    base = BenchConfig("tiny", "unet", 64, 1, "fp32", "cpu", repeats=1, profile=True)
    return dataclasses.replace(base, **changes)


# ---- recordings of a GPU


def test_kernels_take_the_category_of_the_operator_that_launched_them():
    shares = profiling.shares_by_name(plain_call())
    assert shares[CONV_KERNEL] == {CONVOLUTION: 1.0}
    assert shares[NHWC_KERNEL] == {COPIES: 1.0}
    assert shares[ADD_KERNEL] == {POINTWISE: 1.0}
    assert shares["norm_part"] == {NORMALIZATION: 1.0}  # what a norm is made of belongs to it
    assert shares[UNKNOWN] == {COPIES: 1.0}  # but not the copy of its input
    assert shares[GEMM_KERNEL] == pytest.approx({CONVOLUTION: 0.75, ATTENTION: 0.25})


def test_a_replay_is_told_by_what_the_plain_call_launched():
    found = of((GEMM_KERNEL, 0, 8), (UNKNOWN, 8, 10), ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNN", 10, 15))
    assert found.source == REPLAY
    assert found.categories[CONVOLUTION] == pytest.approx(0.006)
    assert found.categories[ATTENTION] == pytest.approx(0.002)
    assert found.categories[COPIES] == pytest.approx(0.002)
    assert found.categories[GEMM] == pytest.approx(0.005)  # of a name that the plain call did not have
    assert found.floor_ms == pytest.approx(0.013)
    assert found.floor_share == pytest.approx(13 / 15)


@pytest.mark.parametrize(
    ("second", "gap", "add"),
    [
        pytest.param((110, 113), 10, 3, id="gap"),
        pytest.param((100, 103), 0, 3, id="back-to-back"),
        pytest.param((95, 104), 0, 4, id="overlap"),
        pytest.param((20, 60), 0, 0, id="inside"),
    ],
)
def test_categories_and_gaps_add_up_to_the_time_on_the_device(second, gap, add):
    found = of((CONV_KERNEL, 0, 100), (ADD_KERNEL, *second))
    assert set(found.categories) == {*CATEGORIES, GAPS}
    assert found.categories[GAPS] == pytest.approx(gap / 1e3, abs=1e-9)
    assert found.categories[POINTWISE] == pytest.approx(add / 1e3, abs=1e-9)
    assert found.categories[CONVOLUTION] == pytest.approx(0.1)
    assert sum(found.categories.values()) == pytest.approx(found.total_ms)


def test_the_order_of_events_does_not_matter():
    assert of((ADD_KERNEL, 95, 104), (CONV_KERNEL, 0, 100)) == of(
        (CONV_KERNEL, 0, 100), (ADD_KERNEL, 95, 104)
    )


def test_unknown_kernels_are_listed_with_their_share():
    found = of(
        ("first_mystery", 0, 2), (CONV_KERNEL, 2, 9), ("second_mystery", 9, 10), ("first_mystery", 10, 12)
    )
    assert found.categories[OTHER] == pytest.approx(0.005)
    assert found.other == [
        {"name": "first_mystery", "category": OTHER, "calls": 2, "ms": pytest.approx(0.004)},
        {"name": "second_mystery", "category": OTHER, "calls": 1, "ms": pytest.approx(0.001)},
    ]
    assert [entry["name"] for entry in found.top] == [CONV_KERNEL, "first_mystery", "second_mystery"]
    assert found.kernels == 4


def test_only_the_longest_are_listed():
    found = of(*((f"mystery_{index}", 20 * index, 21 * index + 1) for index in range(14)))
    assert [entry["name"] for entry in found.top] == [f"mystery_{index}" for index in range(13, 3, -1)]
    assert len(found.other) == 14


@pytest.mark.parametrize(("call_ms", "gaps"), [(1.0, 0.981), (0.01, 0.0)], ids=["slow-cpu", "none"])
def test_gaps_of_the_plain_call_come_from_the_clock(call_ms, gaps):
    assert of((CONV_KERNEL, 0, 100), call_ms=call_ms).call_gaps_ms == pytest.approx(gaps)


def test_ranges_named_by_the_user_are_no_kernels():
    named = event("## Call CompiledFxGraph", 0, 500, on_device=True, is_user_annotation=True)
    found = profiling.of_kernels(
        plain_call(), [named, *kernels((CONV_KERNEL, 0, 100))], source=CALL, timed_ms=1, call_ms=1
    )
    assert (found.total_ms, found.kernels) == (0.1, 1)


def test_recordings_without_kernels_are_an_error():
    none, some = [event("cudaGraphLaunch", 0, 5)], kernels((CONV_KERNEL, 0, 100))
    for plain, replay, what in (([], some, "the plain call"), (plain_call(), none, "the replay")):
        with pytest.raises(RuntimeError, match=f"no kernel of {what}"):
            profiling.of_kernels(plain, replay, source=REPLAY, timed_ms=1, call_ms=1)


@pytest.mark.parametrize("captured", [True, False], ids=["graph", "no-graph"])
def test_on_a_gpu_the_replay_is_recorded_where_there_is_one(captured, monkeypatch):
    def call() -> None: ...

    def replay() -> None: ...

    asked: list[tuple[object, list[str]]] = []

    def recorded(what: object, device: torch.device, activities: list[ProfilerActivity]) -> Any:
        asked.append((what, [activity.name for activity in activities]))
        return plain_call() if len(activities) == 2 else kernels((CONV_KERNEL, 0, 100))

    monkeypatch.setattr(profiling, "_recorded", recorded)
    monkeypatch.setattr(timing, "device_scope", lambda device: contextlib.nullcontext())
    found = profiling.measure(
        call,
        replay if captured else None,
        torch.device("cuda"),
        call_ms=3.0,
        replay_ms=2.0 if captured else None,
        recordings=2,
    )
    what = replay if captured else call
    assert asked == [(call, ["CPU", "CUDA"]), (what, ["CUDA"]), (what, ["CUDA"])]
    assert (found.source, found.timed_ms) == ((REPLAY, 2.0) if captured else (CALL, 3.0))
    assert found.call_gaps_ms == pytest.approx(3.0 - 0.019)


# ---- real recordings on the CPU


def test_operators_of_a_call_on_the_cpu():
    convolution, linear, norm = torch.nn.Conv2d(32, 32, 3), torch.nn.Linear(14, 64), torch.nn.GroupNorm(4, 32)
    x = torch.randn(2, 32, 16, 16)

    def call() -> torch.Tensor:
        y = norm(linear(convolution(x)))
        return torch.nn.functional.scaled_dot_product_attention(y, y, y) + 1

    with torch.no_grad():
        call()
        found = profiling.measure(call, None, torch.device("cpu"), call_ms=2.0, replay_ms=None)
    assert (found.source, found.timed_ms, found.call_gaps_ms) == (CPU, 2.0, None)
    assert all(
        found.categories[name] > 0 for name in (CONVOLUTION, GEMM, ATTENTION, NORMALIZATION, POINTWISE)
    )
    assert sum(found.categories.values()) == pytest.approx(found.total_ms)
    assert found.floor_ms == pytest.approx(sum(found.categories[name] for name in FLOOR))
    assert any(entry["name"] == "aten::mkldnn_convolution" or "conv" in entry["name"] for entry in found.top)


def test_the_recording_of_median_length_counts(monkeypatch):
    lengths = iter([30.0, 10.0, 20.0])

    def recorded(*_: object) -> list[Any]:
        return [event("aten::silu", 0, next(lengths))]

    monkeypatch.setattr(profiling, "_recorded", recorded)
    found = profiling.measure(lambda: None, None, torch.device("cpu"), call_ms=1.0, replay_ms=None)
    assert found.total_ms == 0.02


def test_nothing_recorded_is_an_error():
    with pytest.raises(RuntimeError, match="no operator"):
        profiling.measure(lambda: None, None, torch.device("cpu"), call_ms=1.0, replay_ms=None)


# ---- in the harness


def test_rows_have_a_breakdown_where_it_was_asked_for():
    rows = end_to_end.run(config(), [VARIANTS["eager"], VARIANTS["channels_last"]], workload=SMALL)
    assert [row.status for row in rows] == [OK, OK]
    for row in rows:
        assert row.profile is not None
        found = Breakdown(**row.profile)
        assert found.timed_ms == row.median_ms
        assert all(math.isfinite(value) and value >= 0 for value in found.categories.values())
        assert found.categories[CONVOLUTION] > 0
    (plain,) = end_to_end.run(config(profile=False), [VARIANTS["eager"]], workload=SMALL)
    assert (plain.profile, plain.profile_reason) == (None, "")


def test_a_red_gate_and_a_model_that_fails_show_no_breakdown():
    def call() -> torch.Tensor:
        raise RuntimeError("no")

    (wrong,) = end_to_end.run(config(), [scaled(1.5)], workload=SMALL)
    (failed,) = end_to_end.run(config(), [VARIANTS["eager"]], workload=Workload(MODEL, call, None))
    assert [(row.status, row.profile) for row in (wrong, failed)] == [(WRONG, None), (FAILED, None)]


@pytest.mark.parametrize(("part", "times"), [("unet", 3), ("pipeline", 1)], ids=["step", "pipeline"])
def test_a_pipeline_is_recorded_once(part, times, monkeypatch):
    real, recorded = profiling._recorded, []

    def counted(*arguments: Any) -> Any:
        recorded.append(arguments[0])
        return real(*arguments)

    monkeypatch.setattr(profiling, "_recorded", counted)
    (row,) = end_to_end.run(config(part=part), [VARIANTS["eager"]], workload=SMALL)
    assert (row.status, row.profile_reason, len(recorded)) == (OK, "", times)


def test_a_profiler_that_fails_costs_no_time(monkeypatch):
    def measure(*_: object, **__: object) -> Breakdown:
        raise RuntimeError("CUPTI does not work here")

    monkeypatch.setattr(profiling, "measure", measure)
    (row,) = end_to_end.run(config(), [VARIANTS["eager"]], workload=SMALL)
    assert row.status == OK
    assert row.median_ms is not None
    assert (row.profile, row.profile_reason) == (None, "RuntimeError: CUPTI does not work here")
