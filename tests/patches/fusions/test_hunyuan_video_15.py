"""The fused autoencoders of HunyuanVideo 1.5 and of HunyuanImage's refiner: whole ones, and their blocks."""

from functools import partial

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import hunyuan_video_15 as fusion
from sdfastgn.patches.layers import wrapped_conv
from tests.patches import cases, video_cases
from tests.patches.fusions.autoencoders import HUNYUAN_FILES, hunyuan_autoencoder, hunyuan_class, small
from tests.patches.video_cases import (
    adapt,
    codes,
    decode_of,
    encode_of,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.skipif(file is None, reason="a diffusers before this model"))
        for name, file in HUNYUAN_FILES.items()
    ],
)


def twins(family):
    """(fused, stock). There are no graphs, because the rehearsal of a graph launches kernels, too."""
    return cases.twins(hunyuan_autoencoder(family), cuda_graphs=False)


pixels = partial(video_cases.pixels, 4)


def same(models, call, bound=5e-5):
    fused, stock = (call(model) for model in models)
    assert stock.std() > 1e-2
    assert fused.stride() == stock.stride()
    cases.agree(fused, stock, bound)


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the convolutions that run fused."""
    found = recorded(monkeypatch, fusion, "convolve")
    return recorded(monkeypatch, wrapped_conv, "convolve", found)


def forbid_stock(family, monkeypatch):
    """From now on stock's padding, masks and rearrangements must not run."""

    def refuse(*args, **options):
        raise AssertionError("stock's code ran")

    monkeypatch.setattr(HUNYUAN_FILES[family].F, "pad", refuse)
    for name, method in (
        ("AttnBlock", "prepare_causal_attention_mask"),
        ("Upsample", "_dcae_upsample_rearrange"),
        ("Downsample", "_dcae_downsample_rearrange"),
    ):
        if hasattr(hunyuan_class(family, name), method):
            monkeypatch.setattr(hunyuan_class(family, name), method, refuse)


# --- whole models -------------------------------------------------------------------


@pytest.mark.drawn(2)
@each_family
@pytest.mark.parametrize("frames", [1, 3])
def test_decode_and_encode(family, frames, launches, monkeypatch):
    models = twins(family)
    assert not sdfastgn.report(models[0]).skipped
    calls = decode_of(codes(frames)), encode_of(pixels(2 * frames - 1))
    expected = [call(models[1]) for call in calls]
    forbid_stock(family, monkeypatch)
    for call, want in zip(calls, expected, strict=True):
        found = call(models[0])
        cases.agree(found, want, 5e-5)
        assert found.stride() == want.stride()
    names = [name for name, *_ in launches]
    convs = [m for m in models[0].modules() if isinstance(m, hunyuan_class(family, "CausalConv3d"))]
    assert names.count("frames") == len(convs)
    # The only norms with a pass of their own are attention's.
    assert names.count("channel_norm") == 2


@pytest.mark.drawn(1)
@each_family
def test_a_batch_of_odd_images(family):
    fused, stock = twins(family)
    if family == "video":  # docs/fusions.md says so
        for call in (decode_of(codes(2, batch=2)), encode_of(pixels(3, batch=2))):
            with pytest.raises(RuntimeError, match=r"broadcast shape|expanded size"):
                call(stock)
            call(fused)
    stock.enable_slicing()  # then each call has one video
    same((fused, stock), decode_of(codes(2, batch=2, latents=(3, 1))))
    same((fused, stock), encode_of(pixels(3, batch=2, latents=(1, 3))))


@pytest.mark.drawn(1)
@each_family
def test_slices_and_tiles(family, convolutions):
    models = twins(family)
    for model in models:
        model.enable_slicing()
        model.enable_tiling(8, 8, 2, 2, 0.5)

    def firsts():
        return sum(conv is models[0].decoder.conv_in for conv in convolutions)

    same(models, decode_of(codes(2, batch=2, latents=(1, 2))))
    assert firsts() == 2
    same(models, decode_of(codes(2, latents=(3, 2))))
    assert firsts() == 2 + 3 * 2
    if family == "video":  # upstream's tiles of the refiner's videos are as narrow as latents
        same(models, encode_of(pixels(3, latents=(3, 2))))


