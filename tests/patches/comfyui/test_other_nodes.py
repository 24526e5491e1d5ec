"""What other nodes and ComfyUI itself do to a UNet that is injected: patches, ControlNets, CUDA graphs."""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.sd  # noqa: E402
from comfy import model_management  # noqa: E402
from comfy.controlnet import ControlBase  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from sdfastgn.patches.comfyui.graphs import begin_run, calls_of_run, graphs_of  # noqa: E402
from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from sdfastgn.patches.graphs import forward  # noqa: E402
from sdfastgn.patches.layout import channels_last  # noqa: E402
from tests.patches import cases  # noqa: E402
from tests.patches.code.foreign import replaced  # noqa: E402
from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, latent_of, lora_of, snapshot, step, unet_of  # noqa: E402
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


@pytest.mark.parametrize("patches", [{}, {"middle_patch": [halved]}], ids=["alone", "with a patch"])
def test_a_node_that_replaces_the_forward_of_a_class(model, patches):
    """As AnimateDiff-Evolved does for some motion models. Stock's result with it is drawn."""
    options = {"transformer_options": lambda: {"patches": {**patches}}}
    usual = both(model, **options)[1]
    with replaced(torch.nn.GroupNorm, "forward"):
        ours, stock = both(model, **options)
    close(ours, stock)
    assert (stock - usual).abs().max() > 1e-2
    close(both(model, **options)[0], usual)


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


def control(seed=4, output=(16, 16, 8, 8), inputs=()):
    """What a ControlNet returns. output, inputs: the size of each tensor; None stands for no tensor.

    The first block takes the last entry of its list.
    """
    g = torch.Generator().manual_seed(seed)

    def images(sides):
        return [side and torch.randn(2, 320, side, side, generator=g) for side in sides]

    return {"input": images(inputs), "middle": images([8]), "output": images(output)}


