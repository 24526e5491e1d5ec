"""VAEs of ComfyUI without blocks that can be fused run as plans. ComfyUI's own code runs that of SeedVR2."""

import copy
import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.sd  # noqa: E402
from comfy import model_management  # noqa: E402
from comfy.ldm.cogvideo import vae as cogvideo  # noqa: E402
from comfy.ldm.modules.diffusionmodules import model as comfy_model  # noqa: E402

from scripts.publish.comfyui_models import random_weights  # noqa: E402
from sdfastgn.patches.comfyui import report  # noqa: E402
from sdfastgn.plans import comfyui  # noqa: E402
from sdfastgn.plans.comfyui import optimize_vae, text_of  # noqa: E402
from sdfastgn.plans.forward import PlannedForward  # noqa: E402
from tests.patches.comfyui import comfy_models, other_release  # noqa: E402
from tests.patches.comfyui.comfy_models import close  # noqa: E402

seedvr = pytest.importorskip("comfy.ldm.seedvr.vae", reason="a ComfyUI before SeedVR2")

pytestmark = pytest.mark.fused_on_cpu


@pytest.fixture
def stock(monkeypatch):
    """ComfyUI's VAE from the weights of a small model. Its kind of blocks is fixed, not its channels."""
    monkeypatch.setattr(seedvr, "BYTEDANCE_BLOCK_OUT_CHANNELS", (32,) * 4)
    monkeypatch.setattr(report, "_has_gpu", lambda: True)
    with torch.device("meta"):
        model = seedvr.VideoAutoencoderKLWrapper()
    yield comfy.sd.VAE(sd=random_weights(model, torch.float32, "cpu"))
    model_management.unload_all_models()


def latent(frames=2, seed=0):
    return torch.randn(1, 16, frames, 4, 5, generator=torch.Generator().manual_seed(seed))


def planned(vae):
    found = {name: vars(child).get("forward") for name, child in vae.first_stage_model.named_children()}
    return {name: each for name, each in found.items() if isinstance(each, PlannedForward)}


@torch.inference_mode()
def test_decode_and_encode(stock):
    vae = optimize_vae(stock)
    for frames in (1, 2, 4):  # more than two are decoded in parts, which keep frames for the next one
        expected = [stock.decode(latent(frames, seed)) for seed in range(2)]
        images = torch.rand(4 * frames - 3, 32, 32, 3, generator=torch.Generator().manual_seed(1))
        latents = stock.encode(images)
        for seed, frames_of_stock in enumerate(expected):
            close(vae.decode(latent(frames, seed)), frames_of_stock)
        close(vae.encode(images), latents)
    decoder = planned(vae)["decoder"]
    assert (decoder.calls, decoder.traces, decoder.own) == (2 * (1 + 1 + 3), 1 + 1 + 3, {})
    assert planned(vae)["encoder"].own == {}
    assert vae.first_stage_model.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last_3d)
    text = text_of(vae.patcher)
    assert text.startswith("VideoAutoencoderKLWrapper: faster, once its calls repeat. They run as plans\n")
    assert "decoder: 10 calls as plans" in text


@torch.inference_mode()
def test_stock_stays_and_comes_back(stock):
    vae = optimize_vae(stock)
    expected = stock.decode(latent())
    strides = [p.stride() for p in stock.first_stage_model.parameters()]
    close(vae.decode(latent()), expected)
    assert planned(vae)
    assert torch.equal(stock.decode(latent()), expected)
    assert not planned(vae)
    assert [p.stride() for p in stock.first_stage_model.parameters()] == strides


@torch.inference_mode()
def test_a_vae_of_another_release(monkeypatch):
    """It has blocks that sdfastgn knows, but their code is another one."""
    stock = comfy_models.load_vae()
    z = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    close(optimize_vae(stock).decode(z), stock.decode(z))
    vae, expected = optimize_vae(stock), stock.decode(z)
    vae.decode(z)
    assert not planned(vae)
    other_release.change(monkeypatch, comfy_model.ResnetBlock, "forward")
    for _ in range(4):
        close(vae.decode(z), expected)
    assert planned(vae)["decoder"].calls == 4
    model_management.unload_all_models()


