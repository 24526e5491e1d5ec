"""Sums with factors or a bias for each sample, and statistics of frames as those of a video."""

import math

import pytest
import torch

import sdfastgn
from sdfastgn.kernels.statistics.op import add_kernel, reference_channel_statistics
from sdfastgn.patches.layers.statistics import add_bias, as_video, blend, take_statistics
from tests.kernels.samples import BOUNDS, DTYPES, LAYOUTS, error, kernels, make, to_layout

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_gradients", "statistics_always_pay")
SHAPES = [(6, 10, 7, 9), (4, 64, 16, 16), (6, 6, 1, 1), (4, 8, 3, 4, 5)]
run_blend, run_bias = (kernels(direct=True)(function) for function in (blend, add_bias))


@pytest.mark.drawn(7)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_of_each_sample(shape, dtype, layout, device):
    x, _, bias = make(shape, dtype, device, layout)
    residual = make(shape, dtype, device, layout, seed=1)[0]
    factors = torch.rand(2, shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    kept, scale = factors.double().view(2, -1, *[1] * (len(shape) - 1))
    for given in (bias, None):
        wide = x.double() if given is None else x.double() + given.double().view(-1, *[1] * (len(shape) - 2))
        y = run_blend(x, residual, given, factors)
        assert y.stride() == x.stride()
        assert error(y, kept * residual.double() + scale * wide) < BOUNDS[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_of_each_sample(shape, layout, device):
    x = make(shape, device=device, layout=layout)[0]
    bias = make(shape[:2], device=device)[0]
    expected = x + bias.view(*shape[:2], *[1] * (len(shape) - 2))
    assert error(run_bias(x, bias), expected.double()) < BOUNDS[torch.float32]


def test_the_statistics_are_those_of_the_result(device):
    """Also in a chunk of several tiles, on the way of a norm."""
    x, _, bias = make((4, 64, 16, 16), device=device)
    residual = make((4, 64, 16, 16), device=device, seed=1)[0]
    factors = torch.rand(2, 4, device=device)

    @kernels(direct=True)
    def summed():
        return add_kernel(x, residual, bias, 1.0, factors=factors)

    y, statistics = summed()
    expected = reference_channel_statistics(y, statistics.shape[2]).float()
    torch.testing.assert_close(statistics, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(16, 16), (7, 9)], ids=str)
def test_a_video_has_the_statistics_of_its_frames(size, device):
    x = make((6, 64, *size), device=device)[0]

    @kernels(direct=True)
    def statistics_of_the_video():
        y = blend(x, x, None, torch.ones(2, 6, device=device))
        video = as_video(y, 3)
        assert (video.shape, video.data_ptr()) == ((2, 64, 3, *size), y.data_ptr())
        assert video.is_contiguous(memory_format=torch.channels_last_3d)
        return video, take_statistics(video)

    video, statistics = statistics_of_the_video()
    torch.testing.assert_close(video, to_layout(x + x, "channels_last").unflatten(0, (2, 3)).transpose(1, 2))
    if statistics is None:  # chunks that end in the middle of a frame
        assert math.prod(size) % 2
        return
    expected = reference_channel_statistics(video, statistics.shape[2]).float()
    torch.testing.assert_close(statistics, expected, atol=1e-4, rtol=1e-4)
    plain = sdfastgn.group_norm(video.contiguous(), 8)
    torch.testing.assert_close(sdfastgn.group_norm(video, 8, statistics=statistics), plain)
