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
