"""What other nodes and ComfyUI itself do to a UNet that is injected: patches, ControlNets, CUDA graphs."""

import pytest
import torch

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.sd  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock  # noqa: E402

from sdfastgn.patches.comfyui.graphs import graphs_of  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from sdfastgn.patches.core import channels_last  # noqa: E402
from sdfastgn.patches.graphs import forward  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, latent_of, lora_of, step, unet_of  # noqa: E402
from tests.patches.graphs.tape import TapeBackend  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

KIND = "sd15"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return comfy_models.load_model(KIND)


@pytest.fixture(autouse=True)
def stock_again(model):
    yield
    from comfy import model_management

    model_management.unload_all_models()


def both(model, **options):
    """(result of the injected model, result of stock). An option that is callable is made for each call."""

    def called(patcher):
        patcher.patch_model(CPU)
        try:
            return step(patcher, KIND, **{k: v() if callable(v) else v for k, v in options.items()})
        finally:
            patcher.detach()

    return called(optimize_model(model)), called(model)


class Noted:
    """A patch of another node that counts its calls and returns ``change(*arguments)``."""

    def __init__(self, change):
        self.change, self.calls = change, 0

    def __call__(self, *args):
        self.calls += 1
        return self.change(*args)


def halved(first, *others):
    first *= 0.5  # in place, as such patches do
    return first


PATCHES = {
    "attn1_patch": lambda n, context, value, options: (n * 0.5, context, value),
    "attn1_output_patch": halved,
    "middle_patch": halved,
    "attn2_patch": lambda n, context, value, options: (n, context * 0.5, value * 0.5),
    "attn2_output_patch": halved,
    "input_block_patch": halved,
    "input_block_patch_after_skip": lambda h, options: h * 0.5,
    "output_block_patch": lambda h, hsp, options: (h * 1.1, hsp * 0.9),
    "emb_patch": lambda emb, channels, options: emb * 0.5,
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches(model, name):
    patch = Noted(PATCHES[name])
    fused, stock = both(model, transformer_options=lambda: {"patches": {name: [patch]}})
    assert patch.calls % 2 == 0 < patch.calls
    close(fused, stock)
    assert not torch.allclose(stock, both(model)[1])


@pytest.mark.parametrize("name", ["attn1", "attn2"])
def test_replaced_attention(model, name):
    replace = Noted(lambda q, k, v, options: q * options["n_heads"] / 8)
    where = {("middle", 0, 0): replace}
    fused, stock = both(model, transformer_options=lambda: {"patches_replace": {name: where}})
    assert replace.calls == 2
    close(fused, stock)


def test_another_attention(model):
    calls = []

    def attention(stock, *args, **kwargs):
        calls.append(kwargs["transformer_options"]["block"])
        return stock(*args, **kwargs) * 0.5

    options = {"optimized_attention_override": attention}
    fused, stock = both(model, transformer_options=lambda: dict(options))
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    close(fused, stock)


def test_a_wrapper_around_the_model(model):
    def wrapper(executor, x, *args, **kwargs):
        return executor(x * 0.5, *args, **kwargs) * 2

    def wrapped():
        return {"wrappers": {"diffusion_model": {"other": [wrapper]}}}

    close(*both(model, transformer_options=wrapped))


def control():
    g = torch.Generator().manual_seed(4)

    def image(side):
        return torch.randn(2, 320, side, side, generator=g)

    return {"input": [], "middle": [image(8)], "output": [image(16), image(16), image(8), image(8)][::-1]}


def test_a_controlnet(model):
    close(*both(model, control=control))


def test_an_unknown_release_is_left_alone(model, monkeypatch):
    stock = ResBlock._forward

    def _forward(self, x, emb):
        return stock(self, x, emb)

    monkeypatch.setattr(ResBlock, "_forward", _forward)
    optimized = optimize_model(model)
    optimized.patch_model(CPU)
    fused, stock = parts_of(unet_of(optimized))
    optimized.detach()
    reason = "ResBlock._forward of this ComfyUI is not a version that sdfastgn was tested with"
    assert stock == {reason: {"ResNet blocks": 8}}
    assert "ResNet blocks" not in fused


def test_what_a_model_has_to_be():
    with pytest.raises(TypeError, match="expected a MODEL of ComfyUI, got dict"):
        optimize_model({})
    with pytest.raises(TypeError, match="expected a VAE of ComfyUI with weights, got VAE"):
        optimize_vae(comfy.sd.VAE(sd={}))  # of a checkpoint without one


@pytest.mark.parametrize("mode", ["on", 1, None])
def test_what_graphs_have_to_be(model, mode):
    with pytest.raises(ValueError, match="cuda_graphs"):
        optimize_model(model, mode)


@pytest.fixture
def tape(model, monkeypatch):
    """CUDA graphs are tapes on the CPU."""
    if unet_of(model).training:
        pytest.skip("this ComfyUI leaves UNets in training mode, for which there are no graphs")
    backend = TapeBackend()
    monkeypatch.setattr(forward, "backend_of", lambda device: backend)
    # A tape keeps its weights alive, a graph does not.
    monkeypatch.setattr(channels_last, "is_alone", lambda weight: True)
    return backend


def test_graphs_go_on_in_the_next_run(model, tape):
    eager = latent_of(optimize_model(model, False), KIND, steps=4)
    optimized = optimize_model(model)
    assert torch.equal(latent_of(optimized, KIND, steps=4), eager)
    graphed = graphs_of(unet_of(model))
    assert (graphed.captured, graphed.replays) == (1, 3)
    # ComfyUI ejects and injects before each run.
    assert torch.equal(latent_of(optimized, KIND, steps=4), eager)
    assert (graphed.captured, graphed.replays) == (1, 7)
    optimized.detach()
    assert graphed.alive == 0


def test_a_lora_is_seen_by_graphs(model, tape):
    with_lora = optimize_model(model, False)
    with_lora.add_patches(lora_of(model), 1.0)
    expected = latent_of(with_lora, KIND, steps=4)
    optimized = optimize_model(model)
    plain = latent_of(optimized, KIND, steps=4)
    clone = optimized.clone()
    clone.add_patches(lora_of(model), 1.0)
    assert torch.equal(latent_of(clone, KIND, steps=4), expected)
    assert torch.equal(latent_of(optimized, KIND, steps=4), plain)
    assert tape.captures == 3


@pytest.mark.parametrize(
    "options",
    [
        {"control": control},
        {"transformer_options": lambda: {"patches": {"middle_patch": [halved]}}},
        {"transformer_options": lambda: {"optimized_attention_override": lambda f, *a, **k: f(*a, **k)}},
        {"transformer_options": lambda: {"some_node": 1}},
    ],
    ids=["control", "patch", "attention", "unknown"],
)
def test_calls_that_others_reach_into_are_no_graphs(model, tape, options):
    optimized = optimize_model(model, True)
    optimized.patch_model(CPU)
    for _ in range(3):
        step(optimized, KIND, **{k: v() for k, v in options.items()})
    assert tape.captures == 0
    step(optimized, KIND)
    assert tape.captures == 1
    optimized.detach()


def test_no_graphs_in_low_vram(model, tape):
    optimized = optimize_model(model, True)
    optimized.patch_model(CPU)
    step(optimized, KIND)
    assert graphs_of(unet_of(model)).alive == 1
    optimized.partially_unload(CPU, model.model_size() // 4)
    assert graphs_of(unet_of(model)).alive == 0
    step(optimized, KIND)
    assert tape.captures == 1
    optimized.detach()
