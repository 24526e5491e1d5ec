"""ComfyUI's tiled decode with sdfastgn: the image of an untiled decode, without tiles."""

import copy

import pytest
import torch
from torch import nn

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import nodes  # noqa: E402
from comfy import model_management  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine  # noqa: E402
from comfy.ldm.modules.diffusionmodules import model as comfy_model  # noqa: E402

from scripts.publish import comfyui_models  # noqa: E402
from sdfastgn.patches.comfyui import fused_vae, tiled_decode  # noqa: E402
from sdfastgn.patches.comfyui.inject import eject, inject  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from sdfastgn.patches.fusions import strip_chain  # noqa: E402
from tests.patches import cases  # noqa: E402
from tests.patches.cases import agree  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

TILE = 8  # latents along a side of a tile


def load():
    vae = comfy_models.load_vae()
    vae.upscale_ratio = 2  # ComfyUI takes every VAE with a given configuration for one with a ratio of 8
    return vae


@pytest.fixture(scope="module")
def stock():
    return load()


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    model_management.unload_all_models()


def latents(N=1, H=15, W=19):
    """Latents whose tiles have other statistics than the whole."""
    z = torch.randn(N, 4, H, W, generator=torch.Generator().manual_seed(0))
    return z * torch.linspace(0.1, 2, W)


