"""Models of which ``optimize`` runs the calls as plans: right, never stale, and undone exactly."""

import copy
import enum
import gc
import pickle
import threading
import weakref

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.patches.graphs import policy
from sdfastgn.plans import forward as planned_forward
from sdfastgn.plans import making, store
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.run import plan as plans_run
from sdfastgn.plans.run.bake import Baked
from sdfastgn.plans.run.plan import Plan
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize
from tests.plans.engine import slices_pay
from tests.plans.models import WAN, of_diffusers

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


class Block(nn.Module):
    def __init__(self, channels=8, scale=0.5):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * self.conv(F.silu(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x, factor=1.0):
        return self.blocks(self.conv_in(x)) * factor


class Part(enum.Enum):
    FIRST = "first"
    LATER = "later"


class InParts(Net):
    """Its caller keeps the last rows of a convolution's input in a dict, with the convolution as the key."""

    def forward(self, x, part, kept):
        if part is Part.LATER:
            x = torch.cat([kept[self.conv_in], x], 2)
        kept[self.conv_in] = x[:, :, -1:].clone()
        return self.blocks(self.conv_in(x))


class KeepsCount(Net):
    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)


class Draws(Net):
    def forward(self, x):
        return super().forward(x) + torch.empty(1).uniform_()


class AddsNoise(Net):
    def forward(self, x):
        unused = torch.rand(3)
        x = self.conv_in(x) + torch.randn(x.shape[-2:], dtype=x.dtype)[None, None]
        return self.blocks(x) + torch.randn(8, 1, 1, generator=None) - torch.randn(8, 1, 1), unused.dim()


class DrawsOnItsDevice(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.randn(y.shape, device=y.device)


class Seeds(AddsNoise):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return super().forward(x)


def image(*, seed=0, size=6):
    return noise(2, 3, size, size + 1, seed=seed)


def net(kind=Net):
    return randomize(kind())


def planned(model):
    return vars(model)["forward"]


def follows_stock(model, stock, *args, seeds=(1, 2)):
    """Assert that ``model`` computes what ``stock`` computes, and leaves earlier results as they were."""
    results = [(model(image(seed=s), *args), stock(image(seed=s), *args)) for s in seeds]
    for ours, theirs in results:
        agree(ours, theirs)


@pytest.mark.gpu
def test_kernels_of_new_steps_are_compiled_ahead(monkeypatch):
    compiled, compile_ahead = [], Plan.compile_ahead

    def spy(plan, inputs, device):
        compile_ahead(plan, inputs, device)
        compiled.append({step.target for step in plan.steps if step.kind == "kernel"})

    monkeypatch.setattr(making, "_COMPILED", set())
    monkeypatch.setattr(Plan, "compile_ahead", spy)
    for size in (6, 9):
        stock = net().cuda()
        x = image(size=size).cuda()
        agree(sdfastgn.optimize(copy.deepcopy(stock))(x), stock(x))
    (targets,) = compiled  # the second model has the same steps
    assert "group_norm" in targets
    drawing = sdfastgn.optimize(net(DrawsOnItsDevice).cuda())
    drawing(image().cuda())
    assert planned(drawing).plans[0].draws
    assert len(compiled) == 1


@pytest.fixture
def pair():
    """(optimized model, its stock copy), after one planned call."""
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock)
    assert (len(planned(model).plans), planned(model).own) == (1, {})
    return model, stock


# ---- slices of a large batch


def test_a_large_batch_runs_in_slices(monkeypatch):
    slices_pay(monkeypatch)
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock)
    follows_stock(model, stock, 2.0)
    assert [plan.slices.number for plan in planned(model).plans] == [2, 2]
    assert (planned(model).calls, planned(model).traces, planned(model).own) == (4, 2, {})
    assert sdfastgn.report(model).plans[0].bytes == 2 * sum(
        s.read + s.written for plan in planned(model).plans for s in plan.steps
    )


def test_slices_of_lists_that_a_call_changes(monkeypatch):
    slices_pay(monkeypatch)
    model, stock = in_parts()
    ours, theirs = [], []
    for seed in range(4):
        agree(model(image(seed=seed), ours), stock(image(seed=seed), theirs))
        agree(ours, theirs)
    assert [plan.slices.number for plan in planned(model).plans] == [2] * 3


