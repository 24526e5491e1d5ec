"""Layers of a decoder in strips: any rows are rows of the whole map, and so are the statistics."""

from functools import partial

import pytest
import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.fusions import strips
from sdfastgn.patches.fusions.strips import (
    Held,
    Out,
    OutParts,
    Resnet,
    ResnetParts,
    Upsample,
    UpsampleParts,
    hold,
)
from tests.kernels.samples import kernels
from tests.patches.cases import agree, image
from tests.patches.samples import randomize

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

H, W = 7, 5


def resnet(out_channels=8):
    block = ResnetBlock2D(in_channels=8, out_channels=out_channels, groups=4, temb_channels=None)
    return randomize(block)


def upsample():
    return randomize(Upsample2D(8, use_conv=True, out_channels=12))


def end():
    return randomize(
        Decoder(block_out_channels=(8,), up_block_types=("UpDecoderBlock2D",), norm_num_groups=4)
    )


def whole(module, x):
    if isinstance(module, Decoder):
        return module.conv_out(module.conv_act(module.conv_norm_out(x)))
    return module(x) if isinstance(module, Upsample2D) else module(x, None)


def parts_of(module):
    if isinstance(module, Decoder):
        return OutParts(module.conv_norm_out, module.conv_act, module.conv_out)
    if isinstance(module, Upsample2D):
        return UpsampleParts(module.conv, module)
    first, second = (module.norm1, module.nonlinearity, module.conv1), (module.norm2, module.conv2)
    return ResnetParts(*first, *second, module.conv_shortcut, 1.0, partial(module, temb=None))


def chain(kinds, modules, x, strip_bytes=1):
    layer = Held(x, strip_bytes)
    for kind, module in zip(kinds, modules, strict=True):
        layer = kind(parts_of(module), layer)
        layer.learn()
    return layer


CHAINS = [
    pytest.param((Resnet,), lambda: (resnet(),), id="resnet"),
    pytest.param((Resnet,), lambda: (resnet(12),), id="shortcut"),
    pytest.param((Upsample,), lambda: (upsample(),), id="upsample"),
    pytest.param((Out,), lambda: (end(),), id="out"),
    pytest.param((Resnet, Resnet, Upsample), lambda: (resnet(), resnet(), upsample()), id="chain"),
]


@pytest.mark.parametrize(("kinds", "build"), CHAINS)
def test_any_rows_are_those_of_the_whole_map(monkeypatch, kinds, build):
    monkeypatch.setattr(strips, "LEAST_ROWS", 3)
    modules, x = build(), image(1, 8, H, W)
    layer, expected = chain(kinds, modules, x.clone()), x
    for module in modules:
        expected = whole(module, expected)
    assert layer.shape == tuple(expected.shape[1:])
    for top in range(layer.shape[1]):
        for bottom in range(top + 1, layer.shape[1] + 1):
            agree(layer.rows(top, bottom), expected[:, :, top:bottom])


def test_a_halo_of_one_row_less_shows(monkeypatch):
    """Otherwise the test above could not tell that a halo is too small."""
    monkeypatch.setattr(strips, "LEAST_ROWS", 3)
    block, x = resnet(), image(1, 8, H, W)
    layer = chain((Resnet,), (block,), x)
    agree(layer.rows(2, 4), block(x, None)[:, :, 2:4])
    monkeypatch.setattr(strips, "_grown", lambda top, bottom, H: (top, min(H, bottom + 1)))
    with pytest.raises(AssertionError):
        agree(layer.rows(2, 4), block(x, None)[:, :, 2:4])


@pytest.mark.parametrize("out_channels", [8, 12], ids=["over-its-source", "beside-it"])
@pytest.mark.parametrize("rows", [2, 3, 100])
def test_a_held_result_is_written_over_a_source_of_its_shape(monkeypatch, rows, out_channels):
    monkeypatch.setattr(strips, "LEAST_ROWS", rows)
    block, x = resnet(out_channels), image(1, 8, H, W)
    expected = block(x, None)
    held = hold(chain((Resnet,), (block,), x), is_normalized=True)
    agree(held.x, expected)
    assert (held.x is x) == (out_channels == 8)
    mean, variance = held.moments
    agree(mean.float(), expected.mean((0, 2, 3)))
    agree(variance.float(), expected.var((0, 2, 3), correction=0))


def test_strips_are_as_large_as_asked_and_nearly_equal(monkeypatch):
    monkeypatch.setattr(strips, "LEAST_ROWS", 2)
    layer = Upsample(parts_of(upsample()), Held(image(1, 8, 50, W), strip_bytes=4 * 12 * 2 * W * 30))
    assert layer.row_bytes == 4 * 12 * 2 * W
    assert list(strips._strips(layer)) == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_statistics_of_strips_are_exact_for_a_mean_far_above_the_deviation(monkeypatch):
    monkeypatch.setattr(strips, "LEAST_ROWS", 2)
    x = image(1, 8, H, W) + 1e4
    layer = Upsample(parts_of(upsample()), Held(x[:, :, : H // 2], 1))
    mean, variance = strips._moments_of(Held(x, 1).rows, layer)
    rows = x[:, :, : 2 * (H // 2)].double()
    torch.testing.assert_close(mean, rows.mean((0, 2, 3)), rtol=1e-7, atol=0)
    torch.testing.assert_close(variance, rows.var((0, 2, 3), correction=0), rtol=1e-3, atol=0)


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("kinds", "build"),
    [
        pytest.param((Resnet, Upsample), lambda: (resnet(), upsample()), id="chain"),
        pytest.param((Resnet, Out), lambda: (resnet(), end()), id="end"),
    ],
)
def test_in_kernels_the_rows_are_the_same(monkeypatch, launches, kinds, build, dtype):
    monkeypatch.setattr(strips, "LEAST_ROWS", 3)
    x = image(1, 8, H, W, dtype=dtype)
    modules, expected = build(), x.cpu().double()
    for module in modules:
        expected = whole(module.double(), expected)
    fused = [sdfastgn.optimize(module.to(x.device, dtype)) for module in modules]
    layer = chain(kinds, fused, x)
    found = torch.cat([layer.rows(top, bottom) for top, bottom in strips._strips(layer)], 2)
    agree(found.cpu().double(), expected, 2e-2 if dtype is torch.float16 else 2e-5)
    assert {name for name, _, _ in launches} >= {"statistics", "merge", "apply"}


def test_a_kernel_that_is_turned_off_in_a_call_does_not_take_the_strip_for_the_whole(monkeypatch):
    def fails(x, *args, **options):
        monkeypatch.setattr(dispatch, "why_off", "a kernel could not be compiled")
        return torch.full_like(x, torch.nan)  # what PyTorch computes from the strip alone

    norm, x = randomize(nn.GroupNorm(4, 8)), image(1, 8, H, W)
    expected = nn.functional.silu(norm(x))
    moments = torch.stack((x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0))).double()
    monkeypatch.setattr(strips, "group_norm", fails)
    with kernels(direct=True):
        found = strips._norm_act(norm, nn.SiLU(), x[:, :, 2:4], moments)
    assert dispatch.why_off is not None
    agree(found, expected[:, :, 2:4])
