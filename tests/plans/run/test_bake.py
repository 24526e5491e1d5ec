"""``Baked``: the bits of the plan, whatever happens to weights, arguments and threads between calls."""

import contextlib
import gc
import operator
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from sdfastgn.kernels.common import dispatch, private
from sdfastgn.kernels.common.compile_ahead import rehearse
from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.product import op as product_op
from sdfastgn.kernels.product import packed
from sdfastgn.plans.run import source, steps
from sdfastgn.plans.run.bake import Baked
from tests.kernels.samples import kernels
from tests.plans.run.graphs import Drawn
from tests.plans.run.kernels import Compiled, scaled

aten = torch.ops.aten
each_path = pytest.mark.parametrize(
    "path", [contextlib.nullcontext, partial(kernels, direct=True)], ids=["pytorch", "kernels"]
)


class Block(nn.Module):
    """Weights for ``block_plan``."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3)
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        for p in (self.norm.weight, self.norm.bias):
            nn.init.normal_(p)


def block_plan(block, device="cpu", dtype=torch.float32):
    """Norm, convolution, sum with statistics, attention, and a product added in place."""
    names = (
        "norm.weight",
        "norm.bias",
        "conv.weight",
        "conv.bias",
        "q.weight",
        "q.bias",
        "k.weight",
        "k.bias",
    )
    where = [(block.get_submodule(m), "_parameters", p) for m, p in (n.split(".") for n in names)]
    drawn = Drawn(
        (2, 8, 4, 4), parameters=[*where, (block.out, "_parameters", "weight")], dtype=dtype, device=device
    )
    (x,), (gamma, beta, conv, bias, *products, out) = drawn.inputs, drawn.parameters
    image, tokens, heads = (2, 8, 4, 4), (2, 16, 8), (2, 2, 16, 4)
    y = drawn.add(steps.group_norm, x, 4, gamma, beta, 1e-5, "silu", None, None, False)
    y = drawn.add(steps.conv, y, conv, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    total = drawn.add(steps.add, y, x, bias, 1.0, True, shape=image)
    y, statistics = drawn.add(operator.getitem, total, 0), drawn.add(operator.getitem, total, 1)
    y = drawn.add(steps.group_norm, y, 4, gamma, beta, 1e-5, "identity", None, statistics, False, shape=image)
    t = drawn.add(steps.permute, y, (0, 2, 3, 1), shape=(2, 4, 4, 8))
    t = drawn.add(steps.reshape, t, tokens, shape=tokens)
    q, k = drawn.add(steps.linears, t, products[::2], products[1::2], items=[tokens, tokens])
    split = [drawn.add(steps.reshape, a, (2, 16, 2, 4), shape=(2, 16, 2, 4)) for a in (q, k)]
    q, k = (drawn.add(steps.permute, a, (0, 2, 1, 3), shape=heads) for a in split)
    a = drawn.add(steps.attention, q, k, k, None, False, None, False, shape=heads)
    a = drawn.add(steps.permute, a, (0, 2, 1, 3), shape=(2, 16, 2, 4))
    a = drawn.add(steps.reshape, a, tokens, shape=tokens)
    sums = drawn.add(aten.add.Tensor, t, 1.0, shape=tokens)
    sums = drawn.add(steps.add_linear_, sums, a, out, shape=tokens)
    return drawn.plan(drawn.add(steps.copy, y), sums, k)


class Own(torch.Tensor):
    """A subclass without functions of its own."""


STRIDES = "an argument has other sizes, strides, dtype or device"


def images(count, **to):
    return [[torch.randn(2, 8, 4, 4).to(**to)] for _ in range(count)]


def assert_same(results, expected):
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(a, b)
        assert (a.requires_grad, a.is_inference()) == (b.requires_grad, b.is_inference())


def check(baked, calls):
    """Each call gives the plan's bits, and leaves earlier results as they were."""
    results = [baked.run(inputs) for inputs in calls]
    copies = [[t.clone() for t in result] for result in results]
    for inputs, result, copy in zip(calls, results, copies, strict=True):
        assert_same(result, baked.plan.run(inputs))
        assert all(map(torch.equal, result, copy))