CONTROLS = {
    "output": {},
    "fewer than blocks": {"output": (8,)},
    "more than blocks": {"output": (8, 16, 16, 8, 8)},
    "none": {"output": (None, 16, None, 8)},
    "input": {"output": (), "inputs": (8, None, 16, 16)},
    "wrong size": {"output": (16, 16, 8, 16)},  # ComfyUI logs a warning
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_controlnet(model, name):
    close(*both(model, control=lambda: control(**CONTROLS[name])))


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
    with pytest.raises(ValueError, match="the VAE is empty"):
        optimize_vae(comfy.sd.VAE(sd={}))  # of a checkpoint without one


@pytest.mark.parametrize("mode", ["on", 1, None])
def test_what_graphs_have_to_be(model, mode):
    with pytest.raises(ValueError, match="cuda_graphs"):
        optimize_model(model, mode)


@pytest.fixture
def tape(model, monkeypatch):
    """CUDA graphs are tapes on the CPU."""
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
    expected = latent_of(optimize_model(with_lora(model, 1.0), False), KIND, steps=4)
    optimized = optimize_model(model)
    plain = latent_of(optimized, KIND, steps=4)
    clone = optimized.clone()
    clone.add_patches(lora_of(model), 1.0)
    assert torch.equal(latent_of(clone, KIND, steps=4), expected)
    assert torch.equal(latent_of(optimized, KIND, steps=4), plain)
    assert tape.captures == 3


def with_lora(model, strength):
    clone = model.clone()
    clone.add_patches(lora_of(model), strength)
    return clone


def patched_weights(model):
    """Weak references to the memory of the weights that ``lora_of`` patches."""
    names = lora_of(model)
    return [StorageWeakRef(p.untyped_storage()) for n, p in model.model.named_parameters() if n in names]


def living(weights):
    return sum(not weight.expired() for weight in weights)


def test_weights_of_another_lora_do_not_load_beside_the_old_ones(model, tape, monkeypatch):
    optimized, other = optimize_model(with_lora(model, 1.0)), optimize_model(with_lora(model, 0.5))
    latent_of(optimized, KIND, steps=4)
    graphed, old, left = graphs_of(unet_of(model)), patched_weights(model), []
    assert (graphed.alive, living(old)) == (1, len(lora_of(model)))

    def load(patcher, *args, load=ModelPatcher.load, **kwargs):
        left.append((graphed.alive, living(old)))
        return load(patcher, *args, **kwargs)

    monkeypatch.setattr(ModelPatcher, "load", load)
    latent_of(other, KIND, steps=1)
    assert left == [(0, 0)]


def test_a_stock_clone_frees_the_graphs_of_a_node_that_is_gone(model, tape):
    """The node is bypassed or deleted. Then ComfyUI unloads the model by a clone without our callbacks."""
    latent_of(model, KIND, steps=1)
    model_management.unload_all_models()
    before = snapshot(model.model)
    latent_of(optimize_model(model), KIND, steps=4)
    latent_of(model, KIND, steps=1)
    graphed = graphs_of(unet_of(model))
    replays = graphed.replays
    # The weights have not moved, so the node can go on with its graphs.
    latent_of(optimize_model(model), KIND, steps=4)
    assert (graphed.alive, graphed.replays) == (1, replays + 4)
    latent_of(model, KIND, steps=1)
    model_management.unload_all_models()
    assert graphed.alive == 0
    assert snapshot(model.model) == before


def test_a_stock_clone_frees_the_weights_of_a_lora_that_is_gone(model, tape):
    latent_of(optimize_model(with_lora(model, 1.0)), KIND, steps=4)
    graphed, old = graphs_of(unet_of(model)), patched_weights(model)
    assert (graphed.alive, living(old)) == (1, len(lora_of(model)))
    latent_of(model, KIND, steps=1)
    assert (graphed.alive, living(old)) == (0, 0)


def test_a_copy_of_an_ejected_unet_moves_alone(model, tape):
    optimized = optimize_model(model)
    latent_of(optimized, KIND, steps=4)
    optimized.eject_model()
    unet = unet_of(model)
    # A shallow copy has the same layers, but an entry in it would move the UNet in place of the copy.
    assert "_apply" in vars(unet)
    assert "_apply" not in vars(copy.copy(unet))
    twin = copy.deepcopy(unet)
    assert twin.to("meta") is twin
    assert graphs_of(unet).alive == 1
    assert {weight.device for weight in unet.parameters()} == {CPU}


@pytest.mark.parametrize(
    "options",
    [
        {"transformer_options": lambda: {"patches": {"middle_patch": [halved]}}},
        {"transformer_options": lambda: {"optimized_attention_override": lambda f, *a, **k: f(*a, **k)}},
        {"transformer_options": lambda: {"some_node": 1}},
    ],
    ids=["patch", "attention", "unknown"],
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


@pytest.mark.parametrize("name", CONTROLS)
def test_graphs_take_the_tensors_of_a_controlnet(model, tape, name):
    model.patch_model(CPU)
    stock, left = [], []
    for seed in range(4):
        left.append(control(seed, **CONTROLS[name]))
        stock.append(step(model, KIND, control=left[-1]))
    model.detach()
    optimized = optimize_model(model)
    optimized.patch_model(CPU)
    begin_run(unet_of(model))
    for seed, (expected, rest) in enumerate(zip(stock, left, strict=True)):
        given = control(seed, **CONTROLS[name])
        close(step(optimized, KIND, control=given), expected)
        # Stock removes the tensors that it has used, and so do eager calls and replays.
        assert {k: len(v) for k, v in given.items()} == {k: len(v) for k, v in rest.items()}
        cases.agree([t for v in given.values() for t in v], [t for v in rest.values() for t in v])
    assert tape.captures == 1
    assert calls_of_run(unet_of(model)) == (3, {"first call of its kind": 1})
    optimized.detach()


def test_each_structure_of_control_has_its_own_graph(model, tape):
    kinds = [*CONTROLS.values(), None]
    made = [lambda kind=kind: None if kind is None else control(**kind) for kind in kinds]
    expected = [both(model, control=make)[1] for make in made]
    optimized = optimize_model(model, True)
    optimized.patch_model(CPU)
    begin_run(unet_of(model))
    for _ in range(2):
        for make, stock in zip(made, expected, strict=True):
            close(step(optimized, KIND, control=make()), stock)
    assert tape.captures == len(kinds)
    assert calls_of_run(unet_of(model)) == (2 * len(kinds), {})
    optimized.detach()


class Control(ControlBase):
    """A ControlNet without a model. Its tensors differ at each step. In the last steps it has none."""

    def get_control(self, x_noisy, t, cond, batched_number, *options):
        if t[0] < self.timestep_range[1]:
            return None
        found = control(int(t[0]))
        parts = {k: [x[: len(x_noisy)] for x in v] for k, v in found.items()}
        return self.control_merge(parts, None, x_noisy.dtype)


def test_a_run_with_a_controlnet(model, tape):
    def run(patcher):
        found = Control()
        found.set_cond_hint(None, strength=0.5, timestep_percent_range=(0.0, 0.5))
        return latent_of(patcher, KIND, steps=8, control=found, control_apply_to_uncond=True)

    stock = run(model)
    assert (stock - latent_of(model, KIND, steps=8)).abs().max() > 1e-3 * stock.abs().max()
    optimized = optimize_model(model, True)
    for _ in range(2):
        close(run(optimized), stock)
        assert calls_of_run(unet_of(model)) == (8, {})
    assert tape.captures == 2


@pytest.mark.parametrize("kind", comfy_models.KINDS)
def test_graphs_of_weights_that_are_cast(tape, kind):
    model = comfy_models.load_model(kind, weight_dtype=torch.float8_e4m3fn)
    stock = latent_of(model, kind, steps=4)
    optimized = optimize_model(model)
    close(latent_of(optimized, kind, steps=4), stock)
    assert tape.captures == 1
    # A LoRA is part of the weights, which it changes in place.
    patched = optimized.clone()
    patched.add_patches(lora_of(model), 1.0)
    stock_patched = model.clone()
    stock_patched.add_patches(lora_of(model), 1.0)
    close(latent_of(patched, kind, steps=4), latent_of(stock_patched, kind, steps=4))
    close(latent_of(optimized, kind, steps=4), stock)
    assert graphs_of(unet_of(model)).eager == {"first call of its kind": 3}


def test_graphs_cast_weights_at_each_replay(tape):
    model = comfy_models.load_model(KIND, weight_dtype=torch.float8_e4m3fn)
    optimized = optimize_model(model, True)
    optimized.patch_model(CPU)
    step(optimized, KIND)
    for module in unet_of(model).modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.weight.data.copy_(torch.full_like(module.weight, 0.5))
    found = step(optimized, KIND)
    assert tape.captures == 1
    optimized.detach()
    close(found, step(model, KIND))


def test_no_graphs_with_functions_on_weights(model, tape):
    optimized = optimize_model(model, True)
    optimized.add_weight_wrapper(
        "diffusion_model.middle_block.0.in_layers.2.weight", lambda weight: weight * 0.5
    )
    optimized.patch_model(CPU)
    begin_run(unet_of(model))
    expected = step(optimized, KIND)
    for _ in range(2):
        assert torch.equal(step(optimized, KIND), expected)
    assert tape.captures == 0
    assert calls_of_run(unet_of(model)) == (0, {"they are turned off": 3})
    optimized.detach()


def test_an_interrupt_during_a_capture_ends_the_run(tape, monkeypatch):
    """In ComfyUI before 0.22 the capture ignores the error. It must still come out of the call."""
    model = comfy_models.load_model(KIND, weight_dtype=torch.float8_e4m3fn)
    optimized = optimize_model(model)
    optimized.patch_model(CPU)
    step(optimized, KIND)
    capture = tape.capture

    def interrupted(fn):
        model_management.interrupt_current_processing()
        return capture(fn)

    monkeypatch.setattr(tape, "capture", interrupted)
    with pytest.raises(model_management.InterruptProcessingException):
        step(optimized, KIND)
    model_management.interrupt_current_processing(False)
    monkeypatch.undo()
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
