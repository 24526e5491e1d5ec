"""What is written in place, and which results and written values are copied."""

import pytest
import torch
from torch import fx

from sdfastgn.plans.rewrite.finish import finish
from tests.plans.rewrite.rewriting import Rewritten, checked, steps_of

aten = torch.ops.aten
x, y = torch.randn(4, 6), torch.randn(4, 6)


# ---- writes into parts


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, lambda x: x.new_full((4, 6), 2.0)])
def test_a_new_tensor_is_written_in_place(make):
    def call(x):
        out = make(x)
        out[:, :3], out[:, 3:] = x[:, 3:], x[:, :3]
        out[0] = x[1]
        return out

    assert steps_of(call, x)[1:] == ["write_slice_", "write_slice_", "write_select_"]


def test_two_filled_tensors_are_written_apart():
    def call(x):
        a, b = torch.zeros_like(x), torch.zeros_like(x)
        a[:, 1:] = x[:, 1:]
        b[0] = x[1]
        return a, b, torch.zeros_like(x)

    steps = steps_of(call, x)
    assert (steps.count("aten.full"), steps.count("write_slice_"), steps.count("write_select_")) == (3, 1, 1)


def test_a_tensor_that_is_read_before_the_write_is_copied():
    def call(x):
        out = torch.zeros_like(x)
        out[:, 1:3] = x[:, 1:3]
        before = out * 2
        out[0] = x[1]
        return out, before

    assert steps_of(call, x).count("aten.select_scatter") == 1


def test_a_part_of_itself_is_read_before_the_write():
    def call(x):
        out = torch.zeros_like(x)
        out[:, 1:3] = x[:, 1:3]
        out[0] = out[1]
        return out

    assert "aten.select_scatter" in steps_of(call, x)


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x.clone(), lambda x: x[:3].t().clone().t()])
def test_other_tensors_are_not_written_in_place(make):
    def call(x):
        out = make(x)
        out[0] = 1
        return out, x * 3

    steps_of(call, x)
    assert torch.equal(x, x.clone())


def test_a_tensor_that_is_overwritten_is_not_computed():
    def call(x):
        out = torch.empty(4, 6)
        out[:] = x * 2
        return out

    assert steps_of(call, x) == ["aten.mul"]


def test_a_copy_of_a_part_is_written_in_place():
    def call(x):
        out = x[:2].clone()
        out[:, :1] = x[2:, 1:2]
        return out

    assert steps_of(call, x) == ["copy", "write_slice_"]


# ---- results


def lies_in(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x,
        lambda x: x.view(6, 4),
        lambda x: x.t()[1:],
        lambda x: x[::2],
        lambda x: torch.view_as_complex(x.view(4, 3, 2)),
        lambda x: x.diagonal(),
        lambda x: x.expand(3, 4, 6),
    ],
)
def test_a_result_is_no_view_of_an_argument(call):
    plan = checked(call, x)
    assert plan.steps[-1] == "copy"
    given = x.clone()
    assert not lies_in(plan(given), given)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x.exp(), x.exp()),
        lambda x: (lambda t: (t, t))(x * 2),
        lambda x: (lambda t: (t, t.t()))(x * 2),
        lambda x: (lambda t: (t[:2], t[2:], t[::2]))(x * 2),
    ],
)
def test_results_do_not_share_memory(call):
    results = checked(call, x)(x)
    assert not any(lies_in(a, b) for i, a in enumerate(results) for b in results[:i])


def test_a_parameter_or_constant_as_result_is_copied():
    model = torch.nn.Linear(2, 2)
    model.forward = lambda x: (model.weight, torch.tensor([1.0, 2.0]), x * 2)
    assert Rewritten(model, x).steps.count("copy") == 2


def test_results_of_one_step_are_not_copied():
    def call(x, y):
        total = x + y
        return total, torch.nn.functional.layer_norm(total, (6,)), None, 3

    assert steps_of(call, x, y) == ["add_layer_norm"]


# ---- written arguments


def test_a_result_is_the_value_before_the_write():
    def call(x):
        before = x.clone()
        x.mul_(2)
        return before

    assert steps_of(call, x) == ["aten.mul", "copy", "aten.copy_"]


def test_two_arguments_change_places():
    def call(x, y):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    checked(call, x, y)


def test_an_argument_is_overwritten_by_a_view_of_itself():
    square = torch.randn(4, 4)
    checked(lambda x: x.copy_(x.clone().t()).sum(), square)
    checked(lambda x: x[1:].copy_(x.clone()[:-1]).sum(), square)


def test_an_argument_gets_a_view_of_another():
    checked(lambda x, y: x.copy_(y.view(6, 4).t().reshape(4, 6)).sum(), x, y)


def test_arguments_are_written_after_all_else():
    graph = fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (given, 2))
    graph.call_function(aten.copy_.default, (given, doubled))
    before = graph.call_function(aten.sum.default, (given,))
    for n, shape in ((given, (4, 6)), (doubled, (4, 6)), (before, ())):
        n.meta = {"shape": shape, "dtype": torch.float32, "device": torch.device("cpu")}
    graph.output([before])
    written = torch.ones(4, 6)
    assert fx.GraphModule({}, finish(graph))(written) == [24]
    assert torch.equal(written, torch.full((4, 6), 2.0))


def test_the_graph_has_the_placeholders_that_it_had():
    plan = checked(lambda x, y: y * 2, x, y)
    assert [n.op for n in plan.graph.nodes].count("placeholder") == 2
