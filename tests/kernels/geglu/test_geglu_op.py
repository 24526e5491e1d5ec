"""``sdfastgn.geglu`` as a PyTorch citizen: fallback, errors, gradients, fake tensors, compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sdfastgn
from tests.kernels.samples import kernels


def operands(*shape, dtype=torch.float32, device="cpu", requires_grad=False):
    """x, bias."""
    tensors = (torch.randn(shape) * 1.5 + 0.5, torch.randn(shape[-1]))
    return [t.to(device, dtype).requires_grad_(requires_grad) for t in tensors]


def eager(x, bias=None):
    value, gate = (x if bias is None else x + bias).chunk(2, -1)
    return value * F.gelu(gate)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 10), (4, 14), (6,), (3, 2)], ids=str)
def test_fallback_is_rounded_once(shape, dtype):
    x, bias = operands(*shape, dtype=dtype)
    for b in (bias, None):
        y = sdfastgn.geglu(x, b)
        assert y.dtype is dtype
        assert y.is_contiguous()
        expected = eager(x.double(), None if b is None else b.double())
        bounds = {"atol": 4 * torch.finfo(dtype).eps, "rtol": torch.finfo(dtype).eps}
        torch.testing.assert_close(y.double(), expected, **bounds)


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)], ids=str)
def test_empty_tensors(shape, device):
    x, bias = operands(*shape, device=device, requires_grad=True)
    y = sdfastgn.geglu(x, bias)
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    y.sum().backward()
    assert all(t.grad.shape == t.shape and (t.grad == 0).all() for t in (x, bias))
    assert sdfastgn.geglu(x.detach()).shape == y.shape


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        pytest.param(([1.0],), TypeError, "x must be a torch.Tensor, got list", id="list"),
        pytest.param((torch.ones(2, 4, dtype=torch.int64),), TypeError, "got torch.int64", id="integers"),
        pytest.param((torch.tensor(1.0),), ValueError, "x must be (..., 2D), got shape ()", id="scalar"),
        pytest.param((torch.ones(2, 5),), ValueError, "x must be (..., 2D), got shape (2, 5)", id="odd"),
        pytest.param((torch.ones(2, 4), torch.ones(2)), ValueError, "bias must have shape (4,), got (2,)", id="half"),
        pytest.param((torch.ones(2, 4), torch.ones(1, 4)), ValueError, "(4,), got (1, 4)", id="rank"),
        pytest.param((torch.ones(2, 4), [0.0]), TypeError, "bias must be a floating torch.Tensor, got list", id="bias"),
        pytest.param((torch.ones(2, 4), torch.ones(4).long()), TypeError, "got torch.int64", id="bias-integers"),
        pytest.param((torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "bias is on meta, x on cpu", id="device"),
    ],
)  # fmt: skip
def test_errors_name_the_call_and_the_value(arguments, kind, message):
    with pytest.raises(kind) as caught:
        sdfastgn.geglu(*arguments)
    assert str(caught.value).startswith("sdfastgn.geglu: ")
    assert message in str(caught.value)


# --- gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 6), (2, 2, 4)], ids=str)
def test_first_and_second_derivative(shape):
    x, bias = operands(*shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sdfastgn.geglu, (x, bias))
    assert torch.autograd.gradgradcheck(sdfastgn.geglu, (x, bias))
    assert torch.autograd.gradgradcheck(sdfastgn.geglu, (x,))


def test_derivatives_of_derivatives():
    """Where dy is a function of x itself."""
    x, bias = operands(2, 4, dtype=torch.float64, requires_grad=True)

    def thrice(f):
        g = f(x, bias).pow(3).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return g

    def written_out(x, bias):
        value, gate = (x + bias).chunk(2, -1)
        return value * 0.5 * gate * (1 + torch.erf(gate / 2**0.5))

    torch.testing.assert_close(thrice(sdfastgn.geglu), thrice(written_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_the_dtype_of_their_tensor(dtype):
    x, bias = operands(3, 8, requires_grad=True)
    x = x.detach().to(dtype).requires_grad_()
    sdfastgn.geglu(x, bias).sum().backward()
    assert x.grad.dtype is dtype
    assert bias.grad.dtype is torch.float32


def test_only_inputs_are_kept_for_the_backward():
    x, bias = operands(3, 8, requires_grad=True)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t),
        kernels(),
    ):
        sdfastgn.geglu(x, bias)
    assert set(kept) == {x.data_ptr(), bias.data_ptr()}


# --- tracing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 8), (0, 4)], ids=str)
def test_opcheck(shape, with_bias):
    x, bias = operands(*shape, requires_grad=True)
    bias = bias if with_bias else None
    torch.library.opcheck(torch.ops.sdfastgn.geglu, (x, bias))
    dy = torch.randn(*shape[:-1], shape[-1] // 2, requires_grad=True)
    dtypes = (torch.float32, torch.float32 if with_bias else None)
    torch.library.opcheck(torch.ops.sdfastgn.geglu_backward, (dy, x, bias, *dtypes))


def test_fake_tensors_have_the_real_strides():
    x = torch.randn(3, 4, 10).transpose(0, 1)
    with FakeTensorMode() as mode:
        fake = sdfastgn.geglu(mode.from_tensor(x))
    real = sdfastgn.geglu(x)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_compiles_without_a_graph_break_and_with_any_size():
    compiled = torch.compile(sdfastgn.geglu, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in [(3, 6), (4, 8), (9, 6)]:
        leaves = operands(*shape, requires_grad=True)
        dy = torch.randn(shape[0], shape[1] // 2)
        torch.testing.assert_close(compiled(*leaves), eager(*leaves))
        grads, expected = (torch.autograd.grad(f(*leaves), leaves, dy) for f in (compiled, eager))
        torch.testing.assert_close(grads, expected)


def test_functional_transforms():
    x, bias = operands(3, 4, 6)
    torch.testing.assert_close(torch.vmap(lambda x: sdfastgn.geglu(x, bias))(x), eager(x, bias))
    tangent = torch.randn_like(x)
    found, expected = (
        torch.func.jvp(lambda x, f=f: f(x, bias), (x,), (tangent,)) for f in (sdfastgn.geglu, eager)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_autocast_follows_eager():
    x, bias = operands(64, 640, device="cuda")
    with torch.autocast("cuda", torch.float16):
        for t in (x, x.half()):
            y, expected = sdfastgn.geglu(t, bias.to(t.dtype)), eager(t, bias.to(t.dtype))
            assert y.dtype is expected.dtype
            torch.testing.assert_close(y, expected, atol=2e-3, rtol=2e-3)
