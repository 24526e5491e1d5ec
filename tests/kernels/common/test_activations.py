"""Adding an activation: a name that one file knows is known to ops, gradients, checks and kernels."""

import math

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common import activations, checks
from tests.kernels.samples import DTYPES, HALVES, error, kernels, make, skip_cut_off


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


def test_mish_of_large_numbers(device):
    """exp(z), whose square the kernel needs, does not fit into fp32 there."""
    x, weight, bias = make((2, 8, 3, 5), device=device)
    weight[::2] *= 1e5
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with kernels():
        y = sdfastgn.group_norm(*leaves[:1], 4, *leaves[1:], activation="mish")
        found = [y, *torch.autograd.grad(y.sum(), leaves)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.mish(F.group_norm(exact[0], 4, *exact[1:]))
    for a, b in zip(found, [expected, *torch.autograd.grad(expected.sum(), exact)], strict=True):
        assert error(a.detach(), b.detach()) < 2e-6


def results(norm, x, weight, bias, activation):
    """y, dx, dweight and dbias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves, activation=activation)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def assert_close(found, expected):
    """Finite, and the same but for the last bit: another neighbour rounds a shared reciprocal otherwise."""
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= torch.finfo(found.dtype).eps * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 64], ids=["small", "split"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("channel", [6, 7])
def test_a_channel_that_is_not_finite_leaves_its_neighbours_as_they_are(
    channel, value, dtype, activation, size
):
    """Two neighbours share a reciprocal in channels-last (``PAIRS``)."""
    x, weight, bias = make((2, 64, size, size), dtype, "cuda")
    others = [c for c in range(64) if c != channel]
    # Every channel is a group, so that one alone is damaged.
    damaged = x.clone()
    damaged[1, channel, 3, 3] = value
    found, expected = (results(sdfastgn.instance_norm, t, weight, bias, activation) for t in (damaged, x))
    assert found[0][1, channel].isnan().all()
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert_close(a[:, others], b[:, others])
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert_close(a[others], b[others])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4, 64], ids=["small", "split"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("channel", [6, 7])
def test_a_weight_that_is_not_a_number_leaves_other_channels_as_they_are(channel, activation, size):
    """In the same group, whose sums are those of x; the backward's are of dy * weight."""
    x, weight, bias = make((2, 64, size, size), torch.float16, "cuda")
    others = [c for c in range(64) if c != channel]
    damaged = weight.clone()
    damaged[channel] = float("nan")

    def norm(x, weight, bias, activation):
        return sdfastgn.group_norm(x, 4, weight, bias, activation=activation)

    found, expected = (results(norm, x, w, bias, activation) for w in (damaged, weight))
    assert found[0][:, channel].isnan().all()
    assert_close(found[0][:, others], expected[0][:, others])
    assert_close(found[1][:, 16:], expected[1][:, 16:])
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert_close(a[others], b[others])


# Limits of all activations and their derivatives, and values between which kernels cut off exponentials.
EXTREME = [
    *(-math.inf, math.inf, math.nan, -1e38, 1e38, -1e15, 1e15, -300.0, 300.0),
    *(-90.0, 90.0, -50.0, 50.0, -17.0, 17.0, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_limits_are_those_of_pytorch(name, dtype, device):
    """A norm whose weight is 0 gives the activation of its bias."""
    skip_cut_off(dtype, device)
    x = torch.randn(2, 16, 4, 4).to(device, dtype, memory_format=torch.channels_last)
    z = torch.tensor(EXTREME, device=device, requires_grad=True)
    # PyTorch's gelu(inf) in fp32 is NaN on a CPU.
    expected = activations.ACTIVATIONS[name](z.double() if name == "gelu" else z)
    with kernels(direct=True):
        y = sdfastgn.group_norm(x, 2, torch.zeros_like(z), z, activation=name)
        (found,) = torch.autograd.grad(y.float().sum(), z)
    (dz,) = torch.autograd.grad(expected.sum(), z)
    expected = expected.detach().to(dtype).expand(2, 4, 4, 16).movedim(-1, 1)
    atol = 1e-30 if dtype is torch.float32 else 1e-15
    torch.testing.assert_close(y.detach(), expected, equal_nan=True, atol=atol, rtol=4e-3)
    torch.testing.assert_close(found / 32, dz, equal_nan=True, atol=5e-6, rtol=4e-3)
