"""``Plan``: what it reads anew, what it computes once, and what it refuses."""

import contextlib
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from sdfastgn.kernels.common import compile_ahead
from sdfastgn.kernels.common.compile_ahead import rehearsal
from sdfastgn.kernels.product import packed
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.tracer import trace
from tests.kernels.samples import kernels
from tests.plans.run.graphs import Drawn

aten = torch.ops.aten


def linear_plan(layer):
    """A plan of ``layer(x)`` for x (3, 4), and of nothing else."""
    where = [(layer, "_parameters", "weight"), (layer, "_parameters", "bias")]
    drawn = Drawn((3, 4), parameters=where)
    return drawn.plan(drawn.add(steps.linear, drawn.inputs[0], *drawn.parameters, shape=(3, 5)))


def test_constants_that_no_step_reads_are_freed():
    """For example a mask that rules have left out. It can be as large as 256 MB."""

    def call(x):
        mask = torch.zeros(72, 72)
        for i in range(72):
            mask[i, : i + 1] = i
        return x + mask[0, 0]

    traced = trace(nn.Identity(), call, torch.randn(3))
    (name,) = (n.target for n in traced.graph.graph.nodes if n.op == "get_attr" and n.users)
    constant = weakref.ref(getattr(traced.graph, name))
    for n in traced.graph.graph.nodes:
        if n.target is aten.add.Tensor:
            n.update_arg(1, 0.0)
    plan = Plan(traced, rewrite(traced.graph.graph))
    del traced, n
    gc.collect()
    assert constant() is None
    assert len(plan.steps) == 1


def replace(layer):
    state = {name: torch.randn_like(p) for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def move(layer):
    layer.weight.data = torch.randn(5, 4)


def write(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def set_parameter(layer):
    layer.bias = nn.Parameter(torch.randn(5))


@pytest.mark.parametrize("change", [replace, move, write, set_parameter])
def test_changed_parameters_are_seen(change):
    layer, x = nn.Linear(4, 5), torch.randn(3, 4)
    plan = linear_plan(layer)
    before = plan((x,))
    assert torch.equal(before, layer(x))
    change(layer)
    assert torch.equal(plan((x,)), layer(x))
    assert not torch.equal(plan((x,)), before)


def test_results_need_no_gradient():
    plan = linear_plan(nn.Linear(4, 5))
    assert not plan((torch.randn(3, 4, requires_grad=True),)).requires_grad


def test_unread_parameters_and_others_are_left_out():
    layer = nn.Linear(4, 5)
    where = [(layer, "_parameters", "bias"), (layer, "_parameters", "weight")]
    drawn = Drawn((3, 4), parameters=where, others=[torch.ones(1), torch.ones(4)])
    y = drawn.add(aten.add.Tensor, drawn.inputs[0], drawn.parameters[3])
    plan = drawn.plan(drawn.add(steps.linear, y, drawn.parameters[1], None, shape=(3, 5)))
    assert [name for _, name in plan.parameters] == ["weight"]
    assert plan.others == [drawn.others[1]]
    layer.bias = None
    x = torch.randn(3, 4)
    assert torch.equal(plan((x,)), (x + 1) @ layer.weight.T)


def test_others_are_read_by_reference():
    other = torch.ones(4)
    drawn = Drawn((4,), others=[other])
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], drawn.parameters[0]))
    x = torch.randn(4)
    plan((x,))
    other.fill_(5)
    assert torch.equal(plan((x,)), x + 5)


def test_written_arguments_and_buffers():
    layer = nn.BatchNorm1d(4)
    drawn = Drawn((4,), parameters=[(layer, "_buffers", "running_mean")])
    x, mean = drawn.inputs[0], drawn.parameters[0]
    total = drawn.add(aten.add.Tensor, x, mean)
    double = drawn.add(aten.mul.Tensor, x, 2)
    drawn.add(aten.copy_.default, mean, total)
    drawn.add(aten.copy_.default, x, double)
    plan = drawn.plan(total)
    x = torch.ones(4)
    assert torch.equal(plan((x,)), torch.ones(4))
    assert torch.equal(layer.running_mean, torch.ones(4))
    assert torch.equal(x, torch.full((4,), 2.0))
    assert torch.equal(plan((x,)), torch.full((4,), 3.0))