def test_one_function_serves_all_slices(monkeypatch):
    """Also if a slice has less than 16 bytes, for which kernels are compiled."""
    slices_pay(monkeypatch)
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for _ in range(3):
        agree(model(noise(3, 3, 1, 1)), stock(noise(3, 3, 1, 1)))
    (made,) = next(iter(planned(model)._by_state.values())).made.values()
    assert (made.baked.recorded, made.baked.declined) == (1, {})


def test_slices_without_kernels_that_fail(monkeypatch):
    slices_pay(monkeypatch)
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    agree(model(image()), stock(image()))

    def fail(self, xs, **given):
        raise dispatch.KernelError("off")

    monkeypatch.setattr(Baked, "run", fail)
    agree(model(image()), stock(image()))
    assert planned(model).calls == 2


def test_one_slice_is_compiled_ahead(monkeypatch):
    slices_pay(monkeypatch)
    model = sdfastgn.optimize(net())
    model(image())
    (plan,) = planned(model).plans
    results = []
    monkeypatch.setattr(plans_run, "rehearse", lambda run, device: results.extend(run()))
    plan.compile_ahead([image()], torch.device("cpu"))
    assert [len(y) for y in results] == [1]


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_batch():
    layers = nn.Conv2d(3, 128, 3, padding=1), Block(128), Block(128), nn.Conv2d(128, 3, 3, padding=1)
    model = sdfastgn.optimize(randomize(nn.Sequential(*layers)).cuda().half())
    most = []
    for batch in (2, 16):
        x = torch.randn(batch, 3, 1024, 1024, device="cuda", dtype=torch.float16)
        model(x)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x)
        most.append(torch.cuda.max_memory_allocated() - before - 2 * x.nbytes)
    whole, sliced = planned(model).plans
    assert (whole.slices, sliced.slices.number) == (None, 8)
    assert most[1] < 1.1 * most[0]


# ---- plans are made and used


def test_one_plan_a_kind_of_call(pair):
    model, stock = pair
    follows_stock(model, stock)
    assert (planned(model).traces, planned(model).calls) == (1, 4)
    agree(model(image(size=9)), stock(image(size=9)))
    follows_stock(model, stock, 3.0)
    assert planned(model).traces == 3


def test_a_part_of_a_larger_batch_of_one_is_no_other_kind():
    """Frames that are kept for the next call are a part of more frames, or not."""
    model = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv3d(4, 4, 1)).eval()
    ours = sdfastgn.optimize(copy.deepcopy(model))
    frames = noise(1, 5, 3, 6, 4).transpose(1, 2)
    for x in (frames[:, :, :2], frames[:, :, 3:], frames[:, :, 1:3].clone(), frames[:, :, 2:4, :]):
        agree(ours(x), model(x), 1e-5)
    assert vars(ours)["forward"].traces == 1
    for x in (frames[..., 1:3].clone(), frames[:, :, :2].contiguous()):
        agree(ours(x), model(x), 1e-5)
    assert vars(ours)["forward"].traces == 3


def test_enumerations_and_modules_as_keys():
    stock = net(InParts)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for _ in range(2):
        ours, theirs = {}, {}
        for seed, part in enumerate((Part.FIRST, Part.LATER, Part.LATER)):
            agree(model(image(seed=seed), part, ours), stock(image(seed=seed), part, theirs))
        assert list(ours) == [model.conv_in]
        assert torch.equal(ours[model.conv_in], theirs[stock.conv_in])
    assert (planned(model).traces, planned(model).own) == (2, {})


def test_results_are_contiguous_as_stocks(pair):
    model, _ = pair
    assert model(image()).is_contiguous()
    assert not planned(model).plans[0].run([image()])[0].is_contiguous()


class GivesCaches(Net):
    """Returns what its next call reads, in a dict beside the result."""

    def forward(self, x, caches=None):
        h = self.conv_in(x if caches is None else torch.cat([caches["rows"]["last"], x], 2))
        return self.blocks(h), {"rows": {"last": F.avg_pool2d(h, 1)[:, :3, -1:]}}


class GivesDict(Net):
    def forward(self, x):
        return {"sample": self.blocks(self.conv_in(x))}


