"""``record``: what a run is written down as, and which steps stay one call."""

import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sdfastgn.kernels.common import dispatch
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.record import Unrecordable, places_in, record
from tests.plans.run.graphs import Drawn
from tests.plans.run.kernels import Compiled, scaled

aten = torch.ops.aten
OUTSIDE = torch.ones(4)


def recorded(drawn, *results, inputs=None):
    """(results, recording) of a graph whose arguments are random."""
    plan = drawn.plan(*results)
    if inputs is None:
        inputs = [torch.randn(n.meta["shape"]) for n in drawn.inputs]
    with torch.no_grad():
        return record(plan.graph, plan.operands(()), inputs)


def one_step(step, *more, shape=(4,)):
    """The recording of one step of one argument."""
    drawn = Drawn((4,))
    return recorded(drawn, drawn.add(step, drawn.inputs[0], *more, shape=shape))


def kinds(recording):
    return [action.kind for action in recording.actions]


def test_views_are_no_actions():
    drawn = Drawn((4, 6))
    x = drawn.add(steps.permute, drawn.inputs[0], (1, 0), shape=(6, 4))
    x = drawn.add(
        steps.cut, drawn.add(steps.reshape, x, (6, 2, 2), shape=(6, 2, 2)), 0, 1, 3, shape=(3, 2, 2)
    )
    _, recording = recorded(drawn, drawn.add(aten.neg.default, x))
    (action,) = recording.actions
    (place,) = places_in(action.args)
    assert (place.memory, place.shape, place.stride, place.offset) == (0, (3, 2, 2), (1, 12, 6), 1)


def test_composite_ops_are_recorded_in_parts_but_for_products_and_attention():
    for inference in (False, True):
        drawn = Drawn((2, 3, 4), (4, 4))
        x = drawn.add(steps.linear, drawn.inputs[0], drawn.inputs[1], None)
        x = drawn.add(aten.matmul.default, x, drawn.inputs[1])
        x = drawn.add(steps.attention, x, x, x, None, False, None, False)
        with torch.inference_mode(inference):
            _, recording = recorded(drawn, x)
        names = [action.function.__name__ for action in recording.actions]
        assert names == ["linear", "mm", "scaled_dot_product_attention"]


def test_launches_are_recorded_with_their_allocations():
    launch = scaled(Compiled(), 4)

    def step(x):
        y = torch.empty_like(x)
        launch.run(x, None, y)
        return y

    _, recording = one_step(step)
    assert kinds(recording) == ["allocate", "launch"]
    assert recording.actions[1].writes == {0, 1}
    assert not recording.left


def test_kernels_run_as_outside_of_a_mode():
    plain = []

    def step(x):
        plain.append(dispatch.is_untraced(x, ()))
        with TorchDispatchMode():
            plain.append(dispatch.is_untraced(x, ()))
        return x + 1

    one_step(step)
    assert plain == [True, False]


# ---- steps that stay one call

calls = itertools.count()


def reads_a_value(x):
    next(calls)
    return x * (2 if x.sum().item() > 0 else 3)


def reads_a_foreign_tensor(x):
    next(calls)
    return x * OUTSIDE


def draws(x):
    next(calls)
    return x + torch.rand_like(x)


def makes_a_literal(x):
    next(calls)
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def selects(x):
    next(calls)
    return x[x > -100]


def gives_other_memory(x):
    next(calls)
    return torch.empty(0).set_(x.untyped_storage(), 0, (4,), (1,)) + 1


UNKNOWN = "reads a tensor of unknown origin"
REASONS = {
    reads_a_value: "aten::_local_scalar_dense reads a value",
    reads_a_foreign_tensor: f"aten::mul.Tensor {UNKNOWN}",
    draws: "aten::rand_like draws random numbers",
    makes_a_literal: f"aten::lift_fresh {UNKNOWN}",
    selects: "aten::index.Tensor reads a value",
    gives_other_memory: "aten::set_.source_Storage_storage_offset gives a tensor other memory",
}


@pytest.mark.parametrize("step", REASONS)
def test_a_step_that_cannot_be_recorded_runs_once_and_stays_a_call(step):
    before = next(calls)
    _, recording = one_step(step)
    assert next(calls) == before + 2
    assert [action.function for action in recording.actions] == [step]
    assert list(recording.left) == [f"{step.__name__}: {REASONS[step]}"]


