"""Clocks: medians and spreads, first calls, switches that are put back, hot and cold rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sdfastgn.bench import timing

CPU = torch.device("cpu")


class Clock:
    """Stands still but for those who sleep."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([3.0], (3.0, 3.0, 3.0, 3.0), id="one"),
        pytest.param([5.0, 1.0, 3.0], (3.0, 1.4, 4.6, 4.96), id="odd"),
        pytest.param([float(i) for i in range(101)], (50.0, 10.0, 90.0, 99.0), id="many"),
    ],
)
def test_summary_of_samples(samples, expected):
    result = timing.Timing.of(samples)
    assert (result.median_ms, result.p10_ms, result.p90_ms, result.p99_ms) == pytest.approx(expected)


def test_calls_are_counted_and_timed(clock):
    calls = []
    result = timing.time_callable(lambda: (calls.append(1), clock.sleep(1 / 64)), CPU, repeats=4, warmup=3)
    assert len(calls) == 7
    assert result.median_ms > 9.0
    assert result.p10_ms <= result.median_ms <= result.p90_ms
    assert result.peak_mib is None
    assert result.reserved_mib is None


def test_the_graphs_of_a_call_are_timed_alone(clock, monkeypatch):
    class Graph:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def replay(self) -> None:
            clock.sleep(self.seconds)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    text, unet = Graph(0.001), Graph(0.25)

    def call() -> None:
        clock.sleep(2.0)  # of the CPU
        for graph in (text, unet, unet):
            graph.replay()

    assert timing.time_graphs(call, CPU, repeats=3) == pytest.approx(501.0)
    assert timing.time_graphs(lambda: clock.sleep(1.0), CPU, repeats=3) is None


def test_one_call_is_timed_and_its_result_returned(clock):
    seconds, result = timing.time_once(lambda: (clock.sleep(0.02), "out")[1], CPU)
    assert result == "out"
    assert seconds > 0.019


def switches() -> tuple[object, ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        return cudnn.benchmark, cudnn.conv.fp32_precision, matmul.fp32_precision
    return cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_global_switches_are_set_and_put_back_also_where_the_body_raises(precision, monkeypatch):
    is_newer = hasattr(torch.backends, "fp32_precision")
    if is_newer:  # PyTorch raises for whoever then asks for the older switches
        monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", precision)
    before = switches()

    def body() -> None:
        with timing.global_switches(cudnn_tf32=False, matmul_tf32=True) as recorded:
            assert switches() == (True, *(("ieee", "tf32") if is_newer else (False, True)))
            assert list(recorded.values()) == [True, False, True]
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        body()
    assert switches() == before


@pytest.mark.parametrize(
    ("bytes_a_call", "sets"),
    [
        pytest.param(1, timing.MAX_COLD_SETS, id="tiny-is-capped"),
        pytest.param(timing.COLD_BYTES // 10, 11, id="rounds-up"),
        pytest.param(10 * timing.COLD_BYTES, 2, id="huge-still-rotates"),
    ],
)
def test_cold_sets(bytes_a_call, sets):
    assert timing.cold_sets(bytes_a_call) == sets


@pytest.mark.parametrize(
    ("cold", "expected"),
    [pytest.param(False, {"a"}, id="hot-reuses-one"), pytest.param(True, {"a", "b", "c"}, id="cold-rotates")],
)
def test_kernel_rounds(cold, expected, clock):
    seen: list[str] = []
    call: Callable[[str], object] = lambda name: (seen.append(name), clock.sleep(0.001))  # noqa: E731
    microseconds = timing.time_kernel(call, ["a", "b", "c"], CPU, cold=cold, calls=4, repeats=2)
    assert set(seen) == expected
    assert len(seen) == 3 * 4  # one round of warm-up, two that count
    assert microseconds > 900


def test_outputs_of_a_cold_round_live_together():
    alive: list[int] = []
    addresses: list[set[int]] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(1024)
        alive.append(out.data_ptr())
        addresses.append(set(alive[-3:]))
        return out

    timing.time_kernel(call, [torch.empty(1)] * 3, CPU, cold=True, calls=3, repeats=1)
    assert max(map(len, addresses)) == 3


@pytest.mark.gpu
def test_graph_replays_and_is_timed():
    device = torch.device("cuda")
    x = torch.ones(1024, device=device)
    replay, out = timing.capture_graph(lambda: x * 2)
    x.fill_(3)
    replay()
    torch.cuda.synchronize()
    assert out.eq(6).all()
    assert timing.time_callable(replay, device, repeats=3).median_ms > 0
    many = [torch.ones(1024, device=device) for _ in range(4)]
    assert timing.time_kernel(lambda t: t * 2, many, device, cold=True, calls=8, repeats=3) > 0


@pytest.mark.gpu
def test_peak_memory_counts_the_call():
    timed = timing.time_callable(
        lambda: torch.empty(64 * 2**20, device="cuda"), torch.device("cuda"), repeats=2
    )
    assert timed.peak_mib is not None
    assert timed.reserved_mib is not None
    assert timed.reserved_mib >= timed.peak_mib >= 256


@pytest.mark.gpu
def test_memory_of_a_graph_is_reserved():
    x = torch.ones(64 * 2**20, device="cuda")
    replay, _ = timing.capture_graph(lambda: (x + 1).sum())  # the sum of memory that no tensor holds
    timed = timing.time_callable(replay, torch.device("cuda"), repeats=2)
    assert timed.reserved_mib is not None
    assert timed.reserved_mib >= 512
    assert timing.time_graphs(lambda: None, torch.device("cuda"), repeats=2) is None
