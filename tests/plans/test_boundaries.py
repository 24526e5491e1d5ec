"""Models with a module that cannot be part of a plan: the modules around it and in it have plans."""

import copy
import pickle

import accelerate
import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import sdfastgn
from sdfastgn.plans import forward as planned_forward
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.inside import plan_inside
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    """Its children ``down``, ``mid`` and ``up`` are in one module, as those of an autoencoder's decoder."""

    def __init__(self):
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x):
        return self.decoder(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.mid, self.up = Stage(), Stage(), Stage()

    def forward(self, x):
        return self.up(self.mid(self.down(self.conv_in(x))))


# ---- boundaries: each changes the module ``mid.blocks[0]`` of a model


def a_hook(block):
    block.register_forward_hook(lambda module, args, y: y * 1.5)


def a_hook_that_writes(block):
    block.register_forward_hook(lambda module, args, y: y.mul_(1.5))


def a_hook_that_writes_its_argument(block):
    block.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.5),))


def a_hook_of_accelerate(block):
    accelerate.hooks.add_hook_to_module(block, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))


class Doubles(ModelHook):
    def post_forward(self, module, output):
        return output * 2


def a_hook_of_diffusers(block):
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Doubles(), "doubles")


class ReadsAValue(Block):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if x.mean().item() > 0 else y


class Draws(Block):
    def forward(self, x):
        return super().forward(x) + torch.empty(1).uniform_()


class Counts(Block):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


def of_class(kind):
    def change(block):
        block.__class__ = kind

    change.__name__ = kind.__name__
    return change


BOUNDARIES = [
    (a_hook, "there is a forward hook on mid.blocks.0"),
    (a_hook_that_writes, "there is a forward hook on mid.blocks.0"),
    (a_hook_that_writes_its_argument, "there is a forward hook on mid.blocks.0"),
    (a_hook_of_accelerate, "accelerate's hooks are on mid.blocks.0"),
    (a_hook_of_diffusers, "mid.blocks.0"),
    (of_class(ReadsAValue), "the call reads the value of a tensor"),
    (of_class(Draws), "the call draws random numbers"),
    (of_class(Counts), "sets the attribute calls"),
]


def image(seed=0):
    return noise(1, 3, 6, 5, seed=seed)


def follows_stock(model, stock, seeds):
    results = []
    for seed in seeds:
        torch.manual_seed(seed)
        ours = model(image(seed))
        torch.manual_seed(seed)
        results.append((ours, stock(image(seed))))
    for ours, theirs in results:
        agree(ours, theirs)


def planned(model):
    """Path -> (plans, calls by them), for each module whose calls ran as plans."""
    return {p.path: (p.plans, p.calls) for p in sdfastgn.report(model).plans if p.calls}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize(("boundary", "reason"), BOUNDARIES, ids=[b.__name__ for b, _ in BOUNDARIES])
def test_modules_around_a_boundary_have_plans(boundary, reason, when):
    stock = randomize(Net())
    model = copy.deepcopy(stock)
    if when == "later":
        sdfastgn.optimize(model)
        follows_stock(model, stock, range(2))
    for each in (model, stock):
        boundary(each.decoder.mid.blocks[0])
    sdfastgn.optimize(model)
    follows_stock(model, stock, range(6))
    before = planned(model)
    follows_stock(model, stock, range(6, 10))
    now = planned(model)
    for path in ("decoder.down", "decoder.up", "decoder.mid.blocks.1"):
        assert now[path] == (1, before[path][1] + 4)
    (state,) = [p for p in sdfastgn.report(model).plans if p.path == "decoder"]
    assert any(reason in each for each in state.own)
    sdfastgn.restore(model)
    assert with_entries(model) == set()
    follows_stock(model, stock, range(2))


def with_entries(model):
    """Paths of the modules that have an entry with plans."""
    return {
        p for p, module in model.named_modules() if isinstance(vars(module).get("forward"), PlannedForward)
    }