def test_caches_beside_a_result_keep_the_layout_that_the_next_call_wants():
    stock = net(GivesCaches)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    (y, caches), (expected, theirs) = model(image()), stock(image())
    assert y.is_contiguous()
    assert not caches["rows"]["last"].is_contiguous()
    for seed in (1, 2):
        (y, caches), (expected, theirs) = model(image(seed=seed), caches), stock(image(seed=seed), theirs)
        agree(y, expected)
        agree(caches["rows"]["last"], theirs["rows"]["last"])
    assert planned(model).own == {}


def test_a_result_in_a_dict_is_contiguous():
    assert sdfastgn.optimize(net(GivesDict))(image())["sample"].is_contiguous()


class WritesFlat(Net):
    """The write reaches ``out``, because a stock convolution returns contiguous tensors."""

    def forward(self, x):
        out = self.conv_in(x)
        out.flatten(1).add_(1)
        return self.blocks(out)


def test_views_are_those_of_the_stock_layout():
    """Also in traces after the first plan, which has made the weights channels-last."""
    stock = net(WritesFlat)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for size in (6, 7):
        agree(model(image(size=size)), stock(image(size=size)))
    assert (len(planned(model).plans), planned(model).own) == (2, {})
    assert not model.conv_in.weight.is_contiguous()


def test_no_python_of_the_model_runs(pair, monkeypatch):
    model, stock = pair
    expected = stock(image(seed=4))
    monkeypatch.setattr(making, "trace", None)
    for each in (planned_forward, making):
        monkeypatch.setattr(each, "class_forward", None)
    agree(model(image(seed=4)), expected)


def test_few_plans_are_kept(pair, monkeypatch):
    monkeypatch.setattr(store, "MAX_PLANS", 2)
    model, stock = pair
    for size in (5, 7, 9, 6):
        agree(model(image(size=size)), stock(image(size=size)))
    assert (len(planned(model).plans), planned(model).traces) == (2, 4)  # 6 was used again, so it stayed


def test_a_plan_whose_tables_were_written_is_made_anew(pair, monkeypatch):
    model, stock = pair
    agree(model(image(size=9)), stock(image(size=9)))
    before = planned(model).plans
    monkeypatch.setattr(Plan, "is_current", lambda plan: not any(plan is each for each in before))
    follows_stock(model, stock)
    assert (planned(model).traces, len(planned(model).plans), planned(model).own) == (3, 1, {})


class Table:
    rows = None

    def sum(self):
        if self.rows is None:
            self.rows = [torch.arange(4.0)]
        return self.rows[0].sum()


class FillsATable(Net):
    def __init__(self):
        super().__init__()
        self.table = Table()

    def forward(self, x):
        return super().forward(x) + self.table.sum()


def test_a_table_is_filled_without_a_change_of_the_model():
    stock = net(FillsATable)
    model = sdfastgn.optimize(copy.deepcopy(stock), trust=("tests",))
    follows_stock(model, stock, seeds=range(4))
    assert (planned(model).traces, planned(model).calls, planned(model).last_change) == (2, 3, "")
    assert len(planned(model).own) == 1
    assert (planned(model.blocks).traces, planned(model.blocks).own) == (0, {})
    model.blocks(noise(1, 8, 6, 5))
    assert planned(model.blocks).calls == 1


def test_more_sizes_than_plans_in_rotation(monkeypatch):
    monkeypatch.setattr(store, "MAX_PLANS", 2)
    monkeypatch.setattr(store, "_IN_USE", 10)
    stock = net()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for size in (5, 5, 7, 7, *[5, 7, 9] * 3):
        agree(model(image(size=size)), stock(image(size=size)))
    reason = "it has 2 plans for other kinds of calls, and all are in use"
    assert (planned(model).traces, planned(model).own) == (2, {reason: 3})
    for _ in range(8):  # after 10 calls without the size 5, its plan goes
        agree(model(image(size=9)), stock(image(size=9)))
    assert (planned(model).traces, planned(model).own) == (3, {reason: 10})
    model(image(size=5))
    assert planned(model).traces == 4


@pytest.mark.slow
def test_numbers_that_never_repeat_are_not_traced_each_time(pair):
    model, stock = pair
    for i in range(70):
        agree(model(image(), float(i)), stock(image(), float(i)))
    assert planned(model).traces == 1 + 16 + 2  # those of the first 16 calls, of the 32nd and of the 64th
    assert planned(model).own == {"its calls hardly repeat": 52}
    model(image(), 31.0)
    follows_stock(model, stock, 0.5)
    assert planned(model).own == {"its calls hardly repeat": 52}  # again as at the beginning


