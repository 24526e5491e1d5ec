"""Models whose weights DynamicVRAM moves, in place of which stands a patcher that says that it is dynamic."""

import gc
import inspect
import weakref

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import model_management  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from sdfastgn.patches.comfyui import dynamic_vram  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of, text_of  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, image_of, latent_of, lora_of, unet_of  # noqa: E402

KIND = "sd15"
pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.skipif(
        "disable_dynamic" not in inspect.signature(ModelPatcher.clone).parameters,
        reason="this ComfyUI has no DynamicVRAM",
    ),
]


class Dynamic(ModelPatcher):
    def is_dynamic(self):
        return True


@pytest.fixture(autouse=True)
def nothing_loaded():
    yield
    model_management.unload_all_models()


def dynamic(stock, load):
    """(dynamic patcher of the model of ``stock``, list with an entry for each call of ``load``)

    ``load``: makes a patcher of an equal model, as ComfyUI does from the model's file.
    """
    loads = []
    found = Dynamic(stock.model, stock.load_device, stock.offload_device)
    found.cached_patcher_init = lambda disable_dynamic: (loads.append(disable_dynamic), load())[1], ()
    return found, loads


def dynamic_unet():
    return dynamic(comfy_models.load_model(KIND), lambda: comfy_models.load_model(KIND))


@pytest.fixture(scope="module")
def expected():
    return latent_of(comfy_models.load_model(KIND), KIND)


def test_its_weights_stay_where_there_is_room(gpu_at_hand, expected):
    model, loads = dynamic_unet()
    optimized = optimize_model(model)
    assert not dynamic_vram.is_dynamic(optimized)
    assert optimized.model is not model.model
    close(latent_of(optimized, KIND), expected)
    assert text_of(optimized).startswith("UNetModel: faster\n")
    assert loads == [True]


def test_clones_with_other_loras_share_the_model_that_was_loaded():
    model, loads = dynamic_unet()
    patched = model.clone()
    patched.add_patches(lora_of(model), 1.0)
    first, second = optimize_model(model), optimize_model(patched)
    assert first.model is second.model
    assert loads == [True]
    assert not torch.equal(latent_of(first, KIND), latent_of(second, KIND))


def test_the_second_model_is_unloaded_when_the_node_is_gone():
    model, _ = dynamic_unet()
    patched = model.clone()
    patched.add_patches(lora_of(model), 1.0)
    optimized = optimize_model(patched)
    second = optimized.model
    before = {name: weight.clone() for name, weight in second.state_dict().items()}
    latent_of(optimized, KIND, steps=1)
    assert second.model_loaded_weight_memory > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in second.state_dict().items())
    del optimized
    model_management.unload_all_models()
    assert second.model_loaded_weight_memory == 0
    assert all(torch.equal(weight, before[name]) for name, weight in second.state_dict().items())


def test_the_second_model_lives_as_long_as_the_dynamic_one():
    model, loads = dynamic_unet()
    second = weakref.ref(optimize_model(model).model)
    assert second() is not None
    assert optimize_model(model).model is second()
    assert loads == [True]
    del model
    gc.collect()
    assert second() is None


@pytest.mark.parametrize("lacks", ["room", "loader"])
def test_else_it_runs_as_stock(gpu_at_hand, monkeypatch, lacks, expected):
    model, loads = dynamic_unet()
    if lacks == "room":
        monkeypatch.setattr(model_management, "get_total_memory", lambda device: 2**29)
        reason = "it does not fit the GPU: it needs "
    else:
        model.cached_patcher_init = None
        reason = "its loader cannot load it the older way"
    optimized = optimize_model(model)
    classes = [type(module) for module in unet_of(model).modules()]
    optimized.inject_model()
    assert [type(module) for module in unet_of(model).modules()] == classes
    optimized.eject_model()
    assert not loads
    assert text_of(optimized).startswith(
        f"UNetModel: not faster. DynamicVRAM moves its weights, and {reason}"
    )
    monkeypatch.undo()
    assert torch.equal(latent_of(optimized, KIND), expected)


@pytest.mark.parametrize("dtype_of_file", [torch.float32, torch.float16], ids=str)
def test_a_vae(dtype_of_file):
    """A dynamic layer casts at each call. So a second model may have the dtypes of its file."""
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    vae = comfy_models.load_vae()
    weights = vae.first_stage_model.state_dict()
    with torch.inference_mode():
        vae.first_stage_model.load_state_dict({key: w.to(dtype_of_file) for key, w in weights.items()})
    expected = image_of(vae, latent)

    def load():
        patcher = comfy_models.load_vae().patcher
        with torch.inference_mode():
            patcher.model.to(dtype_of_file)
        return patcher

    vae.patcher, loads = dynamic(vae.patcher, load)
    optimized = optimize_vae(vae)
    assert optimized.first_stage_model is optimized.patcher.model
    assert optimized.first_stage_model is not vae.first_stage_model
    close(image_of(optimized, latent), expected)
    assert loads == [True]
    assert not parts_of(optimized.first_stage_model)[1]