def test_a_written_argument_may_not_share_its_memory():
    drawn = Drawn((4,), (4,))
    x, y = drawn.inputs
    drawn.add(aten.copy_.default, x, drawn.add(aten.add.Tensor, x, y))
    plan = drawn.plan(drawn.add(aten.neg.default, y))
    both = torch.ones(8)
    with pytest.raises(ValueError, match="Plan: tensor 0 of the call shares memory that"):
        plan((both[:4], both[4:]))
    assert both.tolist() == [1] * 8
    x, y = torch.ones(4), torch.ones(4)
    assert plan((x, y)).tolist() == [-1] * 4
    assert x.tolist() == [2] * 4


def test_an_argument_may_not_be_a_written_buffer():
    layer = nn.BatchNorm1d(4)
    drawn = Drawn((4,), parameters=[(layer, "_buffers", "running_mean"), (layer, "_buffers", "running_var")])
    x, (mean, var) = drawn.inputs[0], drawn.parameters
    drawn.add(aten.copy_.default, mean, drawn.add(aten.add.Tensor, mean, var))
    plan = drawn.plan(drawn.add(aten.neg.default, x))
    with pytest.raises(ValueError, match="shares memory that the call writes into"):
        plan((layer.running_mean,))
    assert plan((layer.running_var,)).tolist() == [-1] * 4
    assert layer.running_mean.tolist() == [1] * 4


def test_a_written_argument_may_be_no_buffer():
    layer = nn.BatchNorm1d(4)
    drawn = Drawn((4,), parameters=[(layer, "_buffers", "running_mean")])
    x, mean = drawn.inputs[0], drawn.parameters[0]
    drawn.add(aten.copy_.default, x, drawn.add(aten.add.Tensor, x, mean))
    plan = drawn.plan(drawn.add(aten.neg.default, mean))
    with pytest.raises(ValueError, match="shares memory that the call writes into"):
        plan((layer.running_mean,))


# ---- constants


class Counted:
    """A step that counts its calls."""

    __name__ = "counted"

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return args[0] * 2 if args else torch.arange(4.0)


@pytest.fixture
def counted(monkeypatch):
    found = Counted()
    monkeypatch.setattr(steps, "counted", lambda *args: found(*args), raising=False)
    steps.counted.__name__, steps.counted.__module__ = "counted", steps.__name__
    steps.counted.__qualname__ = "counted"
    return found


def test_constants_are_computed_once(counted):
    drawn = Drawn((4,))
    table = drawn.add(steps.counted, drawn.constant(torch.ones(4)))
    more = drawn.add(steps.counted, table)
    made = drawn.add(steps.counted, shape=(4,))
    y = drawn.add(aten.add.Tensor, drawn.inputs[0], more)
    plan = drawn.plan(drawn.add(aten.add.Tensor, y, made))
    assert counted.calls == 0
    for x in torch.randn(3, 4):
        assert torch.equal(plan((x,)), x + 4 + torch.arange(4.0))
    assert counted.calls == 3
    assert [s.target for s in plan.steps] == ["aten.add.Tensor", "aten.add.Tensor"]


def test_a_rehearsal_launches_the_kernels_of_constants(monkeypatch):
    """A rehearsal launches no kernel that is not compiled yet, and constants are computed only once."""
    rehearsals = []
    monkeypatch.setattr(steps, "copy", lambda x: rehearsals.append(rehearsal.get()) or x.clone())
    drawn = Drawn((4,))
    constant = drawn.add(steps.copy, drawn.constant(torch.ones(4)))
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], constant))
    token = rehearsal.set(object())
    try:
        assert torch.equal(plan((torch.zeros(4),)), torch.ones(4))
    finally:
        rehearsal.reset(token)
    assert rehearsals == [None]


