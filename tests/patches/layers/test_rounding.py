"""Norms under autocast: half precision where all readers would cast the result, with the same bits."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.kernels.common import private
from sdfastgn.patches.layers import rounding
from tests.patches.cases import image, noise
from tests.patches.samples import randomize

pytestmark = pytest.mark.fused_on_cpu

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def norms_return_fp32(monkeypatch):
    """Makes norms return fp32 under autocast of a CPU, as they do on a GPU."""

    for name in ("layer_norm", "group_norm"):
        function = getattr(F, name)

        def call(x, shape, weight=None, bias=None, eps=1e-5, function=function):
            if not torch.is_autocast_enabled("cpu"):
                return function(x, shape, weight, bias, eps)
            return function(x.float(), shape, weight.float(), bias.float(), eps)

        monkeypatch.setattr(F, name, call)
    monkeypatch.setattr(
        "sdfastgn.kernels.common.dispatch.autocast_dtype",
        lambda x: torch.float32 if torch.is_autocast_enabled("cpu") else None,
    )


@pytest.fixture
def read(monkeypatch):
    """Returns a list that collects the dtypes of the inputs of linear layers and convolutions."""
    found = []
    for owner, name in ((F, "linear"), (private, "linear"), (F, "conv2d")):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda x, *args, function=function: found.append(x.dtype) or function(x, *args)
        )
    return found


def block(**options):
    return BasicTransformerBlock(16, 2, 8, cross_attention_dim=12, activation_fn="geglu", **options)


def adapted(model):
    config = LoraConfig(r=3, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    return inject_adapter_in_model(config, model)


def transformer(**options):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "norm_num_groups": 4}
    return Transformer2DModel(**sizes, cross_attention_dim=12, **options)


def resnet(**options):
    return ResnetBlock2D(in_channels=8, out_channels=16, groups=4, temb_channels=None, **options)


TOKENS, TEXT = noise(2, 9, 16), noise(2, 5, 12, seed=1, dtype=DTYPE)
# Name -> (module, function that calls it with x, x).
MODELS = {
    "block": (block, lambda m, x: m(x, encoder_hidden_states=TEXT.to(x.dtype)), TOKENS),
    "adapters": (lambda: adapted(block()), lambda m, x: m(x, encoder_hidden_states=TEXT.to(x.dtype)), TOKENS),
    "linear": (
        lambda: transformer(use_linear_projection=True),
        lambda m, x: m(x, encoder_hidden_states=TEXT.to(x.dtype))[0],
        image(2, 16, 3, 4),
    ),
    "conv": (transformer, lambda m, x: m(x, encoder_hidden_states=TEXT.to(x.dtype))[0], image(2, 16, 3, 4)),
    "resnet": (resnet, lambda m, x: m(x, None), image(2, 8, 5, 4)),
}


def built(name, seed=2):
    torch.manual_seed(seed)
    model, call, x = MODELS[name]
    return randomize(model()).train().requires_grad_(False).to(DTYPE), call, x.to(DTYPE)


def step(model, call, x, dtype=DTYPE):
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", DTYPE, enabled=dtype is DTYPE):
        y = call(model, x)
    y.double().square().mean().backward()
    return y, x.grad


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_without_casts(name, read, monkeypatch):
    stock, call, x = built(name)
    ours = sdfastgn.optimize(copy.deepcopy(stock))
    read.clear()
    y, _ = step(ours, call, x)
    assert set(read) == {DTYPE}
    with monkeypatch.context() as without:
        without.setattr(rounding, "_is_cast", lambda *_: False)
        read.clear()
        expected, _ = step(ours, call, x)
    assert torch.float32 in read
    assert y.dtype is expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_exact_as_stocks(name):
    stock, call, x = built(name)
    ours = sdfastgn.optimize(copy.deepcopy(stock))
    exact = step(copy.deepcopy(stock).double(), call, x.double(), torch.float64)
    found, expected = step(ours, call, x), step(stock, call, x)
    for a, b, true in zip(found, expected, exact, strict=True):
        assert (a.double() - true).norm() <= 1.25 * (b.double() - true).norm()


def hooked(model):
    model.norm1.register_forward_hook(lambda *_: None)


def other_reader(model):
    model.attn1.register_forward_pre_hook(lambda *_: None)


def drops(model):
    model.dropout.p = 0.5


CHANGES = {"hook": ("block", hooked), "reader": ("block", other_reader), "dropout": ("resnet", drops)}


@pytest.mark.parametrize("change", CHANGES)
def test_results_that_other_code_reads_stay_fp32(change, read):
    name, make = CHANGES[change]
    stock, call, x = built(name)
    ours = sdfastgn.optimize(stock)
    make(ours)
    step(ours, call, x)
    assert torch.float32 in read


def test_autocast_is_on_again_after_an_error():
    norm = nn.LayerNorm(4).to(DTYPE)
    with torch.autocast("cpu", DTYPE):
        with contextlib.suppress(RuntimeError):
            rounding.rounded(lambda n, x: n(x), norm, torch.ones(2, 3, dtype=DTYPE), readers=())
        assert torch.is_autocast_enabled("cpu")
