"""The bias that ``sdfastgn.add_layer_norm`` adds to the sum, but not to the norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.layer_norm import op as layer_norm
from tests.kernels.samples import BOUNDS, DEVICES, DTYPES, error, kernels, multiprocessors

pytestmark = pytest.mark.usefixtures("poisoned_memory", "few_multiprocessors")

# A warp a row, warps that share one, and three of chunks.
WAYS = [pytest.param((6, 320), id="rows"), pytest.param((2, 17000), id="chunks")]
SHAPES = [
    *WAYS,
    pytest.param((600, 10), id="many-short-rows"),
    pytest.param((5, 33), id="odd"),
    pytest.param((2, 3, 1280), id="warps-share-a-row"),
    pytest.param((3, 17001), id="chunks-odd"),
]


few_multiprocessors = multiprocessors(4)


def make(shape, dtype=torch.float32, device="cpu", seed=0):
    """x, residual, weight, bias, add_bias, total_bias."""
    g = torch.Generator().manual_seed(seed)
    full = [torch.randn(shape, generator=g) * 1.5 + 3 for _ in range(2)]
    columns = [torch.randn(shape[-1], generator=g) for _ in range(4)]
    columns[3] = columns[3] * 5 + 30
    return [t.to(dtype).to(device) for t in (*full, *columns)]


def add(x, residual, weight, bias, add_bias, total_bias=None):
    return sdfastgn.add_layer_norm(x, residual, weight, bias, add_bias=add_bias, total_bias=total_bias)


def run(*operands):
    with kernels(direct=True), torch.no_grad():
        return add(*operands)


@pytest.fixture
def in_kernels(monkeypatch):
    """What is not done in the kernels raises."""

    def absent(*_):
        raise AssertionError("plain PyTorch made the sum")

    monkeypatch.setattr(layer_norm, "reference_add", absent)


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_add_bias", [True, False], ids=["add-bias", "no-add-bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_does_not_see_it(shape, with_add_bias, device):
    *operands, add_bias, total_bias = make(shape, device=device)
    add_bias = add_bias if with_add_bias else None
    y, total = run(*operands, add_bias, total_bias)
    expected, plain = run(*operands, add_bias)
    # Two kernels: a GPU's compiler may fuse other multiplications and additions.
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(total, plain + total_bias)
    assert total.is_contiguous()


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("param_dtype", [None, torch.float32], ids=["own-dtype", "fp32-params"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_it_is_rounded_once(shape, dtype, param_dtype, device):
    x, residual, weight, bias, add_bias, total_bias = make(shape, dtype, device)
    total_bias = total_bias.to(param_dtype or dtype)
    y, total = run(x, residual, weight, bias, add_bias, total_bias)
    assert total.dtype is y.dtype is dtype
    wide = x.float() + residual.float() + add_bias.float()
    if dtype is torch.bfloat16 and device == "cpu":  # the interpreter truncates to bf16
        assert error(total, wide.double() + total_bias.double()) < BOUNDS[dtype]
        return
    assert torch.equal(total, (wide + total_bias.float()).to(dtype))
    rounded = wide.to(dtype)
    assert dtype is torch.float32 or not torch.equal(total, (rounded.float() + total_bias.float()).to(dtype))
    expected = F.layer_norm(rounded.double(), shape[-1:], weight.double(), bias.double())
    assert error(y, expected) < BOUNDS[dtype]


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (2, 3, 17000)], ids=["rows", "chunks"])
def test_views(shape, device):
    x, residual, *columns = make(shape, device=device)
    x, residual, total_bias = (
        x[:, :2, :80],
        residual[:, ::2, :80][:, :2],
        columns[3].repeat_interleave(2)[:160:2],
    )
    y, total = run(x, residual, None, None, None, total_bias)
    assert torch.equal(total, x + residual + total_bias)
    assert torch.equal(y, run(x, residual, None, None, None)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
@pytest.mark.parametrize("shape", WAYS)
def test_gradients(shape, direct, device):
    leaves, dys = make(shape, device=device), make(shape, device=device, seed=1)[:2]

    def eager(x, residual, weight, bias, add_bias, total_bias):
        total = x + residual + add_bias
        return F.layer_norm(total, total.shape[-1:], weight, bias), total + total_bias

    def grads(f, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in leaves]
        with kernels(direct=direct):
            return torch.autograd.grad(f(*inputs), inputs, [dy.to(dtype) for dy in dys])

    for got, want in zip(grads(add, torch.float32), grads(eager, torch.float64), strict=True):
        assert (got - want).norm() <= 2e-6 * want.norm() + 1e-6
    for t in leaves:
        t.requires_grad_()
    with kernels(direct=direct):
        assert all(map(torch.equal, add(*leaves), run(*leaves)))


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
def test_no_rows(direct):
    x, residual, *columns = make((2, 10))
    with kernels(direct=direct):
        assert all(t.shape == (0, 10) for t in add(x[:0], residual[:0], *columns))
