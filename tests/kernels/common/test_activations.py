"""Adding an activation: a name that one file knows is known to ops, gradients, checks and kernels."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common import activations, checks
from tests.kernels.samples import make


@pytest.fixture
def square(monkeypatch):
    """A throw-away activation."""
    monkeypatch.setitem(activations.ACTIVATIONS, "square", torch.square)
    monkeypatch.setitem(activations.ACTIVATION_GRADS, "square", lambda dy, z: 2 * dy * z)


def as_op(x, groups, weight, bias, *, activation):
    operands = (None, None, None, None, False, None)
    return torch.ops.sdfastgn.group_norm(x, groups, weight, bias, 1e-5, activation, *operands)[0]


@pytest.mark.parametrize("norm", [sdfastgn.group_norm, as_op], ids=["function", "op"])
def test_a_new_activation_reaches_results_and_gradients(square, norm):
    x, weight, bias = (t.requires_grad_() for t in make((2, 8, 3, 4), torch.float64))
    y, expected = norm(x, 4, weight, bias, activation="square"), F.group_norm(x, 4, weight, bias).square()
    torch.testing.assert_close(y, expected)
    found, expected = (torch.autograd.grad(z.sum(), (x, weight, bias)) for z in (y, expected))
    torch.testing.assert_close(found, expected)


def test_a_new_activation_is_named_in_errors(square):
    x, *_ = make((2, 8, 3, 4))
    with pytest.raises(ValueError, match=r"unknown activation 'cube'; known: identity, .*, square$"):
        sdfastgn.group_norm(x, 4, activation="cube")
    checks.check_activation("", "square")


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_every_activation_has_a_derivative(name):
    z = torch.linspace(-3, 3, 50, dtype=torch.float64).requires_grad_()
    dy = torch.ones_like(z)
    [expected] = torch.autograd.grad(activations.ACTIVATIONS[name](z).sum(), z)
    torch.testing.assert_close(activations.ACTIVATION_GRADS[name](dy, z), expected)