def drawn(model, x, seed=0):
    """The result, and the next random number."""
    torch.manual_seed(seed)
    return model(x)[0], torch.rand(1)


def test_random_numbers_are_stocks():
    stock = net(AddsNoise)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for seed in (0, 1, 1, 2):
        ours, theirs = (drawn(m, image(seed=seed), seed) for m in (model, stock))
        agree(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert not torch.equal(model(image())[0], model(image())[0])
    assert (planned(model).traces, planned(model).calls, planned(model).own) == (1, 6, {})
    for each in (model, stock):
        each.blocks[0].norm.eps = 0.5
    ours, theirs = (drawn(m, image()) for m in (model, stock))
    agree(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert (planned(model).traces, planned(model).calls, planned(model).own) == (2, 7, {})


def test_random_numbers_of_a_seed_in_the_code():
    stock = net(Seeds)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for seed in range(3):
        agree(drawn(model, image(), seed)[0], drawn(stock, image(), seed)[0])
    assert (planned(model).calls, sum(planned(model).own.values())) == (0, 3)
    assert any("what seeds them" in reason for reason in planned(model).own)


def test_random_numbers_of_verified_plans():
    stock = net(AddsNoise)
    with pytest.warns(UserWarning, match="not verified"):
        model = sdfastgn.optimize(copy.deepcopy(stock), verify=True)
    ours, theirs = (drawn(m, image()) for m in (model, stock))
    agree(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert (planned(model).calls, planned(model).own) == (1, {})


def test_few_refused_kinds_are_kept(pair, monkeypatch):
    for each in (policy, store):
        monkeypatch.setattr(each, "MAX_REASONS", 3)
    monkeypatch.setattr(store, "_NEW_KINDS", 100)
    model = sdfastgn.optimize(net(Draws))
    for _ in range(3):
        for size in range(5, 15):
            model(image(size=size))
    (plans,) = planned(model)._by_state.values()
    assert len(plans.refused) <= 4


def test_threads(pair):
    model, stock = pair
    found = {}

    def call(i):
        with torch.no_grad():  # which is a setting of each thread
            found[i] = model(image(seed=i, size=5 + i % 3))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, y in found.items():
        agree(y, stock(image(seed=i, size=5 + i % 3)))
    assert planned(model).own == {}


# ---- never stale


def in_place(m):
    m.conv_in.weight.mul_(2)


def by_data(m):
    m.conv_in.weight.data = m.conv_in.weight * 3


def by_assignment(m):
    m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}, assign=True)


def another_layer(m):
    m.blocks[1] = randomize(Block())


def another_number(m):
    m.blocks[0].scale = -2.0


def a_hook(m):
    m.blocks[0].register_forward_hook(lambda module, args, y: y + 1)


def a_pre_hook(m):
    m.blocks[0].conv.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def a_forward_of_one(m):
    m.blocks[1].forward = lambda x: x * 2


def another_class(m):
    class Other(Block):
        def forward(self, x):
            return 2 * super().forward(x)

    m.blocks[0].__class__ = Other


def another_shape(m):
    m.conv_in.weight = nn.Parameter(m.conv_in.weight[:, :, 1:2, 1:2].clone())
    m.conv_in.padding = (0, 0)


def a_parametrization(m):
    nn.utils.parametrizations.weight_norm(m.conv_in)


CHANGES = [
    in_place, by_data, by_assignment, another_layer, another_number, a_hook, a_pre_hook, a_forward_of_one,
    another_class, another_shape, a_parametrization,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_model(pair, change):
    model, stock = pair
    for each in pair:
        torch.manual_seed(0)
        change(each)
    follows_stock(model, stock, seeds=(3, 4, 5))


def test_a_change_is_traced_in_the_call_that_finds_it(pair):
    model, stock = pair
    for each in pair:
        each.blocks[0].scale = 4.0
    calls = planned(model).calls
    follows_stock(model, stock, seeds=(3, 4))
    assert (planned(model).calls, planned(model).own) == (calls + 2, {})


def test_a_model_that_changes_in_each_call_makes_no_plans_inside(pair, monkeypatch):
    model, stock = pair
    run = PlannedForward._run

    def changed(self, found, args):
        if self.module is model:
            for each in pair:
                each.blocks[0].scale += 1.0
        return run(self, found, args)

    monkeypatch.setattr(PlannedForward, "_run", changed)
    agree(model(image()), stock(image()))
    assert planned(model.blocks).traces == 0
    (reason,) = planned(model).own
    assert reason == "the model has changed: attribute scale of blocks.0 changed from 1.5 to 2.5"


@pytest.mark.parametrize(("calls", "traces"), [(4, 4), (planned_forward.SHORT_LIFE, 9)])
def test_traces_that_save_little_become_rare(pair, calls, traces):
    """A change after each ``calls`` calls. A trace takes as long as many of them."""
    model, stock = pair
    for i in range(8 * calls):
        if i % calls == 0:
            model.blocks[0].scale = stock.blocks[0].scale = 0.1 * i
        follows_stock(model, stock, seeds=(i,))
    assert planned(model).traces == traces


def test_a_norm_of_weights_that_lie_channels_last(pair):
    for each in pair:
        each.conv_in.to(memory_format=torch.channels_last)
        nn.utils.parametrizations.weight_norm(each.conv_in)
    follows_stock(*pair, seeds=(3, 4, 5))
    assert len(planned(pair[0]).plans) == 1


@pytest.mark.parametrize("where", ["function", "class", "method_of_tensor"])
def test_code_that_is_replaced_and_put_back(pair, monkeypatch, where):
    model, stock = pair
    with monkeypatch.context() as patch:
        if where == "function":
            patch.setattr(F, "silu", lambda x, inplace=False: torch.tanh(x))
        elif where == "class":
            patch.setattr(nn.GroupNorm, "forward", lambda self, x: x * 0.5)
        else:
            patch.setattr(Block, "forward", lambda self, x: x.sin())
        follows_stock(model, stock)
    follows_stock(model, stock)
    assert len(planned(model).plans) == 2  # one in each state of the code


def test_a_change_while_another_plan_waits(pair):
    model, stock = pair
    agree(model(image(size=9)), stock(image(size=9)))
    for each in pair:
        each.blocks[0].scale = 4.0
    agree(model(image(size=9)), stock(image(size=9)))
    follows_stock(model, stock)


def test_weights_move(pair):
    model, stock = pair
    former = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    for each in pair:
        each.double()
    assert all(reference.expired() for reference in former)
    assert model(image().double()).dtype == torch.float64
    for each in pair:
        each.float()
    follows_stock(model, stock)


# ---- calls that run the model's own code


def test_gradients(pair):
    model, stock = pair
    with torch.enable_grad():
        for each in pair:
            each(image()).square().mean().backward()
    agree(model.conv_in.weight.grad, stock.conv_in.weight.grad)
    assert planned(model).own == {"gradients are enabled": 1}


def test_stock_code_and_other_dtypes(pair):
    model, stock = pair
    with dispatch.stock_code():
        agree(model(image()), stock(image()))
    assert list(planned(model).own) == ["no kernels run for torch.float32 on cpu"]


def test_state_between_calls_is_named():
    model = sdfastgn.optimize(net(KeepsCount))
    for i in range(3):
        model(image())
        assert model.count == i + 1
    (state,) = [p for p in sdfastgn.report(model).plans if not p.path]
    assert state.plans == 0
    assert list(state.own) == ["tests.plans.test_forward.KeepsCount.forward sets the attribute count"]
    assert "sets the attribute count" in " ".join(sdfastgn.report(model).details().split())


def test_trust_lifts_unknown_packages_only_where_named():
    class Flagged(Net):
        def forward(self, x):
            self.was_called = True
            return super().forward(x)

    stock = net(Flagged)
    stock(image())
    model = sdfastgn.optimize(copy.deepcopy(stock), trust=("tests",))
    follows_stock(model, stock)
    assert (len(planned(model).plans), planned(model).own) == (1, {})
    sdfastgn.optimize(model)
    follows_stock(model, stock)
    assert len(planned(model).plans) == 0


def test_verified_plans(monkeypatch):
    stock = net()
    with pytest.warns(UserWarning, match="2 of 2 parts not verified"):  # there are no inputs for the norms
        model = sdfastgn.optimize(copy.deepcopy(stock), verify=True)
    follows_stock(model, stock)
    assert (len(planned(model).plans), planned(model).own) == (1, {})
    run = planned_forward.Baked.run
    rehearsals = []
    note = lambda self, *xs, **given: rehearsals.append(rehearsal.get()) or run(self, *xs, **given)  # noqa: E731
    monkeypatch.setattr(planned_forward.Baked, "run", note)
    token = rehearsal.set(object())
    model(image(size=5))
    rehearsal.reset(token)
    assert not any(rehearsals[:-1])  # the last one is the call itself
    monkeypatch.setattr(planned_forward.Baked, "run", lambda self, xs: [1.01 * y for y in run(self, xs)])
    with torch.no_grad():
        for _ in range(3):
            agree(model(image(size=9)), stock(image(size=9)))
    assert (len(planned(model).plans), planned(model).traces) == (2, 3)
    assert list(planned(model).own) == ["its plan differs from its own code by 1.0e-02"]


# ---- options, undo, copies


def test_without_plans():
    model = sdfastgn.optimize(net(), plans=False)
    assert "forward" not in vars(model)
    sdfastgn.optimize(model)
    assert isinstance(planned(model), PlannedForward)
    sdfastgn.optimize(model, plans=False)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("options", [{"plans": 1}, {"trust": "tests"}, {"trust": ("a.b",)}, {"trust": (3,)}])
def test_bad_options(options):
    model = net()
    before = dict(vars(model))
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"sdfastgn.optimize: {name}=") as error:
        sdfastgn.optimize(model, **options)
    assert repr(value) in str(error.value)
    assert vars(model) == before


def test_restored_exactly():
    model = net()
    before, classes = [dict(vars(m)) for m in model.modules()], [type(m) for m in model.modules()]
    sdfastgn.optimize(model)
    model(image())
    sdfastgn.restore(model)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert [type(m) for m in model.modules()] == classes


def test_a_block_leaves_a_planned_model_as_it_was(pair):
    model, stock = pair
    with sdfastgn.optimized(model, plans=False):
        assert "forward" not in vars(model)
        follows_stock(model, stock)
    assert isinstance(planned(model), PlannedForward)
    follows_stock(model, stock)
    plain = copy.deepcopy(stock)
    with sdfastgn.optimized(plain):
        follows_stock(plain, stock)
    assert "forward" not in vars(plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_plans_of_their_own(pair, copied):
    model, stock = pair
    other = copied(model)
    other.conv_in.weight.mul_(2)
    follows_stock(model, stock)
    stock.conv_in.weight.mul_(2)
    follows_stock(other, stock)
    assert planned(other) is not planned(model)
    assert (len(planned(other).plans), planned(other).own) == (1, {})


class Odd:
    """An object at which nothing can look at first."""

    looks = 0

    @property
    def func(self):
        Odd.looks += 1
        if Odd.looks < 2:
            raise LookupError("not now")
        return 1


def test_a_model_that_cannot_be_looked_at_runs_its_own_code_until_it_can(monkeypatch):
    monkeypatch.setattr(Odd, "looks", 0)
    stock = net()
    stock.blocks.extra = Odd()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    follows_stock(model, stock)
    assert planned(model).own == {"its state cannot be watched: LookupError: not now": 1}
    assert planned(model).calls == 1


def test_shallow_copies_run_their_own_code(pair):
    model, stock = pair
    other = copy.copy(model)
    assert "forward" not in vars(other)
    follows_stock(other, stock)


def test_offloaded_as_a_whole():
    stock = net()
    model = copy.deepcopy(stock)
    accelerate.cpu_offload_with_hook(model, execution_device="cpu")
    sdfastgn.optimize(model)
    follows_stock(model, stock)
    (state,) = [p for p in sdfastgn.report(model).plans if not p.path]
    assert (state.plans, state.calls) == (1, 2)
    accelerate.hooks.remove_hook_from_module(model)
    follows_stock(model, stock)


def test_results_are_freed_at_once(pair):
    model, _ = pair
    gc.disable()
    try:
        y = weakref.ref(model(image()))
        assert y() is None
    finally:
        gc.enable()


# ---- arguments that a call changes: caches of decoders


each_chunked = pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("AutoencoderKLWan", WAN),
        ("AutoencoderKLQwenImage", WAN),
        ("AutoencoderKLQwenImage21", {**WAN, "decoder_base_dim": 8}),
    ],
)