@each_path
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_same_bits_as_the_plan(path, mode):
    baked = Baked(block_plan(Block()))
    with path(), mode():
        check(baked, images(3))
    assert (baked.recorded, baked.declined) == (1, {})
    assert path is not each_path.args[1][1] or not baked.left


@pytest.mark.parametrize(
    "modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)]
)
def test_baked_in_one_mode_and_called_in_the_other(modes):
    baked = Baked(block_plan(Block()))
    for mode in modes:
        with mode():
            check(baked, images(2))
    assert baked.recorded == 1


def test_inputs_are_freed_after_their_last_use():
    baked = Baked(block_plan(Block()))
    (x,) = images(1)
    expected = baked.run(x)
    baked.run(x)
    given, alive = [x[0].clone()], []
    held = weakref.ref(given[0])
    names = baked._bound.run.__globals__
    calls = {name: value for name, value in names.items() if callable(value)}

    def watched(function):
        def call(*args, **kwargs):
            alive.append(held() is not None)
            return function(*args, **kwargs)

        return call

    names.update({name: watched(value) for name, value in calls.items()})
    found = baked.run(given, frees=True)
    names.update(calls)
    assert given == []
    assert alive[0]
    assert not alive[-1]
    assert alive == sorted(alive, reverse=True)
    assert_same(found, expected)
    assert_same(baked.run(x), expected)
    assert len(x) == 1


def test_results_need_no_gradient():
    baked = Baked(block_plan(Block()))
    for _ in range(2):
        results = baked.run([torch.randn(2, 8, 4, 4, requires_grad=True)])
        assert not any(result.requires_grad for result in results)