@each_family
def test_strided_input(family):
    models = twins(family)
    z = codes(6, latents=(4, 4))[:, :, ::2, ::2, 1::2]
    same(models, decode_of(z))
    same(models, encode_of(pixels(3, latents=(2, 1)).mT))


@each_family
def test_calls_leave_nothing_for_the_next_one(family):
    fused, _ = twins(family)
    z = codes(2, latents=(1, 2))
    first = fused.decode(z).sample
    kept = first.clone()
    fused.decode(codes(3, latents=(1, 2)) + 1)
    first.add_(1)  # tiles are blended in place
    assert torch.equal(fused.decode(z).sample, kept)


HOOKED = ["decoder.mid_block.resnets.0.conv1", "decoder.mid_block.attentions.0.to_q", "decoder.conv_out",
          "decoder.mid_block.attentions.0.norm", "decoder.up_blocks.1.upsamplers.0.conv.conv",
          "decoder.up_blocks.1.upsamplers.0"]  # fmt: skip


@pytest.mark.drawn(4)
@each_family
@pytest.mark.parametrize("layer", HOOKED)
def test_a_hook_within_a_whole_model(family, layer):
    models = twins(family)
    for model in models:
        model.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    video_cases.same(models, decode_of(codes(2, latents=(1, 2))))  # the result's layout is that of the hook's


@each_family
@pytest.mark.parametrize("layer", ["conv_out.conv", "mid_block.attentions.0.to_q"])
def test_a_lora_within_a_model(family, layer):
    models = twins(family)
    for model in models:
        adapt(model, f"decoder.{layer}", f"encoder.{layer}")
    video_cases.same(models, decode_of(codes(2, latents=(1, 2))))
    video_cases.same(models, encode_of(pixels(3, latents=(1, 2))))


@each_family
def test_a_convolution_that_cannot_be_fused_leaves_the_model(family):
    model = hunyuan_autoencoder(family)
    model.decoder.conv_in.forward = lambda x: x
    report = sdfastgn.report(sdfastgn.optimize(model))
    assert not report.fused
    assert report.channels_last_weights == 0


# --- blocks ---------------------------------------------------------------------------


# Channels of input and output, and whether frames are resampled too.
RESAMPLED = [(16, 8, True), (8, 8, True), (8, 16, True), (8, 8, False), (16, 8, False), (16, 32, False)]


@each_family
@pytest.mark.parametrize(("C_in", "C_out", "temporal"), RESAMPLED, ids=str)
@pytest.mark.parametrize("kind", ["Upsample", "Downsample"])
@pytest.mark.parametrize("frames", [1, 3])
def test_resampling(family, kind, C_in, C_out, temporal, frames, monkeypatch):
    module = small(hunyuan_class(family, kind), C_in, C_out, temporal)
    models = cases.twins(module)
    x = video(2, C_in, frames, 4, 6)
    expected = models[1](x)
    forbid_stock(family, monkeypatch)
    cases.agree(models[0](x), expected)
    cases.agree(models[0](x.contiguous()), expected)


@each_family
@pytest.mark.parametrize("frames", [1, 4])
def test_attention(family, frames):
    models = cases.twins(small(hunyuan_class(family, "AttnBlock"), 12))
    cases.agree(*(model(video(1, 12, frames, 2, 3)) for model in models))


@each_family
def test_an_activation_without_a_fused_form_is_skipped(family):
    block = hunyuan_class(family, "ResnetBlock")(8)
    block.nonlinearity = nn.Tanh()
    model = sdfastgn.optimize(block)
    (skipped,) = sdfastgn.report(model).skipped
    assert skipped.reason == "activation Tanh has no fused form"