def test_copies_of_tables_on_the_cpu_are_constants():
    table, scale = torch.randn(6, 4), torch.tensor(2.0)
    drawn = Drawn((3, 4), others=[table, scale], device="meta")
    rows = drawn.add(aten.slice.Tensor, drawn.parameters[0], 0, 1, 4, shape=(3, 4))
    rows.meta["device"] = table.device
    copied = drawn.add(aten._to_copy.default, rows, device=torch.device("meta"))
    y = drawn.add(aten.mul.Tensor, drawn.inputs[0], drawn.add(aten.sin.default, copied))
    plan = drawn.plan(drawn.add(aten.mul.Tensor, y, drawn.parameters[1]))
    assert [s.target for s in plan.steps] == ["aten.mul.Tensor", "aten.mul.Tensor"]
    assert (plan.others, plan.copies_from_cpu) == ([scale], False)
    (constant,) = plan.operands(())[1:]
    assert (constant.shape, constant.device.type) == ((3, 4), "meta")
    scale.mul_(2)  # it is read anew in each call
    assert plan.is_current()
    table.mul_(2)
    assert not plan.is_current()


def copied_from_the_cpu(table, device="meta"):
    drawn = Drawn((3, 4), others=[table], device=device)
    copied = drawn.add(aten._to_copy.default, drawn.parameters[0], device=torch.device(device))
    return drawn.plan(drawn.add(aten.mul.Tensor, drawn.inputs[0], copied))


def test_tables_of_plans_on_the_cpu_are_read_by_reference():
    table, x = torch.randn(3, 4), torch.randn(3, 4)
    plan = copied_from_the_cpu(table, "cpu")
    for _ in range(2):
        assert torch.equal(plan((x,)), x * table)
        table.mul_(2)
        assert plan.is_current()


def test_tables_that_do_not_count_writes_are_copied_in_each_call():
    assert not copied_from_the_cpu(torch.randn(3, 4)).copies_from_cpu
    with torch.inference_mode():
        table = torch.randn(3, 4)
    plan = copied_from_the_cpu(table)
    assert plan.copies_from_cpu
    assert len(plan.steps) == 2


def test_what_reads_a_parameter_or_an_input_is_no_constant(counted):
    layer = nn.Linear(4, 4)
    drawn = Drawn((4,), parameters=[(layer, "_parameters", "bias")])
    double = drawn.add(steps.counted, drawn.parameters[0])
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], double))
    for x in torch.randn(2, 4):
        write(layer)
        layer.bias.data.add_(1)
        assert torch.equal(plan((x,)), x + 2 * layer.bias)
    assert counted.calls == 2


def test_large_values_are_no_constants(counted, monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.run.plan._MOST_FOLDED", 15)
    drawn = Drawn((4,))
    made = drawn.add(steps.counted, shape=(4,))  # 16 bytes
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], made))
    for x in torch.randn(2, 4):
        assert torch.equal(plan((x,)), x + torch.arange(4.0))
    assert counted.calls == 2


def test_constants_have_no_repeated_elements():
    drawn = Drawn((3, 4))
    wide = drawn.add(steps.expand, drawn.add(aten.ones.default, [4], shape=(4,)), (3, 4), shape=(3, 4))
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], wide))
    assert [step.read for step in plan.steps] == [4 * (12 + 4)]
    assert [t.shape for t in plan.operands(())] == [(4,)]
    x = torch.randn(3, 4)
    assert torch.equal(plan((x,)), x + 1)


def test_repeated_elements_that_a_constant_reads_are_a_constant():
    drawn = Drawn((3, 4))
    wide = drawn.add(steps.expand, drawn.add(aten.ones.default, [4], shape=(4,)), (3, 4), shape=(3, 4))
    total = drawn.add(aten.add.Tensor, drawn.inputs[0], wide)
    plan = drawn.plan(drawn.add(aten.add.Tensor, total, drawn.add(aten.neg.default, wide)))
    x = torch.randn(3, 4)
    assert torch.equal(plan((x,)), x + 1 - 1)


def test_random_numbers_are_no_constants():
    drawn = Drawn((4,))
    noise = drawn.add(aten.rand.default, [4], shape=(4,))
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], noise))
    x = torch.zeros(4)
    assert not torch.equal(plan((x,)), plan((x,)))


