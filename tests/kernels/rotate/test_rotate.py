"""The kernel of ``rotate`` against fp64."""

import pytest
import torch

from sdfastgn.kernels.rotate.op import rotate
from tests.kernels.samples import BOUNDS, DTYPES, PLACES, error, kernels

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "without_gradients")]

SHAPES = [(2, 5, 3, 16), (1, 7, 2, 10), (1, 1, 1, 2), (2, 3, 1, 2048), (1, 33, 4, 130), (1, 1, 1, 16386)]


def drawn(shape, dtype=torch.float32, device="cpu", columns=1, table=None):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=g) + 1).to(dtype).to(device)
    size = table or (1, shape[1], 1)
    tables = [torch.randn((*size, shape[-1] // columns), generator=g).to(device) for _ in range(2)]
    return x, *tables


def truth(x, cos, sin):
    x, cos, sin = x.double(), cos.double(), sin.double()
    times = x.shape[-1] // cos.shape[-1]
    cos, sin = (t.repeat_interleave(times, -1).expand(x.shape) for t in (cos, sin))
    y = torch.empty_like(x)
    y[..., ::2] = x[..., ::2] * cos[..., ::2] - x[..., 1::2] * sin[..., ::2]
    y[..., 1::2] = x[..., 1::2] * cos[..., 1::2] + x[..., ::2] * sin[..., 1::2]
    return y


def check(x, cos, sin):
    with kernels(direct=True):
        y = rotate(x, cos, sin)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
    assert error(y, truth(x, cos, sin)) < BOUNDS[x.dtype]
    return y


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, columns, device):
    check(*drawn(shape, device=device, columns=columns))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, device):
    x, cos, sin = drawn((2, 5, 3, 16), dtype, device)
    check(x, cos, sin)
    check(x, cos.to(dtype), sin)


@pytest.mark.parametrize("table", [(2, 5, 3), (1, 1, 1), (2, 1, 3), (1, 1, 3)])
def test_tables_of_every_size(table, device):
    check(*drawn((2, 5, 3, 16), device=device, table=table))


@pytest.mark.parametrize("place", PLACES)
def test_every_layout(place, device):
    x, cos, sin = drawn((2, 5, 3, 16), device=device)
    check(x.transpose(1, 2).contiguous().transpose(1, 2), place(cos.expand(x.shape)), place(sin))
    check(place(x), cos, sin)


def test_parts_of_larger_tensors(device):
    """As models cut heads, and every second column of a table."""
    _, cos, sin = drawn((2, 5, 3, 16), device=device)
    packed = torch.randn(2, 5, 3 * 48, device=device)
    x = packed[..., 48:96].view(2, 5, 3, 16)
    check(x, cos[..., ::2], sin[..., 1::2])
    pairs = torch.randn(1, 5, 1, 8, 2, device=device)
    check(x, pairs[..., 0], pairs[..., 1])


def test_not_finite_values_stay_in_their_pair(device):
    x, cos, sin = drawn((1, 5, 3, 10), device=device)
    x[0, 2, 1, 4] = float("nan")
    with kernels(direct=True):
        y = rotate(x, cos, sin)
    assert y[0, 2, 1, 4:6].isnan().all()
    assert y.isnan().sum() == 2


def test_without_elements(device):
    x, cos, sin = drawn((2, 0, 3, 16), device=device)
    with kernels(direct=True):
        assert rotate(x, cos, sin).shape == x.shape


def test_gradients_run_in_pytorch():
    x, cos, sin = (t.double().requires_grad_() for t in drawn((1, 2, 1, 4)))
    with torch.enable_grad():
        assert torch.autograd.gradcheck(rotate, (x, cos, sin))


X = torch.zeros(2, 3, 1, 8)
WRONG = [
    ((X[0], X, X), ValueError, r"x must be \(A, B, C, D\)"),
    ((X[..., :7], X, X), ValueError, "with even D"),
    ((X, X[..., :3], X), ValueError, r"cos must be .* got \(2, 3, 1, 3\)"),
    ((X, X, X[:, :2]), ValueError, r"sin must be .* got \(2, 2, 1, 8\)"),
    ((X, X[0], X), ValueError, r"cos must be .* got \(3, 1, 8\)"),
    ((X, X, X[..., :4]), ValueError, "cos and sin must have the same last size, got 8 and 4"),
    ((X, 1.0, X), TypeError, "cos must be a torch.Tensor, got float"),
    ((X.int(), X, X), TypeError, "x must be a floating"),
]


@pytest.mark.parametrize(("args", "kind", "text"), WRONG)
def test_wrong_arguments(args, kind, text):
    for direct in (False, True):
        with kernels(direct=direct), pytest.raises(kind, match=f"rotate: .*{text}"):
            rotate(*args)