def test_autocast_changes_nothing():
    baked = Baked(block_plan(Block()))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            check(baked, images(2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu_kernels_are_launched_directly(dtype, monkeypatch):
    to = {"device": "cuda", "dtype": dtype}
    baked = Baked(block_plan(Block().to(**to), **to))
    check(baked, images(3, **to))
    assert (baked.left, baked.declined) == ({}, {})
    launched = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *a: launched.append(self))
    baked.run(*images(1, **to))
    assert not launched


@pytest.mark.gpu
def test_a_graph_captures_the_plan():
    to = {"device": "cuda", "dtype": torch.float16}
    baked = Baked(block_plan(Block().to(**to), **to))
    (x,), (y,) = images(2, **to)
    with torch.no_grad():
        with product_op.chosen_after():
            baked.run([x])
        check(baked, [[x], [y]])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = baked.run([x])
        x.copy_(y)
        graph.replay()
        assert_same(captured, baked.run([y]))


# ---- weights


def write(block):
    for p in block.parameters():
        p.mul_(1.5)


def move(block):
    for p in block.parameters():
        old, p.data = p.data, p.data * 1.5
        old.fill_(torch.nan)


def move_one(block):
    old, block.norm.weight.data = block.norm.weight.data, torch.randn(8)
    old.fill_(torch.nan)


def assign(block):
    block.load_state_dict({name: torch.randn_like(p) for name, p in block.state_dict().items()}, assign=True)


def set_parameter(block):
    block.conv.bias = nn.Parameter(torch.randn(8))


def lay_out(block):
    block.conv.weight.data = block.conv.weight.data.contiguous(memory_format=torch.channels_last)


def put_side_by_side(block):
    """As one product: the weights of q and k, and their biases."""
    for kind in ("weight", "bias"):
        parts = [getattr(layer, kind) for layer in (block.q, block.k)]
        for part, data in zip(parts, torch.cat(parts).split(8), strict=True):
            part.data = data


@pytest.mark.drawn(1)
@each_path
@pytest.mark.parametrize(
    ("change", "recordings"),
    [
        (write, 1),
        (move, 1),
        (move_one, 1),
        (assign, 1),
        (set_parameter, 1),
        (lay_out, 2),
        (put_side_by_side, 2),
    ],
)
def test_changed_weights(change, recordings, path):
    block = Block().requires_grad_(False)
    baked = Baked(block_plan(block))
    with path(), torch.no_grad():
        before = baked.run(inputs := images(1)[0])
        for _ in range(2):
            change(block)
            check(baked, [inputs, *images(1)])
    assert (baked.recorded, baked.declined) == (recordings, {})
    assert change in (lay_out, put_side_by_side) or not torch.equal(before[0], baked.run(inputs)[0])


@pytest.mark.slow
@each_path
def test_packed_weights(path, monkeypatch):
    monkeypatch.setattr(packed, "PACKED_DEVICES", ("cpu",))
    block = Block().requires_grad_(False)
    baked = Baked(block_plan(block))

    def products():
        return baked.source.count(f"= {name_of(baked, torch._C._nn.linear)}(")

    with path(), torch.no_grad():
        check(baked, images(1))
        assert products() == 2
        for recordings in (2, 4):
            baked.release()
            baked.plan.pack()
            check(baked, images(2))
            assert (baked.recorded, products()) == (recordings, 1)
            old = packed.joined([block.q.weight, block.k.weight])
            packed.unpack(block.parameters())
            baked.plan.pack()  # into another allocation
            old.fill_(torch.nan)
            check(baked, images(2))
            assert (baked.recorded, products()) == (recordings, 1)
            move(block)  # each into a memory of its own
            check(baked, images(2))
            assert (baked.recorded, products()) == (recordings + 1, 2)
    assert not baked.declined
    assert path is contextlib.nullcontext or not baked.left


def name_of(baked, function):
    """The global name of a function in the source of ``baked``."""
    return next(name for name, value in baked._bound.code.names.items() if value is function)


@each_path
def test_weights_in_one_memory_move_together_and_apart(path):
    block = Block().requires_grad_(False)
    put_side_by_side(block)
    baked = Baked(block_plan(block))
    with path(), torch.no_grad():
        check(baked, images(2))
        put_side_by_side(block)  # into another memory
        check(baked, images(2))
        assert baked.recorded == 1
        move(block)  # each into a memory of its own
        check(baked, images(2))
        assert baked.recorded == 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [move, assign, lay_out])
def test_old_weights_are_kept_until_the_next_call_at_most(change):
    block = Block().requires_grad_(False)
    baked = Baked(block_plan(block))
    baked.run(*images(1))
    read = [dict.__getitem__(holder, name) for holder, name in baked.plan.parameters]
    old = [StorageWeakRef(p.untyped_storage()) for p in read]
    del read
    change(block)
    baked.run(*images(1))
    gc.collect()
    kept = [reference.expired() for reference in old]
    assert kept == [True] * len(old) if change is not lay_out else kept.count(True) == 1


def test_released_weights_are_alone_until_the_next_call():
    block = Block()
    baked = Baked(block_plan(block))
    baked.release()
    check(baked, images(1))
    assert not private.is_alone(block.conv.weight)
    baked.release()
    assert private.is_alone(block.conv.weight)
    check(baked, images(1))
    assert baked.recorded == 1
    assert not private.is_alone(block.conv.weight)


def test_a_dropped_function_lets_go_of_its_weights_at_once():
    block = Block()
    baked = Baked(block_plan(block))
    baked.run(*images(1))
    old = StorageWeakRef(block.conv.weight.untyped_storage())
    gc.disable()
    try:
        del baked, block
        assert old.expired()
    finally:
        gc.enable()


def test_tensors_from_elsewhere_may_be_written_and_moved():
    other = torch.ones(4)
    drawn = Drawn((4,), others=[other])
    baked = Baked(drawn.plan(drawn.add(aten.mul.Tensor, drawn.inputs[0], drawn.parameters[0])))
    x = torch.randn(4)
    for change in (lambda: None, lambda: other.fill_(3), lambda: setattr(other, "data", torch.randn(4))):
        change()
        assert torch.equal(baked.run([x])[0], x * other)


