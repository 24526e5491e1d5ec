"""The convolution of an upsampled image at low resolution, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.statistics.config import statistics_config
from sdfastgn.kernels.statistics.kernels import is_even
from sdfastgn.kernels.upsample import conv as upsample_conv
from sdfastgn.kernels.upsample import conv_kernels as upsample_conv_kernels
from sdfastgn.kernels.upsample.config import phases_pay, weights_config
from sdfastgn.kernels.upsample.conv import reference_upsample_conv2d, upsample_conv2d
from sdfastgn.kernels.upsample.conv_kernels import launch_interleave, launch_phase_weights
from tests.kernels.ops import true_upsample_conv2d
from tests.kernels.samples import (
    DTYPES,
    LAYOUTS,
    assert_statistics,
    checked,
    error,
    first_alone,
    in_fp64,
    interpreted,
    kernels,
    make,
    to_layout,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Three roundings: weights, t and y. Triton's interpreter cuts bf16 off instead.
BOUNDS = {torch.float16: 6e-4, torch.bfloat16: 1e-2, torch.float32: 2e-6}
# (x, C_out, multiprocessors): few make chunks of several tiles.
CASES = [
    pytest.param((2, 5, 7, 9), 30, 132, id="odd"),
    pytest.param((1, 66, 3, 5), 70, 132, id="c-not-a-multiple-of-the-block"),
    pytest.param((2, 64, 8, 8), 64, 132, id="whole-tiles"),
    pytest.param((3, 1, 4, 5), 1, 132, id="one-channel"),
    pytest.param((2, 6, 1, 1), 8, 132, id="one-pixel"),
    pytest.param((1, 8, 1, 6), 5, 132, id="one-row"),
    pytest.param((1, 3, 19, 15), 66, 1, id="long-odd"),
    pytest.param((1, 4, 16, 32), 64, 1, id="long-whole"),
]
each_case = pytest.mark.parametrize(("shape", "C_out", "num_sms"), CASES)


@pytest.fixture
def in_phases(monkeypatch):
    """Every size runs at low resolution, on a GPU of ``num_sms``; counts the interleavings."""
    runs = []
    monkeypatch.setattr(upsample_conv, "phases_pay", lambda *sizes: True)
    monkeypatch.setattr(
        upsample_conv_kernels, "launch_interleave", lambda *a: (runs.append(1), launch_interleave(*a))
    )

    def patch(num_sms=132):
        monkeypatch.setattr(gpu, "num_sms", lambda device: num_sms)
        monkeypatch.setattr(upsample_conv_kernels, "_launches", {})
        return runs

    return patch


def operands(shape, C_out, dtype=torch.float32, device="cpu", layout="channels_last", seed=0):
    """(x, weight, bias), with a mean away from zero."""
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn((C_out, shape[1], 3, 3), generator=g) / (3 * shape[1] ** 0.5)).to(dtype)
    bias = (torch.randn(C_out, generator=g) * 2).to(dtype).to(device)
    return (
        make(shape, dtype, device, layout, mean=2.0, seed=seed)[0],
        to_layout(weight, layout).to(device),
        bias,
    )


call = kernels(direct=True)(upsample_conv2d)
truth = in_fp64(true_upsample_conv2d)


# --- the algebra --------------------------------------------------------------


def phase_weights(weight):
    """The weights of the phases by the definition: (C_out, C_in, 3, 3) -> (4 C_out, C_in, 2, 2)."""
    taps = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]).to(weight)
    found = torch.einsum("ari,bsj,ocij->abocrs", taps, taps, weight)
    return found.reshape(-1, weight.shape[1], 2, 2)


def interleaved(t):
    """y of t by the definition, phase by phase."""
    N, C, H, W = t.shape[0], t.shape[1] // 4, t.shape[2] - 1, t.shape[3] - 1
    y = t.new_empty((N, C, 2 * H, 2 * W))
    for phase, (a, b) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        y[:, :, a::2, b::2] = t[:, phase * C : (phase + 1) * C, a : a + H, b : b + W]
    return y


@each_case
def test_the_phases_are_the_convolution(shape, C_out, num_sms):
    x, weight, bias = operands(shape, C_out, torch.float64)
    t = F.conv2d(x, phase_weights(weight), padding=1)
    y = interleaved(t) + bias.view(-1, 1, 1)
    torch.testing.assert_close(y, truth(x, weight, bias), atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(y, reference_upsample_conv2d(x, weight, bias), atol=1e-13, rtol=1e-13)


# --- the kernels --------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize("channels", [(30, 5), (70, 66), (8, 128), (1, 1), (3, 130)], ids=str)
def test_phase_weights(channels, dtype, layout, device):
    C_out, C_in = channels
    weight = operands((1, C_in, 1, 1), C_out, dtype, device, layout)[1] + 1
    phases = torch.full((4 * C_out, 2, 2, C_in), float("nan"), dtype=dtype, device=device).movedim(-1, 1)
    launch_phase_weights(weight, phases)
    expected = phase_weights(weight.double())
    cut_off = 2 if dtype is torch.bfloat16 and device == "cpu" else 1
    bound = 1.01 * cut_off * torch.finfo(dtype).eps / 2 * expected.abs() + 1e-6
    assert ((phases.double() - expected).abs() <= bound).all()
    if cut_off == 1:
        assert torch.equal(phases[:C_out, :, 0, 0], weight[:, :, 0, 0])  # one tap alone: not rounded at all


@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@each_case
def test_against_fp64(shape, C_out, num_sms, dtype, device, in_phases):
    runs = in_phases(num_sms)
    x, weight, bias = operands(shape, C_out, dtype, device)
    y = call(x, weight, bias)
    assert y.dtype is dtype
    assert y.shape == (shape[0], C_out, 2 * shape[2], 2 * shape[3])
    assert y.movedim(1, -1).is_contiguous()
    assert error(y, truth(x, weight, bias)) < BOUNDS[dtype]
    assert error(call(x, weight), truth(x, weight)) < BOUNDS[dtype]
    assert len(runs) == 2


@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@each_case
def test_statistics_are_those_of_the_result(shape, C_out, num_sms, dtype, device, in_phases):
    runs = in_phases(num_sms)
    x, weight, bias = operands(shape, C_out, dtype, device)
    for b in (bias, None):
        y, statistics = call(x, weight, b, with_statistics=True)
        assert_statistics(statistics, y)
    assert torch.equal(y, call(x, weight))
    assert len(runs) == 3


def test_the_cases_take_every_way_through_the_kernel():
    ways = set()
    for (N, _, H, W), C, num_sms in (p.values for p in CASES):
        config = statistics_config(N, C, 4 * H * W, True, num_sms, kind="write")
        ways.add((config.rows > config.tile_rows, is_even(config, C, 4 * H * W, True)))
    assert ways == {(a, b) for a in (True, False) for b in (True, False)}


def test_statistics_feed_group_norm(device, in_phases):
    in_phases(1)
    x, weight, bias = operands((1, 4, 16, 32), 64, torch.float16, device)
    y, statistics = call(x, weight, bias + 300, with_statistics=True)  # a mean far above the spread
    checked(y, 8, statistics=statistics)


def test_a_change_of_the_weights_counts_at_once(device, in_phases):
    in_phases()
    x, weight, bias = operands((2, 6, 5, 4), 7, device=device)
    for _ in range(2):
        assert error(call(x, weight, bias), truth(x, weight, bias)) < BOUNDS[torch.float32]
        weight.mul_(-3).add_(0.25)
        bias.add_(1)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x, w, b: (x, w.contiguous(), b), id="weight-channels-first"),
        pytest.param(lambda x, w, b: (x, torch.cat((w, w), 1)[:, :6], b), id="weight-with-gaps"),
        pytest.param(lambda x, w, b: (torch.cat((x, x), 1)[:, :6], w, b), id="x-with-gaps"),
        pytest.param(lambda x, w, b: (x, w, torch.stack((b, b), 1)[:, 0]), id="bias-strided"),
    ],
)
def test_other_strides(view, device, in_phases):
    runs = in_phases()
    tensors = view(*operands((2, 6, 5, 4), 7, device=device))
    assert error(call(*tensors), truth(*tensors)) < BOUNDS[torch.float32]
    assert len(runs) == 1


def test_nan_and_inf_reach_what_they_reach_in_stock(device, in_phases):
    in_phases()
    x, weight, bias = operands((1, 3, 5, 6), 4, device=device)
    x[0, 1, 2, 3], x[0, 0, 4, 0] = float("nan"), float("inf")
    assert torch.equal(call(x, weight, bias).isfinite(), truth(x, weight, bias).isfinite())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_high_resolution_where_phases_do_not_pay(layout, device):
    """Images this small; in the layout of x whatever the weight's is."""
    x, weight, bias = operands((2, 6, 5, 4), 7, device=device, layout=layout)
    for w in (weight, weight.contiguous()):
        y, statistics = call(x, w, bias, with_statistics=True)
        assert y.stride() == to_layout(y, layout).stride()
        assert error(y, truth(x, w, bias)) < BOUNDS[torch.float32]
        assert_statistics(statistics, y)


