"""Writes become values: who reads the written memory later reads the new value, and nobody else."""

import pytest
import torch

from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.trace.runs import Net, check, targets

aten = torch.ops.aten


def in_place(net, x):
    y = x @ net.weight
    y.add_(1).mul_(2)
    return y.relu_(), y.masked_fill_(y > 5, 0), y.tril_(), y


def through_views(net, x):
    y = x @ net.weight
    y[:, 1:].mul_(2)
    v = y.t()
    y.add_(1)
    v[0] = 7
    y.unsqueeze(0)[:, 2:].copy_(x[:2])
    y.view(2, 8)[1, ::3] += 1
    y.diagonal().fill_(3)
    y.permute(1, 0)[1:3, 2].sub_(1)
    return v + 0, y


def through_parts(net, x):
    y = x.clone()
    a, b = y.chunk(2, 1)
    a.add_(b)
    b.zero_()
    y.unbind(0)[2].fill_(4)
    return a, b, y


def through_complex(net, x):
    y = x.clone()
    z = torch.view_as_complex(y.view(4, 2, 2))
    z.mul_(2j)
    torch.view_as_real(z)[0, 0, 0] = 5
    return y, torch.view_as_real(z)


def out_arguments(net, x):
    o = torch.empty(4, 4)
    torch.matmul(x, net.weight, out=o)
    torch.add(o, 1, out=o)
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(x, 1, out=(values, indices))
    return o, values, indices


def indexed(net, x):
    y = x.clone()
    y[torch.tensor([0, 2])] = 0
    y[torch.tensor([True, False, False, True])] = 1.0
    y[y > 1] = 5.0
    y.index_fill_(0, torch.tensor([1]), 3.0)
    return y.index_add_(0, torch.tensor([1]), x[:1])


def copies(net, x):
    y = (x @ net.weight).t()
    gaps, whole = y[:, :2].contiguous(), y.contiguous()
    y.add_(1)
    flat = y.reshape(2, 8)  # a copy: y is not contiguous
    y.mul_(2)
    return gaps, whole, flat, y


def no_copies(net, x):
    y = x * 1
    kept, rows = y.contiguous(), y[1:3].contiguous()
    flat, same = y.reshape(2, 8), y.to(y.dtype)
    y.add_(1)
    flat[0] = 9
    return kept, rows, flat, same, y.type_as(x), y


def casts(net, x):
    y = x.double()
    y.add_(x)
    z = torch.zeros(4, 4, dtype=torch.float16)
    z.add_(x)
    z[0] = x.double()[1]
    return y, z


def conjugated(net, x):
    z = torch.view_as_complex(x.clone().view(4, 2, 2))
    kept = z.conj().resolve_conj()
    half = z.conj()
    z.mul_(2)
    return torch.view_as_real(kept), torch.view_as_real(half.resolve_conj()), half.imag + 1


CALLS = [in_place, through_views, through_parts, through_complex, out_arguments, indexed, copies, no_copies]
CALLS += [casts, conjugated]


@pytest.mark.parametrize("call", CALLS)
def test_writes_inside_a_call(call):
    traced = check(call)
    assert aten.copy_.default not in targets(traced)


# ---- numbers that are written into parts of a new tensor

MANY, FEW = 70, 3


def in_a_loop(net, x, rows, value=0.0):
    y = torch.full((72, 4), 9.0)
    for i in range(rows):
        y[i, : i % 5] = value
    return y


def read_after(net, x, rows):
    return in_a_loop(net, x, rows)[:4] + x


def returned(net, x, rows):
    return in_a_loop(net, x, rows), in_a_loop(net, x, rows, 5).t()


def views_before_and_between(net, x, rows):
    y = torch.zeros(72, 4)
    first, turned = y[:4], y.t()
    for i in range(rows):
        turned[i % 4, i] = i
        last = y[i]
    y.view(4, 72)[1].fill_(7)
    return first + x, last + x, turned


def read_between(net, x, rows):
    y = torch.ones(72, 4)
    total = x
    for i in range(rows):
        y[i].zero_()
        total = total + y[:4]
    return total, y


def written_later(net, x, rows):
    y = in_a_loop(net, x, rows)
    y[1] = 4.0
    y[2:6] += x
    for i in range(rows):
        y[i, 0] = 2.0
    return y, in_a_loop(net, x, rows).mul_(2)


def numbers_of_every_dtype(net, x, rows):
    found = []
    number = torch.tensor(0.1)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.bool):
        y = torch.ones(72, 2, dtype=dtype)
        for i in range(rows):
            y[i, 0] = 0.1 * i
            y[i, 1:] = number
        found.append(y)
    number += 1
    half = torch.zeros(72)
    half[:rows] = number
    return found, half + x[0, 0]


def a_number_changes(net, x, rows):
    y, number = torch.zeros(72), torch.tensor(1.0)
    for i in range(rows):
        y[i] = number
        number += 1
        y[i : i + 2].copy_(number)
    return y, torch.tensor(1.0) + x


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(
    "call",
    [
        *(read_after, returned, views_before_and_between, read_between, written_later),
        *(numbers_of_every_dtype, a_number_changes),
    ],
)
def test_numbers_in_parts_of_a_new_tensor(call, rows):
    check(lambda net, x: call(net, x, rows))