HOOKS = [a_hook, a_hook_of_accelerate, a_hook_of_diffusers]
AROUND = {"", "decoder", "decoder.down", "decoder.up", "decoder.mid.blocks.1"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_only_the_largest_modules_have_plans(hook):
    stock = randomize(Net())
    model = copy.deepcopy(stock)
    for each in (model, stock):
        hook(each.decoder.mid.blocks[0])
    sdfastgn.optimize(model)
    follows_stock(model, stock, range(6))
    for each in (model, stock):
        each.decoder.up.blocks[0].norm.eps = 0.1
    follows_stock(model, stock, range(6))
    assert with_entries(model) == AROUND | ({"decoder.mid.blocks.0"} if hook is a_hook else set())
    for each in (model, stock):
        a_hook(each.decoder.up.blocks[1])
    follows_stock(model, stock, range(6))
    before = planned(model)
    follows_stock(model, stock, range(4))
    assert planned(model)["decoder.up.blocks.0"] == (1, before["decoder.up.blocks.0"][1] + 4)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_boundary_with_modules_inside(hook):
    stock = randomize(Net())
    model = copy.deepcopy(stock)
    for each in (model, stock):
        hook(each.decoder.mid)
    sdfastgn.optimize(model)
    follows_stock(model, stock, range(6))
    inside = {"decoder.mid"} if hook is a_hook else {"decoder.mid.blocks.0", "decoder.mid.blocks.1"}
    assert with_entries(model) == {"", "decoder", "decoder.down", "decoder.up"} | inside
    assert inside < planned(model).keys()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("boundary", [a_hook, of_class(ReadsAValue)], ids=lambda change: change.__name__)
def test_modules_are_looked_for_once(monkeypatch, boundary):
    found = []

    def counting(root, make):
        found.append(root)
        plan_inside(root, make)

    monkeypatch.setattr(planned_forward, "plan_inside", counting)
    stock = randomize(Net())
    boundary(stock.decoder.mid.blocks[0])
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock, range(10))
    count, traces = len(found), vars(model.decoder)["forward"].traces
    follows_stock(model, stock, range(10))
    assert (len(found), vars(model.decoder)["forward"].traces) == (count, traces)
    assert traces <= 4
    assert "forward" not in vars(copy.copy(model.decoder.up))


def test_the_whole_model_is_planned_again_after_the_hook():
    stock = randomize(Net())
    model = sdfastgn.optimize(copy.deepcopy(stock))
    hooks = [each.decoder.mid.register_forward_hook(lambda m, a, y: y + 1) for each in (model, stock)]
    follows_stock(model, stock, range(4))
    assert {"decoder.down", "decoder.mid", "decoder.up"} <= planned(
        model
    ).keys()  # the hook is outside of mid
    for hook in hooks:
        hook.remove()
    follows_stock(model, stock, range(12))
    before = planned(model)
    follows_stock(model, stock, range(4))
    assert {path for path, of in planned(model).items() if before[path] != of} == {""}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    stock = randomize(Net())
    stock.decoder.mid.blocks[0].__class__ = ReadsAValue
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock, range(5))
    other = copied(model)
    other.decoder.up.blocks[0].conv.weight.mul_(2)
    follows_stock(model, stock, range(2))
    stock.decoder.up.blocks[0].conv.weight.mul_(2)
    follows_stock(other, stock, range(6))
    assert "decoder.up" in planned(other)


def test_trust_reaches_the_modules_inside():
    stock = randomize(Net())
    a_hook(stock.decoder.mid.blocks[0])
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock, range(3))
    sdfastgn.optimize(model, trust=("tests",))
    assert not any("forward" in vars(m) and not vars(m)["forward"].trusted for m in model.modules())
    follows_stock(model, stock, range(3))
    assert "decoder.up" in planned(model)
    sdfastgn.optimize(model, plans=False)
    assert not any("forward" in vars(m) for m in model.modules())