def chunked(kind, sizes):
    """(optimized, stock): an autoencoder that decodes frame by frame, and keeps frames in lists meanwhile."""
    torch.manual_seed(0)
    stock = randomize(of_diffusers(kind, **sizes)).eval()
    return sdfastgn.optimize(copy.deepcopy(stock), cuda_graphs=False), stock


def decodes_as_stock(model, stock, frames, seeds=range(3)):
    for seed in seeds:
        z = noise(1, 4, frames, 3, 4, seed=seed)
        agree(model.decode(z).sample, stock.decode(z).sample, 5e-5)


def calls_of_plans(model):
    return {each.path: each.calls for each in sdfastgn.report(model).plans if each.calls}


@pytest.mark.slow
def test_a_decoder_with_a_list_of_caches():
    model, stock = chunked("AutoencoderKLWan", WAN)
    decodes_as_stock(model, stock, frames=2)
    assert calls_of_plans(model) == {"decoder": 2 * 3}
    assert all(each.own == {} for each in sdfastgn.report(model).plans)


@pytest.mark.slow
@each_chunked
def test_one_frame_is_one_plan_that_keeps_no_frames(kind, sizes):
    """Of the decoder alone, a plan would return what each convolution keeps for the next frame."""
    model, stock = chunked(kind, sizes)
    decodes_as_stock(model, stock, frames=1)
    (plan,) = vars(model)["_decode"].plans
    assert len(plan.graph.output_node().args[0]) == 1
    model.encode(noise(1, stock.config.get("in_channels", 3), 1, 8, 8))  # clears the lists too
    decodes_as_stock(model, stock, frames=1)
    (state,) = [each for each in sdfastgn.report(model).plans if each.calls and not each.path]
    assert (state.calls, state.traces, state.own, state.last_change) == (6, 1, {}, "")


