"""Reports, moves, options and ``restore`` find graphs and plans also below a wrapper of other code."""

import copy
import functools
import gc
import weakref

import accelerate
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.patches.offload.moves import follow
from sdfastgn.plans.forward import PlannedForward
from tests.patches.cases import agree, noise
from tests.patches.graphs import cases
from tests.patches.samples import each_copy, randomize, snapshot

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


class Graphed:
    """A UNet with CUDA graphs, one of which exists."""

    kind = GraphedForward

    def __init__(self):
        self.other_options = {"cuda_graphs": "training"}
        self.model, self.stock, inputs = cases.make()
        self.call = lambda model: cases.run(model, inputs)

    def counts(self, model):
        """Path -> calls in the report."""
        calls = {g.path: g.replays + sum(g.eager.values()) for g in sdfastgn.report(model).graphs}
        return {path: count for path, count in calls.items() if count}

    def options(self, entry):
        return {"cuda_graphs": entry.mode}


class Planned:
    """A model with plans, one of which exists."""

    kind = PlannedForward

    def __init__(self):
        self.other_options = {"trust": ("numpy",)}
        self.stock = randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3)))
        self.model = sdfastgn.optimize(copy.deepcopy(self.stock))
        self.call = lambda model: model(noise(1, 3, 9, 9))

    def counts(self, model):
        calls = {p.path: p.calls + sum(p.own.values()) for p in sdfastgn.report(model).plans}
        return {path: count for path, count in calls.items() if count}

    def options(self, entry):
        return {"trust": tuple(entry.trusted)}


class GraphedTransformer(Graphed):
    """Its class is not among those that become graphs."""

    def __init__(self):
        self.stock = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8))
        self.model = sdfastgn.optimize(copy.deepcopy(self.stock))
        self.call = lambda model: model(noise(2, 8))


each = pytest.mark.parametrize("make", [Graphed, Planned])


def hidden(module):
    """Keep it where nobody looks for it."""
    kept = (module.forward,)
    module.forward = lambda *args, **kwargs: kept[0](*args, **kwargs)


def with_hooks_of_diffusers(module):
    """As its offloading in groups does."""
    HookRegistry.check_if_exists_or_initialize(module).register_hook(ModelHook(), "some hook")


def with_hooks_of_accelerate(module):
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def partial(module):
    module.forward = functools.partial(module.forward)


each_wrapper = pytest.mark.parametrize(
    "wrap", [hidden, with_hooks_of_diffusers, with_hooks_of_accelerate, partial]
)


def wrapped(make, wrap):
    """(an optimized and a stock model, the entry that has run calls of the first one and is wrapped now)"""
    pair = make()
    entry = make.kind.of(pair.model)
    for _ in range(3):
        agree(pair.call(pair.model), pair.call(pair.stock), 1e-4)
    wrap(pair.model), wrap(pair.stock)
    return pair, entry


@pytest.mark.drawn(2)
@each_wrapper
@each
def test_the_report_finds_it(make, wrap):
    pair, entry = wrapped(make, wrap)
    assert make.kind.of(pair.model) is entry
    before = pair.counts(pair.model)
    agree(pair.call(pair.model), pair.call(pair.stock), 1e-4)
    assert pair.counts(pair.model)[""] == before[""] + 1
    reasons = [why for graphs in sdfastgn.report(pair.model).graphs for why in graphs.eager]
    assert "other code replaced its forward" not in reasons


@pytest.mark.drawn(1)
@each_wrapper
@each
def test_moves_tell_it(make, wrap, monkeypatch):
    pair, _ = wrapped(make, wrap)
    told = []
    monkeypatch.setattr(make.kind, "moved", lambda self: told.append(self.module))
    follow(pair.model)
    pair.model.to(torch.float64)
    assert pair.model in told


@pytest.mark.drawn(1)
@each_wrapper
@each
def test_it_stays_for_the_same_options_and_takes_others(make, wrap):
    pair, entry = wrapped(make, wrap)
    before, counts = pair.options(entry), pair.counts(pair.model)
    sdfastgn.optimize(pair.model)
    assert (make.kind.of(pair.model), pair.counts(pair.model)) == (entry, counts)
    with sdfastgn.optimized(pair.model, **pair.other_options):
        assert (make.kind.of(pair.model), pair.options(entry)) == (entry, pair.other_options)
        agree(pair.call(pair.model), pair.call(pair.stock), 1e-4)
    assert (make.kind.of(pair.model), pair.options(entry)) == (entry, before)
    agree(pair.call(pair.model), pair.call(pair.stock), 1e-4)


@pytest.mark.drawn(1)
@each_wrapper
@each
def test_restore_turns_it_off(make, wrap):
    pair, entry = wrapped(make, wrap)
    sdfastgn.restore(pair.model)
    assert torch.equal(pair.call(pair.model), pair.call(pair.stock))
    assert (pair.counts(pair.model), make.kind.all_of(pair.model), entry.is_on) == ({}, [], False)
    ours, stocks = ([{*vars(part)} for part in model.modules()] for model in (pair.model, pair.stock))
    assert ours == stocks


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("make", [Graphed, GraphedTransformer, Planned])
def test_one_that_other_code_has_taken_out(make, again):
    pair = make()
    entry, kept = make.kind.of(pair.model), pair.model.forward
    del pair.model.forward
    assert pair.counts(pair.model) == {}
    if again:
        sdfastgn.optimize(pair.model)
        assert make.kind.of(pair.model) not in (None, entry)
    sdfastgn.restore(pair.model)
    pair.model.forward = kept  # it may come back at any time
    assert torch.equal(pair.call(pair.model), pair.call(pair.stock))
    assert not entry.is_on


@pytest.mark.drawn(1)
@each_copy
@each
def test_a_copy_of_a_wrapper_has_an_entry_of_its_own(make, copied):
    pair, entry = wrapped(make, partial)
    twin = copied(pair.model)
    (own,) = make.kind.all_of(twin)
    assert (own.module, entry.module) == (twin, pair.model)
    sdfastgn.restore(twin)
    assert (make.kind.of(twin), make.kind.of(pair.model)) == (None, entry)
    assert snapshot(twin).keys() == snapshot(pair.stock).keys()
    assert torch.equal(pair.call(twin), pair.call(pair.stock))


@each
def test_a_model_goes_at_once(make):
    pair = wrapped(make, hidden)[0]
    weight = weakref.ref(next(pair.model.parameters()))
    gc.disable()
    try:
        del pair
        assert weight() is None
    finally:
        gc.enable()
