"""The fused autoencoder of HunyuanImage: whole ones, and their blocks."""

import pytest
import torch

import sdfastgn
from sdfastgn.patches.fusions import hunyuan_image as fusion
from tests.kernels.samples import kernels
from tests.patches import cases
from tests.patches.samples import randomize, snapshot
from tests.patches.video_cases import decode_of, encode_of, is_no_less_exact

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients"),
    pytest.mark.skipif(fusion._image is None, reason="a diffusers before HunyuanImage"),
]

SIZES = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 32, 64),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "sample_size": 32,
}


def autoencoder():
    return randomize(fusion._image.AutoencoderKLHunyuanImage(**SIZES))


def twins(dtype=torch.float32):
    """(fused, stock)"""
    return cases.twins(autoencoder().to(cases.WHERE["device"], dtype))


def codes(batch=1, latents=(2, 3)):
    return cases.noise(batch, 4, *latents, mean=0.0)


def pixels(batch=1, latents=(2, 3)):
    return cases.noise(batch, 3, *(4 * size for size in latents), mean=0.0)


def same(models, call, bound=1e-4):
    fused, stock = (call(model) for model in models)
    assert stock.std() > 1e-2
    cases.agree(fused, stock, bound)


def test_decode_and_encode(monkeypatch):
    models = twins()
    assert not sdfastgn.report(models[0]).skipped
    calls = decode_of(codes(2)), encode_of(pixels(2, (1, 3)))
    expected = [call(models[1]) for call in calls]

    def refuse(*args, **options):
        raise AssertionError("stock's code ran")

    # Every norm but attention's applies SiLU itself.
    monkeypatch.setattr(torch.nn.SiLU, "forward", refuse)
    monkeypatch.setattr(fusion._image.HunyuanImageUpsample, "forward", refuse)
    monkeypatch.setattr(fusion._image.HunyuanImageDownsample, "forward", refuse)
    for call, want in zip(calls, expected, strict=True):
        cases.agree(call(models[0]), want, 1e-4)


def test_slices_and_tiles():
    """Of latents: upstream cannot encode in tiles."""
    models = twins()
    for model in models:
        model.enable_slicing()
        model.enable_tiling(8, 0.5)
    same(models, decode_of(codes(2, latents=(1, 1))))
    same(models, decode_of(codes(latents=(1, 3))))


def test_strided_input():
    models = twins()
    same(models, decode_of(codes(latents=(4, 4))[..., ::2, 1::2]))
    same(models, encode_of(pixels(latents=(2, 1)).mT))


def test_restored_bit_by_bit():
    stock = autoencoder().to(cases.WHERE["device"])
    calls = decode_of(codes(latents=(1, 2))), encode_of(pixels(latents=(1, 2)))
    expected = [call(stock) for call in calls]
    before = snapshot(stock)
    sdfastgn.optimize(stock)
    for call in calls:
        call(stock)
    sdfastgn.restore(stock)
    assert snapshot(stock) == before
    with kernels():
        for call, want in zip(calls, expected, strict=True):
            assert torch.equal(call(stock), want)


HOOKED = ["mid_block.resnets.0.conv1", "mid_block.attentions.0.to_q", "mid_block.attentions.0.norm",
          "conv_out", "norm_out", "up_blocks.2", "up_blocks.2.conv"]  # fmt: skip


@pytest.mark.parametrize("layer", HOOKED)
def test_a_hook_within_a_whole_model(layer):
    models = twins()
    for model in models:
        model.decoder.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, decode_of(codes(latents=(1, 2))))


def image(*shape):
    return cases.noise(*shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("C_in", "C_out"), [(16, 8), (8, 8), (8, 16)], ids=str)
@pytest.mark.parametrize("name", ["HunyuanImageUpsample", "HunyuanImageDownsample"])
def test_resampling(name, C_in, C_out):
    models = cases.twins(randomize(getattr(fusion._image, name)(C_in, C_out)).to(cases.WHERE["device"]))
    x = image(2, C_in, 4, 6)
    cases.agree(*(model(x) for model in models))
    cases.agree(*(model(x.contiguous()) for model in models))


def test_gradients_are_stocks():
    models = [model.encoder for model in twins()]
    cases.same_gradients(models, pixels(latents=(1, 2)), bound=1e-4)


def test_autocast():
    models = twins()
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        same(models, decode_of(codes(latents=(1, 2))), 6e-2)


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    z, x = codes(latents=(17, 23)), pixels(latents=(17, 23))
    is_no_less_exact(twins(dtype), (decode_of, z), (encode_of, x))
