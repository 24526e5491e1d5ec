"""The forward kernels of ``sdfastgn.group_norm`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.group_norm.config import SmallConfig, SplitConfig, launch_config
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    checked,
    error,
    first_alone,
    make,
    run,
    skip_cut_off,
    truth,
)

OPERANDS = ("shift", "ada_scale", "ada_shift")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (shape, groups); small: a group fits into registers, split: it does not.
SMALL = [
    pytest.param((1, 12, 8, 8), 2, id="power-of-two-hw"),
    pytest.param((2, 30, 7, 9), 3, id="cg10-odd-hw"),
    pytest.param((2, 6, 1, 1), 3, id="one-pixel"),
    pytest.param((2, 5, 4, 4), 5, id="instance-norm"),
    pytest.param((1, 7, 3, 5), 1, id="one-group"),
    pytest.param((2, 12, 33), 4, id="rank3"),
    pytest.param((2, 6, 3, 4, 5), 2, id="rank5"),
    pytest.param((1, 64, 2, 2), 32, id="many-groups"),
]
SPLIT = [
    pytest.param((1, 40, 20, 21), 1, id="c40-odd-hw"),
    pytest.param((2, 66, 20, 21), 2, id="c-not-a-multiple-of-the-block"),
    pytest.param((1, 64, 330), 1, id="rank3-c64"),
    pytest.param((1, 32, 9, 8, 8), 1, id="rank5"),
]
GPU_SHAPES = [
    pytest.param((2, 1280, 8, 8), 32, id="2x1280x8x8"),
    pytest.param((2, 2560, 16, 16), 32, id="2x2560x16x16"),
    pytest.param((2, 640, 32, 32), 32, id="2x640x32x32"),
    pytest.param((2, 1920, 32, 32), 32, id="2x1920x32x32"),
    pytest.param((2, 960, 64, 64), 32, id="2x960x64x64"),
    pytest.param((2, 320, 128, 128), 32, id="2x320x128x128"),
    pytest.param((1, 512, 96, 136), 32, id="1x512x96x136"),
    pytest.param((1, 128, 1024, 1024), 32, id="1x128x1024x1024"),
    pytest.param((2, 320, 14, 64, 64), 32, id="video"),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("tokens", [False, True], ids=["image", "tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), SMALL + SPLIT)
def test_every_shape_and_layout(shape, groups, layout, tokens, device):
    x, weight, bias = make(shape, device=device, layout=layout)
    y = checked(x, groups, weight, bias, activation="silu", tokens=tokens)
    assert y.is_contiguous() if tokens else y.stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, groups, dtype, layout):
    x, weight, bias = make(shape, dtype, "cuda", layout)
    assert checked(x, groups, weight, bias, activation="silu").stride() == x.stride()


def test_the_shapes_take_both_ways():
    def kinds(params):
        return {
            type(launch_config(s[0], s[1], s[2:].numel(), p.values[1], True, 132))
            for p in params
            for s in [torch.Size(p.values[0])]
        }

    assert kinds(SMALL) == {SmallConfig}
    assert kinds(SPLIT) == {SplitConfig}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), first_alone([SMALL[1], SPLIT[0]]))
def test_every_activation_and_dtype(shape, groups, dtype, activation, device):
    x, weight, bias = make(shape, dtype, device)
    checked(x, groups, weight, bias, activation=activation)


@pytest.mark.parametrize("activation", first_alone(["identity", "silu", "mish"]))
@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        pytest.param(torch.float32, 1500.0, id="float32-mean-1000-std"),
        pytest.param(torch.float16, 45.0, id="float16-mean-30-std"),
        pytest.param(torch.bfloat16, 0.0, id="bfloat16-centred"),
        pytest.param(torch.float32, 0.0, id="float32-centred"),
    ],
)
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_no_less_exact_than_eager(shape, groups, dtype, mean, activation, device):
    """Error against fp64 at most eager PyTorch's on channels-first input, for which its kernels are sound."""
    x, weight, bias = make(shape, dtype, device, mean=mean)
    expected = truth(x, groups, weight, bias, activation=activation)
    eager = F.group_norm(x.contiguous(), groups, weight, bias)
    eager = ACTIVATIONS[activation](eager)
    skip_cut_off(dtype, device)
    # A fraction of the last rounding: two exact results may round a few elements differently.
    slack = (0.5 if dtype is torch.float32 else 0.1) * torch.finfo(dtype).eps
    assert (
        error(run(x, groups, weight, bias, activation=activation), expected) <= error(eager, expected) + slack
    )


