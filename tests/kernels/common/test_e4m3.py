"""LayerNorm and GEGLU that write E4M3: against fp64, rounded once, with a scale that covers all values."""

import pytest
import torch

from sdfastgn.kernels.common import e4m3
from sdfastgn.kernels.common.e4m3 import (
    AMAX,
    BEYOND,
    E4M3,
    INVERSE,
    LARGEST,
    LEARNED,
    MOST,
    NUMBERS,
    RETRIED,
    SCALE,
    TOTAL,
    quantized,
)
from sdfastgn.kernels.geglu.op import geglu
from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm
from tests.kernels.ops import true_geglu, true_layer_norm
from tests.kernels.samples import HALVES, each_path, in_fp64

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_gradients")
# Rows shared by warps, several rows for each warp, columns that no vector divides, and rows that do not fit
# into registers.
SHAPES = [(6, 320), (2, 1280), (70, 10), (5, 7), (2, 17000)]
# By how much the largest value exceeds the learned range, and the growth that covers it.
FACTORS = {0.5: 1, 0.99: 1, 3.9: 4, 12.0: 16, -12.0: 16, 100.0: 128}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """In a retry several programs share the tiles."""
    monkeypatch.setattr(e4m3, "RETRY_PROGRAMS", 2)


def quantizer(scale, device):
    """A quantizer whose scale was left by another call."""
    found = torch.zeros(NUMBERS, device=device)
    found[SCALE], found[LEARNED], found[INVERSE] = 1000.0, scale, 1 / scale
    return found