@torch.inference_mode()
def tiled(vae, z):
    """The images of the node VAE Decode (Tiled), (N, H, W, 3)."""
    size = TILE * vae.spacial_compression_decode()
    return nodes.VAEDecodeTiled().decode(vae, {"samples": z}, size, size // 4)[0]


def whole(vae, z):
    return comfy_models.image_of(vae, z)


def same_as_stocks_tiles(vae, stock, z):
    agree(tiled(vae, z), tiled(stock, z))
    assert (tiled(stock, z) - whole(stock, z)).abs().max() > 0.02


@pytest.mark.parametrize("size", [(1, 15, 19), (2, 9, 5), (1, 1, 17), (1, 17, 1)])
def test_the_image_is_that_of_an_untiled_decode(stock, held, size):
    z = latents(*size)
    expected, vae = whole(stock, z), optimize_vae(stock)
    found = tiled(vae, z)
    agree(found, expected)
    assert held
    assert (found.dtype, found.device) == (torch.float32, vae.output_device)
    assert (tiled(stock, z) - expected).abs().max() > 0.02


def test_the_other_branch_and_ejection_give_stocks_tiles(stock, held):
    z, vae = latents(), optimize_vae(stock)
    expected = tiled(stock, z)
    for _ in range(2):
        agree(tiled(vae, z), whole(stock, z))
        assert torch.equal(tiled(stock, z), expected)
    assert type(stock) is comfy.sd.VAE
    vae.patcher.detach()
    with torch.inference_mode():
        assert torch.equal(vae.decode_tiled_(z, TILE, TILE, TILE // 4).movedim(1, -1), expected)


def test_a_decode_without_memory_goes_on_in_strips(stock, held, monkeypatch):
    z, vae, calls = latents(), optimize_vae(stock), []
    expected = whole(stock, z)
    decode = AutoencoderKL.decode

    def without_memory(self, z):
        calls.append(z.shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return decode(self, z)

    monkeypatch.setattr(tiled_decode.FusedAutoencoderKL, "decode", without_memory, raising=False)
    agree(whole(vae, z), expected)
    assert calls == [z.shape, z.shape]
    assert held


def test_strips_without_memory_go_on_in_stocks_tiles(stock, held, monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(strip_chain, "write", fails)
    same_as_stocks_tiles(optimize_vae(stock), stock, latents())


def test_what_may_be_held_grows_with_the_largest_tile(stock, monkeypatch):
    found = []

    def held_bytes(parts, x, tile):
        found.append(tile)
        return 2**30

    monkeypatch.setattr(strip_chain, "_held_bytes", held_bytes)
    vae, z = optimize_vae(stock), latents(1, 10, 20)
    with torch.inference_mode():
        vae.decode_tiled(z, tile_x=8, tile_y=8, overlap=2)
        vae.decode_tiled(z, tile_x=4, tile_y=12, overlap=1)
    assert found == [8 * 8, 8 * 6]


@pytest.mark.parametrize("N", [1, 2])
def test_progress(stock, monkeypatch, N):
    """Each layer and the image itself are a step. ComfyUI checks for interrupts when the bar moves."""
    found = []
    monkeypatch.setattr(
        comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *args, **options: found.append((value, total))
    )
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0, raising=False)
    tiled(optimize_vae(stock), latents(N))
    assert found == [(i + 1, 6 * N) for i in range(6 * N)]


def test_an_interrupt_ends_the_decode(stock, monkeypatch):
    def hook(*args, **options):
        model_management.throw_exception_if_processing_interrupted()

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    vae, z = optimize_vae(stock), latents()
    whole(vae, z)
    model_management.interrupt_current_processing()
    with pytest.raises(model_management.InterruptProcessingException):
        tiled(vae, z)
    agree(whole(vae, z), whole(stock, z))


def autoencoder_kl(sizes):
    return AutoencoderKL(ddconfig=sizes, embed_dim=sizes["z_channels"])


def autoencoding_engine(sizes):
    modules, name = comfy_model.__name__, "comfy.ldm.models.autoencoder.EmptyRegularizer"
    return AutoencodingEngine(
        encoder_config={"target": f"{modules}.Encoder", "params": sizes},
        decoder_config={"target": f"{modules}.Decoder", "params": sizes},
        regularizer_config={"target": name},
    )


def flux_2(sizes):
    """Its latents have half of the decoder's size, and four times as many channels."""
    return autoencoder_kl({**sizes, "z_channels": 1, "batch_norm_latent": True})


def vae_of(model):
    """A VAE around ``model``, which ComfyUI does not load, with the pixels as ``model`` has them."""
    vae = optimize_vae(load())
    weight = model.decoder.conv_in.weight
    vae.first_stage_model, vae.device, vae.vae_dtype = model, weight.device, weight.dtype
    vae.process_output = lambda image: image
    return vae


@pytest.mark.usefixtures("on_each_device", "statistics_always_pay")
@pytest.mark.parametrize("build", [autoencoder_kl, autoencoding_engine, flux_2])
@torch.inference_mode()
def test_in_kernels_the_image_is_the_same(held, launches, build):
    model = comfy_models.with_random_parameters(build(comfy_models.VAE))
    z = latents(1, 7, 6).to(cases.WHERE["device"])
    expected, vae = model.decode(z), vae_of(model)
    inject(model)
    agree(vae.decode_tiled_(z, 4, 4, 1).to(z.device), expected, 2e-4)
    assert held
    assert {name for name, *_ in launches} >= {"statistics", "merge", "apply"}


# ---- when stock's tiles are decoded


def _tanh(vae):
    vae.first_stage_model.decoder.tanh_out = True


def _attention(vae):
    for up in vae.first_stage_model.decoder.up:
        up.attn.extend(nn.Identity() for _ in up.block)


def _other_border(vae):
    vae.first_stage_model.decoder.conv_out.padding_mode = "circular"


def _other_norm(vae):
    vae.first_stage_model.decoder.norm_out = nn.Identity()


def _cast(vae):
    vae.first_stage_model.decoder.up[0].block[0].conv1.comfy_cast_weights = True


def _other_decode(vae):
    vae.first_stage_model.decode = vae.first_stage_model.decode


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_tanh, "its decoder ends with tanh"),
        (_attention, "its decoder has attention after the middle block"),
        (_other_border, "its decoder has a convolution that is no 3 x 3 nn.Conv2d with a border of zeros"),
        (_other_norm, "its decoder has a norm that is no nn.GroupNorm"),
        (_cast, "it casts its weights at each call"),
        (_other_decode, "other code replaced this instance's decode"),
    ],
)
def test_other_decoders_are_left_alone(held, change, reason):
    stock = load()
    change(stock)
    vae, z = optimize_vae(stock), latents()
    agree(tiled(vae, z), tiled(stock, z))
    assert not held
    inject(vae.first_stage_model)
    assert parts_of(vae.first_stage_model)[1][reason]["tiled decode"] == 1


@pytest.mark.parametrize("change", [_other_border, _other_decode])
def test_a_decoder_that_changes_after_it_was_fused_is_left_alone(held, change):
    vae, z = optimize_vae(load()), latents()
    agree(tiled(vae, z), whole(vae, z))
    held.clear()
    change(vae)
    tiled(vae, z)
    assert not held


def test_a_hook_in_the_decoder_sees_stocks_tiles(stock, held):
    vae, z = optimize_vae(stock), latents()
    hook = stock.first_stage_model.decoder.conv_in.register_forward_hook(lambda *args: None)
    same_as_stocks_tiles(vae, stock, z)
    hook.remove()
    agree(tiled(vae, z), whole(stock, z))


def test_a_foreign_vae_keeps_its_class(stock):
    class OtherVAE(comfy.sd.VAE):
        pass

    other = copy.copy(stock)
    other.__class__ = OtherVAE
    assert type(optimize_vae(other)) is OtherVAE
    assert type(optimize_vae(optimize_vae(stock))) is fused_vae.FusedVAE


@pytest.mark.without_kernels
def test_without_kernels_stocks_tiles_are_decoded(stock, held):
    same_as_stocks_tiles(optimize_vae(stock), stock, latents())
    assert not held


def test_unknown_code_of_comfyui_is_left_alone(stock, held, monkeypatch):
    def decode_tiled_of_tomorrow(self, samples, **options):
        return stocks(self, samples, **options)

    stocks = comfy.sd.VAE.decode_tiled_
    monkeypatch.setattr(comfy.sd.VAE, "decode_tiled_", decode_tiled_of_tomorrow)
    vae = optimize_vae(stock)
    same_as_stocks_tiles(vae, stock, latents())
    reason = "VAE.decode_tiled_ of this ComfyUI is not a version that sdfastgn was tested with"
    assert parts_of(vae.first_stage_model)[1] == {reason: {"tiled decode": 1}}


# ---- on a GPU


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_gpu_the_image_is_that_of_an_untiled_decode(monkeypatch):
    monkeypatch.setattr(strip_chain, "MOST_BYTES", 0)
    monkeypatch.setitem(cases.WHERE, "device", "cuda")
    exact = comfy_models.with_random_parameters(autoencoder_kl(comfyui_models.VAE))
    z = latents(1, 64, 64).cuda()
    expected = exact.decode(z)
    vae = vae_of(exact.half())
    error = (vae.first_stage_model.decode(z.half()) - expected).abs().max().item()
    inject(vae.first_stage_model)
    found = vae.decode_tiled_(z, 32, 32, 8)
    assert found.device == vae.output_device
    assert (found.cuda() - expected).abs().max().item() < 2 * error
    eject(vae.first_stage_model)
    vae.upscale_ratio = 8
    assert (vae.decode_tiled_(z, 32, 32, 8).cuda() - expected).abs().max().item() > 4 * error
