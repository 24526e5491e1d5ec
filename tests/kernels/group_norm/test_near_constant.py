"""``sdfastgn.group_norm`` in plain PyTorch, where the mean is far above the spread."""

import contextlib
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import dense_is_channels_last
from tests.kernels.samples import LAYOUTS, to_layout

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WAYS = [
    pytest.param(contextlib.nullcontext, id="plain"),
    pytest.param(lambda: mock.patch.object(dispatch, "has_kernels", return_value=True), id="op"),
]
SHAPE, GROUPS = (2, 20, 9, 11), 4
# Of the result, where eager has no other error either. In fp64 the truth is eager itself.
ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-9}


def operands(mean, dtype, layout):
    g = torch.Generator().manual_seed(0)
    x = to_layout((torch.randn(SHAPE, generator=g) + mean).to(dtype), layout)
    weight, bias = (torch.randn(SHAPE[1], generator=g).to(dtype) for _ in range(2))
    dy = to_layout(torch.randn(SHAPE, generator=g).to(dtype), layout)
    return [t.requires_grad_() for t in (x, weight, bias)], dy


def results(call, leaves, dy):
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def errors(results, truth):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, truth, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [1e3, 3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_less_exact_than_pytorch_channels_first(dtype, mean, layout, way):
    leaves, dy = operands(mean, dtype, layout)

    def eager(x, weight, bias):
        return F.silu(F.group_norm(x, GROUPS, weight, bias))

    first = [t.detach().contiguous().requires_grad_() for t in leaves]
    truth = results(eager, [t.detach().double().requires_grad_() for t in first], dy.double().contiguous())
    limits = errors(results(eager, first, dy.contiguous()), truth)
    with way():
        got = results(lambda x, w, b: sdfastgn.group_norm(x, GROUPS, w, b, activation="silu"), leaves, dy)
    assert dense_is_channels_last(got[0]) == (layout == "channels_last")
    for name, error, limit in zip(("y", "dx", "dweight", "dbias"), errors(got, truth), limits, strict=True):
        assert error <= 1.1 * limit + ROUNDING[dtype], name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.1, -12345.678])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_values_only_the_bias_is_left(dtype, value, layout, way):
    """As of a saturated channel or a black border: x is exactly its mean, and the weight gets no gradient."""
    (x, weight, bias), dy = operands(0.0, dtype, layout)
    x = torch.full_like(x, value).requires_grad_()
    for activation, function in ACTIVATIONS.items():
        with way():
            y = sdfastgn.group_norm(x, GROUPS, weight, bias, activation=activation)
            dx, dweight = torch.autograd.grad(y, (x, weight), dy)
        wide = torch.promote_types(dtype, torch.float32)
        # Spread out first: PyTorch rounds an activation of few elements otherwise.
        expected = function(bias.to(wide).view(-1, 1, 1).expand(SHAPE).contiguous()).to(dtype)
        assert torch.equal(y, expected), activation
        assert not dweight.any(), activation
        assert dx.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_of_equal_values_is_its_bias(dtype):
    (_, weight, bias), _ = operands(0.0, dtype, "channels_first")
    x = torch.full((3, SHAPE[1]), 3e4 + 0.7).to(dtype).requires_grad_()
    y = sdfastgn.layer_norm(x, weight, bias)
    assert torch.equal(y, bias.expand(3, -1))
    (dweight,) = torch.autograd.grad(y, weight, torch.randn(3, SHAPE[1]).to(dtype))
    assert not dweight.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_or_row_that_is_not_finite_leaves_the_others_as_they_are(layout, value):
    (x, weight, bias), _ = operands(3e4, torch.float32, layout)
    damaged = x.detach().clone()
    damaged[0, 0, 0, 0] = value
    y, expected = (sdfastgn.group_norm(t, GROUPS, weight, bias) for t in (damaged, x))
    assert torch.equal(y[0, 5:], expected[0, 5:])
    assert torch.equal(y[1], expected[1])
    y, expected = (sdfastgn.layer_norm(t) for t in (damaged, x))
    assert torch.equal(y[0, 0, 1:], expected[0, 0, 1:])
