"""The fused ``AutoencoderTiny``: the calls that its convolutions become, and its error on a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import AutoencoderTiny

import sdfastgn
from sdfastgn.patches.fusions import autoencoder_tiny
from sdfastgn.patches.layers import convolution

pytestmark = pytest.mark.fused_on_cpu


def twins(device="cpu", dtype=torch.float32, **options):
    """(optimized, stock) with the same weights."""
    torch.manual_seed(0)
    stock = AutoencoderTiny(**options).eval().to(device, dtype)
    return sdfastgn.optimize(copy.deepcopy(stock), strict=True), stock


@pytest.fixture
def as_cudnn(monkeypatch):
    """Make cuDNN's fused calls on the CPU too, in plain PyTorch. Returns how often each is made."""
    calls = {"relu": 0, "add_relu": 0}

    def relu(x, weight, bias, *where):
        calls["relu"] += 1
        return F.conv2d(x, weight, bias, *where).relu()

    def add_relu(x, weight, z, alpha, bias, *where):
        calls["add_relu"] += 1
        return (F.conv2d(x, weight, bias, *where) + alpha * z).relu()

    def allowed(conv, x, residual):
        return conv.in_channels % 8 == conv.out_channels % 8 == 0

    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu, raising=False)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu, raising=False)
    monkeypatch.setattr(convolution, "_fits_cudnn", allowed)
    return calls


@torch.no_grad()
def test_each_block_is_three_calls(as_cudnn):
    fused, stock = twins()
    latents, image = torch.randn(1, 4, 4, 4), torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(fused.decode(latents).sample, stock.decode(latents).sample)
    assert as_cudnn == {"relu": 20, "add_relu": 10}  # the first convolution has 4 channels
    torch.testing.assert_close(fused.encode(image).latents, stock.encode(image).latents)
    assert as_cudnn == {"relu": 40, "add_relu": 20}


@torch.no_grad()
def test_output_lies_as_stocks():
    fused, stock = twins()
    for call in (lambda m: m.decode(torch.randn(1, 4, 4, 4)), lambda m: m.encode(torch.rand(1, 3, 32, 32))):
        ours, theirs = (next(iter(call(m).values())) for m in (fused, stock))
        assert ours.stride() == theirs.stride()


def test_another_activation_is_skipped():
    module = AutoencoderTiny(act_fn="mish")
    skipped = {e.reason for e in sdfastgn.report(sdfastgn.optimize(module)).skipped}
    assert skipped == {"activation Mish has no fused form"}


@pytest.mark.drawn(1)
@torch.no_grad()
@pytest.mark.parametrize("where", ["decoder.layers", "decoder.layers.2.conv", "decoder.layers.2.conv.1"])
def test_hooks_within_are_called(where, as_cudnn):
    fused, stock = twins()
    seen = []
    fused.get_submodule(where).register_forward_hook(lambda m, args, y: seen.append(y.shape) or 2 * y)
    stock.get_submodule(where).register_forward_hook(lambda m, args, y: 2 * y)
    latents = torch.randn(1, 4, 4, 4)
    torch.testing.assert_close(fused.decode(latents).sample, stock.decode(latents).sample)
    assert seen


@torch.no_grad()
def test_a_replaced_conv_forward_is_called(as_cudnn):
    fused, stock = twins()
    for model in (fused, stock):
        conv = model.decoder.layers[2].conv[0]
        conv._conv_forward = lambda x, w, b: F.conv2d(F.pad(x, 4 * [1], mode="circular"), w, b)
    latents = torch.randn(1, 4, 4, 4)
    torch.testing.assert_close(fused.decode(latents).sample, stock.decode(latents).sample)


@torch.no_grad()
def test_under_vmap_stocks_code_runs():
    fused, stock = twins()
    latents, pixels = torch.randn(2, 1, 4, 4, 4), torch.rand(2, 1, 3, 16, 16)
    for call, x in (
        (lambda model: lambda z: model.decode(z).sample, latents),
        (lambda model: lambda image: model.encode(image).latents, pixels),
    ):
        ours, theirs = (torch.vmap(call(model))(x) for model in (fused, stock))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_and_checkpointing():
    fused, stock = twins()
    latents = torch.randn(1, 4, 4, 4)
    for checkpointing in (False, True):
        grads = []
        for model in (fused, stock):
            model.train()
            if checkpointing:
                model.enable_gradient_checkpointing()
            model.zero_grad()
            model.decode(latents).sample.square().sum().backward()
            grads.append([p.grad for p in model.decoder.parameters()])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (17, 23)], ids=str)
def test_no_less_exact_than_stock(dtype, size, monkeypatch):
    fused, stock = twins("cuda", dtype)
    calls = []
    conv_relu = autoencoder_tiny.conv_relu
    monkeypatch.setattr(
        autoencoder_tiny,
        "conv_relu",
        lambda conv, relu, x, *z: (
            calls.append(convolution._fits_cudnn(conv, x, *(z or (None,)))) or conv_relu(conv, relu, x, *z)
        ),
    )
    exact = copy.deepcopy(stock).double()
    latents = torch.randn(2, 4, *size, device="cuda", dtype=dtype)
    pixels = torch.rand(2, 3, 8 * size[0], 8 * size[1], device="cuda", dtype=dtype)
    for name, x in (("decode", latents), ("encode", pixels)):
        truth = next(iter(getattr(exact, name)(x.double()).values()))
        errors = []
        for model in (fused, stock):
            y = next(iter(getattr(model, name)(x).values()))
            errors.append(float((y.double() - truth).norm() / truth.norm()))
        assert errors[0] <= 1.1 * errors[1] + 1e-6
    assert any(calls) is (dtype is not torch.float32)


@pytest.mark.gpu
@torch.no_grad()
def test_replayed_as_a_graph():
    fused, _ = twins("cuda", torch.float16)
    latents = torch.randn(1, 4, 32, 32, device="cuda", dtype=torch.float16)
    first = fused.decode(latents).sample
    for _ in range(3):
        again = fused.decode(latents).sample
    assert torch.equal(first, again)
    graphs = {g.kind: g for g in sdfastgn.report(fused).graphs}
    assert graphs["DecoderTiny"].replays >= 2