# ---- arguments


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda x: x.contiguous(memory_format=torch.channels_last), STRIDES),
        (lambda x: x[:, :, :2].repeat(1, 1, 2, 1).expand(2, 8, 4, 4).mT, STRIDES),
        (lambda x: torch._neg_view(x), "an argument is a conjugate or negative view"),
        (lambda x: x.as_subclass(Own), "an argument is of a subclass of Tensor"),
    ],
)
def test_other_arguments_run_the_plan(other, why):
    baked = Baked(block_plan(Block()))
    (x,), (y,) = images(2)
    baked.run([x])
    assert_same(baked.run([other(y)]), baked.plan.run([other(y)]))
    assert baked.declined == {why: 1}
    check(baked, [[x]])
    assert baked.declined == {why: 1}


def test_arguments_of_other_sizes_and_dtypes_run_the_plan():
    drawn = Drawn((4,))
    baked = Baked(drawn.plan(drawn.add(aten.neg.default, drawn.inputs[0])))
    x = torch.randn(4)
    check(baked, [[x], [x.double()], [x[:3].clone()], [x]])
    assert baked.declined == {STRIDES: 2}


def test_arguments_that_share_memory_run_the_plan_until_there_is_a_function():
    drawn = Drawn((4,), (4,))
    baked = Baked(drawn.plan(drawn.add(aten.sub.Tensor, *drawn.inputs)))
    base = torch.randn(8)
    shared = [base[:4], base[4:]]
    check(baked, [shared])
    assert baked.declined == {"an argument shares its memory with another one, or with a weight": 1}
    check(baked, [[torch.randn(4), torch.randn(4)], shared])
    assert (baked.recorded, baked.declined.total()) == (1, 1)


def test_arguments_that_the_call_writes_are_written_once_in_each_call():
    drawn = Drawn((2, 4), others=[torch.zeros(4)])
    (x,), (counter,) = drawn.inputs, drawn.parameters
    more, next_x = drawn.add(aten.add.Tensor, counter, 1), drawn.add(aten.mul.Tensor, x, 2)
    y = drawn.add(aten.add.Tensor, next_x, more)
    drawn.add(aten.copy_.default, x, next_x)
    drawn.add(aten.copy_.default, counter, more)
    baked = Baked(drawn.plan(y))
    for i in range(1, 4):
        x = torch.randn(2, 4)
        before = x.clone()
        (y,) = baked.run([x])
        assert torch.equal(x, before * 2)
        assert torch.equal(drawn.others[0], torch.full((4,), float(i)))
        assert torch.equal(y, before * 2 + i)


def test_arguments_may_be_views_at_other_offsets():
    drawn = Drawn((4, 3))
    x = drawn.add(steps.cut, drawn.inputs[0], 0, 1, 2, shape=(2, 3))
    baked = Baked(drawn.plan(drawn.add(aten.neg.default, x), x))
    base = torch.randn(12, 3)
    check(baked, [[base[5:9]], [base[:4]], [base[8:]]])
    (_, view) = baked.run([base[5:9]])
    assert view.data_ptr() == base[6:].data_ptr()
    assert not baked.declined


# ---- steps


def test_steps_in_place():
    drawn = Drawn((2, 4, 6, 6), others=[torch.randn(4)])
    x, bias = drawn.inputs[0], drawn.parameters[0]
    y = drawn.add(aten.mul.Tensor, x, 2.0)
    y = drawn.add(operator.getitem, drawn.add(steps.add_bias_, y, bias, False), 0)
    y = drawn.add(steps.write_slice_, y, drawn.add(steps.cut, x, 3, 0, 2, shape=(2, 4, 6, 2)), 3, 2, 6, 2)
    part = drawn.add(aten.select.int, x, 1, 0, shape=(2, 6, 6))
    y = drawn.add(steps.write_select_, y, part, 1, 3)
    baked = Baked(drawn.plan(y))
    check(baked, [[torch.randn(2, 4, 6, 6)] for _ in range(3)])
    assert not baked.left


