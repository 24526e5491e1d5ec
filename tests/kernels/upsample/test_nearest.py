"""Nearest-neighbor upsampling by two and its adjoint: the kernels."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.common.launch import Launch
from sdfastgn.kernels.upsample.config import tile_config
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from tests.kernels.samples import BOUNDS, DTYPES, LAYOUTS, error, first_alone, kernels, make, to_layout

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [
    pytest.param((2, 30, 7, 9), id="odd"),
    pytest.param((2, 66, 5, 7), id="c-not-a-multiple-of-the-block"),
    pytest.param((3, 1, 4, 5), id="one-channel"),
    pytest.param((2, 6, 1, 1), id="one-pixel"),
    pytest.param((1, 130, 1, 13), id="one-row"),
    pytest.param((1, 130, 13, 1), id="one-column"),
    pytest.param((2, 128, 8, 8), id="whole-tiles"),
    pytest.param((64, 4, 2, 1), id="batch-64"),
]


upsampled = kernels()(upsample_nearest_2x)
summed = kernels()(torch.ops.sdfastgn.upsample_nearest_2x_backward)


def by_index(x):
    """The definition, pixel by pixel."""
    rows, columns = (torch.arange(2 * size, device=x.device) // 2 for size in x.shape[2:])
    return x[:, :, rows][:, :, :, columns]


# --- the kernels --------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that ran."""
    names, real = [], Launch.__call__

    def noted(self, *args):
        names.append(self.kernel.__name__)
        real(self, *args)

    monkeypatch.setattr(Launch, "__call__", noted)
    return names


@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, dtype, device, launched):
    x = make(shape, dtype, device)[0]
    y = upsampled(x)
    assert torch.equal(y, by_index(x))
    assert torch.equal(y, F.interpolate(x.cpu(), scale_factor=2.0, mode="nearest").to(device))
    assert y.movedim(1, -1).is_contiguous()
    assert launched == ["_upsample_kernel"]


@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_adjoint(shape, dtype, device, launched):
    dy = make((*shape[:2], 2 * shape[2], 2 * shape[3]), dtype, device)[0]
    dx = summed(dy)
    assert dx.dtype is dtype
    assert dx.shape == shape
    assert dx.movedim(1, -1).is_contiguous()
    assert launched == ["_upsample_grad_kernel"]
    leaf = torch.zeros(shape, dtype=torch.float64, device=device, requires_grad=True)
    expected = torch.autograd.grad(by_index(leaf), leaf, dy.double())[0]
    assert error(dx, expected) < BOUNDS[dtype]
    # One rounding, but for ties that fp32 moves. Triton's interpreter cuts bf16 off instead.
    cut_off = 2 if dtype is torch.bfloat16 and device == "cpu" else 1
    assert (
        (dx.double() - expected).abs() <= 1.01 * cut_off * torch.finfo(dtype).eps / 2 * expected.abs() + 1e-6
    ).all()


def test_the_sum_is_not_rounded_on_the_way(device):
    """In fp16 each of the small values would vanish beside the large one."""
    dy = torch.tensor([[2048.0, 1.0], [1.0, 1.0]], dtype=torch.float16, device=device).expand(1, 64, 2, 2)
    assert (summed(to_layout(dy, "channels_last")) == 2052).all()  # 2051 to even; one by one it would be 2048


def test_nan_and_inf_stay_where_they_are(device):
    x = make((1, 5, 3, 3), device=device)[0]
    x[0, 1, 2, 0], x[0, 4, 1, 1] = float("nan"), float("inf")
    torch.testing.assert_close(upsampled(x), by_index(x), rtol=0, atol=0, equal_nan=True)
    assert summed(by_index(x).contiguous(memory_format=torch.channels_last)).isfinite().sum() == x.numel() - 2


def test_other_layouts_keep_theirs_and_run_in_pytorch(device, launched):
    x = make((2, 6, 5, 4), device=device, layout="channels_first")[0]
    for view in (x, x[:, ::2], x[..., ::2]):
        y = upsampled(view)
        assert y.is_contiguous()
        assert torch.equal(y, by_index(view))
        assert torch.equal(summed(y), view * 4)
    assert launched == []


def test_channels_last_with_gaps(device, launched):
    base = make((2, 12, 6, 7), device=device)[0]
    for view in (base[:, :5], base[..., ::2], base[:1].expand(3, -1, -1, -1)):
        y = upsampled(view)
        assert torch.equal(y, by_index(view))
        assert y.movedim(1, -1).is_contiguous()
    assert launched == ["_upsample_kernel"] * 3


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 0, 4, 4), (2, 8, 0, 4)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty(shape, layout, device):
    x = to_layout(torch.empty(shape, device=device), layout)
    y = upsampled(x)
    assert y.shape == (*shape[:2], 2 * shape[2], 2 * shape[3])
    assert summed(y).shape == shape


# --- launch configuration -----------------------------------------------------


@pytest.mark.parametrize("C", [1, 3, 30, 33, 64, 66, 130, 320, 512, 1280])
@pytest.mark.parametrize("pixels", [1, 7, 128, 4096, 70000])
def test_tiles_cover_everything_in_a_power_of_2(pixels, C):
    config = tile_config(pixels, C, 132)
    columns = -(-C // config.block_c)
    rows, rest = divmod(config.programs, columns)
    assert rest == 0
    assert (rows - 1) * config.block_rows < pixels <= rows * config.block_rows
    for size in (config.block_rows, config.block_c, config.num_warps):
        assert size & (size - 1) == 0
    assert config.block_rows * config.block_c <= 2048
    assert config.num_warps <= 4
    assert config.even == (rows * config.block_rows * columns * config.block_c == pixels * C)


def test_small_images_get_smaller_tiles():
    tiles = {
        pixels: tile_config(pixels, 1280, 132).block_rows * tile_config(pixels, 1280, 132).block_c
        for pixels in (128, 512, 131072)
    }
    assert tiles == {128: 512, 512: 1024, 131072: 2048}


# --- GPU ----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gigabytes
def test_more_than_2_to_the_31_elements():
    x = torch.randn((1, 2048, 4096, 65), dtype=torch.float16, device="cuda").movedim(-1, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    y = upsample_nearest_2x(x)
    assert y.numel() > 2**31
    for a in (0, 1):
        for b in (0, 1):
            assert torch.equal(y[:, :, a::2, b::2], x)
    dx = torch.ops.sdfastgn.upsample_nearest_2x_backward(y)
    assert torch.equal(dx, x * 4)