def test_many_numbers_are_one_constant():
    """A loop over thousands of rows must not make thousands of nodes."""
    traced = check(lambda net, x: read_after(net, x, MANY))
    assert len(traced.graph.graph.nodes) < 12
    assert not {aten.fill.Scalar, aten.select_scatter.default} & {*targets(traced)}


def test_few_numbers_stay_ops():
    assert targets(check(lambda net, x: read_after(net, x, FEW))).count(aten.fill.Scalar) == FEW


def test_the_constant_has_values_for_a_model_without_weights():
    """There, as on a GPU, a number that is written into a part is a tensor on the device."""

    def call(x):
        y = torch.full((72, 4), 9.0, device=x.device)
        for i in range(MANY):
            y[i, : i % 5] = 0.0
        return x + y

    traced = trace(Net(call), call, torch.empty(72, 4, device="meta"))
    rows, which = constants_of(traced)
    assert torch.equal(rows[which], in_a_loop(None, None, MANY))
    assert len(traced.graph.graph.nodes) < 14


def constants_of(traced):
    nodes = traced.graph.graph.nodes
    return [getattr(traced.graph, n.target) for n in nodes if n.op == "get_attr" and n.users]


def test_equal_rows_are_kept_once():
    traced = check(lambda net, x: read_after(net, x, MANY))
    rows, which = constants_of(traced)
    # The loop writes into 70 of 72 rows. The last two are a kind of their own.
    assert (rows.shape, which.tolist()) == ((6, 4), [i % 5 for i in range(MANY)] + [5, 5])


def different(net, x):
    y = torch.zeros(72, 4)
    for i in range(MANY):
        y[i, i % 4 :] = i
    return y + x[0, 0]


def several_at_once(net, x):
    y = torch.zeros(72, 4)
    for i in range(MANY):
        y[i - 1 : i + 1, 2:] = 5
    return y + x[0, 0]


def in_columns(net, x):
    y = torch.zeros(4, 72)
    for i in range(MANY):
        y[:, i] = i % 2
    return y + x[0, 0]


def from_the_end(net, x):
    y = torch.zeros(72, 4)
    for i in range(MANY):
        y[-1 - i, : i % 3] = -0.0 if i % 2 else 0.0
        y[i % 7] = 1
    return y + x[0, 0], 1 / y


@pytest.mark.parametrize(
    ("call", "count"), [(different, 1), (several_at_once, 1), (in_columns, 1), (from_the_end, 2)]
)
def test_other_numbers_in_parts(call, count):
    assert len(constants_of(check(call))) == count


def test_a_tensor_that_is_too_large_to_be_filled(monkeypatch):
    monkeypatch.setattr("sdfastgn.plans.trace.fills._MOST_MEMORY", 1000)
    with pytest.raises(Untraceable, match="the call fills more than"):
        check(different)
    check(lambda net, x: read_after(net, x, MANY))  # whose six different rows take less


def into_an_argument(net, x):
    y = x * 2
    x[1:].add_(1)
    x.t()[0] = 3
    return y, x + 0


def into_a_buffer(net, x):
    net.table.mul_(0.5)
    net.table[:2].copy_(x[0, :2])
    return x + net.table


def into_a_parameter(net, x):
    net.weight.data[0].add_(x[0])
    return net.weight @ x


@pytest.mark.parametrize("call", [into_an_argument, into_a_buffer, into_a_parameter])
def test_writes_from_outside_are_copied_at_the_end(call):
    graph = check(call).graph.graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    assert [n.target for n in nodes].count(aten.copy_.default) == 1
    assert nodes[-1].target is aten.copy_.default
    assert nodes[-1].args[0].op == "placeholder"


def test_a_view_that_nobody_writes_is_not_copied():
    assert targets(check(lambda net, x: x.t()[1:].relu()))[-1] is aten.relu.default


KEPT = torch.zeros(4)


def reshaped_in_place(net, x):
    return x.clone().transpose_(0, 1)


def a_list_of_writes(net, x):
    torch._foreach_add_([x.clone()], 1)
    return x


REFUSED = {
    "writes into a tensor that is no argument": lambda net, x: KEPT.add_(1) + x,
    "transpose_": reshaped_in_place,
    "_foreach_add_": a_list_of_writes,
    "as_strided": lambda net, x: x.as_strided((2, 2), (1, 4)),
    "batch norm in training": lambda net, x: torch.batch_norm(
        x, None, None, net.table, net.table.abs(), True, 0.1, 1e-5, False
    ),
    "an expanded tensor": lambda net, x: (x[:1] * 1).expand(4, 4).add_(1),
    "Tensor.data": lambda net, x: setattr(x, "data", x * 2),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_writes_are_refused(reason):
    net = Net(REFUSED[reason])
    before = net.table.clone()
    with pytest.raises(Untraceable, match=reason):
        trace(net, net, torch.randn(4, 4))
    assert torch.equal(net.table, before)
    assert not KEPT.any()


def test_a_write_into_shared_memory_is_refused():
    x = torch.randn(4, 4)
    net = Net(lambda net, x, y: x.add_(1) + y)
    with pytest.raises(Untraceable, match="shares its memory"):
        trace(net, net, x, x[1:2])
    trace(Net(lambda net, x, y: x + y), lambda x, y: x + y, x, x[1:2])
