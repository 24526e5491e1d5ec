"""The fused autoencoder of Cosmos: whole ones, and their blocks."""

from functools import partial

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import cosmos as fusion
from tests.patches import cases, video_cases
from tests.patches.fusions.autoencoders import cosmos_autoencoder, mode_of, small
from tests.patches.video_cases import codes, decode_of, video

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

stock_file = fusion.cosmos
# Compression of space and of time; with (8, 4) a level resamples images alone.
RATIOS = [(8, 8), (8, 4)]


def twins(*args, **options):
    """(fused, stock)"""
    return cases.twins(cosmos_autoencoder(*args, **options))


pixels = partial(video_cases.pixels, 8)


def same(models, call, bound=1e-4):
    fused, stock = (call(model) for model in models)
    assert stock.std() > 1e-2
    cases.agree(fused, stock, bound)


@pytest.fixture
def no_stock_code(monkeypatch):
    """Call it, and stock's padding, repetitions and wavelets must not run from then on."""

    def refuse(*args, **options):
        raise AssertionError("stock's code ran")

    def forbid():
        monkeypatch.setattr(torch.Tensor, "repeat_interleave", refuse)
        for name in ("conv_transpose3d", "avg_pool3d"):
            monkeypatch.setattr(nn.functional, name, refuse)
        for cls in (stock_file.CosmosCausalConv3d, stock_file.CosmosPatchEmbed3d):
            monkeypatch.setattr(cls, "forward", refuse)

    return forbid


@pytest.mark.parametrize("ratios", RATIOS, ids=str)
@pytest.mark.parametrize("frames", [1, 2])
def test_decode_and_encode(ratios, frames, no_stock_code):
    models = twins(*ratios)
    assert not sdfastgn.report(models[0]).skipped
    calls = decode_of(codes(frames)), mode_of(pixels(ratios[1] * (frames - 1) + 1))
    expected = [call(models[1]) for call in calls]
    no_stock_code()
    for call, want in zip(calls, expected, strict=True):
        cases.agree(call(models[0]), want, 1e-4)


def test_patches_without_wavelets():
    models = twins(patch_type="rearrange")
    same(models, decode_of(codes(2)))
    same(models, mode_of(pixels(9)))


def test_a_batch_in_slices():
    models = twins()
    same(models, decode_of(codes(2, batch=2, latents=(1, 2))))
    same(models, mode_of(pixels(9, batch=2, latents=(1, 2))))
    for model in models:
        model.enable_slicing()
    same(models, decode_of(codes(2, batch=2, latents=(1, 2))))


def test_strided_input():
    models = twins()
    same(models, decode_of(codes(4, latents=(4, 6))[:, :, ::2, ::2, 1::2]))
    same(models, mode_of(pixels(9, latents=(2, 1)).mT))


HOOKED = ["conv_in", "mid_block.resnets.0.conv1.conv_t", "mid_block.attentions.0.to_q",
          "mid_block.resnets.0.norm1", "mid_block.attentions.0.to_out.0", "conv_out.conv_s", "norm_out",
          "up_blocks.1.upsamplers.0.conv2", "unpatch_embed"]  # fmt: skip


@pytest.mark.parametrize("layer", HOOKED)
def test_a_hook_within_a_decoder(layer):
    models = twins()
    for model in models:
        model.decoder.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, decode_of(codes(2, latents=(1, 1))))


# --- blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("frames", [1, 4, 5])
@pytest.mark.parametrize("name", ["CosmosUpsample3d", "CosmosDownsample3d"])
def test_resampling(name, frames, cell):
    models = cases.twins(small(getattr(stock_file, name), 6, *cell))
    x = video(2, 6, frames, 4, 6)
    cases.agree(*(model(x) for model in models))
    cases.agree(*(model(x.contiguous()) for model in models))


@pytest.mark.parametrize("p", [2, 4])
def test_wavelets(p):
    for cls, x in (("PatchEmbed3d", pixels(2 * p + 1)), ("Unpatcher3d", video(2, 3 * p**3, 3, 2, 4))):
        models = cases.twins(getattr(stock_file, f"Cosmos{cls}")(p).to(cases.WHERE["device"]))
        cases.agree(*(model(x) for model in models))
        assert type(models[0]) is getattr(fusion, f"FusedCosmos{cls}")
