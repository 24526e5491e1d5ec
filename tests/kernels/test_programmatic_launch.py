"""Kernels that start before the one ahead of them has ended read what was written last (ADR 7)."""

import pytest
import torch

import sdfastgn
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.common.plan_cache import PlanCache
from tests.kernels.launch_cases import launches
from tests.kernels.samples import interpreted, kernels

# Those that read x before their own wait.
READING_AHEAD = {
    "apply_kernel", "apply_grad_kernel", "batch_apply_kernel", "batch_apply_grad_kernel", "_normalise_kernel",
}  # fmt: skip
REPEATS, REPLAYS = 1000, 100


def image():
    """8 MiB, in groups that are not small."""
    x = torch.randn(2, 512, 64, 64, device="cuda").half()
    return x.contiguous(memory_format=torch.channels_last)


def tokens():
    """8 MiB, in rows that do not fit into registers."""
    return torch.randn(128, 32768, device="cuda").half()


def group_norm(x):
    return sdfastgn.group_norm(x, 32, activation="silu")


def group_norm_with_statistics(x):
    return sdfastgn.group_norm(x, 32, activation="silu", statistics=sdfastgn.channel_statistics(x))


def batch_norm(x):
    return sdfastgn.batch_norm(x, training=True, activation="silu")


def batch_norm_with_a_residual(x):
    return sdfastgn.batch_norm(x, training=True, activation="silu", residual=x)


CASES = [
    pytest.param(image, group_norm, id="group_norm"),
    pytest.param(image, group_norm_with_statistics, id="statistics-from-outside"),
    pytest.param(image, batch_norm, id="batch_norm"),
    pytest.param(image, batch_norm_with_a_residual, id="batch_norm-residual"),
    pytest.param(tokens, sdfastgn.layer_norm, id="layer_norm"),
]


def step(x, dy, norm, *, backward):
    """Reads x and dy on all multiprocessors, changes their signs, and normalizes."""
    x.sum()
    x.neg_()
    if not backward:
        return norm(x)
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = norm(leaf)
    dy.sum()
    dy.neg_()
    return torch.autograd.grad(y, leaf, dy)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("make", "norm"), CASES)
def test_x_is_read_as_it_was_last_written(make, norm, backward, monkeypatch):
    """1e5 times in CUDA graphs: every value is that of kernels that run one after the other."""
    x, dy = make(), make()
    with torch.no_grad():
        with monkeypatch.context() as patches:
            launch = Launch.__call__

            def one_at_a_time(self, *args):
                torch.cuda.synchronize()
                launch(self, *args)
                torch.cuda.synchronize()

            patches.setattr(Launch, "__call__", one_at_a_time)
            expected = [step(x, dy, norm, backward=backward) for _ in range(2)]  # of either sign
        assert not torch.equal(*expected)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # autograd, and cuBLAS's memory, before the capture
            for _ in range(2):
                step(x, dy, norm, backward=backward)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(REPEATS):
                found = step(x, dy, norm, backward=backward)
                wrong += (found != expected[i % 2]).sum()
        for _ in range(REPLAYS):
            graph.replay()
    assert wrong.item() == 0


@pytest.fixture
def no_plans(monkeypatch):
    """No plan is kept, and none is found: those of this test are for another machine than other tests'."""
    monkeypatch.setattr(PlanCache, "get", lambda self, key: None)
    monkeypatch.setattr(PlanCache, "__setitem__", lambda self, key, plan: None)


@interpreted
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("reads_ahead", [True, False], ids=["ahead", "waiting"])
def test_one_constant_makes_every_kernel_wait_first(reads_ahead, monkeypatch):
    monkeypatch.setattr(gpu, "has_programmatic_launch", lambda device: True)
    monkeypatch.setattr(gpu, "READS_AHEAD", reads_ahead)
    cases = [((2, 32, 64, 64), "channels_last"), ((3, 32768), "tokens"), ((8, 2, 64, 64), "batch")]
    with kernels(direct=True):
        made = [launch for shape, kind in cases for launch, _ in launches(shape, torch.float16, kind)]
    ahead = {launch.kernel.__name__ for launch in made if launch.constants.get("AHEAD")}
    assert ahead == (READING_AHEAD if reads_ahead else set())


@interpreted
@pytest.mark.usefixtures("no_plans")
def test_without_dependent_launch_nothing_is_read_ahead():
    with kernels(direct=True):
        assert not any(
            launch.constants.get("AHEAD")
            for launch, _ in launches((2, 32, 64, 64), torch.float16, "channels_last")
        )
