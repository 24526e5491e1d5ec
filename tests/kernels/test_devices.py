"""Launches of the models' shapes on GPUs of all sizes: within their limits, and enough to fill them."""

import math

import pytest
import torch

from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.kernels.common import dispatch, gpu
from sdfastgn.kernels.common.e4m3 import RETRY_PROGRAMS
from sdfastgn.kernels.common.plan_cache import PlanCache
from tests.kernels.gpus import GPUS
from tests.kernels.launch_cases import cases, launches

# Of a grid's first axis, the only one that is used.
MAX_PROGRAMS = 2**31 - 1
# Elements of a tile in a thread, at most.
MAX_PER_THREAD = 128
# Elements of a tensor for each multiprocessor, from which on every one has a program.
ENOUGH = 2**14
# Kernels that go through whole tensors in tiles.
STREAMING = {
    "_statistics_kernel",
    "apply_kernel",
    "sums_kernel",
    "apply_grad_kernel",
    "_interleave_kernel",
    "_rows_kernel",
    "_channel_norm_kernel",
    "_frames_kernel",
    "_geglu_kernel",
    "batch_apply_kernel",
    "batch_apply_grad_kernel",
}
TILE = ("LANES", "WARPS", "STEPS", "BLOCK")
COUNTS = {"one": 1, "odd": 1001, **{name: each.multiprocessors for name, each in GPUS.items()}}


def calls():
    """(shape, dtype, kind) of the benchmarks' images and tokens, and of what is compiled."""
    for _, *sizes in dict.fromkeys((0, *shape[1:]) for shape in SUITES["training"].shape_sets["all"]):
        for batch in (1, 2, 8):
            yield (batch, *sizes), torch.float16, "channels_last"
        yield (2, *sizes), torch.float16, "channels_first"
    for shape in SUITES["layer_norm"].shape_sets["all"]:
        yield shape, torch.float16, "tokens"
    for shape in SUITES["batch_norm"].shape_sets["all"]:
        yield shape, torch.float16, "batch"
    # Without merged weights, whose launch needs tables of addresses: these tensors have none.
    yield from (case for case in cases("sm_90") if case[2] != "weights")


@pytest.fixture
def nothing_runs(monkeypatch):
    """Tensors have no memory, and each call makes its launches as its first one on a GPU does."""
    for name in ("runs_in_triton", "has_kernels", "is_plain"):
        monkeypatch.setattr(dispatch, name, lambda x, others=(): True)
    monkeypatch.setattr(PlanCache, "__contains__", lambda cache, key: False, raising=False)
    monkeypatch.setattr(PlanCache, "__setitem__", lambda cache, key, plan: None)
    monkeypatch.setattr(PlanCache, "get", lambda cache, key, default=None: default, raising=False)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which knows no such device
    token = gpu.META_CAPABILITY.set((9, 0))
    with torch.device("meta"):
        yield
    gpu.META_CAPABILITY.reset(token)


@pytest.mark.slow
@pytest.mark.parametrize("count", dict.fromkeys(COUNTS.values()), ids={n: k for k, n in COUNTS.items()}.get)
def test_launches_fit_and_fill_the_gpu(count, nothing_runs, monkeypatch):
    monkeypatch.setattr(gpu, "num_sms", lambda device: count)
    seen = set()
    for call in calls():
        for launch, tensors in launches(*call):
            kernel, warps = launch.kernel.__name__, launch.options["num_warps"]
            where = f"{kernel} of {call}: {launch.programs} programs, {warps} warps, {launch.constants}"
            seen.add(kernel)
            assert warps in (1, 2, 4, 8, 16, 32), where
            assert 1 <= launch.programs <= MAX_PROGRAMS, where
            blocks = [value for label, value in launch.constants.items() if label.startswith("BLOCK")]
            axes = [launch.constants.get(label, 1) for label in TILE] if "LANES" in launch.constants else []
            assert all(size > 0 and size & (size - 1) == 0 for size in blocks + axes), where
            assert max(math.prod(axes), *blocks, 1) <= MAX_PER_THREAD * 32 * warps, where
            if launch.constants.get("RETRY"):  # nearly all retries end at once
                assert launch.programs <= RETRY_PROGRAMS, where
            elif kernel in STREAMING and max(t.numel() for t in tensors if t is not None) >= ENOUGH * count:
                assert launch.programs >= count, where
    assert seen >= STREAMING