def values(*shape, seed, device, dtype=torch.float16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.5
    return x.to(device, dtype)


def check(y, expected, q):
    """``expected``: fp64. Each element is off by at most half a unit of E4M3, and a little for fp32 sums."""
    assert y.dtype is E4M3
    assert y.is_contiguous()
    finite = expected[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    growth = 1
    while largest > 1.0001 * growth * LARGEST * q[LEARNED].item():
        growth *= 2
    assert q[SCALE].item() == q[LEARNED].item() * growth
    u = expected / q[SCALE].double()
    unit = torch.exp2(u.abs().clamp(2.0**-6, LARGEST).log2().floor() - 3)
    assert torch.equal(y.double().isnan(), ~expected.isfinite())
    assert ((y.double() - u).abs() <= 0.51 * unit)[expected.isfinite()].all()
    assert q[[BEYOND, AMAX, RETRIED]].tolist() == [0, 0, 0]
    beyond = (~(expected.abs() <= LARGEST * q[LEARNED].item())).sum().item()
    assert 0.9 * beyond - 1 <= q[TOTAL].item() <= 1.1 * beyond + 1
    assert q[MOST].item() == pytest.approx(largest / q[LEARNED].item() if growth > 1 else 0.0, rel=1e-3)
    return growth


def scale_for(expected, factor):
    """A scale with which the largest value is ``factor`` times as large as the range."""
    return expected.abs().max().item() / (abs(factor) * LARGEST)


@pytest.mark.drawn(5)
@each_path
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, factor, dtype, path, device):
    x, residual, weight, bias, total_bias = (
        values(*size, seed=seed, device=device, dtype=dtype)
        for seed, size in enumerate((shape, shape, shape[1:], shape[1:], shape[1:]))
    )
    weight = weight if factor > 0 else -weight
    truth = in_fp64(true_layer_norm)
    with path():
        expected = truth(x, weight, bias)
        q = quantizer(scale_for(expected, factor), device)
        growth = check(layer_norm(x, weight, bias, quantizer=q), expected, q)
        assert growth == FACTORS[factor]
        _, added = add_layer_norm(x, residual, weight, bias)
        expected = truth(added, weight, bias)
        q = quantizer(scale_for(expected, factor), device)
        y, total = add_layer_norm(x, residual, weight, bias, total_bias=total_bias, quantizer=q)
        check(y, expected, q)
        _, expected = add_layer_norm(x, residual, weight, bias, total_bias=total_bias)
        assert torch.equal(total, expected)


@each_path
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("shape", [(8, 512), (9, 330)], ids=["even", "masked"])
def test_geglu(shape, factor, dtype, path, device):
    x, bias = (
        values(*size, seed=seed, device=device, dtype=dtype) for seed, size in enumerate((shape, shape[1:]))
    )
    x[:, : shape[1] // 2] *= 1 if factor > 0 else -1
    expected = in_fp64(true_geglu)(x, bias)
    q = quantizer(scale_for(expected, factor), device)
    with path():
        y = geglu(x, bias, quantizer=q)
    check(y, expected, q)


@each_path
@pytest.mark.parametrize("factor", [0.5, 12.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_not_finite_becomes_nan(broken, factor, path, device):
    """It does not change the scale, which still covers all other values."""
    x = values(4, 32, seed=0, device=device)
    expected = in_fp64(true_geglu)(x, None)
    q = quantizer(scale_for(expected, factor), device)
    x[0, 3] = x[2, 7] = broken
    with path():
        y = geglu(x, quantizer=q)
    expected = in_fp64(true_geglu)(x, None)
    assert (~expected.isfinite()).sum() == 2
    check(y, expected, q)


@each_path
def test_rows_with_nan(path, device):
    x = values(6, 320, seed=0, device=device)
    x[1, 5], x[4, 7] = float("nan"), float("inf")
    q = quantizer(1.0, device)
    with path():
        y = layer_norm(x, quantizer=q)
    check(y, in_fp64(true_layer_norm)(x, None, None), q)


@each_path
def test_zeros(path, device):
    q = quantizer(1.0, device)
    with path():
        check(
            geglu(torch.zeros(4, 32, dtype=torch.float16, device=device), quantizer=q),
            torch.zeros(4, 16, device=device),
            q,
        )


@each_path
def test_calls_one_after_the_other(path, device):
    """Only the present call decides the scale. The totals are those of all calls."""
    x = values(70, 64, seed=0, device=device)
    expected = in_fp64(true_geglu)(x, None)
    q = quantizer(expected.abs().max().item() / LARGEST, device)
    with path():
        first = geglu(x, quantizer=q)
        found = []
        for factor in (1, 6, 3, 1):
            large = x.clone()
            large[:, :32] *= factor
            y = geglu(large, quantizer=q)
            found.append((q[SCALE] / q[LEARNED]).item())
    assert found == [1, 8, 4, 1]
    assert torch.equal(y.view(torch.uint8), first.view(torch.uint8))
    most = 6 * expected.abs()
    assert q[MOST].item() == pytest.approx(6 * LARGEST, rel=1e-2)
    limit = LARGEST * q[LEARNED].item()
    assert q[TOTAL].item() == pytest.approx(((most > limit).sum() + (most / 2 > limit).sum()).item(), abs=3)


@pytest.mark.parametrize("exponent", [-3, 0, 1, 9])
@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_the_growth_is_the_smallest_power_of_2(exponent, nudge):
    largest = torch.tensor(LARGEST * 2.0**exponent)
    largest = torch.nextafter(largest, largest + nudge)
    q = quantizer(1.0, "cpu")
    quantized(torch.stack([largest, -largest / 2]), q)
    assert q[SCALE].item() == 2.0 ** max(0, exponent + (nudge > 0))


def layer_norms(x, q):
    return layer_norm(x, quantizer=q)


def sums_and_layer_norms(x, q):
    return add_layer_norm(x, x, x[0], quantizer=q)[0]


def geglus(x, q):
    return geglu(x, quantizer=q)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 640), (2048, 1280), (32, 40000)], ids=str)
@pytest.mark.parametrize("call", [layer_norms, sums_and_layer_norms, geglus])
def test_replays_of_a_graph(call, shape, monkeypatch):
    """Each replay has the scale of its own values, although several kernels may run at once (ADR 7)."""
    monkeypatch.setattr(e4m3, "RETRY_PROGRAMS", 128)
    base = values(*shape, seed=0, device="cuda")
    q = quantizer(1.0, "cuda")
    exact = call(base, q).float() * q[SCALE]
    q = quantizer(exact.abs().max().item() / 200, "cuda")
    x, factors = base.clone(), (1, 1, 7, 1, 90, 7, 1)
    # LayerNorm takes the size of its input away, so a column becomes larger than the others.
    inputs = [torch.cat((base[:, :1] * factor, base[:, 1:]), 1) for factor in factors]
    if call is geglus:
        half = shape[1] // 2
        inputs = [torch.cat((base[:, :half] * factor, base[:, half:]), 1) for factor in factors]
    expected = []
    for each in inputs:
        x.copy_(each)
        own = q.clone()
        expected.append((call(x, own).clone(), own[SCALE].item()))
    assert len({scale for _, scale in expected}) > 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(x, q) for _ in range(20)]
        scale = q[SCALE].clone()
    for _ in range(10):
        for each, (y, its_scale) in zip(inputs, expected, strict=True):
            x.copy_(each)
            graph.replay()
            assert scale.item() == its_scale
            assert all(torch.equal(t.view(torch.uint8), y.view(torch.uint8)) for t in found)
            assert q[[BEYOND, AMAX, RETRIED]].tolist() == [0, 0, 0]