def test_views_in_other_dtypes():
    table = torch.polar(torch.ones(4, 2), torch.randn(4, 2))
    drawn = Drawn((3, 4, 4), others=[torch.view_as_real(table).flatten(1)])
    (x,), (own,) = drawn.inputs, drawn.parameters

    def as_complex(n, shape):
        pairs = drawn.add(steps.reshape, n, (*shape, 2), shape=(*shape, 2))
        return drawn.add(aten.view_as_complex.default, pairs, shape=shape, dtype=torch.complex64)

    turned = drawn.add(
        aten.mul.Tensor, as_complex(x, (3, 4, 2)), as_complex(own, (4, 2)), dtype=torch.complex64
    )
    y = drawn.add(aten.view_as_real.default, turned, shape=(3, 4, 2, 2))
    bits = drawn.add(aten.view.dtype, x, torch.int32, dtype=torch.int32)
    baked = Baked(drawn.plan(drawn.add(aten.neg.default, y), y, drawn.add(aten.neg.default, bits), bits))
    check(baked, [[torch.randn(3, 4, 4)] for _ in range(2)])
    check(baked, [[torch.randn(96)[48:].view(3, 4, 4)], [torch.randn(96)[2:50].view(3, 4, 4)]])
    drawn.others[0].data = torch.randn(4, 4)
    check(baked, [[torch.randn(3, 4, 4)]])
    assert (baked.recorded, baked.declined) == (1, {})


def test_results_may_be_operands_and_views_of_one_another():
    layer = nn.Linear(4, 4)
    drawn = Drawn((2, 4), parameters=[(layer, "_parameters", "weight")])
    (x,), (weight,) = drawn.inputs, drawn.parameters
    y = drawn.add(aten.mm.default, x, weight)
    turned = drawn.add(steps.permute, y, (1, 0), shape=(4, 2))
    part = drawn.add(steps.cut, weight, 0, 1, 2, shape=(2, 4))
    plan = drawn.plan(x, weight, y, y, turned, part, drawn.add(steps.reshape, x, (8,), shape=(8,)))
    baked = Baked(plan)
    for i in range(3):
        x = torch.randn(2, 4)
        results = baked.run([x])
        assert results[0] is x
        assert results[1] is layer.weight
        assert results[2] is results[3]
        assert results[4].data_ptr() == results[2].data_ptr()
        assert results[5].data_ptr() == layer.weight[1:].data_ptr()
        assert results[6].data_ptr() == x.data_ptr()
        for a, b in zip(results, plan.run([x]), strict=True):
            assert torch.equal(a, b)
        if i:
            layer.weight = nn.Parameter(torch.randn(4, 4))


def test_a_result_may_be_missing():
    drawn = Drawn((2, 4, 4, 4), (2, 4, 4, 4))
    both = drawn.add(steps.add, *drawn.inputs, None, 2.0, True)
    baked = Baked(drawn.plan(drawn.add(operator.getitem, both, 0), drawn.add(operator.getitem, both, 1)))
    for _ in range(2):
        y, statistics = baked.run([torch.ones(2, 4, 4, 4), torch.ones(2, 4, 4, 4)])
        assert torch.equal(y, torch.ones(2, 4, 4, 4))
        assert statistics is None


