"""What callers do with the results of every op under autograd, as they do with those of PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor

import sdfastgn
from sdfastgn.kernels.common import dispatch
from tests.kernels.ops import OPS, each_derivative
from tests.kernels.samples import channels_last, interpreted, kernels

pytestmark = interpreted


def half_of_the_channels(t: Tensor) -> Tensor:
    """Channels-last with gaps."""
    return channels_last(torch.cat((t, t), 1))[:, : t.shape[1]] if t.dim() > 2 else t


@pytest.mark.parametrize("place", [channels_last, half_of_the_channels])
@each_derivative
def test_results_may_be_written_to(op, place):
    """As by ReLU(inplace=True) behind a norm."""

    def gradients(call, dtype, relu):
        leaves = [place(t).detach().requires_grad_() for t in op.operands(dtype).values()]
        y = relu(call(**dict(zip(op.shapes, leaves, strict=True)))[0])
        return torch.autograd.grad(y.sum(), leaves, allow_unused=True)

    exact = gradients(op.true, torch.float64, torch.relu)
    with kernels(direct=True):
        found = gradients(op.call, torch.float32, torch.relu_)
    for a, b in zip(found, exact, strict=True):
        assert (a is None) == (b is None)
        assert b is None or (a - b).norm() <= 3e-5 * b.norm() + 1e-5


def test_a_concatenation_of_two_layouts_may_be_written_to():
    a, b = torch.randn(2, 3, 4, 5).requires_grad_(), torch.randn(2, 2, 4, 5)
    with kernels(direct=True):
        for first, second in ((channels_last(a), b), (a, channels_last(b))):
            y = sdfastgn.cat_with_statistics(first, second)[0].relu_()
            (da,) = torch.autograd.grad(y.sum(), a)
            assert torch.equal(da, (a > 0).float())


@pytest.mark.parametrize("call", [lambda x: sdfastgn.group_norm(x, 3), sdfastgn.instance_norm])
def test_a_result_without_elements_is_not_the_input(call):
    call(torch.zeros(0, 6, 2, 2, requires_grad=True)).add_(1)


@each_derivative
def test_many_gradients_at_once(op):
    """As ``torch.autograd.functional.jacobian(vectorize=True)`` takes them."""
    operands = op.operands(torch.float32)
    leaves = [t.requires_grad_() for t in operands.values()]
    with kernels(direct=True):
        results = op.call(**operands)
        along = [torch.randn(2, *y.shape) for y in results]
        many = torch.autograd.grad(results, leaves, along, is_grads_batched=True, retain_graph=True)
        for i in range(2):
            alone = torch.autograd.grad(results, leaves, [dy[i] for dy in along], retain_graph=True)
            for a, b in zip(many, alone, strict=True):
                assert (a[i] - b).norm() <= 3e-5 * b.norm() + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["group_norm", "batch_norm", "layer_norm", "geglu"])
def test_a_backward_is_compiled_without_a_graph_break(name, monkeypatch):
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)  # the registered ops, in plain PyTorch
    op = OPS[name]
    operands = {label: t.requires_grad_() for label, t in op.operands(torch.float32).items()}
    compiler = torch.compile(backend="eager", fullgraph=True)
    loss = op.call(**operands)[0].square().sum()
    expected = torch.autograd.grad(loss, list(operands.values()), retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    for t, want in zip(operands.values(), expected, strict=True):
        assert torch.equal(t.grad, want)
