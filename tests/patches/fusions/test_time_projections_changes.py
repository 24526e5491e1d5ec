"""Time embeddings that ResNet blocks share are never stale: whatever changes between or within calls."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from tests.patches.fusions import projection_cases as cases

as_on_a_gpu, launches = cases.as_on_a_gpu, cases.launches
WHERE, agree, blocks, call, random, twins, widths = (
    cases.WHERE, cases.agree, cases.blocks, cases.call, cases.random, cases.twins, cases.widths,
)  # fmt: skip


@torch.no_grad()
def in_place(model):
    for i, block in enumerate(blocks(model)):
        block.time_emb_proj.weight.mul_(i - 1.5)
        block.time_emb_proj.bias.add_(0.1)
        block.conv1.bias.mul_(2)


def through_data(model):
    for block in blocks(model):
        block.conv1.bias.data += 0.3 * random(len(block.conv1.bias), seed=8).to(block.conv1.bias)


def loaded(model):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


def lora(model, target="time_emb_proj"):
    torch.manual_seed(5)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=[target], init_lora_weights=False), model.mid_block
    )
    model.to(WHERE["device"])


def lora_of_a_convolution(model):
    lora(model, "conv1")


def hook(model):
    blocks(model)[1].time_emb_proj.register_forward_hook(lambda m, i, y: y * 2)


def hook_on_a_convolution(model):
    blocks(model)[1].conv1.register_forward_hook(lambda m, i, y: y * 2)


def hook_on_the_activation(model):
    blocks(model)[1].nonlinearity.register_forward_hook(lambda m, i, y: y * 2)


def replaced_parameter(model):
    layer = blocks(model)[3].time_emb_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def replaced_bias(model):
    conv = blocks(model)[0].conv1
    conv.bias.data = conv.bias.data * 2


def no_bias(model):
    blocks(model)[0].conv1.bias = None


def replaced_block(model):
    block = copy.deepcopy(model.mid_block.resnets[0])
    with torch.no_grad():
        block.conv1.bias.mul_(3)
    model.mid_block.resnets[0] = block


def restored_part(model):
    sdfastgn.restore(model.mid_block)
    with torch.no_grad():
        model.mid_block.resnets[0].conv1.bias.mul_(3)


def swapped(model):
    a, b = (block.time_emb_proj.weight for block in model.up_blocks[0].resnets)
    a.data, b.data = b.data, a.data


STILL_ONE = [in_place, through_data, loaded]
APART = [
    lora, lora_of_a_convolution, hook, hook_on_a_convolution, hook_on_the_activation, replaced_parameter, replaced_bias, no_bias,
    replaced_block, restored_part, swapped,
]  # fmt: skip


@pytest.mark.parametrize("change", [*STILL_ONE, *APART], ids=lambda f: f.__name__)
def test_changes_between_two_calls(launches, change):
    fused, stock = twins()
    before = call(fused)
    for model in (fused, stock):
        change(model)
    launches.clear()
    agree(call(fused), call(stock), 2e-4)
    assert not torch.allclose(call(stock), before, atol=1e-4)
    assert (sum(widths(fused)) in launches) == (change in STILL_ONE)


def written_weights(model):
    with torch.no_grad():
        model.up_blocks[-1].resnets[-1].time_emb_proj.weight.mul_(2)


def written_bias(model):
    with torch.no_grad():
        model.up_blocks[-1].resnets[-1].conv1.bias.mul_(2)


def moved_bias(model):
    conv = model.up_blocks[-1].resnets[-1].conv1
    conv.bias.data = conv.bias.data * 2


def other_activation(model):
    model.up_blocks[-1].resnets[-1].nonlinearity = nn.ReLU()


def late_hook(model):
    model.up_blocks[-1].resnets[-1].time_emb_proj.register_forward_hook(lambda m, i, y: y * 2)


WITHIN = [written_weights, written_bias, moved_bias, other_activation, late_hook]


@pytest.mark.parametrize("change", WITHIN, ids=lambda f: f.__name__)
def test_changes_in_the_middle_of_a_call(change):
    """After the first blocks have taken theirs, before the last one does."""
    fused, stock = twins()
    outputs, before = [], call(stock)
    for model in (fused, stock):
        model.mid_block.register_forward_hook(lambda m, i, y, model=model: change(model))
        outputs.append(call(model))
    agree(*outputs, tolerance=2e-4)
    assert not torch.allclose(outputs[1], before, atol=1e-5)


@pytest.mark.parametrize("how", ["other", "written"])
def test_an_embedding_that_changes_on_the_way(launches, how):
    fused, stock = twins()
    other = random(2, 32, seed=9)

    def change(module, args, kwargs):
        if how == "written":
            args[1].mul_(2)
            return None
        return (args[0], other, *args[2:]), kwargs

    outputs = []
    for model in (fused, stock):
        model.mid_block.resnets[0].register_forward_pre_hook(change, with_kwargs=True)
        outputs.append(call(model))
    agree(*outputs, tolerance=2e-4)
    middle = fused.mid_block.resnets[0].time_emb_proj.out_features
    assert launches == [sum(widths(fused)), *([middle] if how == "other" else [sum(widths(fused))])]
