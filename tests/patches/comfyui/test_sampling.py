"""ComfyUI's own nodes on tiny models: stock against injected, from KSampler to the decoded image."""

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import model_management  # noqa: E402

from sdfastgn.patches.comfyui import graphs, inject  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of, text_of  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, image_of, latent_of, lora_of, snapshot, step, unet_of  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu


@pytest.fixture(scope="module", params=comfy_models.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return comfy_models.load_model(kind)


@pytest.fixture(scope="module")
def stock(model, kind):
    return latent_of(model, kind)


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    model_management.unload_all_models()


def test_from_ksampler_to_the_image(model, kind, stock):
    vae = comfy_models.load_vae()
    picture = image_of(vae, stock)
    optimized, optimized_vae = optimize_model(model), optimize_vae(vae)
    found = latent_of(optimized, kind)
    close(found, stock)
    close(image_of(optimized_vae, stock), picture)
    assert not parts_of(unet_of(optimized))[1]
    assert not parts_of(optimized_vae.first_stage_model)[1]
    # The patchers that came in are stock's, also right after the others ran.
    assert torch.equal(latent_of(model, kind), stock)
    assert torch.equal(image_of(vae, stock), picture)
    assert torch.equal(latent_of(optimized, kind), found)


def test_everything_is_fused(model, kind):
    optimized = optimize_model(model)
    blocks = sum(type(m).__name__ == "ResBlock" for m in unet_of(model).modules())
    latent_of(optimized, kind, steps=1)
    assert parts_of(unet_of(optimized))[0]["ResNet blocks"] == blocks
    stock_classes = {type(m).__name__ for m in unet_of(model).modules() if type(m).__module__[:6] == "comfy."}
    assert stock_classes == {"TimestepEmbedSequential", "CrossAttention", "FeedForward", "Downsample"}


def test_ejection_gives_everything_back(model, kind):
    latent_of(model, kind, steps=1)  # ComfyUI itself leaves attributes behind
    model.detach()
    before = snapshot(model.model)
    optimized = optimize_model(model)
    latent_of(optimized, kind, steps=1)
    assert type(unet_of(model)) is graphs.FusedUNetModel
    assert snapshot(model.model) != before
    optimized.detach()
    assert snapshot(model.model) == before


def test_ejection_of_channels_last_weights(kind):
    """ComfyUI's option --force-channels-last."""
    model = comfy_models.load_model(kind)
    with torch.inference_mode():
        unet_of(model).to(memory_format=torch.channels_last)
    stock = latent_of(model, kind)
    model.detach()
    before = snapshot(model.model)
    optimized = optimize_model(model)
    close(latent_of(optimized, kind), stock)
    optimized.detach()
    assert snapshot(model.model) == before


def test_clones_carry_it(model, kind, stock):
    optimized = optimize_model(optimize_model(model))
    found = latent_of(optimized, kind)
    clone = optimized.clone()
    assert torch.equal(latent_of(clone, kind), found)
    assert type(unet_of(model)) is graphs.FusedUNetModel
    assert torch.equal(latent_of(model, kind), stock)
    assert torch.equal(latent_of(clone, kind), found)


def test_a_clone_that_dies_does_not_end_it(model, kind):
    optimized = optimize_model(model)
    latent_of(optimized, kind, steps=1)
    clone = optimized.clone()
    del clone  # ejects what it never injected
    assert type(unet_of(model)) is not graphs.FusedUNetModel
    optimized.pre_run()
    assert type(unet_of(model)) is graphs.FusedUNetModel


def test_it_stays_fused_between_two_runs(kind):
    ejected = []
    model = comfy_models.load_model(kind)
    stock = latent_of(model, kind)
    optimized = optimize_model(model, restore=lambda root: (ejected.append(root), inject.eject(root)))
    found = latent_of(optimized, kind)
    for _ in range(2):
        assert torch.equal(latent_of(optimized, kind), found)
    assert unet_of(model) not in ejected
    assert torch.equal(latent_of(model, kind), stock)
    assert ejected.count(unet_of(model)) == 1
    patched = optimized.clone()
    assert patched.add_patches(lora_of(model), 0.0)  # ComfyUI does not see that this changes no value
    for _ in range(2):
        assert torch.equal(latent_of(patched, kind), found)
        assert type(unet_of(model)) is graphs.FusedUNetModel


def test_a_lora_and_back(model, kind, stock):
    def with_lora(patcher):
        clone = patcher.clone()
        assert clone.add_patches(lora_of(model), 1.0)
        return clone

    expected = latent_of(with_lora(model), kind)
    assert (expected - stock).abs().max() > 1e-3 * stock.abs().max()
    optimized = optimize_model(model)
    plain = latent_of(optimized, kind)
    close(latent_of(with_lora(optimized), kind), expected)  # cloned while injected
    assert torch.equal(latent_of(optimized, kind), plain)
    assert torch.equal(latent_of(model, kind), stock)


def test_another_model_in_between(model, kind):
    optimized = optimize_model(model)
    found = latent_of(optimized, kind)
    other = comfy_models.load_model(kind)
    latent_of(other, kind, steps=1)
    model_management.unload_all_models()
    assert torch.equal(latent_of(optimized, kind), found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
def test_weights_in_another_dtype(kind, dtype, gpu_at_hand):
    """The model computes in fp32. Its layers cast their weights at each call."""
    model = comfy_models.load_model(kind, weight_dtype=dtype)
    assert {weight.dtype for weight in unet_of(model).parameters()} == {dtype}
    stock = latent_of(model, kind)
    model.detach()
    before = snapshot(model.model)
    optimized = optimize_model(model)
    close(latent_of(optimized, kind), stock)
    assert not parts_of(unet_of(optimized))[1]
    assert text_of(optimized).startswith("UNetModel: faster\n")
    optimized.detach()
    assert snapshot(model.model) == before
    assert torch.equal(latent_of(model, kind), stock)


def test_low_vram(model, kind, gpu_at_hand):
    """Some weights stay on another device. They are moved and patched at each call."""
    device, some = torch.device("cpu"), model.model_size() // 2
    patched = model.clone()
    patched.add_patches(lora_of(model), 1.0)
    patched.patch_model(device, lowvram_model_memory=some)
    stock = step(patched, kind)
    patched.detach()
    optimized = optimize_model(patched)
    optimized.patch_model(device, lowvram_model_memory=some)
    assert any(getattr(layer, "weight_function", ()) for layer in unet_of(model).modules())
    reason = "GPU memory is short, so ComfyUI moves some of its weights at each call"
    assert text_of(optimized) == f"UNetModel: not faster. {reason}"
    assert torch.equal(step(optimized, kind), stock)
    optimized.detach()
    optimized.patch_model(device)
    assert text_of(optimized).startswith("UNetModel: faster\n")
    close(step(optimized, kind), stock)
    optimized.partially_unload(device, model.model_size())
    assert text_of(optimized) == f"UNetModel: not faster. {reason}"
    torch.testing.assert_close(step(optimized, kind), stock)  # a LoRA in all weights rounds otherwise
    optimized.detach()
    patched.patch_model(device, lowvram_model_memory=some)
    assert torch.equal(step(patched, kind), stock)
    patched.detach()