def test_tiles_of_one_frame_have_plans_of_the_decoder():
    model, stock = chunked("AutoencoderKLQwenImage", WAN)
    for each in (model, stock):
        each.enable_tiling(16, 16, 8, 8)
    decodes_as_stock(model, stock, frames=1)
    assert set(calls_of_plans(model)) == {"decoder"}
    assert vars(model)["_decode"].own == {}


def test_caches_that_outlive_one_frame_have_no_plan(monkeypatch):
    """As if a release of diffusers cleared its lists only before a decode."""
    model, stock = chunked("AutoencoderKLQwenImage", WAN)
    clear = type(stock).clear_cache

    def only_before(vae):
        if vars(vae).get("_conv_idx") in (None, [0]):
            clear(vae)

    monkeypatch.setattr(type(stock), "clear_cache", only_before)
    for each in (model, stock):
        clear(each)
    z = noise(1, 4, 1, 3, 4)
    agree(model.decode(z).sample, stock.decode(z).sample, 5e-5)
    (state,) = [each for each in sdfastgn.report(model).plans if not each.path]
    assert state.plans == 0
    assert "its forward leaves a tensor in the attribute _feat_map" in state.own


@pytest.mark.slow
def test_a_decoder_with_a_dict_of_caches():
    sizes = {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2}
    stock = randomize(of_diffusers("AutoencoderKLKVAEVideo", **sizes)).eval()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for _ in range(2):
        z = noise(1, 4, 5, 3, 4)
        agree(model.decode(z).sample, stock.decode(z).sample, 5e-5)
    assert planned(model.decoder).own == {}
    assert planned(model.decoder).calls > 0


