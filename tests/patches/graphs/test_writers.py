"""Copies of weights after a write into the weights, by any optimizer and by other code.

The copies are merged weights of adapters. Writes of which PyTorch's ``_version`` shows nothing count too.
"""

import pytest
import torch
from peft import LoraConfig

import sdfastgn
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.lora import adapter_survey, contents, merging
from tests.patches.graphs.cases import DEVICES, agree, make, run, same_results
from tests.patches.writers import WRITERS

pytestmark = pytest.mark.fused_on_cpu

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in", "time_emb_proj"]


def with_adapter(device="cpu", mode="auto"):
    unet, stock, inputs = make(device, mode)
    for model in (unet, stock):
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False), "a")
    if mode is False:
        sdfastgn.optimize(unet, cuda_graphs=False)
    return unet, stock, inputs


def parameters_of(model, part):
    return [p for name, p in model.named_parameters() if part in name]


def trained(model, inputs):
    """A step of training, whose gradients are not used."""
    model(**inputs).sample.sum().backward()
    model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["auto", "training", False])
@pytest.mark.parametrize("part", [".lora_", "base_layer.weight"])
def test_the_next_call_has_the_new_weights(part, mode, device):
    unet, stock, inputs = with_adapter(device, mode)
    same_results(unet, stock, inputs, 3)
    before, wrong = run(stock, inputs), []
    kept = [p.detach().clone() for p in parameters_of(stock, part)]
    for name, write in WRITERS.items():
        if mode == "training":
            trained(unet, inputs)
        for model in (unet, stock):
            write(parameters_of(model, part))
        expected = run(stock, inputs)
        assert (before - expected).norm() > 0.02 * expected.norm()
        found = [run(unet, inputs) for _ in range(2)]
        wrong += [name for each in found if (each - expected).norm() > 2e-3 * expected.norm()]
        for model in (unet, stock):
            with torch.no_grad():  # many writes one after the other would make the model chaotic
                torch._foreach_copy_(parameters_of(model, part), kept)
        run(unet, inputs)
    assert wrong == []
    for graphs, _ in () if mode is False else cuda_graphs.inspect(unet):
        assert (graphs.captured, graphs.last_change) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", False])
def test_one_number_of_a_large_weight_is_noticed_within_all_windows(mode, monkeypatch):
    monkeypatch.setattr("sdfastgn.kernels.checksum.op.BLOCK", 16)
    monkeypatch.setattr(contents, "WINDOWS", 4)
    unet, stock, inputs = with_adapter(mode=mode)
    same_results(unet, stock, inputs, 3)
    for model in (unet, stock):
        parameters_of(model, "base_layer.weight")[-1].data[-1, -1] += 300
    run(unet, inputs, calls=3)
    agree(run(unet, inputs), run(stock, inputs))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["auto", False])
def test_nothing_is_written_again_without_a_write(mode, monkeypatch):
    unet, stock, inputs = with_adapter(mode=mode)
    same_results(unet, stock, inputs, 3)
    wrote = []
    monkeypatch.setattr(merging, "write", lambda *args: wrote.append(args))
    monkeypatch.setattr(adapter_survey, "write_prepared", lambda *args: wrote.append(args))
    same_results(unet, stock, inputs, 3)
    assert wrote == []
