"""The fused autoencoders of HunyuanVideo 1.5 and of HunyuanImage's refiner: whole ones, and their blocks."""

from functools import partial

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import hunyuan_video_15 as fusion
from sdfastgn.patches.layers import wrapped_conv
from tests.patches import cases, video_cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    adapt,
    codes,
    decode_of,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {
    "latent_channels": 4,
    "block_out_channels": (16, 16, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}
FILES = {"video": fusion._video, "refiner": fusion._refiner}
PREFIXES = {"video": "HunyuanVideo15", "refiner": "HunyuanImageRefiner"}
each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.skipif(file is None, reason="a diffusers before this model"))
        for name, file in FILES.items()
    ],
)


def class_of(family, name):
    if name.endswith("sample") and family == "refiner":
        name += "DCAE"
    return getattr(FILES[family], PREFIXES[family] + name)


def autoencoder(family):
    return randomize(getattr(FILES[family], f"AutoencoderKL{PREFIXES[family]}")(**SIZES))


def twins(family, dtype=torch.float32):
    """(fused, stock). There are no graphs, because the rehearsal of a graph launches kernels, too."""
    return cases.twins(autoencoder(family).to(cases.WHERE["device"], dtype), cuda_graphs=False)


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

    monkeypatch.setattr(FILES[family].F, "pad", refuse)
    for name, method in (
        ("AttnBlock", "prepare_causal_attention_mask"),
        ("Upsample", "_dcae_upsample_rearrange"),
        ("Downsample", "_dcae_downsample_rearrange"),
    ):
        if hasattr(class_of(family, name), method):
            monkeypatch.setattr(class_of(family, name), method, refuse)


# --- whole models -------------------------------------------------------------------


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
    convs = [m for m in models[0].modules() if isinstance(m, class_of(family, "CausalConv3d"))]
    assert names.count("frames") == len(convs)
    # The only norms with a pass of their own are attention's.
    assert names.count("channel_norm") == 2


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


@each_family
def test_restored_bit_by_bit(family):
    stock = autoencoder(family).to(cases.WHERE["device"])
    is_restored_bit_by_bit(stock, decode_of(codes(2, latents=(1, 2))), encode_of(pixels(3, latents=(1, 2))))


HOOKED = ["decoder.mid_block.resnets.0.conv1", "decoder.mid_block.attentions.0.to_q", "decoder.conv_out",
          "decoder.mid_block.attentions.0.norm", "decoder.up_blocks.1.upsamplers.0.conv.conv",
          "decoder.up_blocks.1.upsamplers.0"]  # fmt: skip


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
    model = autoencoder(family)
    model.decoder.conv_in.forward = lambda x: x
    report = sdfastgn.report(sdfastgn.optimize(model))
    assert not report.fused
    assert report.channels_last_weights == 0


# --- blocks ---------------------------------------------------------------------------


def block(family, C_in=6, C_out=10):
    return randomize(class_of(family, "ResnetBlock")(C_in, C_out)).to(cases.WHERE["device"])


# Channels of input and output, and whether frames are resampled too.
RESAMPLED = [(16, 8, True), (8, 8, True), (8, 16, True), (8, 8, False), (16, 8, False), (16, 32, False)]


@each_family
@pytest.mark.parametrize(("C_in", "C_out", "temporal"), RESAMPLED, ids=str)
@pytest.mark.parametrize("kind", ["Upsample", "Downsample"])
@pytest.mark.parametrize("frames", [1, 3])
def test_resampling(family, kind, C_in, C_out, temporal, frames, monkeypatch):
    module = randomize(class_of(family, kind)(C_in, C_out, temporal)).to(cases.WHERE["device"])
    models = cases.twins(module)
    x = video(2, C_in, frames, 4, 6)
    expected = models[1](x)
    forbid_stock(family, monkeypatch)
    cases.agree(models[0](x), expected)
    cases.agree(models[0](x.contiguous()), expected)


@each_family
@pytest.mark.parametrize("frames", [1, 4])
def test_attention(family, frames):
    models = cases.twins(randomize(class_of(family, "AttnBlock")(12)).to(cases.WHERE["device"]))
    cases.agree(*(model(video(1, 12, frames, 2, 3)) for model in models))


PARTS = ["norm1", "norm2", "nonlinearity", "conv1", "conv1.conv", "conv2", "conv_shortcut"]


@each_family
@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(family, name):
    models = cases.twins(block(family))
    x = video(1, 6, 3, 3, 4)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x) for m in models)))


CHANGES = {
    "a-replaced-conv-forward": lambda m: setattr(
        m.conv1.conv, "_conv_forward", lambda x, w, b: nn.functional.conv3d(x, 2 * w, b)
    ),
    "another-norm": lambda m: setattr(m, "norm1", nn.Identity()),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "another-mode": lambda m: setattr(m.conv2, "pad_mode", "reflect"),
    "another-shortcut": lambda m: setattr(m, "conv_shortcut", nn.Conv3d(6, 10, (1, 3, 3), padding=(0, 1, 1))),
}


@each_family
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(family, change):
    torch.manual_seed(0)
    fused, stock = cases.twins(block(family))
    change(fused)
    fused.to(cases.WHERE["device"])
    change(stock)
    stock.to(cases.WHERE["device"]).load_state_dict(fused.state_dict())
    cases.agree(*(model(video(1, 6, 3, 3, 4)) for model in (fused, stock)))


@each_family
def test_an_activation_without_a_fused_form_is_skipped(family):
    block = class_of(family, "ResnetBlock")(8)
    block.nonlinearity = nn.Tanh()
    model = sdfastgn.optimize(block)
    (skipped,) = sdfastgn.report(model).skipped
    assert skipped.reason == "activation Tanh has no fused form"


@each_family
def test_gradients_are_stocks(family, convolutions):
    cases.same_gradients(cases.twins(block(family)), video(1, 6, 2, 3, 4))
    assert not convolutions


@each_family
def test_autocast_runs_stocks_code(family, convolutions):
    models = cases.twins(block(family))
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(video(1, 6, 2, 3, 4)) for model in models]
    assert not convolutions
    cases.agree(*found, bound=3e-2)


@each_family
def test_under_a_compiler_the_graph_is_diffusers_own(family):
    cases.compiles_to_stocks_graph(cases.twins(block(family)), lambda m: m(video(1, 6, 2, 3, 4)))


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@each_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(family, dtype):
    models = twins(family, dtype)
    is_no_less_exact(
        models, (decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(9, latents=(17, 23)))
    )
