"""Adding a kernel: one declaration makes an op of PyTorch, of autograd, of compilers and of the kernel."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from sdfastgn.kernels.common import op as ops
from sdfastgn.kernels.common.declaration import Operand
from tests.kernels.samples import kernels

X = torch.arange(6.0)


class Call(NamedTuple):
    x: Annotated[Tensor, Operand("(...,)")]
    factor: float


class Plan:
    """Stands for a kernel: its results are told from the reference's by their sign."""

    made = 0

    def __init__(self, call):
        Plan.made += 1

    def run(self, call):
        return -call.factor * call.x

    def run_and_save(self, call):
        return self.run(call)


@pytest.fixture
def scaled(monkeypatch):
    """A throw-away op, gone after the test."""
    library = torch.library.Library("sdfastgn", "FRAGMENT")
    monkeypatch.setattr(ops, "_LIBRARY", library)
    monkeypatch.setattr(Plan, "made", 0)
    yield ops.PlannedOp(
        "scaled",
        Call,
        ("y",),
        plan=Plan,
        reference=lambda call: call.factor * call.x,
        fake=lambda call: torch.empty_like(call.x),
        save=lambda ctx, call, results: setattr(ctx, "factor", call.factor),
        backward=lambda ctx, needs, dy: {"x": ctx.factor * dy},
    )
    library._destroy()


def test_it_is_an_op_of_pytorch(scaled):
    torch.library.opcheck(torch.ops.sdfastgn.scaled.default, (X.clone().requires_grad_(), 2.0))


def test_plain_pytorch_where_no_kernel_runs(scaled):
    assert torch.equal(scaled(Call(X, 2.0)), 2 * X)
    assert Plan.made == 0


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
def test_the_kernel_runs_by_a_plan_that_is_made_once(scaled, direct):
    x = X.clone().requires_grad_()
    with kernels(direct=direct):
        for _ in range(2):
            assert torch.equal(scaled(Call(X, 2.0)), -2 * X)
            y = scaled(Call(x, 2.0))
            assert torch.equal(y, -2 * X)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((6,), 2.0))
    # Straight to the kernel there is one that saves and one that does not.
    assert Plan.made == 1 + direct


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
def test_errors_begin_with_the_public_name(scaled, direct):
    with kernels(direct=direct), pytest.raises(TypeError, match=r"^sdfastgn\.scaled: x must be"):
        scaled(Call(X.long(), 2.0), "sdfastgn.scaled")