def test_steps_that_stay_calls():
    table, runs = torch.randn(4), []

    def value(x, y):
        runs.append("value")
        return (x * (2 if y.sum().item() > 0 else 3), [y + 1, y])

    def foreign_(x, y):
        runs.append("foreign")
        return x.add_(table * y)

    drawn = Drawn((4,), others=[torch.randn(4)])
    (x,), (other,) = drawn.inputs, drawn.parameters
    both = drawn.add(value, x, other)
    pair = drawn.add(operator.getitem, both, 1)
    a, b, c = (drawn.add(operator.getitem, p, i) for p, i in ((both, 0), (pair, 0), (pair, 1)))
    total = drawn.add(foreign_, drawn.add(aten.mul.Tensor, a, b), c)
    baked = Baked(drawn.plan(drawn.add(aten.neg.default, total)))
    baked.run([torch.randn(4)])
    assert runs == ["value", "foreign"]
    assert baked.left.total() == 2
    check(baked, [[torch.randn(4)] for _ in range(2)])
    drawn.others[0].neg_()
    table.neg_()
    check(baked, [[torch.randn(4)] for _ in range(2)])
    assert not baked.declined


def test_random_numbers_are_new_in_each_call():
    drawn = Drawn((4,))
    baked = Baked(drawn.plan(drawn.add(aten.rand_like.default, drawn.inputs[0])))
    x = torch.zeros(4)
    for _ in range(2):
        torch.manual_seed(3)
        a, b = baked.run([x])[0], baked.run([x])[0]
        torch.manual_seed(3)
        assert torch.equal(a, baked.plan.run([x])[0])
        assert not torch.equal(a, b)


def test_random_numbers_that_nobody_reads_are_drawn():
    drawn = Drawn((4,))
    drawn.add(aten.randn.default, [4], shape=(4,))
    noise = drawn.add(aten.rand.default, [4], shape=(4,))
    baked = Baked(drawn.plan(drawn.add(aten.add.Tensor, drawn.inputs[0], noise)))
    for _ in range(2):
        torch.manual_seed(3)
        y = baked.run([torch.zeros(4)])[0]
        torch.manual_seed(3)
        torch.randn(4)
        assert torch.equal(y, torch.rand(4))


def test_a_plan_that_cannot_be_baked_runs_as_it_is():
    drawn = Drawn((4,))
    number = drawn.add(lambda x: x.sum().item(), drawn.inputs[0])
    baked = Baked(drawn.plan(drawn.add(aten.mul.Tensor, drawn.inputs[0], number)))
    check(baked, [[torch.randn(4)] for _ in range(3)])
    assert baked.declined == {"<lambda> returns a float": 2}
    assert (baked.source, baked.recorded) == ("", 0)


def test_an_error_in_a_step_leaves_no_trace():
    fails = [True]

    def step(x):
        if fails[0]:
            raise torch.OutOfMemoryError("no memory")
        return x + 1

    drawn = Drawn((4,))
    baked = Baked(drawn.plan(drawn.add(step, drawn.inputs[0])))
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        baked.run([torch.randn(4)])
    fails.clear()
    fails.append(False)
    check(baked, [[torch.randn(4)] for _ in range(2)])
    assert baked.recorded == 1


def test_memory_is_dropped_after_its_last_use():
    seen, alive = [], []

    def look(x):
        seen.append(StorageWeakRef(x.untyped_storage()))
        alive.append([not s.expired() for s in seen])
        return x * (1 if x.sum().item() else 2)

    drawn = Drawn((4,))
    x = drawn.add(aten.neg.default, drawn.inputs[0])
    for _ in range(3):
        x = drawn.add(steps.reshape, drawn.add(look, x), (2, 2), shape=(2, 2))
        x = drawn.add(aten.neg.default, x)
    baked = Baked(drawn.plan(x))
    for _ in range(3):
        baked.run([torch.randn(4)])
        assert alive == [[True], [False, True], [False, False, True]]
        seen.clear(), alive.clear()


# ---- launches that take addresses


def direct_plan(kernel, weight):
    """``y = 2 * weight * x``, then ``3 * y`` of its second half, written over the first half of another."""
    first, second = scaled(kernel, 8), scaled(kernel, 4, times=3.0)

    def halves(x, weight):
        y = torch.empty_like(x)
        first.run(x, weight, y)
        out = torch.zeros(2, 4)
        second.run(y[4:], None, out[0])
        second.run(y[4:], weight[4:], out[1])
        return out

    drawn = Drawn((8,), others=[weight])
    return drawn.plan(drawn.add(halves, drawn.inputs[0], drawn.parameters[0], shape=(2, 4)))


