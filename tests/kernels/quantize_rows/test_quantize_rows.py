"""The kernel of ``quantize_rows`` against fp64."""

import pytest
import torch

from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.quantize_rows.op import quantize_rows
from tests.kernels.samples import DTYPES, PLACES, kernels

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "without_gradients")]

SHAPES = [(2, 5, 16), (1, 1, 1), (1, 33, 130), (3, 1, 640), (1, 2, 5000), (1, 1, 16400)]
# Half a unit in the last place of E4M3, which has three bits, and of its subnormal numbers.
RELATIVE, SMALLEST = 2.0**-4, 2.0**-10


def drawn(shape, dtype=torch.float32, device="cpu", seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.tensor([1e-3, 1.0, 1e3]).repeat(shape[1])[: shape[1], None]).to(dtype).to(device)


def check(x, activation="identity", second=None, second_activation="identity", multiplies=False):
    with kernels(direct=True):
        y, scales = quantize_rows(x, activation, second, second_activation, multiplies)
    rows = ACTIVATIONS[activation](x.double())
    if second is not None:
        others = ACTIVATIONS[second_activation](second.double())
        rows = rows * others if multiplies else torch.cat([rows, others], -1)
    assert (y.shape, y.dtype, y.is_contiguous()) == (rows.shape, E4M3, True)
    assert (scales.shape, scales.dtype, scales.is_contiguous()) == (rows.shape[:-1], torch.float32, True)
    torch.testing.assert_close(scales.double(), rows.abs().amax(-1) / 448, rtol=1e-5, atol=0)
    found, scale = y.double() * scales.double().unsqueeze(-1), scales.double().unsqueeze(-1)
    most = rows.abs() * RELATIVE + scale * SMALLEST
    assert ((found - rows).abs() <= 1.01 * most).all()
    return y, scales


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, device):
    check(drawn(shape, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "gelu_tanh"])
def test_every_dtype(dtype, activation, device):
    check(drawn((2, 5, 32), dtype, device), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    check(drawn((1, 5, 48), device=device).abs() + 0.5, activation)


@pytest.mark.parametrize("sizes", [(16, 48), (48, 16), (5, 3), (640, 2560)])
def test_rows_of_two_tensors(sizes, device):
    first, second = (drawn((2, 3, size), device=device, seed=size) for size in sizes)
    check(first, "identity", second, "gelu_tanh")
    check(first, "silu", second)


@pytest.mark.parametrize("size", [16, 130, 2560])
def test_products_of_two_tensors(size, device):
    first, second = (drawn((2, 3, size), device=device, seed=seed) for seed in range(2))
    check(first, "silu", second, multiplies=True)
    check(first, "identity", second, "gelu_tanh", multiplies=True)


@pytest.mark.parametrize("place", PLACES)
def test_every_layout(place, device):
    x = drawn((2, 5, 16), device=device)
    check(place(x), "identity", place(drawn((2, 5, 32), device=device)))


def test_parts_of_larger_tensors(device):
    """As models cut the tokens of an image out of those of image and text."""
    joint = drawn((2, 7, 64), device=device)
    check(joint[:, 2:, 16:48], "identity", joint[:, :5, :16])
    check(joint[:, ::2])
    check(joint[..., 32:], "silu", joint[..., :32], multiplies=True)


def test_an_outlier_costs_only_its_own_row(device):
    """With one scale for all rows, the others would be rounded to 0."""
    x = drawn((1, 6, 64), device=device)
    plain, scales = check(x)
    x = x.clone()
    x[0, 1, 3] = 1e9
    y, found = check(x)
    others = [0, 2, 3, 4, 5]
    assert torch.equal(y[0, others].float(), plain[0, others].float())
    assert torch.equal(found[0, others], scales[0, others])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_values_become_nan_and_leave_the_others(value, device):
    x = drawn((1, 5, 32), device=device)
    plain, scales = check(x)
    spoiled = x.clone()
    spoiled[0, 2, 0] = value
    x[0, 2, 0] = 0
    with kernels(direct=True):
        y, found = quantize_rows(spoiled)
        expected, other = quantize_rows(x)
    assert y[0, 2, 0].float().isnan()
    assert y.float().isnan().sum() == 1
    assert torch.equal(found, other)
    assert torch.equal(y[0, 2, 1:].float(), expected[0, 2, 1:].float())
    rest = [0, 1, 3, 4]
    assert torch.equal(y[0, rest].float(), plain[0, rest].float())
    assert torch.equal(found[0, rest], scales[0, rest])


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e-42, 3e38])
def test_rows_of_extreme_values(value, device):
    x = torch.full((1, 3, 16), value, device=device)
    with kernels(direct=True):
        y, scales = quantize_rows(x)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    found = y.double() * scales.double().unsqueeze(-1)
    torch.testing.assert_close(found, x.double(), rtol=2**-4, atol=1e-40, equal_nan=True)


def test_without_elements(device):
    for shape in [(2, 0, 16), (2, 3, 0)]:
        with kernels(direct=True):
            y, scales = quantize_rows(torch.zeros(shape, device=device))
        assert (y.shape, scales.shape) == (shape, shape[:2])


X = torch.zeros(2, 3, 8)
WRONG = [
    ((X[0],), ValueError, r"x must be \(B, S, D\), got shape \(3, 8\)"),
    ((X[None],), ValueError, r"x must be \(B, S, K\), got shape \(1, 2, 3, 8\)"),
    ((X, "tanh"), ValueError, "unknown activation 'tanh'"),
    ((X, "silu", X, 3), ValueError, "unknown activation 3"),
    ((X, "silu", X[:, :2]), ValueError, r"second must be \(B, S, L\), got \(2, 2, 8\)"),
    ((X, "silu", X[..., :4], "silu", True), ValueError, r"second must be \(B, S, K\), got \(2, 3, 4\)"),
    ((X, "silu", X, "silu", 1), TypeError, "multiplies must be a bool, got 1"),
    ((X, "silu", X.half()), TypeError, "second must have the dtype torch.float32, got torch.float16"),
    ((X, "silu", 1.0), TypeError, "second must be a torch.Tensor, got float"),
    ((X.int(),), TypeError, "x must be a floating"),
]


@pytest.mark.parametrize(("args", "kind", "text"), WRONG)
def test_wrong_arguments(args, kind, text):
    for direct in (False, True):
        with kernels(direct=direct), pytest.raises(kind, match=f"quantize_rows: .*{text}"):
            quantize_rows(*args)