@pytest.mark.parametrize("through_a_view", [False, True])
def test_steps_do_not_write_over_constants(through_a_view):
    drawn = Drawn((2,))
    zeros = drawn.add(aten.zeros.default, [4], shape=(4,))
    place = drawn.add(steps.reshape, zeros, (4, 1), shape=(4, 1)) if through_a_view else zeros
    part = drawn.add(steps.reshape, drawn.inputs[0], (2, 1), shape=(2, 1))
    part = part if through_a_view else drawn.inputs[0]
    y = drawn.add(steps.write_slice_, place, part, 0, 0, 2, 1)
    plan = drawn.plan(drawn.add(aten.add.Tensor, y, 0))
    assert plan((torch.ones(2),)).flatten().tolist() == [1, 1, 0, 0]
    assert plan((torch.full((2,), 3.0),)).flatten().tolist() == [3, 3, 0, 0]
    constants = plan.operands(())
    assert [t.flatten().tolist() for t in constants] == [[0, 0, 0, 0]] * through_a_view


def test_a_constant_that_constant_steps_write_over_is_folded_whole():
    drawn = Drawn((4,))
    given = drawn.constant(torch.zeros(4))
    two = drawn.add(aten.full.default, [2], 2.0, shape=(2,))
    table = drawn.add(steps.write_slice_, given, two, 0, 0, 2, 1)
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], table))
    for _ in range(2):
        assert plan((torch.zeros(4),)).tolist() == [2, 2, 0, 0]
    assert len(plan.steps) == 1
    assert drawn.root.c0.tolist() == [0, 0, 0, 0]  # another plan of this trace reads it


def test_callers_may_write_over_results_that_are_constants():
    drawn = Drawn((4,))
    ones = drawn.add(aten.ones.default, [4], shape=(4,))
    wide = drawn.add(steps.expand, ones, (2, 4), shape=(2, 4))
    plan = drawn.plan(ones, wide, ones)
    for _ in range(2):
        first, second, third = plan((torch.zeros(4),))
        assert first.sum() + second.sum() + third.sum() == 16
        first.zero_()
        second[0].zero_()


@pytest.mark.parametrize("what", ["argument", "parameter", "read-later", "a-part-read-later"])
@pytest.mark.parametrize("view", [None, aten.alias.default])
def test_steps_do_not_write_over_what_others_read(what, view):
    layer, x = nn.Conv2d(1, 2, 1), torch.randn(1, 2, 1, 1)
    drawn = Drawn((1, 2, 1, 1), parameters=[(layer, "_parameters", "weight"), (layer, "_parameters", "bias")])
    h, weight, bias = *drawn.inputs, *drawn.parameters
    if what == "parameter":
        h = drawn.add(steps.reshape, weight, (1, 2, 1, 1), shape=(1, 2, 1, 1))
    elif what != "argument":
        h = drawn.add(aten.neg.default, h)
    before = drawn.add(steps.cut, h, 1, 0, 1, shape=(1, 1, 1, 1)) if what == "a-part-read-later" else h
    (y,) = drawn.add(
        steps.add_bias_, h if view is None else drawn.add(view, h), bias, False, items=[(1, 2, 1, 1)]
    )
    plan = drawn.plan(y, drawn.add(aten.mul.Tensor, before, 2))
    expected = {"argument": x, "parameter": layer.weight.detach().view(1, 2, 1, 1)}.get(what, -x).clone()
    for _ in range(2):
        y, double = plan((x,))
        assert torch.equal(y, expected + layer.bias.view(2, 1, 1))
        assert torch.equal(double, 2 * expected[:, : double.shape[1]])
    assert [s.target for s in plan.steps].count("copy") == 1


def test_steps_write_over_what_nobody_else_reads():
    drawn = Drawn((1, 2, 1, 1), (2,))
    h = drawn.add(
        steps.reshape, drawn.add(aten.neg.default, drawn.inputs[0]), (1, 2, 1, 1), shape=(1, 2, 1, 1)
    )
    (y,) = drawn.add(steps.add_bias_, h, drawn.inputs[1], False, items=[(1, 2, 1, 1)])
    (y,) = drawn.add(steps.add_bias_, y, drawn.inputs[1], False, items=[(1, 2, 1, 1)])
    assert "copy" not in [s.target for s in drawn.plan(y).steps]


