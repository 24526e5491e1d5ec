"""``sdfastgn.group_norm`` with statistics that someone else took, and with tokens as output, against fp64."""

import pytest
import torch

from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.group_norm.config import SmallConfig, launch_config
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from tests.kernels.samples import BOUNDS, DTYPES, LAYOUTS, checked, error, first_alone, make, run, truth

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL = pytest.param((2, 30, 7, 9), 3, id="small")
SPLIT = pytest.param((1, 40, 20, 21), 1, id="split")
# P of statistics of 63 and of 420 positions, with (whole, short, empty) chunks.
CHUNKS = [
    pytest.param(1, id="one-chunk"),
    pytest.param(7, id="7-chunks"),  # (7, 0, 0) and (6, 1, 0)
    pytest.param(20, id="20-chunks"),  # (15, 1, 4) and (19, 1, 0)
    pytest.param(100, id="100-chunks"),  # (63, 0, 37) and (93, 0, 7): more than the merge takes at once
]


def poisoned_statistics(x, chunks):
    """fp32 statistics of ``x``, with NaN for chunks that hold no position."""
    statistics = reference_channel_statistics(x, chunks).float()
    rows = ceil_div(x.shape[2:].numel(), chunks)
    statistics[:, :, ceil_div(x.shape[2:].numel(), rows) :] = float("nan")
    return statistics


def test_the_shapes_take_both_ways_and_the_chunks_leave_some_empty():
    for param, kind in ((SMALL, True), (SPLIT, False)):
        (N, C, H, W), groups = param.values
        assert isinstance(launch_config(N, C, H * W, groups, True, 132), SmallConfig) is kind
        x = torch.ones(N, C, H, W)
        empty = [poisoned_statistics(x, p.values[0]).isnan().any().item() for p in CHUNKS]
        assert any(empty)
        assert not all(empty)


# --- statistics ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_statistics_of_any_number_of_chunks(shape, groups, chunks, dtype, layout, device):
    x, weight, bias = make(shape, dtype, device, layout)
    statistics = poisoned_statistics(x, chunks)
    y = checked(x, groups, weight, bias, activation="silu", statistics=statistics)
    assert y.stride() == x.stride()
    assert checked(x, groups, weight, bias, statistics=statistics, tokens=True).is_contiguous()


@pytest.mark.parametrize(
    "shape", [(2, 12, 33), (2, 6, 3, 4, 5), (3, 6, 1, 1), (2, 5, 4, 4), (2, 12)], ids=str
)
def test_statistics_of_any_rank(shape, device):
    layout = "channels_last" if len(shape) > 2 else "channels_first"
    x, weight, bias = make(shape, device=device, layout=layout)
    groups = 5 if shape[1] == 5 else 3
    checked(x, groups, weight, bias, statistics=poisoned_statistics(x, 4))


@pytest.mark.parametrize(
    "names", [("shift",), ("ada_scale", "ada_shift"), ("shift", "ada_scale", "ada_shift")], ids="+".join
)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_statistics_are_those_of_x_without_the_shift(shape, groups, dtype, names, device):
    x, weight, bias = make(shape, dtype, device)
    g = torch.Generator().manual_seed(1)
    operands = {name: (torch.randn(shape[:2], generator=g) * 2).to(device, dtype) for name in names}
    checked(x, groups, weight, bias, activation="silu", statistics=poisoned_statistics(x, 20), **operands)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda s: s.transpose(2, 3).contiguous().transpose(2, 3), id="transposed"),
        pytest.param(lambda s: torch.stack((s, s + 100), -1)[..., 0], id="every-second-channel"),
        pytest.param(lambda s: torch.cat((s, s + 100), 2)[:, :, : s.shape[2]], id="first-chunks"),
    ],
)
@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_statistics_that_are_views(shape, groups, view, device):
    x, weight, bias = make(shape, device=device)
    statistics = poisoned_statistics(x, 20)
    strided = view(statistics)
    assert not strided.is_contiguous()
    assert torch.equal(strided.nan_to_num(), statistics.nan_to_num())
    checked(x, groups, weight, bias, statistics=strided)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_the_statistics_given_are_the_ones_used(shape, groups, layout, device):
    """Those of another tensor normalize x by that one's mean and deviation."""
    x, weight, bias = make(shape, device=device, layout=layout)
    other = make(shape, device=device, seed=5, mean=-4.0)[0] * 3
    y = run(x, groups, weight, bias, statistics=poisoned_statistics(other, 7))
    per_group = other.double().contiguous().view(shape[0], groups, -1)
    var, mean = torch.var_mean(per_group, dim=2, correction=0, keepdim=True)
    z = (x.double().contiguous().view(per_group.shape) - mean) * torch.rsqrt(var + 1e-5)
    expected = z.view(shape) * weight.double().view(-1, 1, 1) + bias.double().view(-1, 1, 1)
    assert error(y, expected) < BOUNDS[torch.float32]
    assert error(y, truth(x, groups, weight, bias)) > 0.1


@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_statistics_of_chunks_of_different_means(shape, groups, device):
    """Most of the variance is between chunks and channels, which Chan's formula must add."""
    x, weight, bias = make(shape, device=device)
    x += torch.linspace(-50, 50, shape[2], device=device)[:, None]
    x += torch.linspace(0, 30, shape[1], device=device)[:, None, None]
    for chunks in (1, 7, 100):
        checked(x, groups, weight, bias, statistics=poisoned_statistics(x, chunks))


@pytest.mark.parametrize(("shape", "groups"), [SMALL, SPLIT])
def test_tokens_with_every_operand(shape, groups, device):
    x, weight, bias = make(shape, device=device)
    g = torch.Generator().manual_seed(1)
    names = ("shift", "ada_scale", "ada_shift")
    operands = {name: torch.randn(shape[:2], generator=g).to(device) for name in names}
    checked(x, groups, weight, bias, activation="gelu", tokens=True, **operands)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [False, True], ids=["image", "tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(2, 1280, 8, 8), (2, 960, 32, 32), (2, 320, 64, 64), (1, 512, 128, 128), (2, 320, 14, 32, 32)],
    ids=str,
)
def test_real_shapes_on_the_gpu(shape, dtype, layout, tokens):
    x, weight, bias = make(shape, dtype, "cuda", layout)
    for statistics in (None, poisoned_statistics(x, 77), poisoned_statistics(x, 1)):
        checked(x, 32, weight, bias, activation="silu", statistics=statistics, tokens=tokens)
