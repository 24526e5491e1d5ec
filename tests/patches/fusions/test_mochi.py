"""The fused autoencoder of Mochi: whole ones, in tiles and slices, and its blocks."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLMochi
from diffusers.models.autoencoders import autoencoder_kl_cogvideox, autoencoder_kl_mochi
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import mochi as fusion
from tests.patches import cases, samples, video_cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    codes,
    decode_of,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    same,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {
    "encoder_block_out_channels": (32,) * 3,
    "decoder_block_out_channels": (32,) * 3,
    "layers_per_block": (1,) * 4,
    "temporal_expansions": (2, 3),
    "spatial_expansions": (2, 2),
    "add_attention_block": (False, True, True, True),
    "latent_channels": 4,
}


def autoencoder():
    model = randomize(AutoencoderKLMochi(**SIZES))
    model.spatial_compression_ratio = 4
    return model


def twins():
    """(fused, stock)"""
    return cases.twins(autoencoder().to(cases.WHERE["device"]))


pixels = partial(video_cases.pixels, 4)


def block(C=32):
    return randomize(autoencoder_kl_mochi.MochiResnetBlock3D(C)).to(cases.WHERE["device"])


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the convolutions of blocks that run fused."""
    return recorded(monkeypatch, fusion, "convolve")


# --- whole models -------------------------------------------------------------------


def test_decode(launches, monkeypatch):
    models = twins()
    assert not sdfastgn.report(models[0]).skipped
    z = codes(2)
    expected = models[1].decode(z).sample
    # Stock's padding must not run.
    monkeypatch.setattr(autoencoder_kl_cogvideox.F, "pad", None)
    found = models[0].decode(z).sample
    cases.agree(found, expected, 5e-5)
    assert found.stride() == expected.stride()
    names = [name for name, *_ in launches]
    blocks = [
        m for m in models[0].decoder.modules() if isinstance(m, autoencoder_kl_mochi.MochiResnetBlock3D)
    ]
    assert names.count("frames") == 2 * len(blocks)
    assert names.count("apply") + names.count("small") == 0


def test_encode(monkeypatch):
    models = twins()
    x = pixels(6)
    expected = encode_of(x)(models[1])
    # No activation may run in a pass of its own.
    monkeypatch.setattr(nn.SiLU, "forward", None)
    cases.agree(encode_of(x)(models[0]), expected, 5e-5)


@pytest.mark.parametrize("layer", ["proj_in", "block_out", "norm_out", "nonlinearity", "proj_out"])
def test_a_hook_within_an_encoder(layer):
    models = twins()
    for model in models:
        part = model.encoder.get_submodule(layer)
        part.register_forward_hook(lambda m, args, y: (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y)
    same(models, encode_of(pixels(6)))


def test_slices_tiles_and_strided_inputs():
    models = twins()
    for model in models:
        model.enable_slicing()
    # The last norms have two values a group.
    same(models, encode_of(pixels(6, batch=2, latents=(1, 2)).transpose(3, 4)), 5e-4)
    for model in models:
        model.enable_tiling(8, 8, 8, 8)
    same(models, decode_of(codes(2, latents=(3, 2)).transpose(3, 4)))


def test_restored_bit_by_bit():
    stock = autoencoder().to(cases.WHERE["device"])
    is_restored_bit_by_bit(stock, decode_of(codes(2, latents=(1, 2))), encode_of(pixels(6, latents=(1, 2))))


def test_an_unknown_block_is_left(monkeypatch):
    samples.make_unknown(monkeypatch, "MochiResnetBlock3D.forward")
    models = twins()
    assert "mochi_resnet_block" not in {e.fusion for e in sdfastgn.report(models[0]).fused}
    same(models, decode_of(codes(1, latents=(1, 2))))


# --- blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 64, 1, 3, 4), (2, 32, 3, 2, 5)], ids=str)
def test_a_block(shape, convolutions):
    models = cases.twins(block(shape[1]))
    for x in (video(*shape), video(*shape).contiguous()):
        cases.agree(*(model(x)[0] for model in models))
    assert len(convolutions) == 4
    assert models[0](video(*shape))[1] == {"conv1": None, "conv2": None}


def test_a_norm():
    models = cases.random_twins(autoencoder_kl_mochi.MochiChunkedGroupNorm3D(64, chunk_size=2))
    cases.agree(*(model(video(2, 64, 3, 4, 5)) for model in models))


@pytest.mark.parametrize("times", [(1, 2), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_upsampling_block(has_bias, times):
    sizes = {"temporal_expansion": times[0], "spatial_expansion": times[1]}
    module = autoencoder_kl_mochi.MochiUpBlock3D(32, 5, **sizes)
    if not has_bias:
        module.proj.bias = None
    models = cases.random_twins(module)
    for x in (video(2, 32, 3, 3, 4), video(1, 32, 2, 3, 4).contiguous()):
        cases.agree(*(model(x)[0] for model in models))


PARTS = ["norm1", "norm1.norm_layer", "nonlinearity", "conv1", "conv1.conv", "conv2"]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(block())
    x = video(1, 32, 2, 3, 4)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x)[0] for m in models)))


CHANGES = {
    "another-norm": lambda m: setattr(m.norm1, "norm_layer", nn.Identity()),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "another-mode": lambda m: setattr(m.conv2, "pad_mode", "first"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(change):
    models = cases.twins(block())
    for model in models:
        change(model)
        if model.conv2.pad_mode == "first":
            model.conv2.conv.padding = (0, 1, 1)
    cases.agree(*(model(video(1, 32, 2, 3, 4))[0] for model in models))


def test_a_hook_on_a_projection_sees_what_it_saw():
    models = cases.random_twins(autoencoder_kl_mochi.MochiUpBlock3D(32, 5))
    for model in models:
        model.proj.register_forward_hook(lambda m, args, y: 2 * y)
    cases.agree(*(model(video(1, 32, 2, 3, 4))[0] for model in models))


def test_gradients_are_stocks(convolutions):
    class First(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[0]

    models = [First(model) for model in cases.twins(block())]
    cases.same_gradients(models, video(1, 32, 2, 3, 4).requires_grad_())
    assert not convolutions


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    models = [model.to(dtype) for model in twins()]
    is_no_less_exact(
        models, (decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(12, latents=(17, 23)))
    )