def test_a_first_call_in_inference_mode_makes_ordinary_constants():
    drawn = Drawn((4,))
    ones = drawn.add(aten.ones.default, [4], shape=(4,))
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], ones))
    with torch.inference_mode():
        plan((torch.zeros(4),))
    assert not plan.operands([torch.zeros(4)])[0].is_inference()


def test_a_rehearsal_computes_constants(monkeypatch, poisoned_memory):
    monkeypatch.setattr(compile_ahead.torch.cuda, "device", lambda _: contextlib.nullcontext())
    table, x = (torch.randn(1, 4, 2, 2).contiguous(memory_format=torch.channels_last) for _ in range(2))
    drawn = Drawn(table.shape)
    normed = drawn.add(
        steps.group_norm, drawn.constant(table), 2, None, None, 1e-5, "silu", None, None, False
    )
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], normed))
    with kernels(direct=True):
        plan.compile_ahead([x], torch.device("cpu", 0))
        (y,) = plan.run([x])
    torch.testing.assert_close(y, x + F.silu(F.group_norm(table, 2)))


def test_a_first_call_inside_of_a_capture_is_refused(monkeypatch):
    drawn = Drawn((4,))
    ones = drawn.add(aten.ones.default, [4], shape=(4,))
    plan = drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], ones))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="first call must not be inside the capture"):
        plan((torch.zeros(4),))
    monkeypatch.undo()
    plan((torch.zeros(4),))


# ---- arguments and results


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (torch.zeros(3, 5), r"torch.float32\[3, 4\] on cpu, got torch.float32\[3, 5\] on cpu"),
        (torch.zeros(12), r"got torch.float32\[12\] on cpu"),
        (torch.zeros(3, 4, dtype=torch.float64), r"got torch.float64\[3, 4\] on cpu"),
        (torch.zeros(3, 4, device="meta"), r"got torch.float32\[3, 4\] on meta"),
    ],
)
def test_other_tensors_than_traced_are_refused(x, found):
    with pytest.raises(ValueError, match=f"Plan: tensor 0 of the call must be .*{found}"):
        linear_plan(nn.Linear(4, 5))((x,))


@pytest.mark.parametrize("call", [((), {}), ((torch.zeros(3, 4),) * 2, {}), ((), {"x": torch.zeros(3, 4)})])
def test_other_structures_than_traced_are_refused(call):
    with pytest.raises(ValueError, match="Plan: the arguments must have the structure"):
        linear_plan(nn.Linear(4, 5))(*call)


def test_a_number_in_place_of_a_tensor_is_refused():
    with pytest.raises(ValueError, match="Plan: the call must have 1 tensors, got 0"):
        linear_plan(nn.Linear(4, 5))((2,))


def test_arguments_that_are_only_read_may_share_memory():
    drawn = Drawn((4,), (4,))
    x = torch.ones(4)
    assert drawn.plan(drawn.add(aten.add.Tensor, *drawn.inputs))((x, x)).tolist() == [2] * 4


def test_keyword_arguments_and_nested_results():
    drawn = Drawn((4,), (4,))
    a, b = drawn.inputs
    out = pytree.tree_structure({"sum": 0, "more": (0, [0])})
    total = drawn.add(aten.add.Tensor, a, b)
    less = drawn.add(aten.sub.Tensor, a, b)
    plan = drawn.plan(total, less, None, args=(0, "a word"), kwargs={"b": 0}, out=out)
    x, y = torch.randn(2, 4)
    found = plan((x, "a word"), {"b": y})
    assert torch.equal(found["sum"], x + y)
    assert torch.equal(found["more"][0], x - y)
    assert found["more"][1] == [None]


def test_results_of_diffusers_classes():
    from diffusers.models.autoencoders.vae import DecoderOutput
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

    for result in (DecoderOutput(sample=0), UNet2DConditionOutput(sample=0)):
        drawn = Drawn((4,))
        y = drawn.add(aten.neg.default, drawn.inputs[0])
        found = drawn.plan(y, out=pytree.tree_structure(result))((torch.ones(4),))
        assert type(found) is type(result)
        assert found.sample.tolist() == found[0].tolist() == [-1] * 4


