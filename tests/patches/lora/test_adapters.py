"""Which layers an adapter is wrapped around, as the report and ``strict=True`` name them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.models.lora import LoRACompatibleLinear, LoRALinearLayer
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.models.architectures import build_unet
from sdfastgn.patches.lora.adapters import adapted_layers, adapter_reason
from tests.controlnet import build_controlnet
from tests.small_pipelines import pipeline

pytestmark = pytest.mark.fused_on_cpu

# Layers of fused modules, and two of other modules.
TARGETS = ["to_q", "to_out.0", "conv1", "proj_in", "net.0.proj", "net.2", "conv_in", "linear_1"]


def unet():
    return build_unet("tiny", torch.float32, "cpu")


def add_lora(model):
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False), adapter_name="a")


def paths_with_lora(model):
    """Paths of the layers with a LoRA, found by peft's parameters."""
    return {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_report_names_each_layer_with_a_lora(when):
    model = unet()
    if when == "before":
        add_lora(model)
    sdfastgn.optimize(model, merge_adapters=False)
    fused = len(sdfastgn.report(model).fused)
    if when == "after":
        assert not sdfastgn.report(model).skipped
        add_lora(model)
    report = sdfastgn.report(model)
    assert {e.path for e in report.skipped} == paths_with_lora(model)
    assert len(report.skipped) > 30
    assert len(report.fused) == fused
    words = " ".join(str(report).split())
    assert f"{len(report.skipped)} skipped: it has an adapter (LoRA): stock's code runs" in words
    assert "fuse_lora() and then unload_lora_weights() make it a plain layer (" in words
    assert all(path in report.details() for path in paths_with_lora(model))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_report_names_other_adapters_in_all_models_of_a_pipeline(when):
    controlnet = build_controlnet("tiny", torch.float32, "cpu")
    plain = nn.ModuleDict({"fc1": nn.Linear(4, 4)})  # nothing but its adapter is in the report
    components = {**pipeline().components, "controlnet": controlnet, "plain": plain}
    pipe = SimpleNamespace(components=components)
    if when == "after":
        sdfastgn.optimize(pipe)
    config = LoHaConfig(r=2, target_modules=["conv_in", "linear_1", "fc1"])
    for name in ("unet", "controlnet", "text_encoder", "plain"):
        inject_adapter_in_model(config, components[name])
    if when == "before":
        sdfastgn.optimize(pipe)
    skipped = {e.path: e for e in sdfastgn.report(pipe).skipped}
    assert {path for path, e in skipped.items() if e.fusion == "adapter"} == {
        f"{name}.{path}"
        for name in ("unet", "controlnet", "text_encoder", "plain")
        for path, module in components[name].named_modules()
        if hasattr(module, "base_layer")
    }
    entry = skipped["controlnet.controlnet_cond_embedding.conv_in"]
    assert (entry.component, entry.kind) == ("controlnet", "Conv2d")
    assert "its kind of adapter is not merged" in entry.reason
    with pytest.raises(ValueError, match=r"not merged\).*unet\.conv_in \(adapter\)"):
        sdfastgn.optimize(pipe, strict=True)


def test_the_report_names_adapters_that_are_not_merged_yet():
    model = unet()
    add_lora(model)
    assert not sdfastgn.report(model).skipped  # ``optimize`` has not been called
    model.unload_lora()
    sdfastgn.optimize(model, cuda_graphs=False)
    add_lora(model)
    reasons = {e.path: e.reason for e in sdfastgn.report(model).skipped}
    assert set(reasons) == paths_with_lora(model)
    assert all("is not merged yet" in reason for reason in reasons.values())
    sdfastgn.optimize(model, cuda_graphs=False)
    assert not sdfastgn.report(model).skipped


def test_the_report_says_that_moved_adapters_are_merged_in_the_next_call():
    model = inject_adapter_in_model(
        LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(1, 4)).eval()
    )
    sdfastgn.optimize(model, cuda_graphs=False)
    model.half().float()
    [skipped] = sdfastgn.report(model).skipped
    assert skipped.reason == "its adapter (LoRA) is not merged yet: its next call without gradients merges it"
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert not sdfastgn.report(model).skipped


STATES = {
    "on": (lambda model: None, "it has an adapter (LoRA)"),
    "off": (lambda model: model.disable_adapters(), "its adapter (LoRA) is off, but still wrapped around it"),
    "deleted": (lambda model: model.delete_adapters("a"), "its adapter (LoRA) is off"),
    "merged": (lambda model: model.fuse_lora(), "its adapter (LoRA) is fused, but still wrapped around it"),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("state", STATES)
def test_strict_refuses_every_state_of_an_adapter_until_it_is_gone(state):
    model = unet()
    add_lora(model)
    change, reason = STATES[state]
    change(model)
    paths = paths_with_lora(model) or {"mid_block.resnets.0.conv1"}
    sdfastgn.restore(sdfastgn.optimize(model, strict=True))
    with pytest.raises(ValueError, match=r"^sdfastgn.optimize: strict=True and \d+ parts") as caught:
        sdfastgn.optimize(model, strict=True, merge_adapters=False)
    assert reason in str(caught.value)
    assert all(path in str(caught.value) for path in paths)
    assert not sdfastgn.report(model).fused
    model.unload_lora()
    assert not sdfastgn.report(sdfastgn.optimize(model, strict=True)).skipped


def test_strict_refuses_a_lora_that_cannot_be_merged():
    model = unet()
    add_lora(model)
    model.mid_block.resnets[0].conv1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"1 part cannot .* \(it has hooks\).* mid_block\.resnets\.0\.conv1"):
        sdfastgn.optimize(model, strict=True)


def test_merged_weights_stay_when_the_adapter_is_taken_off():
    """The reason for a merged adapter promises this."""
    model = unet()
    weight = model.mid_block.resnets[0].conv1.weight.detach().clone()
    add_lora(model)
    model.fuse_lora()
    model.unload_lora()
    conv = model.mid_block.resnets[0].conv1
    assert type(conv) is nn.Conv2d
    assert not torch.equal(conv.weight, weight)


@pytest.mark.parametrize("name", ["base_layer", "original_module"])
def test_a_module_without_an_adapter_may_use_the_names_of_peft(name):
    head = nn.Sequential()
    head.add_module(name, nn.Linear(4, 4))
    model = nn.Sequential(nn.GroupNorm(1, 4), nn.SiLU(), head)
    sdfastgn.optimize(model, strict=True)
    assert not sdfastgn.report(model).skipped


def test_other_kinds_of_adapters():
    loha = inject_adapter_in_model(LoHaConfig(target_modules=["0"]), nn.Sequential(nn.Linear(4, 4)))
    [layer] = adapted_layers(loha.modules())
    assert layer is loha[0]
    assert str(adapter_reason(layer)).startswith("it has an adapter (LoRA)")
    assert "its kind of adapter is not merged" in str(adapter_reason(layer))
    trained = LoraConfig(target_modules=["0"], modules_to_save=["1"])
    both = inject_adapter_in_model(trained, nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    assert list(adapted_layers(both.modules())) == [both[0], both[1]]
    assert str(adapter_reason(both[1])).startswith("an adapter trains a copy of it")
    old = LoRACompatibleLinear(4, 4, lora_layer=LoRALinearLayer(4, 4, 2))
    assert str(adapter_reason(old)).startswith("it has an adapter (LoRA)")
    assert adapter_reason(nn.Linear(4, 4)) is None
    assert adapter_reason(None) is None
