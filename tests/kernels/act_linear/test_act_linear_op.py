"""``sdfastgn.act_linear`` as a PyTorch citizen: fallback, errors, gradients, fake tensors, compile, autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sdfastgn
from sdfastgn.kernels.common.activations import ACTIVATIONS


def operands(N=3, C=5, K=7, dtype=torch.float32, requires_grad=False):
    """x, weight, bias, extra_bias."""
    shapes = ((N, K), (C, K), (C,), (C,))
    return [(torch.randn(s) + 0.5).to(dtype).requires_grad_(requires_grad) for s in shapes]


def eager(x, weight, bias=None, activation="silu", extra_bias=None):
    y = F.linear(ACTIVATIONS[activation](x), weight, bias)
    return y if extra_bias is None else y + extra_bias


def ours(x, weight, bias=None, extra_bias=None, activation="silu"):
    return sdfastgn.act_linear(x, weight, bias, activation, extra_bias=extra_bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fallback_is_rounded_once(dtype):
    x, weight, bias, extra = operands(dtype=dtype)
    y = ours(x, weight, bias, extra)
    assert y.dtype is dtype
    expected = eager(x.double(), weight.double(), bias.double(), "silu", extra.double())
    torch.testing.assert_close(
        y.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0)], ids=str)
def test_empty_tensors(sizes, device):
    tensors = [t.to(device).detach().requires_grad_() for t in operands(*sizes)]
    y = ours(*tensors)
    torch.testing.assert_close(y, eager(*tensors[:3], "silu", tensors[3]))
    y.sum().backward()
    assert all(t.grad.shape == t.shape for t in tensors)
    assert torch.equal(ours(*(t.detach() for t in tensors)), y)


X, W = torch.ones(2, 4), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        pytest.param(([1.0], W), TypeError, "x must be a floating torch.Tensor, got list", id="list"),
        pytest.param((X.long(), W), TypeError, "x must be a floating torch.Tensor, got torch.int64", id="integers"),
        pytest.param((X, None), TypeError, "weight must be a floating torch.Tensor, got NoneType", id="no-weight"),
        pytest.param((X, W.half()), TypeError, "one dtype, got torch.float32 and torch.float16", id="dtypes"),
        pytest.param((X[0], W), ValueError, "x must be (N, K), got shape (4,)", id="rank"),
        pytest.param((X, W.T), ValueError, "weight must be (C, 4), got shape (4, 3)", id="transposed"),
        pytest.param((X, W, X[0]), ValueError, "bias must have shape (3,), got (4,)", id="bias"),
        pytest.param((X, W, 1.0), TypeError, "bias must be a floating torch.Tensor, got float", id="number"),
        pytest.param((X, W, W[:, 0], X[0]), ValueError, "extra_bias must have shape (3,), got (4,)", id="extra-bias"),
        pytest.param((X, W.to("meta")), ValueError, "weight is on meta, x on cpu", id="device"),
        pytest.param((X, W, None, None, "mish"), ValueError, "relu, silu, gelu, gelu_tanh, got 'mish'", id="activation"),
        pytest.param((X, W, None, None, None), ValueError, "got None", id="no-activation"),
    ],
)  # fmt: skip
def test_errors_name_the_call_and_the_value(arguments, kind, message):
    with pytest.raises(kind) as caught:
        ours(*arguments)
    assert str(caught.value).startswith("sdfastgn.act_linear: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("activation", ["identity", "silu", "gelu"])
def test_first_and_second_derivative(activation):
    tensors = operands(2, 3, 4, torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: ours(*t, activation), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: ours(*t, activation), tensors)


@pytest.mark.parametrize("needs", range(4), ids=["x", "weight", "bias", "extra"])
def test_only_what_is_needed(needs):
    tensors = operands()
    tensors[needs].requires_grad_()
    ours(*tensors).square().sum().backward()
    twins = [t.detach().clone() for t in tensors]
    twins[needs].requires_grad_()
    eager(*twins[:3], "silu", twins[3]).square().sum().backward()
    torch.testing.assert_close(tensors[needs].grad, twins[needs].grad)
    assert [t.grad is None for t in tensors].count(False) == 1


def test_fake_tensors_have_the_real_strides():
    x, weight, bias, _ = operands()
    x = x.T.contiguous().T
    with FakeTensorMode() as mode:
        fake = ours(*map(mode.from_tensor, (x, weight, bias)))
    real = ours(x, weight, bias)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_tensors():
    y = ours(*(t.to("meta") for t in operands(2, 3, 4)))
    assert (y.shape, y.device.type) == ((2, 3), "meta")


def test_compiles_without_a_graph_break_and_with_any_size():
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in [(2, 3, 4), (5, 6, 7)]:
        tensors = operands(*sizes, requires_grad=True)
        y, expected = compiled(*tensors), eager(*tensors[:3], "silu", tensors[3])
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, tensors, dy)
        )


def test_functional_transforms():
    x, weight, bias, extra = operands()
    batch = torch.randn(4, *x.shape)
    torch.testing.assert_close(
        torch.vmap(lambda x: ours(x, weight, bias, extra))(batch), eager(batch, weight, bias, "silu", extra)
    )
    found, expected = (
        torch.func.jvp(lambda x, f=f: f(x, weight, bias), (x,), (torch.ones_like(x),)) for f in (ours, eager)
    )
    torch.testing.assert_close(found, expected)


def test_autocast_follows_eager():
    x, weight, bias, extra = operands()
    with torch.autocast("cpu", torch.bfloat16):
        for e in (None, extra):
            y, expected = (
                ours(x, weight, bias, e),
                eager(x, weight, bias, "silu", None if e is None else e.bfloat16()),
            )
            assert y.dtype is expected.dtype is torch.bfloat16
            assert torch.equal(y, expected)
