"""The fused autoencoder of Allegro: whole ones, in tiles and slices, and its layers over time."""

import pytest
import torch
from diffusers import AutoencoderKLAllegro
from diffusers.models.autoencoders.autoencoder_kl_allegro import AllegroTemporalConvLayer
from torch import nn

import sdfastgn
from sdfastgn.kernels.statistics.plain import reference_channel_statistics
from sdfastgn.patches.fusions import allegro as fusion
from sdfastgn.patches.layers.statistics import add
from tests.patches import cases, samples
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    codes,
    decode_of,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    pixels,
    recorded,
    same,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {
    "down_block_types": ("AllegroDownBlock3D",) * 2,
    "up_block_types": ("AllegroUpBlock3D",) * 2,
    "block_out_channels": (8, 16),
    "temporal_downsample_blocks": (True, False),
    "temporal_upsample_blocks": (True, False),
    "temporal_compression_ratio": 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
KINDS = {"plain": {}, "down": {"down_sample": True, "stride": 3}, "up": {"up_sample": True, "stride": 3}}
each_kind = pytest.mark.parametrize("kind", KINDS)


def autoencoder():
    """One that computes tiles of 4 frames, which overlap, as upstream computes a video in no other way."""
    model = randomize(AutoencoderKLAllegro(**SIZES)).to(cases.WHERE["device"])
    model.enable_tiling()
    model.kernel, model.stride = (4, 4, 4), (2, 4, 2)
    return model


def layer(kind="plain", C=12):
    module = AllegroTemporalConvLayer(C, norm_num_groups=4, dropout=0.1, **KINDS[kind])
    return randomize(module).to(cases.WHERE["device"])


def images(*shape):
    """(N * T, C, H, W), channels-last. Frames differ, so that it matters which count twice."""
    x = cases.image(*shape)
    return x + torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the steps of layers that run fused."""
    return recorded(monkeypatch, fusion, "_convolve")


def chunked(monkeypatch, chunks):
    """Let frames have statistics in this number of chunks."""
    monkeypatch.setattr(
        fusion, "channel_statistics", lambda x: reference_channel_statistics(x, chunks).float()
    )


# --- whole models -------------------------------------------------------------------


def test_encoder_and_decoder(launches, monkeypatch):
    models = cases.twins(autoencoder())
    assert not sdfastgn.report(models[0]).skipped
    z, x = codes(1, batch=2), pixels(2, 4, batch=2)
    expected = models[1].decoder(z), models[1].encoder(x)
    # Stock's padding must not run.
    monkeypatch.setattr(AllegroTemporalConvLayer, "_pad_temporal_dim", None)
    found = models[0].decoder(z), models[0].encoder(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 1e-2
        cases.agree(ours, theirs, 5e-5)
    layers = [m for m in models[0].modules() if isinstance(m, AllegroTemporalConvLayer)]
    # One pass for each norm, and one for the frames of the residual that are repeated.
    assert [name for name, *_ in launches].count("frames") == 4 * len(layers) + 1


def test_tiles_slices_and_strided_inputs(convolutions):
    models = cases.twins(autoencoder())
    for model in models:
        model.enable_slicing()
    same(models, decode_of(codes(2, batch=2)[..., :2]))
    first = models[0].decoder.mid_block.temp_convs[0].conv1
    assert convolutions.count(first) == 2  # samples
    same(models, encode_of(pixels(2, 6, latents=(2, 2)).transpose(3, 4)))
    first = models[0].encoder.mid_block.temp_convs[0].conv1
    assert convolutions.count(first) == 2  # tiles of frames


def test_restored_bit_by_bit():
    is_restored_bit_by_bit(autoencoder(), decode_of(codes(2, latents=(2, 2))))


def test_an_unknown_layer_is_left(monkeypatch):
    samples.make_unknown(monkeypatch, "AllegroTemporalConvLayer._pad_temporal_dim")
    models = cases.twins(layer())
    assert {e.fusion for e in sdfastgn.report(models[0]).fused} == {"group_norm", "sequential"}
    cases.agree(*(model(images(4, 12, 3, 5), 2) for model in models))


# --- layers ---------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("shape", [(1, 2, 4, 4), (2, 4, 3, 1)], ids=str)
def test_a_layer(shape, kind, convolutions):
    models = cases.twins(layer(kind))
    N, T, *size = shape
    x = images(N * T, 12, *size)
    for each in (x, x.contiguous()):
        cases.agree(*(model(each, batch_size=N) for model in models))
    assert len(convolutions) == 2 * (4 if kind == "plain" else 3)


def test_a_single_frame():
    for kind in ("plain", "up"):
        cases.agree(*(model(images(2, 12, 5, 3), 2) for model in cases.twins(layer(kind))))


def test_an_odd_number_of_frames_runs_stocks_code(convolutions):
    models = cases.twins(layer("down"))
    cases.agree(*(model(images(3, 12, 3, 4), 1) for model in models))
    assert not convolutions


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_of_statistics(chunks, launches, monkeypatch):
    """Two chunks do not divide the 15 positions of a frame evenly."""
    chunked(monkeypatch, chunks)
    models = cases.twins(layer())
    cases.agree(*(model(images(6, 12, 5, 3), 2) for model in models))
    assert [name for name, *_ in launches].count("frames") == (8 if chunks == 2 else 4)


@each_kind
def test_statistics_of_the_block_before(kind, statistics_always_pay, monkeypatch):
    models = cases.twins(layer(kind))
    computed = recorded(monkeypatch, fusion, "channel_statistics")
    x = images(4, 12, 4, 2)
    fused, stock = (model(add(x, x), 2) for model in models)
    cases.agree(fused, stock)
    assert len(computed) == 3
    # The layer stores those of its own result.
    norm = sdfastgn.optimize(nn.GroupNorm(4, 12).to(x.device))
    cases.agree(norm(fused), nn.functional.group_norm(stock, 4))


PARTS = ["conv1", "conv1.0", "conv2.1", "conv2.2", "conv3.3", "conv4", "conv4.2"]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(layer())
    x = images(4, 12, 3, 4)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x, 2) for m in models)))


def drop_all(module):
    module.conv3[2].p = 1.0
    module.conv3[2].train()


CHANGES = {
    "another-norm": lambda m: m.conv1.__setitem__(0, nn.Identity()),
    "another-activation": lambda m: m.conv2.__setitem__(1, nn.Tanh()),
    "another-convolution": lambda m: m.conv3.__setitem__(3, nn.AvgPool3d((3, 1, 1), stride=1)),
    "no-bias": lambda m: setattr(m.conv4[2], "bias", None),
    "more-steps": lambda m: m.conv4.append(nn.Tanh()),
    "dropout": drop_all,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_run_stocks_code(change, convolutions):
    models = cases.twins(layer())
    for model in models:
        CHANGES[change](model)
    cases.agree(*(model(images(4, 12, 3, 4), 2) for model in models))
    assert not convolutions


@each_kind
def test_gradients_are_stocks(kind, convolutions):
    models = cases.twins(layer(kind))
    cases.same_gradients(models, images(4, 12, 3, 4).contiguous().requires_grad_(), 2)
    assert not convolutions


def test_autocast_and_a_compiler_run_stocks_code(convolutions):
    models = cases.twins(layer())
    x = images(4, 12, 3, 4)
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        cases.agree(*(model(x, 2) for model in models), bound=5e-2)
    torch._dynamo.reset()
    compiled = (torch.compile(model, backend="eager", fullgraph=True) for model in models)
    cases.agree(*(model(x, 2) for model in compiled))
    assert not convolutions


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    models = [model.to(dtype) for model in cases.twins(autoencoder())]
    # The halves, because the autoencoder cuts a video into small tiles.
    halves = (lambda z: lambda m: m.decoder(z)), (lambda x: lambda m: m.encoder(x))
    z, x = codes(3, latents=(17, 23)), pixels(2, 6, latents=(17, 23))
    is_no_less_exact(models, *zip(halves, (z, x), strict=True))