@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_an_outlier_in_the_first_pixel(shape, groups, device):
    """The pivot of the sums is then far from everything else."""
    x, weight, bias = make(shape, device=device)
    x[(..., *[0] * (len(shape) - 2))] = 3000.0
    assert error(run(x, groups, weight, bias), truth(x, groups, weight, bias)) < 1e-5


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    "rows",
    [pytest.param(lambda n: n, id="NxC"), pytest.param(lambda n: 1, id="1xC"), pytest.param(None, id="C")],
)
@pytest.mark.parametrize("names", [OPERANDS, ("shift",), ("ada_scale", "ada_shift")], ids="+".join)
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[1]])
def test_operands(shape, groups, names, rows, device):
    x, weight, bias = make(shape, torch.float16, device)
    g = torch.Generator().manual_seed(1)
    size = (shape[1],) if rows is None else (rows(shape[0]), shape[1])
    operands = {name: torch.randn(size, generator=g).to(device, torch.float16) for name in names}
    checked(x, groups, weight, bias, activation="silu", **operands)


@pytest.mark.parametrize("has", ["none", "weight", "bias"])
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[0]])
def test_affine_parts_are_independent(shape, groups, has, device):
    x, weight, bias = make(shape, device=device)
    checked(x, groups, weight if has == "weight" else None, bias if has == "bias" else None)


@pytest.mark.parametrize(("shape", "rows"), [((0, 8, 4, 4), 16), ((2, 8, 0, 4), 0), ((0, 8), 1)], ids=str)
def test_empty(shape, rows, device):
    x = torch.empty(shape, device=device)
    for statistics in (None, torch.zeros(2, shape[0], 1, 8, device=device)):
        assert run(x, 4, activation="silu", statistics=statistics).shape == shape
        assert run(x, 4, statistics=statistics, tokens=True).shape == (shape[0], rows, 8)


@pytest.mark.parametrize("value", first_alone([float("nan"), float("inf"), float("-inf")]), ids=str)
@pytest.mark.parametrize(("shape", "groups"), [SMALL[1], SPLIT[1]])
def test_nan_and_inf_stay_in_their_group(shape, groups, value, device):
    x, weight, bias = make(shape, device=device)
    x[0, 0, 1, 1] = value
    y, expected = (
        run(x, groups, weight, bias, activation="relu"),
        truth(x, groups, weight, bias, activation="relu"),
    )
    assert torch.equal(y.isnan(), expected.isnan())
    assert y.isnan().any()
    assert error(y.nan_to_num(), expected.nan_to_num()) < BOUNDS[torch.float32]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nan_stays_on_its_side_of_a_pair(value, device):
    """Two neighbors share a reciprocal in the sigmoid; channels 4 and 5 are in two groups."""
    x, weight, bias = make((1, 15, 60, 61), torch.float16, device)
    assert isinstance(launch_config(1, 15, 60 * 61, 3, True, 132), SplitConfig)
    x[0, 4, 1, 1] = value
    y = run(x, 3, weight, bias, activation="silu")
    assert y[0, :5].isnan().all()
    expected = truth(x[:, 5:], 2, weight[5:], bias[5:], activation="silu")
    assert error(y[:, 5:], expected) < BOUNDS[torch.float16]


@pytest.mark.parametrize("eps", [0.0, -1e-3, 10.0], ids=str)
def test_eps_is_only_added(eps, device):
    x, weight, bias = make((2, 12, 5, 5), device=device)
    checked(x, 4, weight, bias, eps)


def test_views_with_gaps_keep_the_innermost_axis(device):
    base = make((2, 24, 6, 7), device=device)[0]
    for x in (base[:, :12], base[..., ::2], base.contiguous()[:, ::2], base[:1].expand(3, -1, -1, -1)):
        y = checked(x, 4, activation="silu")
        assert y.stride().index(min(y.stride())) == x.stride().index(min(s for s in x.stride() if s))


@pytest.mark.gpu
@pytest.mark.gigabytes
def test_more_than_2_to_the_31_elements():
    C, H, W = 64, 8192, 4100
    x = torch.empty(
        (1, C, H, W), dtype=torch.float16, device="cuda", memory_format=torch.channels_last
    ).normal_(2.0, 1.5)
    assert x.numel() > 2**31
    y = sdfastgn.group_norm(x, 32, activation="silu")
    for group in (0, 31):
        part = x[:, 2 * group : 2 * group + 2]
        var, mean = torch.var_mean(part.float(), correction=0)
        expected = F.silu((part[:, :, -3:].double() - mean) * torch.rsqrt(var + 1e-5))
        assert error(y[:, 2 * group : 2 * group + 2, -3:], expected) < BOUNDS[torch.float16]