def whole(count):
    """Random whole numbers, whose products are exact."""
    return torch.randint(-9, 9, (count,)).float()


def expected_of(x, weight):
    y = 2 * weight[4:] * x[4:]
    return torch.stack((3 * y, 3 * y * weight[4:]))


def test_compiled_kernels_get_addresses(monkeypatch):
    kernel, weight = Compiled(), whole(8)
    baked = Baked(direct_plan(kernel, weight))
    for i in range(4):
        x = whole(8)
        assert torch.equal(baked.run([x])[0], expected_of(x, weight))
        assert (len(kernel.launcher.calls), len(kernel.through_triton)) == (1 + 3 * i, 2)
        if i == 2:
            old, weight.data = weight.data, whole(8)
            old.fill_(torch.nan)
        monkeypatch.setattr(Launch, "__call__", None)  # a call of it would fail
    assert (baked.recorded, baked.left) == (1, {})


def test_addresses_that_are_not_aligned_go_through_triton():
    kernel = Compiled()
    weight = whole(9)[1:]
    baked = Baked(direct_plan(kernel, weight))
    for i in range(3):
        x = whole(8)
        assert torch.equal(baked.run([x])[0], expected_of(x, weight))
        assert len(kernel.through_triton) == 3 + 2 * i
    weight.data = whole(8)  # now it is aligned
    for _ in range(2):
        x = whole(8)
        assert torch.equal(baked.run([x])[0], expected_of(x, weight))
    # The first aligned launch of a kernel compiles it.
    assert (baked.recorded, len(kernel.through_triton)) == (2, 3 + 2 * 2 + 1)


def test_what_kernels_write_is_allocated_as_it_is_read():
    launch = scaled(Compiled(), 8)

    def step(x):
        y = torch.empty_like(x)
        launch.run(x, None, y)
        return y

    drawn = Drawn((8,))
    y = drawn.add(steps.reshape, drawn.add(step, drawn.inputs[0]), (2, 4), shape=(2, 4))
    baked = Baked(drawn.plan(drawn.add(aten.mm.default, y, drawn.add(aten.t.default, y, shape=(4, 2)))))
    check(baked, [[torch.randn(8)] for _ in range(2)])
    assert baked.source.count("(2, 4,), (4, 1,)") == 1


def test_what_is_read_with_strides_of_zero_is_allocated_as_it_is_written():
    launch = scaled(Compiled(), 8)

    def step(x):
        y = torch.empty_like(x)
        launch.run(x, None, y)
        return y

    drawn = Drawn((2, 4))
    row = drawn.add(steps.cut, drawn.add(step, drawn.inputs[0]), 0, 0, 1, shape=(1, 4))
    rows = drawn.add(steps.expand, row, (2, 4), shape=(2, 4))
    baked = Baked(drawn.plan(drawn.add(aten.neg.default, rows), drawn.add(aten.abs.default, rows)))
    check(baked, [[torch.randn(2, 4)] for _ in range(2)])
    assert baked.source.count("(2, 4,), (4, 1,)") == 1


@pytest.mark.parametrize("name", ["allocators", "view_at"])
def test_without_private_functions(name, monkeypatch):
    if name == "view_at":
        monkeypatch.setattr(source, name, private._moved_view)
    else:
        monkeypatch.setattr(source, name, {"cpu": private._empty_on("cpu")})
    check(Baked(block_plan(Block())), images(3))


# ---- other circumstances