@torch.inference_mode()
def test_layers_have_plans_if_the_decoder_is_never_called(monkeypatch):
    """ComfyUI's decode of CogVideoX calls the decoder's layers, the last ones with four frames at a time."""
    sizes = {"block_out_channels": (32,) * 4, "layers_per_block": 1}
    small = functools.partial(cogvideo.AutoencoderKLCogVideoX, **sizes)
    monkeypatch.setattr(cogvideo, "AutoencoderKLCogVideoX", small)
    monkeypatch.setattr(report, "_has_gpu", lambda: True)
    stock = comfy.sd.VAE(sd=random_weights(small(latent_channels=4), torch.float32, "cpu"))
    z = [torch.randn(1, 4, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = [stock.decode(each) for each in z]
    vae = optimize_vae(stock)
    assert torch.equal(vae.decode(z[0]), expected[0])
    for _ in range(2):
        for each, frames in zip(z, expected, strict=True):
            close(vae.decode(each), frames)
    decoder = vae.first_stage_model.decoder
    blocks = [PlannedForward.of(block) for block in (decoder.mid_block, *decoder.up_blocks)]
    assert [block.calls for block in blocks] == [6, 6, 6, 18, 18]
    assert all(block.own == {} for block in blocks)
    assert "decoder.mid_block: 6 calls as plans" in text_of(vae.patcher)
    for each, frames in zip(z, expected, strict=True):
        assert torch.equal(stock.decode(each), frames)
    assert not any(PlannedForward.of(module) for module in stock.first_stage_model.modules())
    model_management.unload_all_models()


@torch.inference_mode()
def test_weights_that_move_are_freed(stock):
    vae = optimize_vae(stock)
    for _ in range(3):
        vae.decode(latent())
    weight = vae.first_stage_model.decoder.conv_in.weight
    old = StorageWeakRef(weight.untyped_storage())
    vae.patcher.eject_model()  # gives weights their strides back
    weight.data = weight.data.clone()
    assert old.expired()


@torch.inference_mode()
def test_without_plans(stock):
    vae = optimize_vae(stock, plans=False)
    assert torch.equal(vae.decode(latent()), stock.decode(latent()))
    assert not planned(vae)
    assert text_of(vae.patcher) == "VideoAutoencoderKLWrapper: not faster. sdfastgn knows none of its blocks"


@torch.inference_mode()
def test_the_report_after_a_load(stock):
    texts = []
    vae = optimize_vae(stock, texts.append)
    vae.decode(latent())
    assert [text.splitlines()[0] for text in texts] == [text_of(vae.patcher).splitlines()[0]]


# --- between two calls of a VAE --------------------------------------------------------------------------


@pytest.fixture
def injections(monkeypatch):
    """The names of what plans for VAEs have done: "_put_in" and "_take_out"."""
    seen = []

    def noting(name, real):
        return lambda *args: (seen.append(name), real(*args))[-1]

    for name in ("_put_in", "_take_out"):
        monkeypatch.setattr(comfyui, name, noting(name, getattr(comfyui, name)))
    return seen


@torch.inference_mode()
def test_plans_stay_between_calls(stock, injections):
    texts, expected = [], stock.decode(latent())
    vae = optimize_vae(stock, texts.append)
    for i in range(3):
        close(vae.decode(latent()), expected)
        assert injections == ["_put_in"]
        assert len(texts) == i + 1
    assert "decoder: 2 calls as plans" in texts[-1]
    assert planned(vae)["decoder"].calls == 3
    assert vae.encode(torch.rand(5, 32, 32, 3)).shape == (1, 16, 2, 4, 4)
    assert torch.equal(stock.decode(latent()), expected)  # stock's patcher has the model now
    assert injections == ["_put_in", "_take_out"]


@torch.inference_mode()
def test_a_clone_does_not_take_the_others_injection_for_its_own(stock, injections):
    expected = stock.decode(latent())
    first = optimize_vae(stock)
    first.decode(latent())
    second = optimize_vae(first)  # its patcher has a copy of ``is_injected``
    for vae in (second, first, second):
        close(vae.decode(latent()), expected)
        assert planned(vae)
        assert injections[-2:] == ["_take_out", "_put_in"]
    before = len(injections)
    close(second.decode(latent()), expected)
    assert len(injections) == before
    second.patcher.detach()  # as when a clone is deleted
    assert not planned(first)
    close(first.decode(latent()), expected)
    assert planned(first)


def unload(vae):
    vae.patcher.detach()


def unload_a_part(vae):
    vae.patcher.partially_unload(vae.patcher.offload_device, 1e9)


def patch_an_object(vae):
    vae.patcher.add_object_patch("decoder.marked", True)


def patch_a_weight(vae):
    key = "decoder.conv_in.weight"
    diff = torch.ones_like(vae.patcher.model.get_parameter(key))
    vae.patcher.add_patches({key: ("diff", (diff,))}, 0.5)


@pytest.mark.parametrize("change", [unload, unload_a_part, patch_an_object, patch_a_weight])
@torch.inference_mode()
def test_a_change_takes_plans_out_first(stock, injections, change):
    vae, reference = optimize_vae(stock), copy.copy(stock)
    reference.patcher = stock.patcher.clone()
    vae.decode(latent())
    for each in (vae, reference):
        change(each)
    found = vae.decode(latent())
    assert injections[:3] == ["_put_in", "_take_out", "_put_in"]
    assert planned(vae)
    close(found, reference.decode(latent()))


@torch.inference_mode()
def test_an_error_while_comfyui_loads_leaves_stocks_model(stock, injections, monkeypatch):
    vae, expected = optimize_vae(stock), stock.decode(latent())
    vae.decode(latent())

    def fail(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_management.LoadedModel, "model_load", fail)
        with pytest.raises(KeyboardInterrupt):
            vae.decode(latent())
    assert injections == ["_put_in", "_take_out"]
    assert not planned(vae)
    assert torch.equal(stock.decode(latent()), expected)
    close(vae.decode(latent()), expected)
    assert planned(vae)
