"""The autoencoder of Flux2: whole decodes and encodes, and large images in tiles."""

import diffusers
import pytest
import torch

import sdfastgn
from tests.patches import cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    decode_of,
    encode_of,
    is_no_less_exact,
    is_restored_bit_by_bit,
    same,
)

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients"),
    pytest.mark.skipif(not hasattr(diffusers, "AutoencoderKLFlux2"), reason="a diffusers before Flux2"),
]


SIZES = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 8,  # of a tile
}


def flux2_autoencoder(**options):
    return randomize(diffusers.AutoencoderKLFlux2(**{**SIZES, **options})).to(cases.WHERE["device"])


def codes(*latents):
    return cases.noise(1, 4, *latents, mean=0.0)


def pixels(*size):
    return cases.noise(1, 3, *size, mean=0.0)


# FLUX.2's small decoder has fewer channels than its encoder.
@pytest.mark.drawn(1)
@pytest.mark.parametrize("plans", [True, False], ids=["plans", "blocks"])
@pytest.mark.parametrize("options", [{}, {"decoder_block_out_channels": (12, 8)}], ids=str)
def test_decode_and_encode(options, plans, monkeypatch):
    # Without graphs: a call on copies, before a capture, counts as a call of the plan.
    models = cases.twins(flux2_autoencoder(**options), plans=plans, cuda_graphs=False)
    assert not sdfastgn.report(models[0]).skipped
    calls = decode_of(codes(4, 6)), encode_of(pixels(8, 12))
    expected = [call(models[1]) for call in calls]
    # No activation may run in a pass of its own.
    if not plans:
        monkeypatch.setattr(torch.nn.SiLU, "forward", None)
    for call, want in zip(calls, expected, strict=True):
        cases.agree(call(models[0]), want, 5e-5)
    found = [p for p in sdfastgn.report(models[0]).plans if p.calls or p.own]
    assert [p.calls for p in found] == [1, 1] * plans
    assert not any("silu" in step for p in found for step in p.steps)


@pytest.mark.slow
def test_tiles():
    stock = flux2_autoencoder()
    whole = decode_of(codes(9, 6))(stock)
    stock.enable_tiling()
    same(cases.twins(stock, exact_tiling=False), decode_of(codes(9, 6)))
    models = cases.twins(stock)
    same(models, encode_of(pixels(18, 12)))
    cases.agree(decode_of(codes(9, 6))(models[0]), whole, 5e-5)


@pytest.mark.slow
def test_restored_bit_by_bit():
    is_restored_bit_by_bit(flux2_autoencoder(), decode_of(codes(4, 6)), encode_of(pixels(8, 12)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    models = [model.to(dtype) for model in cases.twins(flux2_autoencoder(), cuda_graphs=False)]
    is_no_less_exact(models, (decode_of, codes(17, 23)), (encode_of, pixels(34, 46)))