def test_channels_first_is_never_in_phases(in_phases):
    runs = in_phases()
    x, weight, bias = operands((2, 6, 5, 4), 7, layout="channels_first")
    assert error(call(x, weight, bias), truth(x, weight, bias)) < BOUNDS[torch.float32]
    assert runs == []


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4)], ids=str)
def test_empty(shape, device, in_phases):
    in_phases()
    x, weight = torch.empty(shape, device=device), torch.ones((5, 8, 3, 3), device=device)
    if shape[2] == 0:
        with pytest.raises(RuntimeError):  # PyTorch's own word
            call(x, weight)
    else:
        assert call(x, weight).shape == (0, 5, 8, 8)


# --- when it pays -------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("sizes", "pays"),
    [
        pytest.param((1, 512, 512, 128, 128), True, id="vae-128"),
        pytest.param((1, 512, 512, 256, 256), True, id="vae-256"),
        pytest.param((1, 256, 256, 512, 512), True, id="vae-512"),
        pytest.param((2, 1280, 1280, 32, 32), True, id="sdxl-32"),
        pytest.param((2, 640, 640, 64, 64), True, id="sdxl-64"),
        pytest.param((2, 1280, 1280, 8, 8), False, id="sd15-8"),
        pytest.param((1, 1280, 1280, 8, 8), False, id="sd15-8-single"),
        pytest.param((2, 6, 7, 5, 4), False, id="tiny"),
        pytest.param((1, 512, 512, 1023, 1022), True, id="below-2^31"),
        pytest.param((1, 512, 512, 1024, 1024), False, id="above-2^31"),
        pytest.param((0, 512, 512, 64, 64), False, id="no-image"),
    ],
)
def test_when_phases_pay(sizes, pays, itemsize):
    assert phases_pay(*sizes, itemsize) is pays