def test_tiles_of_an_autoencoder():
    sizes = {
        "latent_channels": 4,
        "encoder_block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16),
    }
    blocks = {f"{part}_block_types": ("ResBlock", "ResBlock") for part in ("encoder", "decoder")}
    layers = {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1)}
    qkv = {"encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}
    norms = {"decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"}
    stock = randomize(of_diffusers("AutoencoderDC", **sizes, **blocks, **layers, **qkv, **norms)).eval()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    z = noise(1, 4, 12, 12)
    agree(model.decode(z).sample, stock.decode(z).sample, 5e-5)
    for each in (model, stock):
        each.enable_tiling(16, 16, 12, 12)
    agree(model.decode(z).sample, stock.decode(z).sample, 5e-5)
    assert planned(model.decoder).own == {}


def with_list(run):
    """(optimized model, stock model). A call is ``run(x, y, items)``, where ``y`` is what ``Net`` gives."""

    class Given(Net):
        def forward(self, x, items):
            return run(x, super().forward(x), items)

    stock = net(Given)
    return sdfastgn.optimize(copy.deepcopy(stock)), stock


def in_parts():
    """(optimized model, stock model). A call keeps its result in a list for the next call."""

    def run(x, y, items):
        y = y + items[0] if items else y
        items[:] = [y, items[-1] if items else y]
        return y * 2

    return with_list(run)


def test_what_a_call_replaces_is_let_go():
    model, stock = in_parts()
    ours, theirs = [], []
    for seed in range(5):
        before, last = list(ours), len(ours) and ours[0].clone()
        agree(model(image(seed=seed), ours), stock(image(seed=seed), theirs))
        agree(ours[0], theirs[0])
        assert ours[1] is (before[1] if before else ours[0])
        if before:
            assert torch.equal(before[0], last)  # somebody else may still have it
    assert (planned(model).traces, planned(model).calls, planned(model).own) == (3, 5, {})


def test_an_error_after_arguments_were_let_go(monkeypatch):
    """The model's own code cannot run without them."""
    model, _ = in_parts()
    items = []
    for seed in range(3):
        model(image(seed=seed), items)
    run = Baked.run

    def fails(self, inputs, *, frees=False):
        assert frees
        run(self, inputs, frees=frees)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Baked, "run", fails)
        with pytest.raises(torch.OutOfMemoryError):
            model(image(), items)
    assert items[0] is None
    assert planned(model).own == {}


