"""Groups that one program holds, in one pass and in two tiles."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.group_norm.config import SplitConfig, launch_config
from tests.kernels.gradients import check
from tests.kernels.samples import BOUNDS, checked, error, first_alone, kernels, make, run, skip_cut_off, truth

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALVES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in (torch.float16, torch.bfloat16)]
TWO_TILES = [
    pytest.param((1, 80, 7, 9), 2, id="40-channels-odd-hw"),
    pytest.param((1, 160, 5, 5), 2, id="80-channels"),
    pytest.param((1, 96, 30), 2, id="48-channels-rank3"),
    pytest.param((2, 40, 3, 4, 5), 1, id="one-group-rank5"),
]
ONE_TILE = pytest.param((1, 30, 7, 9), 3, id="one-tile")


@pytest.mark.parametrize("activation", first_alone(["silu", "identity"]))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "groups"), TWO_TILES)
def test_two_tiles(shape, groups, dtype, activation, device):
    skip_cut_off(dtype, device)
    assert launch_config(*shape[:2], torch.Size(shape[2:]).numel(), groups, True, 132).tail > 0
    x, weight, bias = make(shape, dtype, device)
    assert checked(x, groups, weight, bias, activation=activation).stride() == x.stride()


@pytest.mark.parametrize("tokens", [False, True], ids=["like-x", "tokens"])
@pytest.mark.parametrize(("shape", "groups"), [*TWO_TILES[:2], ONE_TILE])
def test_operands(shape, groups, tokens, device):
    """The shift is far from zero, and another one in each channel."""
    x, weight, bias = make(shape, torch.float16, device)
    g = torch.Generator().manual_seed(1)
    names = ("shift", "ada_scale", "ada_shift")
    operands = {name: torch.randn(shape[:2], generator=g).to(device, torch.float16) for name in names}
    operands["shift"] += 20
    checked(x, groups, weight, bias, activation="silu", tokens=tokens, **operands)


@pytest.mark.parametrize(("shape", "groups"), TWO_TILES[:2])
def test_gradients_of_two_tiles(shape, groups, device):
    check(shape, groups, torch.float16, device, "channels_last", "silu", "channels_last", direct=True)


@pytest.mark.parametrize("outlier", [30.0, 3000.0])
@pytest.mark.parametrize(("shape", "groups"), [*TWO_TILES[:2], ONE_TILE])
def test_an_outlier_is_no_worse_a_pivot_than_in_eager(shape, groups, outlier, device):
    x, weight, bias = make(shape, torch.float16, device, mean=0.0)
    x[:, :: shape[1] // groups, 0, 0] = outlier
    expected = truth(x, groups, weight, bias)
    eager = F.group_norm(x.contiguous(), groups, weight, bias)
    assert error(run(x, groups, weight, bias), expected) <= error(eager, expected) * 1.05


@pytest.mark.parametrize(("shape", "groups"), [TWO_TILES[0], ONE_TILE])
def test_squares_beyond_the_largest_number(shape, groups, device):
    x, _, _ = make(shape, torch.bfloat16, device)
    x[:, :: shape[1] // groups, 0, 0] = 1e19
    assert error(run(x, groups), truth(x, groups)) < 2 * BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(("shape", "groups"), [TWO_TILES[0], ONE_TILE])
def test_fp32_results_of_16_bits_keep_their_last_bits(shape, groups, device):
    """As under autocast. The pivot is 7.9 deviations off: not yet an outlier."""
    x, weight, bias = make(shape, torch.float16, device, mean=0.0)
    x[:, :: shape[1] // groups, 0, 0] = 7.9 * 1.5
    with kernels():
        y = torch.ops.sdfastgn.group_norm(
            x, groups, weight, bias, 1e-5, "identity", None, None, None, None, False, torch.float32
        )[0]
    assert y.dtype is torch.float32
    assert error(y, truth(x, groups, weight, bias)) < 5e-7


def test_samples_of_2_to_the_31_elements_are_not_small():
    assert isinstance(launch_config(1, 2**20, 2048, 2**20, False, 132), SplitConfig)
    assert not isinstance(launch_config(1, 2**19, 2048, 2**19, False, 132), SplitConfig)


@pytest.mark.gpu
def test_more_than_2_to_the_31_positions():
    """The chunks' starts pass 2^31 within a channel."""
    x = torch.empty((1, 1, 1300, 1300, 1300), dtype=torch.float16, device="cuda").normal_(2.0, 1.5)
    x[..., -200:, :, :] += 1
    rows = x.view(1300, -1)  # 17 GB in fp64 at once
    mean = sum(row.double().sum() for row in rows) / x.numel()
    variance = sum((row.double() - mean).square().sum() for row in rows) / x.numel()
    y = sdfastgn.group_norm(x, 1, activation="silu")
    for some in (slice(0, 2), slice(-2, None)):
        expected = F.silu((x[:, :, some].double() - mean) * torch.rsqrt(variance + 1e-5))
        assert error(y[:, :, some], expected) < BOUNDS[torch.float16]