def test_phases_pay_from_some_number_of_pixels_on():
    for C in (64, 320, 1280):
        pays = [phases_pay(2, C, C, size, size, 2) for size in (4, 8, 16, 32, 64, 128)]
        assert pays == sorted(pays)
        assert pays[0] is False
        assert pays[-1] is True


@pytest.mark.parametrize("channels", [(1, 1), (30, 5), (1280, 1280), (512, 66), (3, 320)], ids=str)
def test_tiles_cover_the_weights(channels):
    C_out, C_in = channels
    config = weights_config(C_out, C_in)
    assert config.programs == -(-C_out // config.block_rows) * -(-C_in // config.block_c)
    assert config.block_rows * config.block_c <= 256
    assert config.num_warps == 1


# --- the op -------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_that_of_conv2d(dtype, in_phases):
    in_phases()
    tensors = operands((2, 6, 5, 4), 7, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y, (recorded, _) = call(*tensors), call(*(t.requires_grad_() for t in tensors), with_statistics=True)
    assert y.dtype is recorded.dtype is torch.bfloat16
    # One in phases, one at the high resolution.
    assert error(y, truth(*tensors)) < 2e-2
    assert error(recorded, truth(*tensors)) < 2e-2


# --- GPU ----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_on_a_gpu_beside_stocks(dtype):
    x, weight, bias = operands((1, 256, 64, 64), 256, dtype, "cuda")
    assert upsample_conv.runs_in_phases(x, weight)
    expected = truth(x, weight, bias)
    stock = F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest"), weight, bias, padding=1)
    assert error(upsample_conv2d(x, weight, bias), expected) < 1.35 * error(stock, expected)