def test_what_a_step_did_before_its_reason_is_dropped():
    launch = scaled(Compiled(), 4)

    def step(x):
        y = torch.empty_like(x)
        launch.run(x + 1, None, y)
        y.sum().item()
        launch.run(y, None, y)
        return y.view(2, 2)

    (result,), recording = one_step(step, shape=(2, 2))
    assert [action.function for action in recording.actions] == [step]
    assert len(recording.memories) == 2
    assert result.shape == (2, 2)


def test_a_step_that_writes_over_its_first_argument_says_so_as_a_call():
    def add_(x, y):
        assert y.sum().item() is not None
        return x.add_(y)

    drawn = Drawn((4,))
    y = drawn.add(aten.neg.default, drawn.inputs[0])
    _, recording = recorded(drawn, drawn.add(add_, y, drawn.inputs[0]))
    action = recording.actions[-1]
    assert (action.writes, action.made, action.is_kept) == ({1}, [], True)


def test_attention_with_dropout_stays_a_call():
    def step(x):
        return aten.scaled_dot_product_attention.default(*[x.view(1, 1, 2, 2)] * 3, None, 0.5)

    _, recording = one_step(step, shape=(1, 1, 2, 2))
    assert list(recording.left) == ["step: aten::scaled_dot_product_attention draws random numbers"]


@torch.library.custom_op("sdfastgn_tests::doubled_", mutates_args=["x"])
def doubled_(x: torch.Tensor, kernel: bool) -> None:
    x.mul_(2 if x.sum().item() else 3)  # below the mode: nobody sees it


@torch.library.custom_op("sdfastgn_tests::launched", mutates_args=[])
def launched(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    scaled(Compiled(), 4).run(x, None, y)
    return y


def test_ops_of_others_are_one_call():
    def step(x):
        y = launched(x)
        doubled_(y, True)
        return y

    (result,), recording = one_step(step)
    assert [a.function for a in recording.actions] == [
        torch.ops.sdfastgn_tests.launched.default,
        torch.ops.sdfastgn_tests.doubled_.default,
    ]
    assert [a.writes for a in recording.actions] == [set(), {1}]
    assert not recording.left
    assert result.shape == (4,)


# ---- graphs and calls without a recording


def test_a_step_that_returns_a_number_fails_and_the_results_are_right():
    drawn = Drawn((4,))
    x = drawn.inputs[0]
    number = drawn.add(lambda x: 2.0, x)
    given = torch.randn(4)
    results, why = recorded(drawn, drawn.add(aten.mul.Tensor, x, number), inputs=[given])
    assert why == "<lambda> returns a float"
    assert torch.equal(results[0], given * 2)


def test_a_conjugate_view_is_no_place():
    drawn = Drawn((4,), dtype=torch.complex64)
    conj = drawn.add(torch.conj, drawn.inputs[0])
    given = torch.randn(4, dtype=torch.complex64)
    results, why = recorded(drawn, drawn.add(aten.add.Tensor, conj, 1), inputs=[given])
    assert why == "add.Tensor reads a conjugate or negative view"
    assert torch.equal(results[0], given.conj() + 1)


def test_arguments_that_share_memory_are_refused_before_anything_runs():
    ran = []

    def step(x, y):
        ran.append(1)
        return x + y

    base = torch.randn(8)
    for inputs in ([base[:4], base[4:]], [base[:4], OUTSIDE]):
        drawn = Drawn((4,), (4,), others=[OUTSIDE])
        y = drawn.add(step, *drawn.inputs)
        with pytest.raises(Unrecordable, match="shares its memory"):
            recorded(drawn, drawn.add(aten.add.Tensor, y, drawn.parameters[0]), inputs=inputs)
    assert not ran


def test_other_kinds_of_tensors_are_refused():
    class Own(torch.Tensor):
        pass

    for x in (torch.randn(4).as_subclass(Own), torch.randn(4).to_sparse(), torch.empty(4, device="meta")):
        drawn = Drawn((4,))
        with pytest.raises(Unrecordable, match="an operand is a"):
            recorded(drawn, drawn.add(aten.neg.default, drawn.inputs[0]), inputs=[x])


def test_values_are_dropped_after_their_last_use():
    seen, alive = [], []

    def look(x, after):
        seen.append(StorageWeakRef(x.untyped_storage()))
        alive.append([not s.expired() for s in seen])
        return x + 1

    drawn = Drawn((4,))
    x = drawn.inputs[0]
    for i in range(3):
        x = drawn.add(look, x, i)
    recorded(drawn, x)
    assert alive == [[True], [True, True], [True, False, True]]
