"""Blocks whose last kernel stores statistics: stock's result, fewer passes, upstream's code elsewhere."""

import copy
import itertools

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from sdfastgn.kernels.upsample import conv as upsample_conv
from sdfastgn.patches.layers import statistics
from tests.kernels.samples import error
from tests.patches import cases, samples
from tests.patches.cases import WHERE, agree, image, noise, resnet
from tests.patches.cases import random_twins as twins
from tests.patches.cases import resnet_inputs as inputs

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients", "statistics_always_pay"),
]


# --- ResNet blocks --------------------------------------------------------------------------------

RESNETS = {
    "shortcut": {},
    "no-shortcut": {"out_channels": 4},
    "shortcut-without-bias": {"conv_shortcut_bias": False},
    "output-scale": {"output_scale_factor": 2**0.5},
    "one-channel-a-group": {"groups": 4, "groups_out": 6},
    "other-output-channels": {"conv_2d_out_channels": 5},
    "up": {"up": True},
    "down": {"down": True},
}


def biases_moved(monkeypatch):
    """A list of the convolutions that left their bias to another kernel."""
    moved = []
    inner = nn.Conv2d._conv_forward

    def forward(conv, x, weight, bias):
        if bias is None and conv.bias is not None:
            moved.append(conv)
        return inner(conv, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", forward)
    return moved


@pytest.mark.parametrize("options", RESNETS.values(), ids=RESNETS)
def test_a_resnet_ends_in_one_sum(ran, options, monkeypatch):
    """The sum also adds the bias of the second convolution."""
    fused, stock = twins(resnet(**options))
    moved = biases_moved(monkeypatch)
    y = fused(*inputs())
    agree(y, stock(*inputs()), 5e-5)
    assert ran("add") == 1
    assert fused.conv2 in moved
    assert fused.conv_shortcut not in moved
    assert statistics.take_statistics(y) is not None


def test_a_resnet_is_no_less_exact_than_stock():
    """Not tested in bfloat16, because the interpreter truncates instead of rounding."""
    fused, stock = twins(resnet(output_scale_factor=2**0.5), torch.float16)
    x, temb = image(2, 4, 16, 16, dtype=torch.float16), noise(2, 8, dtype=torch.float16)
    expected = copy.deepcopy(stock).double()(x.double(), temb.double())
    assert error(fused(x, temb), expected) <= 1.02 * error(stock(x, temb), expected)


def test_a_small_resnet_ends_in_a_sum_without_statistics(ran, monkeypatch):
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: False)
    fused, stock = twins(resnet())
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert (ran("add"), ran("add alone")) == (0, 1)


def test_a_watched_convolution_is_called(ran, monkeypatch):
    fused, stock = twins(resnet())
    seen = {}
    for model, name in itertools.product((fused, stock), ("conv2", "conv_shortcut")):
        model.get_submodule(name).register_forward_hook(
            lambda m, i, o, key=(model, name): seen.update({key: o + 0})
        )
    moved = biases_moved(monkeypatch)
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert fused.conv2 not in moved
    for name in ("conv2", "conv_shortcut"):
        agree(seen[fused, name], seen[stock, name], 5e-5)
    assert ran("add") == 1


def test_lora(monkeypatch):
    targets = ["conv1", "conv2", "conv_shortcut"]
    fused, stock = twins(resnet())
    before = fused(*inputs())
    for model in (fused, stock):
        torch.manual_seed(3)
        config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
        inject_adapter_in_model(config, model).to(WHERE["device"])
    moved = biases_moved(monkeypatch)
    after = fused(*inputs())
    agree(after, stock(*inputs()), 5e-5)
    assert not torch.allclose(after, before, atol=1e-3)
    assert not {fused.get_submodule(f"{t}.base_layer") for t in targets} & set(moved)


def test_gradients_run_stocks_operations(ran):
    models = twins(resnet(output_scale_factor=1.5))
    x, temb = inputs()
    cases.same_gradients(models, x.requires_grad_(), temb)  # stock PyTorch crashes without
    assert not ran("add") + ran("add alone")


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "conv"])
def test_a_transformer_ends_in_a_sum_with_statistics(ran, products, linear):
    dtype = torch.float16
    model = Transformer2DModel(
        2, 10, in_channels=20, norm_num_groups=5, cross_attention_dim=12, use_linear_projection=linear
    )
    fused, stock = twins(model, dtype)
    x, context = image(2, 20, 4, 6, dtype=dtype), image(2, 3, 12, 1, dtype=dtype, seed=1)[..., 0]
    y = fused(x, context).sample
    assert ran("add") == 1
    projections = {layer.weight.data_ptr() for layer in (fused.proj_in, fused.proj_out)}
    assert {weight.data_ptr() for _, weight, *_ in products} >= projections
    expected = copy.deepcopy(stock).double()(x.double(), context.double()).sample
    assert error(y, expected) <= 1.05 * error(stock(x, context).sample, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)


# --- upsamplers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pays", [True, False], ids=["emits", "does-not-emit"])
@pytest.mark.parametrize("low", [True, False], ids=["low-resolution", "high-resolution"])
def test_an_upsampler_ends_in_the_bias(ran, low, pays, monkeypatch):
    monkeypatch.setattr(upsample_conv, "phases_pay", lambda *sizes: low)
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: pays)
    fused, stock = twins(Upsample2D(12, use_conv=True, out_channels=8))
    x = image(2, 12, 5, 7)
    y = fused(x)
    agree(y, stock(x), 5e-5)
    assert (ran("bias"), ran("bias alone")) == ((0, 0) if low else (pays, not pays))
    found = statistics.take_statistics(y)
    assert (found is not None) == pays
    if pays:
        expected = reference_channel_statistics(y.double(), found.shape[2])
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


# --- whole models ---------------------------------------------------------------------------------


def unet():
    return samples.unet(block_out_channels=(8, 16), norm_num_groups=1, attention_head_dim=4)


def call(model, size):
    x = image(1, 4, size, size)
    if isinstance(model, AutoencoderKL):
        return model.decode(x).sample
    return model(x, 10, image(1, 3, 12, 1, seed=1)[..., 0]).sample


@pytest.mark.parametrize("build", [unet, samples.vae])
def test_a_whole_model(ran, build):
    fused, stock = twins(build(), plans=False)
    y = call(fused, 4)
    agree(y, call(stock, 4), 5e-5)
    assert ran("add") > 5
    assert not vars(y)
    assert statistics.take_statistics(y) is None


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("build", "alone", "handed"),
    [
        # What is left: the norm behind conv_in, and those between two convolutions.
        pytest.param(unet, 12, 1 + 3, id="unet"),
        # And the norms in the attention and behind it.
        pytest.param(samples.vae, 14, 1 + 6 + 2, id="vae-decoder"),
    ],
)
def test_fewer_passes_for_statistics_in_a_whole_model(build, alone, handed, monkeypatch, launches):
    """Nothing is launched, so images can be so large that a norm reads its input twice."""
    fused = sdfastgn.optimize(build().to(WHERE["device"]), cuda_graphs=False, plans=False)
    counts, launches.runs = [], False
    for pays in (False, True):
        monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW, pays=pays: pays)
        launches.clear()
        call(fused, 64)
        counts.append(cases.passes(launches))
    assert [c["statistics"] for c in counts] == [alone, handed]
    plain, told = counts
    assert (plain["add"], plain["cat"], told["add alone"], told["cat alone"]) == (0, 0, 0, 0)
    assert (plain["add alone"], plain["cat alone"]) == (told["add"], told["cat"])