class WritesItsArgument(Net):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_an_error_after_arguments_were_written(monkeypatch):
    """The model's own code would write them a second time."""
    model = sdfastgn.optimize(net(WritesItsArgument))
    model(image())

    def fails(*args):
        raise torch.OutOfMemoryError

    x = image()
    monkeypatch.setattr(Outcome, "deliver", fails)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert torch.equal(x, image() * 2)


def test_nothing_is_let_go_if_the_model_has_changed():
    model, stock = in_parts()
    ours, theirs = [], []
    for seed in range(4):
        agree(model(image(seed=seed), ours), stock(image(seed=seed), theirs))
        if seed == 2:
            for each in (model, stock):
                each.blocks[0].norm.eps = 0.5
    assert (planned(model).calls, planned(model).own) == (4, {})


def test_a_call_that_returns_a_list_that_it_was_given():
    model, stock = with_list(lambda x, y, items: (y, items["a"]))
    for seed in range(2):
        items = {"a": [seed]}
        ours, kept = model(image(seed=seed), items)
        agree(ours, stock(image(seed=seed), items)[0])
        assert kept is items["a"]
    assert planned(model).own == {}


def test_a_list_that_is_given_twice():
    model, stock = with_list(lambda x, y, items: (items[0].append(y), y * (1 + len(items[1])))[1])
    agree(model(image(), [[], []]), stock(image(), [[], []]))
    for _ in range(2):
        ours, theirs = [], []
        agree(model(image(), [ours, ours]), stock(image(), [theirs, theirs]))
        assert len(ours) == len(theirs) == 1
    assert planned(model).own == {"a list or dict occurs twice in its arguments": 2}


def test_zeros_of_both_signs_and_nan():
    model, stock = with_list(lambda x, y, number: y * 0 + 1 / torch.full_like(x[:1, :1, :1, :1], number))
    for number in (0.0, -0.0, 0.0):
        assert torch.equal(model(image(), number), stock(image(), number))
    for _ in range(3):
        assert model(image(), float("nan")).isnan().all()
    assert planned(model).traces == 3


class Compares(Net):
    def forward(self, x, y):
        return super().forward(x) * (2 if x is y else 1)


def test_the_same_tensor_twice_is_another_kind_of_call():
    stock = net(Compares)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    x = image()
    for args in ((x, x.clone()), (x, x), (x, x.clone()), (x, x)):
        agree(model(*args), stock(*args))
    assert (planned(model).traces, planned(model).own) == (2, {})


class CountsInABuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, factor):
        self.count.add_(1)
        return super().forward(x) * factor


def test_an_argument_that_is_a_written_buffer():
    stock = net(CountsInABuffer)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for seed in range(3):
        agree(model(image(seed=seed), torch.ones(1)), stock(image(seed=seed), torch.ones(1)))
        agree(model(image(seed=seed), model.count), stock(image(seed=seed), stock.count))
    assert planned(model).calls == 3
