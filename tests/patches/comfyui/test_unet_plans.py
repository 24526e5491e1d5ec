"""A UNet of a release of ComfyUI that sdfastgn was not tested with runs as plans, and as graphs of them."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy import model_management  # noqa: E402
from comfy.ldm.modules.attention import CrossAttention  # noqa: E402
from comfy.ldm.modules.diffusionmodules.model import ResnetBlock  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, UNetModel  # noqa: E402
from comfy.ops import disable_weight_init  # noqa: E402

from sdfastgn.patches.comfyui import graphs  # noqa: E402
from sdfastgn.patches.graphs import forward  # noqa: E402
from sdfastgn.patches.layout import channels_last  # noqa: E402
from sdfastgn.patches.swap.tested_sources import newest_release  # noqa: E402
from sdfastgn.plans.comfyui import optimize_model, optimize_vae, text_of  # noqa: E402
from tests.patches import cases  # noqa: E402
from tests.patches.code.foreign import replaced  # noqa: E402
from tests.patches.comfyui import comfy_models, other_release  # noqa: E402
from tests.patches.comfyui.comfy_models import close, latent_of, lora_of, snapshot, step, unet_of  # noqa: E402
from tests.patches.graphs.tape import TapeBackend  # noqa: E402
from tests.plans.engine import often_captured  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

KIND = "sd15"
CPU = torch.device("cpu")
WHY = "CrossAttention.forward of this ComfyUI is not a version that sdfastgn was tested with"


@pytest.fixture
def model():
    return comfy_models.load_model(KIND)


@pytest.fixture(autouse=True)
def release(monkeypatch):
    """ComfyUI is another release."""
    other_release.change(monkeypatch, CrossAttention, "forward")
    yield
    model_management.unload_all_models()


@pytest.fixture
def tape(monkeypatch):
    """CUDA graphs are tapes on the CPU."""
    backend = TapeBackend()
    often_captured(monkeypatch)
    monkeypatch.setattr(forward, "backend_of", lambda device: backend)
    monkeypatch.setattr(channels_last, "is_alone", lambda weight: True)  # a tape keeps its weights alive
    return backend


def loaded(patcher):
    patcher.patch_model(CPU)
    return patcher


def plans_of(model):
    (planned,) = graphs.graphs_of(unet_of(model)).planned
    return planned


def test_a_run(model, tape, gpu_at_hand):
    stock = latent_of(model, KIND, steps=5)
    model.detach()
    before = snapshot(model.model)
    texts = []
    optimized = optimize_model(model, after_run=texts.append)
    close(latent_of(optimized, KIND, steps=5), stock)
    planned, graphed = plans_of(model), graphs.graphs_of(unet_of(model))
    assert (planned.traces, planned.own) == (1, {})
    assert (graphed.captured, graphed.replays) == (1, 2)
    lines = texts[0].splitlines()
    assert lines[0] == "UNetModel: faster, once its calls repeat. They run as plans"
    assert lines[1] == f"Reason for plans: {WHY}"
    assert "Last run: 2 of 5 calls as CUDA graphs" in texts[0]
    # ComfyUI takes out and puts in around each run. Plans and graphs stay.
    close(latent_of(optimized, KIND, steps=5), stock)
    assert (planned.traces, graphed.captured, graphed.replays) == (1, 1, 7)
    optimized.detach()
    assert snapshot(model.model) == before
    assert (graphed.alive, planned.plans) == (0, [])
    close(latent_of(optimized, KIND, steps=5), stock)  # loaded again


def test_sdxl():
    model = comfy_models.load_model("sdxl")
    expected = step(loaded(model), "sdxl")
    model.detach()
    optimized = loaded(optimize_model(model))
    close(step(optimized, "sdxl"), expected)
    assert plans_of(model).calls == 1
    optimized.detach()


def test_a_known_release_gets_none(model, monkeypatch):
    monkeypatch.undo()
    optimized = loaded(optimize_model(model))
    assert type(unet_of(model)) is graphs.FusedUNetModel
    optimized.detach()


@pytest.mark.parametrize("changed", [(ResBlock, "_forward"), (UNetModel, "_forward")])
def test_other_code_of_another_release(model, monkeypatch, changed, gpu_at_hand):
    other_release.change(monkeypatch, *changed)
    stock = loaded(model)
    expected = step(stock, KIND)
    stock.detach()
    optimized = loaded(optimize_model(model))
    close(step(optimized, KIND), expected)
    assert plans_of(model).calls == 1
    assert f"Reason for plans: {changed[0].__name__}._forward of this ComfyUI" in text_of(optimized)
    optimized.detach()


def test_other_arguments_in_another_release(model, monkeypatch, gpu_at_hand):
    """There are no plans. The text says what this costs, and how to see what changed."""
    own = UNetModel._forward

    def _forward(self, x, timesteps=None, context=None, y=None, control=None, options=None):
        return own(self, x, timesteps, context, y, control, options)

    monkeypatch.setattr(UNetModel, "_forward", _forward)
    optimized = loaded(optimize_model(model))
    assert type(unet_of(model)) is UNetModel
    lines = text_of(optimized).splitlines()
    assert lines[0] == "UNetModel: partly faster"
    assert f"As stock: 7 transformer blocks. Reason: {WHY}" in "\n".join(lines)
    assert "This costs speed: its transformer blocks are not fused, and no call becomes a CUDA graph" in lines
    assert lines[-1] == (
        "To see what changed: fetch comfy/ldm/modules/attention.py, "
        "comfy/ldm/modules/diffusionmodules/openaimodel.py and comfy/ops.py of ComfyUI "
        f"{newest_release('comfy')} into a folder, then run "
        "`sdfastgn sources --comfyui CHECKOUT --against FOLDER`"
    )
    optimized.detach()


def test_a_vae_of_another_release_without_plans(monkeypatch, gpu_at_hand):
    other_release.change(monkeypatch, ResnetBlock, "forward")
    vae = optimize_vae(comfy_models.load_vae(), plans=False)
    (line,) = (line for line in text_of(vae.patcher).splitlines() if line.startswith("This costs speed"))
    assert "ResNet blocks" in line
    assert "CUDA graph" not in line


def control(seed, sides):
    g = torch.Generator().manual_seed(seed)
    images = [side and torch.randn(2, 320, side, side, generator=g) for side in sides]
    return {"input": [], "middle": [torch.randn(2, 320, 8, 8, generator=g)], "output": images}


@pytest.mark.parametrize("sides", [(None, 8), (8, 16, 16, 8, 8)])
def test_a_controlnet(model, tape, sides):
    loaded(model)
    left = [control(seed, sides) for seed in range(4)]
    stock = [step(model, KIND, control=each) for each in left]
    model.detach()
    optimized = loaded(optimize_model(model))
    for seed, (expected, rest) in enumerate(zip(stock, left, strict=True)):
        given = control(seed, sides)
        close(step(optimized, KIND, control=given), expected)
        # ComfyUI's code removes the tensors that it has used. Plans and graphs do, too.
        assert {name: len(each) for name, each in given.items()} == {k: len(v) for k, v in rest.items()}
        cases.agree([t for each in given.values() for t in each], [t for v in rest.values() for t in v])
    assert (plans_of(model).traces, tape.captures) == (1, 1)
    optimized.detach()


def test_a_lora(model, tape):
    def with_lora(patcher, strength):
        clone = patcher.clone()
        clone.add_patches(lora_of(model), strength)
        return clone

    stock = [latent_of(with_lora(model, strength), KIND, steps=2) for strength in (1.0, 0.5)]
    optimized = optimize_model(model)
    plain = latent_of(optimized, KIND, steps=2)
    found = [latent_of(with_lora(optimized, strength), KIND, steps=2) for strength in (1.0, 0.5)]
    for ours, theirs in zip(found, stock, strict=True):
        close(ours, theirs)
        assert (theirs - plain).abs().max() > 1e-3 * plain.abs().max()
    assert torch.equal(latent_of(optimized, KIND, steps=2), plain)
    assert (plans_of(model).traces, plans_of(model).own) == (4, {})


@pytest.mark.parametrize("cuda_graphs", ["auto", False])
def test_the_weights_of_a_lora_that_is_gone_are_freed(model, tape, cuda_graphs):
    clone = optimize_model(model, cuda_graphs).clone()
    clone.add_patches(lora_of(model), 1.0)
    latent_of(clone, KIND, steps=4 if cuda_graphs else 1)
    names = lora_of(model)
    old = [StorageWeakRef(p.untyped_storage()) for n, p in model.model.named_parameters() if n in names]
    assert len(old) == len(names)
    latent_of(model, KIND, steps=1)
    assert all(weight.expired() for weight in old)


def halved(n, context, value, options):
    return n * 0.5, context, value


def test_other_nodes_in_the_middle_of_a_run(model, tape):
    """A call with their code runs it. The calls before and after it are plans."""
    options = [{}, {}, {"patches": {"attn1_patch": [halved]}}, {}, {"some_node": 1}, {}]
    loaded(model)
    stock = [step(model, KIND, transformer_options=dict(each)) for each in options]
    model.detach()
    assert (stock[2] - stock[1]).abs().max() > 1e-3
    optimized = loaded(optimize_model(model))
    for each, expected in zip(options, stock, strict=True):
        close(step(optimized, KIND, transformer_options=dict(each)), expected)
    graphed = graphs.graphs_of(unet_of(model))
    assert graphed.eager["other nodes take part: attn1_patch"] == 1
    assert graphed.eager["other nodes take part: some_node"] == 1
    assert (plans_of(model).traces, tape.captures, graphed.replays) == (1, 1, 1)
    optimized.detach()


def test_a_wrapper_around_the_model(model):
    def wrapper(executor, x, *args, **kwargs):
        return executor(x * 0.5, *args, **kwargs) * 2

    def call(patcher):
        options = {"wrappers": {"diffusion_model": {"other": [wrapper]}}}
        return step(patcher, KIND, transformer_options=options)

    expected = call(loaded(model))
    model.detach()
    optimized = loaded(optimize_model(model))
    close(call(optimized), expected)
    assert plans_of(model).calls == 1
    optimized.detach()


def test_code_that_reads_what_only_informs_other_nodes(model, monkeypatch, tape):
    """The later release computes with an entry that differs in each call. So there is no plan."""
    own = UNetModel._forward

    def _forward(
        self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs
    ):
        x = x * transformer_options["sigmas"]
        return own(self, x, timesteps, context, y, control, transformer_options, **kwargs)

    monkeypatch.setattr(UNetModel, "_forward", _forward)
    sigmas = [torch.tensor([0.5 + i]) for i in range(4)]
    loaded(model)
    stock = [step(model, KIND, transformer_options={"sigmas": each}) for each in sigmas]
    model.detach()
    optimized = loaded(optimize_model(model))
    for each, expected in zip(sigmas, stock, strict=True):
        close(step(optimized, KIND, transformer_options={"sigmas": each}), expected)
    (reason,) = plans_of(model).own
    assert reason.startswith("the call computes with an entry of transformer_options")
    assert tape.captures == 0
    optimized.detach()


def test_a_node_that_replaces_the_forward_of_a_class(model):
    loaded(model)
    usual = step(model, KIND)
    with replaced(torch.nn.GroupNorm, "forward"):
        stock = step(model, KIND)
    model.detach()
    assert (stock - usual).abs().max() > 1e-2
    optimized = loaded(optimize_model(model))
    close(step(optimized, KIND), usual)
    with replaced(torch.nn.GroupNorm, "forward"):
        close(step(optimized, KIND), stock)
    close(step(optimized, KIND), usual)
    optimized.detach()


@pytest.mark.parametrize("graphs_of_a_run", [1, 0], ids=["a known cast", "an unknown cast"])
def test_weights_that_are_cast(tape, monkeypatch, graphs_of_a_run):
    if not graphs_of_a_run:
        other_release.change(monkeypatch, disable_weight_init.Linear, "forward_comfy_cast_weights")
    model = comfy_models.load_model(KIND, weight_dtype=torch.float8_e4m3fn)
    stock = latent_of(model, KIND, steps=4)
    optimized = optimize_model(model)
    close(latent_of(optimized, KIND, steps=4), stock)
    assert (plans_of(model).own, tape.captures) == ({}, graphs_of_a_run)


def test_functions_on_weights(model, tape):
    """Plans run, but no graphs: a graph would not repeat the function."""
    stock = model.clone()
    name = "diffusion_model.middle_block.0.in_layers.2.weight"
    stock.add_weight_wrapper(name, lambda weight: weight * 0.5)
    expected = step(loaded(stock), KIND)
    stock.detach()
    optimized = loaded(optimize_model(stock))
    for _ in range(4):
        close(step(optimized, KIND), expected)
    assert tape.captures == 0
    optimized.detach()


def test_low_vram(model, gpu_at_hand):
    expected = step(loaded(model), KIND)
    model.detach()
    optimized = optimize_model(model)
    optimized.patch_model(CPU, lowvram_model_memory=model.model_size() // 2)
    assert type(unet_of(model)) is UNetModel
    assert torch.equal(step(optimized, KIND), expected)
    optimized.detach()
    close(step(loaded(optimized), KIND), expected)
    optimized.detach()


def test_an_interrupt_during_a_trace_ends_the_run():
    """Layers that cast notice the interrupt. The trace ignores the error, and the call must raise it."""
    optimized = loaded(optimize_model(comfy_models.load_model(KIND, weight_dtype=torch.float8_e4m3fn)))
    model_management.interrupt_current_processing()
    with pytest.raises(model_management.InterruptProcessingException):
        step(optimized, KIND)
    model_management.interrupt_current_processing(False)
    optimized.detach()


def test_plans_inside_end_when_it_is_unloaded(model, monkeypatch, tape):
    """Code that cannot be traced: it reads what only informs other nodes."""
    own = CrossAttention.forward

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
        scale = 0.9 if float(transformer_options["sigmas"][0]) > 3 else 1.1
        return own(self, x, context, value, mask, transformer_options) * scale

    def inside():
        return [path for path, module in unet_of(model).named_modules() if "forward" in vars(module)]

    monkeypatch.setattr(CrossAttention, "forward", forward)
    stock = latent_of(model, KIND, steps=3)
    optimized = optimize_model(model)
    for _ in range(2):
        close(latent_of(optimized, KIND, steps=3), stock)
        assert inside()
        model_management.unload_all_models()
        assert not inside()
        assert torch.equal(latent_of(model, KIND, steps=3), stock)
