"""The kernels on groups of equal or nearly equal values: a saturated channel, a black border."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.group_norm.op import reference_group_norm
from tests.kernels.gradients import grads_of, leaves_of
from tests.kernels.samples import (
    DTYPES,
    LAYOUTS,
    first_alone,
    interpreted,
    make,
    run,
    run_statistics,
    to_layout,
    truth,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (shape, groups): a group in the registers of one program, three launches, and InstanceNorm.
SHAPES = [
    pytest.param((1, 20, 7, 9), 2, id="small"),
    pytest.param((1, 40, 20, 21), 1, id="split"),
    pytest.param((1, 6, 7, 9), 6, id="one-channel"),
]
GPU_SHAPES = [
    pytest.param((2, 320, 64, 64), 32, id="2x320x64x64"),
    pytest.param((1, 66, 197, 161), 2, id="1x66x197x161"),
    pytest.param((1, 3, 200, 200), 3, id="one-channel-1x3x200x200"),
    pytest.param((1, 512, 256, 256), 32, id="1x512x256x256"),
    pytest.param((34, 512, 56, 56), 32, id="34x512x56x56"),
]
CASES = [pytest.param("cpu", *p.values, id=f"cpu-{p.id}", marks=interpreted) for p in SHAPES] + [
    pytest.param("cuda", *p.values, id=f"cuda-{p.id}", marks=pytest.mark.gpu) for p in SHAPES + GPU_SHAPES
]
# The mean over the spread of a nearly constant group.
RATIO = 3e4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", first_alone([1e4, -2.3e4, 0.1]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "shape", "groups"), CASES)
def test_equal_values_give_exactly_the_bias(shape, groups, dtype, value, layout, device):
    x, weight, bias = make(shape, dtype, device, layout)
    x = torch.full_like(x, value)
    y = run(x, groups, weight, bias)
    assert torch.equal(y, bias.view(-1, *[1] * (x.dim() - 2)).expand(shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", first_alone(ACTIVATIONS))
def test_equal_values_give_exactly_the_activation_of_the_bias(activation, dtype, device):
    """Also with statistics from a producer, and beside a group that is not constant."""
    x, weight, bias = make((1, 80, 20, 21), dtype, device)
    x[:, :40] = 2.5e4
    y = run(x, 2, weight, bias, activation=activation, statistics=run_statistics(x))
    # What a group of zeros gives, which has nothing to round.
    zeros = run(torch.zeros_like(x), 2, weight, bias, activation=activation)
    assert torch.equal(y[:, :40], zeros[:, :40])
    assert not torch.equal(y[:, 40:], zeros[:, 40:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize(("device", "shape", "groups"), CASES)
def test_equal_values_and_an_equal_gradient_give_x_no_gradient(shape, groups, dtype, layout, device):
    x = to_layout(torch.full(shape, 1e4, dtype=dtype, device=device), layout)
    (dx,) = grads_of(lambda x: sdfastgn.group_norm(x, groups), [x.requires_grad_()], torch.ones_like(x))
    # The slope of the norm is 1 / sqrt(eps) = 316; the mean of the gradient is rounded to fp32.
    assert dx.abs().max() <= 316.3 * 2**-23


def _nearly_constant(shape, dtype, device, layout):
    """Values next to each other in ``dtype``, such that the mean is ``RATIO`` times the spread or more."""
    g = torch.Generator().manual_seed(3)
    mean = torch.tensor(3e4).to(dtype)
    step = torch.nextafter(mean, torch.tensor(torch.inf).to(dtype)) - mean
    if dtype is torch.float32:
        x = mean + torch.randn(shape, generator=g) * mean / RATIO
    else:
        rare = torch.rand(shape, generator=g) < (mean.double() / RATIO / step.double()).item() ** 2
        x = torch.where(rare, mean + step, mean)
    return to_layout(x.to(dtype), layout).to(device)


@pytest.mark.parametrize("layout", first_alone(LAYOUTS))
@pytest.mark.parametrize("activation", first_alone(["silu", "identity"]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "shape", "groups"), CASES)
def test_nearly_equal_values_are_no_less_exact_than_eager(shape, groups, dtype, activation, layout, device):
    """Output and gradients of x, weight and bias, against fp64.

    Twice eager's error is allowed: both keep the mean as one fp32 number, and luck decides
    which of the two is rounded by less.
    """
    x = _nearly_constant(shape, dtype, device, layout)
    _, weight, bias = make(shape, dtype, device, layout)
    dy = make(shape, dtype, device, layout, mean=0.5, seed=7)[0]

    def eager(x, weight, bias):
        return ACTIVATIONS[activation](F.group_norm(x, groups, weight, bias))

    def ours(x, weight, bias):
        return sdfastgn.group_norm(x, groups, weight, bias, activation=activation)

    leaves, plain = leaves_of(x, weight, bias), leaves_of(x.contiguous(), weight, bias)
    want = grads_of(
        lambda *ts: reference_group_norm(ts[0], groups, *ts[1:], activation=activation),
        leaves,
        dy,
        torch.float64,
    )
    got = (run(x, groups, weight, bias, activation=activation), *grads_of(ours, leaves, dy))
    of_eager = (eager(*plain).detach(), *torch.autograd.grad(eager(*plain), plain, dy.contiguous()))
    want = (truth(x, groups, weight, bias, activation=activation), *want)
    for name, mine, stock, right in zip(("y", "dx", "dweight", "dbias"), got, of_eager, want, strict=True):
        one_rounding = right.abs().max() * torch.finfo(dtype).eps
        assert (mine - right).abs().max() <= 2 * (stock - right).abs().max() + one_rounding, name
