"""The kernel of ``gated`` against fp64."""

import pytest
import torch

from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.geglu.gated import gated
from tests.kernels.samples import BOUNDS, DTYPES, PLACES, error, kernels, skip_cut_off

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "without_gradients")]

SHAPES = [(7, 5), (2, 3, 320), (4, 256), (2, 2, 3, 50), (20,), (3, 1)]


def drawn(shape, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=g) * 2).to(dtype).to(device) for _ in range(2)]


def check(value, gate, activation="silu", bound=None):
    with kernels(direct=True):
        y = gated(value, gate, activation)
    assert (y.shape, y.dtype, y.is_contiguous()) == (value.shape, value.dtype, True)
    wanted = value.double() * ACTIVATIONS[activation](gate.double())
    assert error(y, wanted) < BOUNDS[value.dtype]
    return y


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, device):
    check(*drawn(shape, device=device))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation(activation, dtype, device):
    check(*drawn((9, 165), dtype, device), activation)
    check(*drawn((8, 256), dtype, device), activation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_less_exact_than_eager(dtype, device):
    skip_cut_off(dtype, device)
    value, gate = drawn((9, 165), dtype, device)
    wanted = value.double() * torch.nn.functional.silu(gate.double())
    eager = error(value * torch.nn.functional.silu(gate), wanted)
    assert error(check(value, gate), wanted) <= eager + 0.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("place", PLACES)
def test_every_layout(place, device):
    value, gate = drawn((2, 5, 24), device=device)
    check(place(value), gate)
    check(value, place(gate))
    check(place(value), place(gate))


@pytest.mark.parametrize("first", [0, 1], ids=["values-first", "gates-first"])
def test_parts_of_a_wider_tensor(first, device):
    """Rows that are far apart are read where they are, and what lies between them is not read."""
    x = torch.full((2, 5, 100), float("nan"), device=device)
    halves = x[..., 4:44].chunk(2, -1)
    x[..., 4:44] = torch.randn(2, 5, 40, device=device)
    before = x.clone()
    assert check(halves[first], halves[1 - first]).isfinite().all()
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))


def test_two_strides(device):
    value, gate = drawn((6, 40), device=device)
    check(value[:, :24], gate[::2, 16:].repeat_interleave(2, 0))
    check(value[:3, :24], gate[::2, 16:])


def test_one_tensor_twice(device):
    x, _ = drawn((3, 24), device=device)
    check(x, x)


def test_without_elements(device):
    x = torch.zeros(2, 0, 8, device=device)
    with kernels(direct=True):
        assert gated(x, x, "silu").shape == x.shape


def test_gradients_run_in_pytorch():
    value, gate = (t.double().requires_grad_() for t in drawn((2, 3)))
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda a, b: gated(a, b, "silu"), (value, gate))


X = torch.zeros(2, 8)
WRONG = [
    ((X, X[:1], "silu"), ValueError, r"gate must have shape \(2, 8\), got \(1, 8\)"),
    ((X, X[0], "silu"), ValueError, r"gate must have shape \(2, 8\), got \(8,\)"),
    ((X, X.half(), "silu"), TypeError, "gate must have the dtype torch.float32, got torch.float16"),
    ((X, 1.0, "silu"), TypeError, "gate must be a torch.Tensor, got float"),
    ((X[0, 0], X[0, 0], "silu"), ValueError, r"value must be \(..., D\)"),
    ((X.int(), X.int(), "silu"), TypeError, "value must be a floating"),
    ((X, X, "swish"), ValueError, "swish"),
    ((X, X, ["silu"]), (TypeError, ValueError), "silu"),
]


@pytest.mark.parametrize(("args", "kind", "text"), WRONG)
def test_wrong_arguments(args, kind, text):
    for direct in (False, True):
        with kernels(direct=direct), pytest.raises(kind, match=f"gated: .*{text}"):
            gated(*args)
