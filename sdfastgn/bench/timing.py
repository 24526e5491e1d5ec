"""Times one call, many calls, a captured CUDA graph, a kernel with a hot or a cold L2, or a call's CPU time.

Many calls on CUDA are timed with events. A single call, calls on the CPU, and a call's CPU time are timed
with ``time.perf_counter``. Results for many calls are medians, and in ``Timing`` also percentiles. Nothing in
this file depends on a model or a variant.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from sdfastgn.kernels.common.private import tf32

T = TypeVar("T")

# Number of bytes that a measurement with a cold L2 cache should read and write before it uses the same copy
# of the inputs (input set) again: several times the L2 cache of an H200, which has 60 MB. For small inputs
# ``MAX_COLD_SETS`` makes the number smaller.
COLD_BYTES = 256 * 2**20
# Maximum number of copies of the inputs (input sets) in a measurement with a cold L2. Small inputs would need
# thousands of copies.
MAX_COLD_SETS = 512
# Number of seconds for which ``spin_up`` makes the GPU work, so that it reaches its full clock rate.
SPIN_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, and 10th, 90th and 99th percentile.

    ``peak_mib`` is the maximum memory that tensors occupied during the calls, with weights and inputs.
    ``reserved_mib`` is the maximum memory of the GPU that PyTorch's CUDA allocator held during the calls,
    with CUDA graphs. Both fields are None on the CPU.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    p99_ms: float
    peak_mib: float | None = None
    reserved_mib: float | None = None

    @classmethod
    def of(cls, samples_ms: Sequence[float], **memory: float) -> Timing:
        return cls(*map(float, np.percentile(samples_ms, (50, 10, 90, 99))), **memory)


@contextlib.contextmanager
def global_switches(
    *, cudnn_benchmark: bool = True, cudnn_tf32: bool = True, matmul_tf32: bool = False
) -> Iterator[dict[str, bool]]:
    """A context in which PyTorch's global switches for speed have the given values. Yields name -> value.

    By default the two TF32 switches have PyTorch's own defaults, but ``cudnn.benchmark`` is on.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = cudnn_benchmark
    try:
        with tf32(convolutions=cudnn_tf32, products=matmul_tf32):
            yield {
                "cudnn.benchmark": cudnn_benchmark,
                "cudnn.allow_tf32": cudnn_tf32,
                "cuda.matmul.allow_tf32": matmul_tf32,
            }
    finally:
        torch.backends.cudnn.benchmark = before


