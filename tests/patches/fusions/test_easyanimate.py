"""The fused autoencoder of EasyAnimate: whole ones, in tiles, slices and batches, and its blocks."""

import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_magvit as stock_file
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import easyanimate as fusion
from tests.patches import cases, samples, video_cases
from tests.patches.fusions.autoencoders import (
    easyanimate_autoencoder,
    easyanimate_block,
    frames_kept,
    same_in_batches,
    small,
)
from tests.patches.video_cases import (
    codes,
    decode_of,
    encode_of,
    pixels,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

each_norm = pytest.mark.parametrize("by_frames", [True, False], ids=["frames", "videos"])


def same(models, call, bound=5e-5):
    fused, stock = video_cases.same(models, call, bound)
    assert fused.stride() == stock.stride()


def causal(C_in=6, C_out=10, **options):
    return small(stock_file.EasyAnimateCausalConv3d, C_in, C_out, **options)


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the causal convolutions that run fused, but those of downsampling."""
    return recorded(monkeypatch, fusion, "_convolve")


# --- whole models -------------------------------------------------------------------


@pytest.mark.drawn(1)
@each_norm
def test_decode(by_frames, launches, monkeypatch):
    models = cases.twins(easyanimate_autoencoder(spatial_group_norm=by_frames))
    assert not sdfastgn.report(models[0]).skipped
    z = codes(3, batch=2)
    stock = models[1].decode(z).sample
    monkeypatch.setattr(stock_file.F, "pad", None)  # stock's padding must not run
    found = models[0].decode(z).sample
    cases.agree(found, stock, 5e-5)
    assert found.stride() == stock.stride()
    convs = [m for m in models[0].decoder.modules() if isinstance(m, nn.Conv3d) and m.kernel_size[0] == 3]
    names = [name for name, *_ in launches]
    # One pass for each convolution of each batch of frames, and one for frames that are repeated.
    assert names.count("frames") == 3 * len(convs) + (2 if by_frames else 0)
    assert names.count("apply") + names.count("small") == 0
    assert all(kept is None for kept in frames_kept(models[0]).values())


@each_norm
def test_encode(by_frames, launches):
    models = cases.twins(easyanimate_autoencoder(spatial_group_norm=by_frames))
    same(models, encode_of(pixels(2, 7)[..., :-1, :]))
    names = [name for name, *_ in launches]
    convs = [m for m in models[0].encoder.modules() if isinstance(m, nn.Conv3d) and m.kernel_size[0] == 3]
    assert names.count("frames") == 3 * (len(convs) - 1)  # all but the downsampling one
    assert names.count("apply") + names.count("small") == 0


def test_slices_tiles_and_strided_inputs(convolutions):
    models = cases.twins(easyanimate_autoencoder())
    for model in models:
        model.enable_slicing()
        model.enable_tiling(4, 4, None, 2, 2)
    tiles = 2 * 3  # samples and columns
    same(models, decode_of(codes(1, batch=2, latents=(3, 1)).transpose(3, 4)))
    assert convolutions.count(models[0].decoder.conv_in) == tiles
    same(models, encode_of(pixels(2, 3, latents=(3, 1)).transpose(3, 4)))


def test_an_unknown_block_is_left(monkeypatch):
    samples.make_unknown(monkeypatch, "EasyAnimateResidualBlock3D.forward")
    models = cases.twins(easyanimate_autoencoder())
    assert "easyanimate_resnet_block" not in {e.fusion for e in sdfastgn.report(models[0]).fused}
    same(models, decode_of(codes(2, latents=(1, 2))))


# --- blocks ---------------------------------------------------------------------------


@each_norm
@pytest.mark.parametrize("C_out", [6, 10])
def test_a_easyanimate_block(C_out, by_frames, convolutions):
    models = cases.twins(
        easyanimate_block(C_out=C_out, spatial_group_norm=by_frames, output_scale_factor=2.0)
    )
    for x in (video(2, 6, 4, 3, 5), video(1, 6, 4, 4, 2).contiguous()):
        same_in_batches(models, x, 1, 3)
    assert len(convolutions) == 8


@each_norm
def test_statistics_of_the_block_before(by_frames, statistics_always_pay, launches):
    models = cases.twins(
        nn.Sequential(*(easyanimate_block(6, 6, spatial_group_norm=by_frames) for _ in range(2)))
    )
    x = video(2, 6, 3, 4, 2)
    cases.agree(*(model(x) for model in models))
    names = [(name, pointers) for name, _, pointers in launches if name == "statistics"]
    alone = [p for _, p in names if p["y_ptr"] is None]
    assert (len(names), len(alone)) == (5, 3)  # norm1 of the second block takes those of the sum


CONVOLUTIONS = [{}, {"stride": 2}, {"stride": (1, 2, 2)}, {"kernel_size": (3, 5, 1)}]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options, convolutions):
    models = cases.twins(causal(**options))
    for x in (video(2, 6, 5, 5, 6), video(1, 6, 5, 5, 6).contiguous()):
        same_in_batches(models, x, 1, 2, 2)
    assert len(convolutions) == 6


@pytest.mark.parametrize(
    "options", [{"kernel_size": 1}, {"dilation": 2}, {"padding_mode": "reflect"}], ids=str
)
def test_other_convolutions_run_stocks_code(options, convolutions):
    models = cases.twins(causal(**options))
    same_in_batches(models, video(1, 6, 3, 5, 6), 1, 2)
    assert not convolutions


def test_frames_of_another_size_raise_stocks_error():
    for model in cases.twins(causal()):
        model(video(1, 6, 1, 5, 6))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            model(video(1, 6, 1, 5, 5))


@each_norm
@pytest.mark.parametrize("repeats", [False, True])
def test_upsampling(repeats, by_frames):
    options = {"temporal_upsample": repeats, "spatial_group_norm": by_frames}
    models = cases.random_twins(stock_file.EasyAnimateUpsampler3D(6, 10, **options))
    for x in (video(2, 6, 4, 3, 2), video(1, 6, 4, 2, 3).contiguous()):
        same_in_batches(models, x, 1, 1, 2)


@pytest.mark.parametrize("stride", [(1, 2, 2), (2, 2, 2)], ids=str)
def test_downsampling(stride):
    models = cases.random_twins(stock_file.EasyAnimateDownsampler3D(6, 10, stride=stride))
    for x in (video(2, 6, 5, 4, 5), video(1, 6, 5, 2, 3).contiguous()):
        same_in_batches(models, x, 1, 2, 2)


@pytest.mark.parametrize(
    "layer", ["decoder.conv_in", "decoder.conv_out", "decoder.up_blocks.0.upsampler.conv"]
)
def test_a_hook_that_comes_between_batches_of_frames(layer):
    """Stock's code then reads the frames that fused code has kept."""
    models = cases.twins(easyanimate_autoencoder())
    for model in models:
        model.decoder(codes(1))
        model.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    cases.agree(*(model.decoder(codes(1) + 1) for model in models), 5e-5)


def test_a_compiler_runs_stocks_code(convolutions):
    models = cases.twins(easyanimate_block())
    x = video(1, 6, 3, 4, 4)
    torch._dynamo.reset()
    compiled = (torch.compile(model, backend="eager", fullgraph=True) for model in models)
    cases.agree(*(model(x) for model in compiled))
    assert not convolutions
