"""CUDA graphs of models with products in FP8: weights are quantized again before a replay."""

import copy

import pytest
import torch
from diffusers.utils.peft_utils import set_weights_and_activate_adapters
from peft import LoraConfig

import sdfastgn
from sdfastgn.models.architectures import unet_inputs
from sdfastgn.patches.core import fp8_product
from tests.patches.graphs.cases import built, run, state

# A tape records with a dispatch mode of PyTorch, and products in FP8 do not run inside of one.
pytestmark = pytest.mark.gpu

CALLS = 2


def add(unet, name, seed):
    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=4, target_modules=["to_q", "to_v", "net.2"], init_lora_weights=False)
    unet.add_adapter(config, adapter_name=name)


@torch.no_grad()
def write(unet):
    for name, weight in unet.named_parameters():
        if name.endswith(("attn1.to_v.weight", "ff.net.2.weight", "ff.net.2.base_layer.weight")):
            weight.mul_(-2)


def scaled(unet):
    set_weights_and_activate_adapters(unet, ["a"], [-2.0])


def switched(unet):
    set_weights_and_activate_adapters(unet, ["b"], [1.5])


@torch.no_grad()
def write_adapter(unet):
    for name, weight in unet.named_parameters():
        if "lora_A.a" in name:
            weight.mul_(-2)


def one(unet):
    add(unet, "a", 5)
    unet.to("cuda", torch.float16)


def two(unet):
    add(unet, "a", 5)
    add(unet, "b", 6)
    unet.set_adapter("a")


def none(unet):
    pass


def error(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def learned(monkeypatch):
    """Makes (UNet with products in FP8 and a graph, the same UNet in its dtype, inputs)."""
    monkeypatch.setattr(fp8_product, "CALLS", CALLS)

    def make(prepare):
        plain = copy.deepcopy(built("tiny", "cuda")).to(torch.float16)
        prepare(plain)
        plain.to("cuda", torch.float16)
        quick = sdfastgn.optimize(copy.deepcopy(plain), precision="fp8")
        sdfastgn.optimize(plain, cuda_graphs=False)
        inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float16, device="cuda", seed=0)
        run(quick, inputs, CALLS)
        assert state(quick).captured == 0
        run(quick, inputs, 3)
        assert state(quick).captured == 1
        return quick, plain, inputs

    return make


@pytest.mark.parametrize(
    ("prepare", "change"),
    [(none, write), (two, write), (two, scaled), (two, switched), (two, write_adapter)],
    ids=lambda f: f.__name__,
)
def test_a_replay_reads_new_weights(prepare, change, learned):
    quick, plain, inputs = learned(prepare)
    expected = run(plain, inputs)
    assert 0.002 < error(run(quick, inputs), expected) < 0.1
    for unet in (quick, plain):
        change(unet)
    y, changed = run(quick, inputs), run(plain, inputs)
    assert error(changed, expected) > 0.2
    assert error(y, changed) < 0.1
    assert state(quick).captured == 1
    (found,) = sdfastgn.report(quick).fp8
    assert found.adapted == 0
    assert found.in_e4m3 == found.products


def replays_differ(quick, plain, inputs, without):
    """Assert that ``quick`` gives the results of ``plain``, and that both differ from ``without``."""
    expected = run(plain, inputs)
    for _ in range(4):
        assert error(run(quick, inputs), expected) < 0.1 < error(without, expected)


def test_adapters_that_come_and_go(learned):
    quick, plain, inputs = learned(none)
    without = run(quick, inputs)
    for unet in (quick, plain):
        one(unet)
    replays_differ(quick, plain, inputs, without)
    assert state(quick).captured == 2
    quick.unload_lora()
    for _ in range(4):
        assert torch.equal(run(quick, inputs), without)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "in_parts"])
def test_a_model_that_moves_away_and_back(is_whole, learned):
    quick, _, inputs = learned(none)
    expected, (before,) = run(quick, inputs), sdfastgn.report(quick).fp8
    # If only parts of the model move, its graphs are not dropped before the next call.
    for device in ("cpu", "cuda"):
        for module in [quick] if is_whole else quick.children():
            module.to(device)
        (found,) = sdfastgn.report(quick).fp8
        assert found.bytes == 0
    for _ in range(4):
        assert error(run(quick, inputs), expected) < 0.01
    (found,) = sdfastgn.report(quick).fp8
    assert (found.bytes, found.in_e4m3) == (before.bytes, before.products)
    assert state(quick).captured == 2


def test_adapters_that_were_fused_and_unloaded(learned):
    quick, plain, inputs = learned(none)
    without = run(quick, inputs)
    for unet in (quick, plain):
        one(unet)
        unet.fuse_lora()
        unet.unload_lora()
    replays_differ(quick, plain, inputs, without)