def device_scope(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``device`` is the current CUDA device. It does nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spin_up(device: torch.device) -> None:
    """Load CUDA's libraries and wait for full clock rates, so that the first measurement is not slower."""
    if device.type != "cuda":
        return
    a = torch.randn(2048, 2048, device=device, dtype=torch.float16)
    image = torch.randn(1, 64, 64, 64, device=device, dtype=torch.float16)
    weight = torch.randn(64, 64, 3, 3, device=device, dtype=torch.float16)
    torch.nn.functional.conv2d(image, weight, padding=1)
    until = time.perf_counter() + SPIN_UP_SECONDS
    while time.perf_counter() < until:
        for _ in range(20):
            torch.mm(a, a)
        synchronize(device)


def time_once(fn: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Call ``fn`` once. Returns (wall-clock seconds until the device is done, result of the call)."""
    synchronize(device)
    start = time.perf_counter()
    result = fn()
    synchronize(device)
    return time.perf_counter() - start, result


def time_callable(fn: Callable[[], object], device: torch.device, *, repeats: int, warmup: int = 2) -> Timing:
    """Time ``repeats`` calls of ``fn``, after ``warmup`` calls that are not timed."""
    if device.type == "cuda":
        # Unused memory is given back first. Otherwise ``reserved_mib`` would count memory of earlier calls.
        torch.cuda.empty_cache()
    for _ in range(warmup):
        fn()
    if device.type != "cuda":
        return Timing.of([1e3 * time_once(fn, device)[0] for _ in range(repeats)])
    with device_scope(device):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        # As in a denoising loop, the CPU does not wait between calls. If the CPU launches kernels more slowly
        # than the GPU runs them, the time of a call includes the GPU's waits.
        for start, end in pairs:
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        samples = [start.elapsed_time(end) for start, end in pairs]
        most = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20
        return Timing.of(samples, peak_mib=most[0], reserved_mib=most[1])


def time_graphs(fn: Callable[[], object], device: torch.device, *, repeats: int) -> float | None:
    """Sum of the times of all CUDA graphs that one call of ``fn`` replays, in milliseconds.

    Each graph is timed separately. A graph that the call replays n times is counted n times. None if ``fn``
    replays no graph.
    """
    replay, found = torch.cuda.CUDAGraph.replay, []

    def noted_replay(graph: torch.cuda.CUDAGraph) -> None:
        found.append(graph)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", noted_replay):
        fn()
    counts = Counter(found)
    times = {graph: time_callable(graph.replay, device, repeats=repeats).median_ms for graph in counts}
    return sum(count * times[graph] for graph, count in counts.items()) if counts else None


def capture_graph(fn: Callable[[], T], *, warmup: int = 3) -> tuple[Callable[[], None], T]:
    """Capture one call of ``fn`` on the current CUDA device. Returns (replay function, result of the call).

    Each replay overwrites this result. Raises any error of the capture.
    """
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Lazy initialization and autotuning are not allowed in a capture. The warm-up calls do both, on the
    # stream of the capture.
    with torch.cuda.stream(side):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = fn()
    return graph.replay, result


def cold_sets(bytes_a_call: int) -> int:
    """Number of copies of the inputs that a measurement with a cold L2 needs.

    ``bytes_a_call``: number of bytes that one call reads and writes.
    """
    return max(2, min(MAX_COLD_SETS, -(-COLD_BYTES // max(1, bytes_a_call))))


def time_kernel(
    fn: Callable[[T], object],
    inputs: Sequence[T],
    device: torch.device,
    *,
    cold: bool,
    calls: int = 100,
    repeats: int = 20,
) -> float:
    """Microseconds of one call of ``fn``: the median over ``repeats`` rounds of many calls each.

    On CUDA the calls of a round are one CUDA graph, so the time does not include launches by the CPU. On the
    CPU a round is a timed loop.

    Args:
        fn: the kernel.
        inputs: copies of the argument of ``fn``; :func:`cold_sets` says how many are needed.
        device: where the calls run.
        cold: if False, every call gets ``inputs[0]`` and writes to the same memory, which stays in the L2
            cache if it fits. If True, calls rotate among all ``inputs``, and each input has its own output.
        calls: number of calls in a round. If ``cold``, there is at least one call for each input.
        repeats: number of rounds.
    """
    chosen = list(inputs) if cold else [inputs[0]]
    calls = max(calls, len(chosen))

    def many() -> list[object]:
        # The last output of each input is kept alive. Otherwise all calls would write to the same memory,
        # which would stay in the L2 cache.
        outputs: list[object] = [None] * len(chosen)
        for call in range(calls):
            slot = call % len(chosen)
            outputs[slot] = None
            outputs[slot] = fn(chosen[slot])
        return outputs

    if device.type != "cuda":
        return time_callable(many, device, repeats=repeats, warmup=1).median_ms * 1e3 / calls
    with device_scope(device):
        for one in chosen[:2]:
            fn(one)
        # The kernel is compiled already, so one round on the stream of the capture is enough to warm up.
        replay, outputs = capture_graph(many, warmup=1)
        timing = time_callable(replay, device, repeats=repeats, warmup=3)
        del outputs
        return timing.median_ms * 1e3 / calls


def time_host(fn: Callable[[], object], device: torch.device, *, calls: int = 100, repeats: int = 9) -> float:
    """Returns the microseconds that the CPU needs for one call of ``fn``, without waiting for the GPU.

    The result is the median over ``repeats`` rounds of ``calls`` calls.
    """
    with device_scope(device):
        samples = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            samples.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(samples[1:])
