"""Threads that call a model while another one traces it."""

import copy
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.plans.run.bake import Baked
from tests.plans.engine import forward_of

pytestmark = pytest.mark.fused_on_cpu


class Caching(nn.Module):
    """Its first call fills a cache of a size that later calls read. ``between`` is called in between."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.GroupNorm(2, 4)

    @functools.lru_cache  # noqa: B019
    def table(self, size):
        return torch.arange(size).sin()

    def forward(self, x):
        self.table(x.shape[-1])
        between()
        return self.norm(self.conv(x)) * self.table(x.shape[-1])


def between():
    pass


class Meeting:
    """Takes the place of ``between``: the first call of it waits until another thread was seen."""

    def __init__(self):
        self.first, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        if not self.first.is_set():
            self.first.set()
            assert self.go_on.wait(30)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    stock = Caching().eval()
    return sdfastgn.optimize(copy.deepcopy(stock), trust=("tests",)), stock, torch.randn(1, 4, 8, 8)


def call(model, x, gradients=False):
    with torch.set_grad_enabled(gradients):
        return model(x).detach()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["trace", "own code"])
def test_a_trace_and_the_models_own_code_take_turns(pair, first, monkeypatch):
    """Gradients let the own code run. It would find traced tensors in the cache, or the trace its tables."""
    model, stock, x = pair
    expected = call(stock, x)
    meeting = Meeting()
    monkeypatch.setitem(globals(), "between", meeting)
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(call, model, x, gradients=first != "trace")]
        assert meeting.first.wait(30)
        results.append(pool.submit(call, model, x, gradients=first == "trace"))
        time.sleep(0.1)
        meeting.go_on.set()
    for found in results:
        torch.testing.assert_close(found.result(), expected)
    planned = vars(model)["forward"]
    assert ("another thread runs the model's own code" in planned.own) == (first != "trace")
    call(model, x)
    assert planned.traces == 1


def test_threads_share_what_runs_by_plans(monkeypatch):
    """Each thread is about to make it when the others are."""
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)).eval()
    sdfastgn.optimize(model)
    cuda_graphs.set_mode(model, "auto")
    sdfastgn.optimize(model)
    maker = type(vars(model)["forward"].planner.make)
    make, made = maker.__call__, []

    def slow(*args):
        time.sleep(0.1)
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(maker, "__call__", slow)
    x = torch.randn(2, 3, 8)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: call(model, x), range(3)))
    assert made == [forward_of(model)]


@pytest.mark.slow
def test_a_change_of_a_part_waits_for_the_plan_around_it(pair, monkeypatch):
    """While a plan runs, no call of the part itself does."""
    model, stock, x = pair
    expected = call(stock, x)
    call(model, x)
    inside, order, run = threading.Event(), [], Baked.run

    def slow(*args, **options):
        inside.set()
        time.sleep(0.3)
        order.append("plan")
        return run(*args, **options)

    monkeypatch.setattr(Baked, "run", slow)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(call, model, x)
        assert inside.wait(30)
        sdfastgn.restore(model.conv)
        order.append("change")
    torch.testing.assert_close(found.result(), expected)
    assert order[-1] == "change"  # the plan may run twice, because it notices the change
