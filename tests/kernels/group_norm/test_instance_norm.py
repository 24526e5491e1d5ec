"""The kernels of ``sdfastgn.instance_norm`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.group_norm.config import SmallConfig, launch_config
from tests.kernels.samples import BOUNDS, DTYPES, LAYOUTS, each_path, error, kernels, make

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [
    pytest.param((2, 37, 5, 9), id="2d-small"),
    pytest.param((2, 34, 23, 29), id="2d-split"),
    pytest.param((2, 5, 3, 4, 5), id="3d-small"),
    pytest.param((2, 34, 7, 9, 11), id="3d-split"),
    pytest.param((1, 5, 21), id="1d"),
    pytest.param((1, 1, 40, 41), id="one-channel"),
]
GPU_SHAPES = [
    pytest.param((2, 32, 128, 128, 128), id="2x32x128x128x128"),
    pytest.param((8, 256, 32, 32, 32), id="8x256x32x32x32"),
    pytest.param((4, 99, 33, 35), id="odd"),
]


def stock(x, weight, bias, activation="identity", eps=1e-5):
    y = F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return F.silu(y) if activation == "silu" else y


def test_the_shapes_take_both_ways():
    kinds = {
        param.id: isinstance(
            launch_config(
                *param.values[0][:2], torch.Size(param.values[0][2:]).numel(), param.values[0][1], True, 132
            ),
            SmallConfig,
        )
        for param in SHAPES
    }
    assert kinds["2d-small"]
    assert kinds["3d-small"]
    assert not kinds["2d-split"]
    assert not kinds["3d-split"]


def check(shape, dtype, device, layout, activation):
    x, weight, bias = (t.requires_grad_() for t in make(shape, dtype, device, layout))
    # Of mean 0, else the weight's gradient is a small difference of large sums.
    dy = make(shape, dtype, device, layout, mean=0.0, seed=5)[0]
    with kernels():
        y = sdfastgn.instance_norm(x, weight, bias, 1e-4, activation)
        got = (y, *torch.autograd.grad(y, (x, weight, bias), dy))
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = stock(doubles[0].contiguous(), *doubles[1:], activation, 1e-4)
    want = (expected, *torch.autograd.grad(expected, doubles, dy.double()))
    assert got[0].stride() == got[1].stride() == x.stride()
    assert got[0].dtype is dtype
    for ours, exact in zip(got, want, strict=True):
        assert error(ours, exact.detach()) < 2 * BOUNDS[dtype]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, layout, device):
    check(shape, torch.float32, device, layout, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, dtype, layout):
    check(shape, dtype, "cuda", layout, "identity")


@pytest.mark.parametrize("shape", [(2, 37, 5, 9), (2, 34, 23, 29)], ids=["small", "split"])
def test_each_channel_has_its_own_scale(shape, device):
    """Neighboring channels of very different sizes, one of them NaN, lie in one program's tile."""
    x = make(shape, device=device)[0]
    factors = (10.0 ** torch.linspace(-2, 4, shape[1], device=device)).reshape(1, -1, 1, 1)
    x = (x * factors).to(memory_format=torch.channels_last)
    x[0, 3, 2, 2] = float("nan")
    with kernels():
        y = sdfastgn.instance_norm(x, eps=0.0)
    expected = stock(x.double().contiguous(), None, None, eps=0.0)
    assert y[0, 3].isnan().all()
    rest = [c for c in range(shape[1]) if c != 3]
    assert (y[:, rest].double() - expected[:, rest]).abs().max() < 2e-5


@each_path
@pytest.mark.parametrize("shape", [(2, 0, 4, 4), (0, 0, 5), (0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
def test_nothing_to_normalize(shape, path):
    x = torch.ones(shape, requires_grad=True)
    weight = torch.ones(shape[1], requires_grad=True)
    with path():
        y = sdfastgn.instance_norm(x, weight, activation="silu")
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[1]))
