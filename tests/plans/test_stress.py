"""Long random programs of events and calls: a transformer gives stock's results at any moment.

Each event of ``events.py`` happens to an optimized transformer and to its twin, which was never optimized.
After it both are called. Between events, the optimized one is also restored, optimized again and copied.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import _pytree as pytree

import sdfastgn
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.graphs import policy
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.plans import install as planning
from sdfastgn.plans.adapters import Adapters
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.outcome import Outcome
from tests.patches.graphs.tape import TapeBackend
from tests.patches.transformers import TRANSFORMERS
from tests.plans import events
from tests.plans.engine import often_captured
from tests.plans.programs import relative

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.filterwarnings("ignore")]

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8, torch.bfloat16: 0.1}
KEPT = 6  # results of earlier calls that are watched


class Drawn:
    """Random tensors of one seed, dtype and device."""

    def __init__(self, seed, dtype, device):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def time(self, batch):
        return torch.rand(batch, generator=self.generator).to(self.device)


def flux(draw, batch, width):
    ids = torch.cartesian_prod(*map(torch.arange, (1, 2, width))).to(draw.device, draw.dtype)
    return {
        **tokens(draw, batch, width),
        "pooled_projections": draw(batch, 32),
        "timestep": draw.time(batch),
        "img_ids": ids,
        "txt_ids": ids.new_zeros(5, 3),
    }


def tokens(draw, batch, width):
    return {"hidden_states": draw(batch, 2 * width, 16), "encoder_hidden_states": draw(batch, 5, 32)}


def pixels(draw, batch, *shape):
    states = {"hidden_states": draw(batch, *shape), "encoder_hidden_states": draw(batch, 5, 32)}
    return {**states, "timestep": draw.time(batch) * 1000}


def sd3(draw, batch, width):
    return {**pixels(draw, batch, 4, 4, width), "pooled_projections": draw(batch, 64)}


def qwen_image(draw, batch, width):
    states = {**tokens(draw, batch, width), "timestep": draw.time(batch)}
    return {
        **states,
        "encoder_hidden_states_mask": torch.ones(batch, 5, device=draw.device).long(),
        "img_shapes": [[(1, 2, width)]] * batch,
    }


def z_image(draw, batch, width):
    images, prompts = [draw(4, 1, 4, width) for _ in range(batch)], [draw(5, 32) for _ in range(batch)]
    return {"x": images, "t": draw.time(batch), "cap_feats": prompts}


def wan(draw, batch, width):
    return pixels(draw, batch, 4, 2, 4, width)


INPUTS = {"flux": flux, "sd3": sd3, "qwen_image": qwen_image, "z_image": z_image, "wan": wan}


class Program:
    """A transformer and its twin, and what has happened to them so far."""

    def __init__(self, name, seed, device="cpu", mode=False):
        self.kind, self.inputs, self.device, self.mode = TRANSFORMERS[name], INPUTS[name], device, mode
        self.chance = random.Random(seed)
        self.stock = self.kind.build().to(device)
        self.model = copy.deepcopy(self.stock)
        self.optimize()
        self.history = []
        self.kept = []  # (result, its values)
        self.calls = self.replays = 0
        if not mode:  # models with adapters have no graphs
            self.happen("add_adapter")

    # ---- events

    def happen(self, name):
        seed = self.chance.randrange(10**6)
        done = {self._done(name, each, seed) for each in (self.stock, self.model)}
        assert len(done) == 1
        if done == {True}:
            self.history.append(f"{name} {seed}")

    def _done(self, name, model, seed):
        """False if the event does not apply."""
        return events.EVENTS[name](model, random.Random(seed)) is not False

    def optimize(self, **options):
        sdfastgn.optimize(self.model, cuda_graphs=self.mode, **options)
        if self.device == "cpu" and self.mode and options.get("plans", True):
            cuda_graphs.set_mode(self.model, self.mode, TapeBackend())
            planning.install(self.model, True, frozenset(), self.mode)

    def optimize_again(self):
        options = self.chance.choice(({}, {"merge_adapters": False}, {"verify": True}, {"plans": False}))
        self.history.append(f"optimize {options}")
        with contextlib.suppress(*([ValueError] if "plans" in options else [])):
            self.optimize(**options)

    def restore(self):
        self.history.append("restore")
        sdfastgn.restore(self.model)
        inputs = self.drawn(1, 4)
        with torch.no_grad():
            found, expected = (self.run(each, inputs) for each in (self.model, self.stock))
        self.is_stocks(found, expected)
        self.optimize()

    def in_a_block(self):
        self.history.append("block")
        with sdfastgn.optimized(self.model, merge_adapters=self.chance.random() < 0.5):
            self.call()

    def copied(self):
        """The old one or the copy is used from now on."""
        self.history.append("copy")
        old = self.model
        self.model = pickle.loads(pickle.dumps(old)) if self.chance.random() < 0.5 else copy.deepcopy(old)
        self.call()
        if self.chance.random() < 0.5:
            self.model = old

    # ---- calls

    def drawn(self, batch, width):
        dtype = next(p.dtype for name, p in self.stock.named_parameters() if ".lora_" not in name)
        draw = Drawn(self.chance.randrange(10**6), dtype, self.device)
        return self.inputs(draw, batch, width)

    def run(self, model, inputs, scale=None):
        more = {} if scale is None else {self.kind.scale: {"scale": scale}}
        (result, *_) = model(**inputs, **more, return_dict=False)
        return torch.stack(result) if isinstance(result, list) else result

    def agree(self, found, expected, how):
        """``how``: the call, in words."""
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        dtype = torch.bfloat16 if "autocast" in how else self.dtype
        error = float((found - expected).norm() / expected.norm())
        assert error <= TOLERANCE[dtype], (how, error, self.history)

    def is_stocks(self, found, expected):
        """On a GPU, PyTorch may choose products by the addresses of weights."""
        if self.device == "cpu":
            assert torch.equal(found, expected), self.history
        self.agree(found, expected, "restored")

    @property
    def dtype(self):
        dtypes = {p.dtype for p in self.stock.parameters()}
        return torch.bfloat16 if torch.bfloat16 in dtypes else dtypes.pop()

    def call(self):
        """A random call of both."""
        chance = self.chance
        how = chance.choice(("plain",) * 5 + ("scale", "autocast", "inference_mode", "gradients", "threads"))
        sizes = chance.choice(((1, 4),) * 6 + ((2, 4), (1, 6)))
        before = self.counts()
        getattr(self, how)(sizes)
        after = self.counts()
        self.calls += max(0, after[0] - before[0])
        self.replays += max(0, after[1] - before[1])
        for result, values in self.kept:
            assert torch.equal(result, values), ("an earlier result was written", how, self.history)

    def counts(self):
        entry = vars(self.model).get("forward")
        planned = entry.planned if isinstance(entry, GraphedForward) else [entry]
        calls = sum(each.calls for each in planned if isinstance(each, PlannedForward))
        return calls, entry.replays if isinstance(entry, GraphedForward) else 0

    def plain(self, sizes, how="plain", scale=None):
        inputs = self.drawn(*sizes)
        given = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, inputs)
        with torch.no_grad():
            expected, found = self.run(self.stock, inputs, scale), self.run(self.model, given, scale)
        self.agree(found, expected, how)
        for a, b in zip(pytree.tree_leaves(given), pytree.tree_leaves(inputs), strict=True):
            assert a is b or not isinstance(a, torch.Tensor) or torch.equal(a, b)
        self.kept = [*self.kept, (found, found.clone())][-KEPT:]

    def scale(self, sizes):
        self.plain(sizes, "scale", self.chance.choice((0.0, 0.5, -1.0)))

    def autocast(self, sizes):
        with torch.autocast(self.device, torch.bfloat16):
            self.plain(sizes, "autocast")

    def inference_mode(self, sizes):
        with torch.inference_mode():
            self.plain(sizes, "inference_mode")

    def gradients(self, sizes):
        inputs, found = self.drawn(*sizes), []
        for each in (self.stock, self.model):
            result = self.run(each, inputs)
            leaves = [p for p in each.parameters() if p.requires_grad]
            sums = result.float().square().sum()
            made = torch.autograd.grad(sums, leaves, allow_unused=True) if sums.requires_grad else ()
            found.append([result.detach(), *(g for g in made if g is not None)])
        assert len(found[0]) == len(found[1])
        self.agree(found[1][0], found[0][0], "gradients")
        for ours, theirs in zip(*found, strict=True):
            assert relative(ours, theirs) <= TOLERANCE[self.dtype], ("gradients", self.history)

    def threads(self, sizes):
        inputs = [self.drawn(*sizes) for _ in range(3)]
        with torch.no_grad():
            expected = [self.run(self.stock, each) for each in inputs]
        start = threading.Barrier(len(inputs))

        def work(given):
            start.wait()
            with torch.no_grad():
                return self.run(self.model, given)

        with ThreadPoolExecutor(len(inputs)) as pool:
            results = list(pool.map(work, inputs))
        for found, other in zip(results, expected, strict=True):
            self.agree(found, other, "threads")

    # ---- both

    def go(self, steps):
        own = {"optimize_again": 2, "restore": 2, "in_a_block": 1, "copied": 2}
        for _ in range(steps):
            name = self.chance.choice(
                [*events.EVENTS, *(n for n, often in own.items() for _ in range(often))]
            )
            if name in own:
                getattr(self, name)()
            else:
                self.happen(name)
            for _ in range(self.chance.choice((1, 2, 4))):
                self.call()
        sdfastgn.restore(self.model)
        inputs = self.drawn(1, 4)
        with torch.no_grad():
            self.is_stocks(self.run(self.model, inputs), self.run(self.stock, inputs))


@pytest.fixture(autouse=True)
def often_planned(monkeypatch):
    """Short pauses after changes."""
    monkeypatch.setattr(policy, "_MAX_PAUSE", 1)
    often_captured(monkeypatch)


def short(name, mode):
    return pytest.param(name, mode, "cpu", 0, 6, id=f"{name}-{mode}")


def long(name, mode, seed):
    marks = pytest.mark.slow, pytest.mark.many_programs
    return pytest.param(name, mode, "cpu", seed, 25, id=f"{name}-{mode}-{seed}", marks=marks)


def on_gpu(name, mode):
    return pytest.param(name, mode, "cuda", 0, 12, id=f"{name}-{mode}-graph", marks=pytest.mark.gpu)


MODES = {"flux": True, "sd3": False, "qwen_image": "auto", "z_image": True, "wan": "auto"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "mode", "device", "seed", "steps"),
    [
        *(short(name, mode) for name, mode in MODES.items()),
        *(long(name, mode, seed) for name in MODES for mode in (False, "auto", True) for seed in (2, 3)),
        *(on_gpu(name, mode or "auto") for name, mode in MODES.items()),
    ],
)
def test_random_programs(name, mode, device, seed, steps):
    program = Program(name, seed, device, mode)
    program.go(steps)
    assert program.calls + program.replays > steps / 2
    # With "auto", which calls become graphs depends on threads, and a short program may have none.
    assert mode == "auto" or bool(program.replays) == mode


def writes_into_results(deliver):
    """``deliver``, which also writes into the tensors that it returned before."""
    former = []

    def wrong(*args):
        for result in former:
            if not result.is_inference():
                result.add_(1)
        delivered = deliver(*args)
        former[:] = pytree.tree_leaves(delivered)
        return delivered

    return wrong


# What is wrong -> (class, method, what it does instead)
WRONG = {
    "changes of modules are not seen": (Guard, "same", lambda self: True),
    "changes of adapters are not seen": (Adapters, "run", lambda self, run, *args, **options: run()),
    "results are written": (Outcome, "deliver", writes_into_results(Outcome.deliver)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_programs_find_wrong_plans(wrong, monkeypatch):
    monkeypatch.setattr(*WRONG[wrong])
    with pytest.raises(AssertionError):
        Program("sd3", 2).go(10)