def test_a_rehearsal_and_a_capture_run_the_plan(monkeypatch):
    baked = Baked(block_plan(Block()))
    x, y = images(2)
    why = "it is a rehearsal or the capture of a CUDA graph"
    with product_op.chosen_after():
        baked.run(x)
    assert (baked.declined, baked.recorded) == ({why: 1}, 0)
    check(baked, [x, y])
    with product_op.chosen_after():
        assert_same(baked.run(x), baked.plan.run(x))
    monkeypatch.setattr(product_op, "is_choosing", lambda: True)
    assert_same(baked.run(y), baked.plan.run(y))
    assert (baked.declined, baked.recorded) == ({why: 3}, 1)


def test_kernels_that_are_compiled_ahead_are_not_recorded(monkeypatch):
    monkeypatch.setattr(
        "sdfastgn.kernels.common.compile_ahead.torch.cuda.device", lambda _: contextlib.nullcontext()
    )
    baked = Baked(block_plan(Block()))
    rehearse(lambda: baked.run(*images(1)), torch.device("cpu", 0))
    assert baked.recorded == 0


def test_kernels_that_are_turned_off_do_not_run(launches):
    baked = Baked(block_plan(Block()))
    x, y = images(2)
    with kernels(direct=True):
        check(baked, [x])
        launches.clear()
        with dispatch.stock_code():
            check(baked, [y])
        assert not launches
        check(baked, [y])
        assert launches
    assert baked.declined == {"kernels have been turned on or off": 1}


def test_a_dispatch_mode_sees_the_ops_of_the_plan():
    baked = Baked(block_plan(Block()))
    (x,) = images(1)
    baked.run(x)
    with FlopCounterMode(display=False) as counted:
        baked.run(x)
    assert counted.get_total_flops() > 0
    assert baked.declined == {"a dispatch mode is active": 1}


@pytest.mark.parametrize("is_new", [True, False], ids=["first call", "later calls"])
def test_threads(is_new):
    block = Block().requires_grad_(False)
    baked = Baked(block_plan(block))
    calls = [images(1)[0] for _ in range(4)]
    expected = [baked.plan.run(inputs) for inputs in calls]
    wrong, start = [], threading.Barrier(5)
    if not is_new:
        baked.run(calls[0])

    def work(i):
        start.wait()
        for _ in range(25):
            if not all(map(torch.equal, baked.run(calls[i]), expected[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        for p in block.parameters():
            p.data = p.data.clone()  # the same values at another place
    for thread in threads:
        thread.join()
    assert not wrong
    check(baked, calls)
    assert (baked.recorded, baked.declined) == (1, {})


def test_weights_that_move_in_a_recording():
    other = torch.randn(4, 4)
    moves = [lambda: setattr(other, "data", other.data.t().contiguous().t())]

    def step(x):
        for move in moves:
            move()
        return x + 1

    drawn = Drawn((4, 4), others=[other])
    x = drawn.add(step, drawn.inputs[0])
    baked = Baked(drawn.plan(drawn.add(aten.mul.Tensor, x, drawn.parameters[0])))
    x = torch.randn(4, 4)
    assert torch.equal(baked.run([x])[0], (x + 1) * other)
    moves.clear()
    assert (baked.recorded, baked.left) == (1, {})
    check(baked, [[torch.randn(4, 4)] for _ in range(2)])
    assert (baked.recorded, baked.left, baked.declined) == (2, {}, {})


def test_another_thread_launches_as_usual_while_a_plan_is_recorded():
    recording, done, seen = threading.Event(), threading.Event(), []
    launch = scaled(Compiled(), 4)

    def step(x):
        recording.set()
        assert done.wait(10)
        return x + 1

    def other():
        recording.wait(10)
        y = torch.empty(4)
        launch.run(torch.ones(4), None, y)
        seen.append(y)
        done.set()

    drawn = Drawn((4,))
    baked = Baked(drawn.plan(drawn.add(step, drawn.inputs[0])))
    thread = threading.Thread(target=other)
    thread.start()
    baked.run([torch.randn(4)])
    thread.join()
    assert torch.equal(seen[0], torch.full((4,), 2.0))
    assert "stream" not in baked.source
