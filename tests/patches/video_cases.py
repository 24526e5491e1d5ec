"""What tests of autoencoders for videos share: inputs, calls, and checks that each family passes."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import sdfastgn
from tests.kernels.samples import kernels
from tests.patches import cases
from tests.patches.samples import snapshot


def codes(frames, batch=1, latents=(2, 3)):
    return cases.noise(batch, 4, frames, *latents, mean=0.0)


def pixels(ratio, frames, batch=1, latents=(2, 3)):
    """ratio: pixels per latent, along each side."""
    return cases.noise(batch, 3, frames, *(ratio * size for size in latents), mean=0.0)


def decode_of(z):
    def decode(model):
        return model.decode(z).sample

    return decode


def encode_of(x):
    def encode(model):
        return model.encode(x).latent_dist.parameters

    return encode


def same(models, call, bound=5e-5):
    """Assert that both models give the same, and return both results. The results must not be near 0."""
    fused, stock = (call(model) for model in models)
    assert stock.std() > 1e-2
    cases.agree(fused, stock, bound)
    return fused, stock


def recorded(monkeypatch, module, name, found=None):
    """A list of the layers with which the function ``name`` of ``module`` is called from now on.

    ``found``: the list that gets them. None: a new list.
    """
    found = [] if found is None else found
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda conv, *a, **o: found.append(conv) or original(conv, *a, **o))
    return found


def is_restored_bit_by_bit(stock, *calls):
    expected = [call(stock) for call in calls]
    before = snapshot(stock)
    sdfastgn.optimize(stock)
    for call in calls:
        call(stock)
    assert sdfastgn.report(stock).channels_last_weights > 0
    sdfastgn.restore(stock)
    assert snapshot(stock) == before
    with kernels():  # on a GPU stock's convolutions choose by the layout
        for call, want in zip(calls, expected, strict=True):
            assert torch.equal(call(stock), want)


def is_no_less_exact(models, *calls):
    """Assert that in each call the fused model's error against fp64 is not above stock's.

    ``models``: (fused, stock), in the dtype to test. ``calls``: pairs of a function, such as ``decode_of``,
    and the tensor that it gets.
    """
    if cases.WHERE["device"] == "cpu":
        pytest.skip("about the GPU's convolutions")
    exact = copy.deepcopy(models[1]).double()
    for call, x in calls:
        truth = call(x.double())(exact)
        found = [call(x.to(model.dtype))(model).double() for model in models]
        errors = [float((y - truth).norm() / truth.norm()) for y in found]
        assert errors[0] <= 1.1 * errors[1] + 1e-6


def hooks_see_the_same(models, layer, call, bound=2e-5):
    """Assert that a hook on ``layer`` sees stock's results while ``call`` calls both models."""
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        model.get_submodule(layer).register_forward_hook(
            lambda m, args, y, found=found: found.append((y[0] if isinstance(y, tuple) else y).clone())
        )
    call()
    assert seen[0]
    for ours, theirs in zip(*seen, strict=True):
        cases.agree(ours, theirs, bound)


def adapt(model, *layers):
    """Put a LoRA around the layers ``layers`` of ``model``, which are 3-D convolutions."""
    torch.manual_seed(5)
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=list(layers))
    inject_adapter_in_model(config, model)