# ---- life, threads, modes


def test_a_plan_keeps_no_module():
    layer = nn.Linear(4, 5)
    plan = linear_plan(layer)
    plan((torch.randn(3, 4),))
    layer.plan = plan  # no cycle: the layer goes at once
    gone = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()


def test_four_threads():
    layer = nn.Linear(4, 5)
    drawn = Drawn((3, 4), parameters=[(layer, "_parameters", "weight")])
    ones = drawn.add(aten.ones.default, [5], shape=(5,))
    y = drawn.add(steps.linear, drawn.inputs[0], drawn.parameters[0], ones, shape=(3, 5))
    plan = drawn.plan(y)
    start, wrong = threading.Barrier(4), []

    def work():
        start.wait()
        for x in torch.randn(50, 3, 4):
            if not torch.equal(plan((x,)), torch.nn.functional.linear(x, layer.weight, torch.ones(5))):
                wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_autocast_is_off():
    layer, x = nn.Linear(4, 5), torch.randn(3, 4)
    plan = linear_plan(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert plan((x,)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


# ---- packed weights


@pytest.fixture
def packs(monkeypatch):
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(4, 8))

    def forward(self, x, names="qkv"):
        return tuple(getattr(self, name)(x) for name in names)


def projections_plan(model, names="qkv"):
    where = [(getattr(model, name), "_parameters", kind) for kind in ("weight", "bias") for name in names]
    drawn = Drawn((2, 3, 4), parameters=where)
    weights, biases = drawn.parameters[: len(names)], drawn.parameters[len(names) :]
    return drawn.plan(
        *drawn.add(steps.linears, drawn.inputs[0], weights, biases, items=[(2, 3, 8)] * len(names))
    )


def agree(plan, model, names="qkv"):
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = model(x, names)
    for a, b in zip(plan((x,)), expected, strict=True):
        torch.testing.assert_close(a, b)


def addresses(model):
    return [p.data_ptr() for p in model.parameters()]


def test_weights_are_packed_when_asked(packs, products):
    model = Projections()
    plan = projections_plan(model)
    before = addresses(model)
    agree(plan, model)
    assert addresses(model) == before
    products.clear()
    plan.pack()
    plan((torch.randn(2, 3, 4),))
    assert len(products) == 1
    agree(plan, model)
    packed.unpack(model.parameters())
    agree(plan, model)


@pytest.mark.parametrize("change", [replace, write, lambda m: m.double().float()])
def test_packed_weights_that_change(change, packs):
    model = Projections()
    plan = projections_plan(model)
    plan.pack()
    change(model if change is not write else model.k)
    agree(plan, model)
    plan.pack()
    agree(plan, model)


def test_what_one_plan_has_packed_no_other_plan_moves(packs):
    """A graph that was captured of the first plan reads the weights where they are."""
    model = Projections()
    first, second = projections_plan(model), projections_plan(model, "kv")
    first.pack()
    before = addresses(model)
    for plan in (first, second, projections_plan(model)):
        plan.pack()
        assert addresses(model) == before
    agree(first, model)
    agree(second, model, "kv")


def test_a_move_packs_again_when_asked(packs, products):
    model = Projections()
    plan = projections_plan(model)
    plan.pack()
    model.double().float()
    plan.pack()
    products.clear()
    plan((torch.randn(2, 3, 4),))
    assert len(products) == 1


def test_packed_models_are_saved_as_before(packs):
    model, before, after = Projections(), io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), before)
    projections_plan(model).pack()
    torch.save(model.state_dict(), after)
    assert len(after.getvalue()) == len(before.getvalue())


def test_products_with_other_weights_than_parameters_are_not_packed(packs):
    drawn = Drawn((2, 3, 4), others=[torch.randn(8, 4), torch.randn(8, 4)])
    before = [t.data_ptr() for t in drawn.others]
    plan = drawn.plan(*drawn.add(steps.linears, drawn.inputs[0], drawn.parameters, [], items=[(2, 3, 8)] * 2))
    plan.pack()
    assert [t.data_ptr() for t in drawn.others] == before
