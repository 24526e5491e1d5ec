"""LayerNorm and GEGLU that write E4M3: against fp64, rounded once, with values beyond the range counted."""

import pytest
import torch

from sdfastgn.kernels.common.e4m3 import BEYOND, E4M3, INVERSE, LARGEST, SCALE
from sdfastgn.kernels.geglu.op import geglu
from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm
from tests.kernels.ops import true_geglu, true_layer_norm
from tests.kernels.samples import each_path, in_fp64

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_gradients")
# Rows shared by warps, several rows for each warp, columns that no vector divides, and rows that do not fit
# into registers.
SHAPES = [(6, 320), (2, 1280), (70, 10), (5, 7), (2, 17000)]


def quantizer(scale, device):
    found = torch.zeros(4, device=device)
    found[SCALE], found[INVERSE] = scale, 1 / scale
    return found


def values(*shape, seed, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.5
    return x.to(device, torch.float16)


def check(y, expected, q):
    """``expected``: fp64. Each element is off by at most half a unit of E4M3, and a little for fp32 sums."""
    assert y.dtype is E4M3
    assert y.is_contiguous()
    u = expected / q[SCALE].double()
    beyond = (u.abs() > LARGEST).sum().item()
    assert 0.9 * beyond - 1 <= q[BEYOND].item() <= 1.1 * beyond + 1
    within = u.clamp(-LARGEST, LARGEST)
    unit = torch.exp2(within.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((y.double() - within).abs() <= 0.51 * unit).all()


@each_path
@pytest.mark.parametrize("scale", [1 / 64, 1 / 224], ids=["fits", "saturates"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, scale, path, device):
    x, residual = values(*shape, seed=0, device=device), values(*shape, seed=1, device=device)
    weight, bias, total_bias = (values(shape[-1], seed=s, device=device) for s in (2, 3, 4))
    truth = in_fp64(true_layer_norm)
    with path():
        q = quantizer(scale, device)
        check(layer_norm(x, weight, bias, quantizer=q), truth(x, weight, bias), q)
        q = quantizer(scale, device)
        y, total = add_layer_norm(x, residual, weight, bias, total_bias=total_bias, quantizer=q)
        check(y, truth(x + residual, weight, bias), q)
        _, expected = add_layer_norm(x, residual, weight, bias, total_bias=total_bias)
        assert torch.equal(total, expected)


@each_path
@pytest.mark.parametrize("scale", [1 / 32, 1 / 224], ids=["fits", "saturates"])
@pytest.mark.parametrize("shape", [(8, 512), (9, 330)], ids=["even", "masked"])
def test_geglu(shape, scale, path, device):
    x, bias = values(*shape, seed=0, device=device), values(shape[-1], seed=1, device=device)
    q = quantizer(scale, device)
    with path():
        y = geglu(x, bias, quantizer=q)
    check(y, in_fp64(true_geglu)(x, bias), q)


@each_path
def test_what_is_not_finite_becomes_finite_and_counts(path, device):
    x = values(4, 32, seed=0, device=device)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), float("-inf")
    q = quantizer(1.0, device)
    with path():
        y = geglu(x, quantizer=q)
    assert torch.isfinite(y.float()).all()
    assert q[BEYOND].item() == 3
    assert y.float()[1, 5].abs() == LARGEST
