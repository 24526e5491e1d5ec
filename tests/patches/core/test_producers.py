"""Blocks whose last kernel hands statistics on: same values as stock, fewer passes, and upstream's own way where something is unusual."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.upsampling import Upsample2D
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from sdfastgn.kernels.upsample import conv as upsample_conv
from sdfastgn.patches.core import convolution, statistics
from tests.kernels import samples
from tests.patches import cases
from tests.patches.cases import WHERE, agree, image, noise
from tests.patches.samples import twins_of

on_each_device, without_gradients = cases.on_each_device, cases.without_gradients
launches = cases.launches


@pytest.fixture(autouse=True)
def statistics_always_pay(monkeypatch):
    """However small the tensor is."""
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: True)


def counted(launches: cases.Launches) -> Counter[str]:
    """GroupNorm's passes over memory; sums and concatenations with statistics, or alone."""
    names: Counter[str] = Counter()
    uses = {"residual_ptr": "add", "tail_ptr": "cat", "bias_ptr": "bias"}
    for name, _, pointers in launches:
        if name == "statistics":
            name = next((use for p, use in uses.items() if pointers[p] is not None), name)
            name += "" if pointers["statistics_ptr"] is not None else " alone"
        names[name] += 1
    return names


@pytest.fixture
def ran(launches):
    """``ran(name)``: how often that was launched."""
    return lambda name: counted(launches)[name]


def twins(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    return twins_of(module, WHERE["device"], dtype)


def resnet(**options: Any) -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 6, "groups": 2, "temb_channels": 8, "eps": 1e-5}
    return ResnetBlock2D(**{**sizes, **options})


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return image(2, 4, 3, 4, dtype=dtype), noise(2, 8, dtype=dtype)


# --- ResNet blocks --------------------------------------------------------------------------------------------------------------------

RESNETS: dict[str, dict[str, Any]] = {
    "shortcut": {}, "no-shortcut": {"out_channels": 4}, "shortcut-without-bias": {"conv_shortcut_bias": False},
    "output-scale": {"output_scale_factor": 2**0.5}, "one-channel-a-group": {"groups": 4, "groups_out": 6},
    "other-output-channels": {"conv_2d_out_channels": 5}, "up": {"up": True}, "down": {"down": True},
}  # fmt: skip


@pytest.mark.parametrize("options", RESNETS.values(), ids=RESNETS)
def test_a_resnet_ends_in_one_sum(ran, options):
    fused, stock = twins(resnet(**options))
    y = fused(*inputs())
    agree(y, stock(*inputs()), 5e-5)
    assert ran("add") == 1
    assert statistics.take_statistics(y) is not None


def test_a_resnet_is_no_less_exact_than_stock():
    """Not in bfloat16, to which the interpreter does not round but cuts."""
    fused, stock = twins(resnet(output_scale_factor=2**0.5), torch.float16)
    x, temb = image(2, 4, 16, 16, dtype=torch.float16), noise(2, 8, dtype=torch.float16)
    expected = copy.deepcopy(stock).double()(x.double(), temb.double())
    assert samples.error(fused(x, temb), expected) <= 1.02 * samples.error(stock(x, temb), expected)


def test_a_small_resnet_ends_in_a_sum_without_statistics(ran, monkeypatch):
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: False)
    fused, stock = twins(resnet())
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert (ran("add"), ran("add alone")) == (0, 1)


def biases_moved(monkeypatch) -> list[nn.Module]:
    """The convolutions that left their bias to another kernel."""
    moved = []
    inner = nn.Conv2d._conv_forward

    def forward(conv, x, weight, bias):
        if bias is None and conv.bias is not None:
            moved.append(conv)
        return inner(conv, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", forward)
    return moved


def test_the_bias_of_the_second_convolution_goes_into_the_sum(monkeypatch):
    fused, stock = twins(resnet())
    moved = biases_moved(monkeypatch)
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert fused.conv2 in moved
    assert fused.conv_shortcut not in moved


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


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when, monkeypatch):
    targets = ["conv1", "conv2", "conv_shortcut"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    fused, stock = twins(inject_adapter_in_model(config, resnet()) if when == "before" else resnet())
    if when == "after":
        before = fused(*inputs())
        for model in (fused, stock):
            torch.manual_seed(3)
            inject_adapter_in_model(config, model).to(WHERE["device"])
        assert not torch.allclose(stock(*inputs()), before, atol=1e-3)
    moved = biases_moved(monkeypatch)
    agree(fused(*inputs()), stock(*inputs()), 5e-5)
    assert not {fused.get_submodule(f"{t}.base_layer") for t in targets} & set(moved)


def test_gradients_run_stocks_operations(ran):
    models = twins(resnet(output_scale_factor=1.5))
    x, temb = inputs()
    cases.same_gradients(models, x.requires_grad_(), temb)  # stock PyTorch crashes without
    assert not ran("add") + ran("add alone")


def test_autocast():
    fused, stock = twins(resnet())
    with torch.autocast(WHERE["device"], torch.bfloat16):
        y, expected = fused(*inputs()), stock(*inputs())
    torch.testing.assert_close(y.float(), expected.float(), atol=0.06, rtol=0.02)


# --- transformers ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """Matrix products that stood for a convolution."""
    found = []
    linear = nn.functional.linear
    monkeypatch.setattr(convolution.nn.functional, "linear", lambda *a: found.append(a) or linear(*a))
    return found


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
    assert sum(a[0].dim() == 2 for a in products) == (0 if linear else 2)
    expected = copy.deepcopy(stock).double()(x.double(), context.double()).sample
    assert samples.error(y, expected) <= 1.05 * samples.error(stock(x, context).sample, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)


# --- downsamplers ------------------------------------------------------------------------------------------------------------------------


NORM = {"norm_type": "ln_norm", "eps": 1e-5, "elementwise_affine": True}


@pytest.mark.parametrize(
    ("options", "kernels"),
    [({}, 1), ({"padding": 0}, 1), ({"out_channels": 8}, 1), ({"bias": False}, 0), (NORM, 0)],
    ids=["padding-1", "padding-0", "other-output-channels", "no-bias", "norm"],
)
def test_a_downsampler_ends_in_the_bias(ran, options, kernels):
    fused, stock = twins(Downsample2D(12, use_conv=True, **options))
    x = image(2, 12, 5, 7)
    y = fused(x)
    agree(y, stock(x), 5e-5)
    assert ran("bias") == kernels
    assert (statistics.take_statistics(y) is not None) == bool(kernels)


def test_a_hooked_downsampler_keeps_its_bias(ran):
    fused, stock = twins(Downsample2D(12, use_conv=True))
    seen = []
    for model in (fused, stock):
        model.conv.register_forward_hook(lambda m, i, o: seen.append(o.clone()))
    x = image(2, 12, 5, 7)
    agree(fused(x), stock(x), 5e-5)
    agree(*seen, 5e-5)
    assert not ran("bias")


def test_downsamplers_refuse_what_upstream_refuses():
    fused, _ = twins(Downsample2D(12, use_conv=True))
    with pytest.raises(AssertionError):
        fused(image(2, 8, 5, 7))
    with pytest.warns(FutureWarning, match="scale"):
        fused(image(2, 12, 5, 7), scale=1.0)


# --- upsamplers --------------------------------------------------------------------------------------------------------------------------


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


# --- up blocks --------------------------------------------------------------------------------------------------------------------------

SIZES = {
    "in_channels": 4,
    "prev_output_channel": 8,
    "out_channels": 6,
    "temb_channels": 8,
    "resnet_groups": 2,
}


def up_block(cross: bool, **options: Any) -> nn.Module:
    if cross:
        options = {"num_attention_heads": 2, "cross_attention_dim": 12, **options}
    return (CrossAttnUpBlock2D if cross else UpBlock2D)(**SIZES, num_layers=1, **options)


def up_inputs(cross: bool) -> dict[str, Any]:
    skips = image(2, 5, 2, 3), image(2, 4, 2, 3, seed=2)
    inputs = {
        "hidden_states": image(2, 8, 2, 3, seed=4),
        "res_hidden_states_tuple": skips,
        "temb": noise(2, 8),
    }
    return inputs | ({"encoder_hidden_states": noise(2, 3, 12, seed=5)} if cross else {})


both = pytest.mark.parametrize("cross", [False, True], ids=["up", "cross-attention"])


@both
def test_an_up_block_concatenates_with_statistics(ran, cross):
    fused, stock = twins(up_block(cross))
    agree(fused(**up_inputs(cross)), stock(**up_inputs(cross)), 5e-5)
    assert ran("cat") == 1
    assert ran("statistics") == 0


@pytest.mark.parametrize(("cross", "stage"), [(False, 2), (True, 0)])
def test_freeu(ran, launches, cross, stage):
    """Its writes in place take the statistics away, and the block is upstream's."""
    fused, stock = twins(up_block(cross, resolution_idx=stage))
    plain = fused(**up_inputs(cross))
    for model in (fused, stock):
        model.s1, model.s2, model.b1, model.b2 = 0.9, 0.2, 1.4, 1.6
    launches.clear()
    inputs, expected = up_inputs(cross), stock(**up_inputs(cross))
    inputs["hidden_states"] = statistics.add(*[inputs["hidden_states"] / 2] * 2)
    got = fused(**inputs)
    agree(got, expected, 5e-5)
    assert ran("cat") == 0
    assert torch.allclose(got, plain, atol=1e-3) == (stage == 2)
    for model in (fused, stock):
        model.s1 = model.s2 = model.b1 = model.b2 = None
    agree(fused(**up_inputs(cross)), plain, 5e-5)
    assert ran("cat") == 1


@both
def test_gradient_checkpointing_of_up_blocks(ran, cross):
    fused, stock = twins(up_block(cross))
    checkpoints = []
    for model in (fused, stock):
        model.gradient_checkpointing = True
        model._gradient_checkpointing_func = lambda f, *args: checkpoints.append(f) or f(*args)
    agree(fused(**up_inputs(cross)), stock(**up_inputs(cross)), 5e-5)
    assert not checkpoints
    assert ran("cat") == 1
    with torch.enable_grad():
        agree(fused(**up_inputs(cross)).detach(), stock(**up_inputs(cross)).detach(), 5e-5)
    assert len(checkpoints) == 2
    assert ran("cat") == 1


@both
def test_gradients_of_an_up_block_run_upstreams_forward(ran, cross):
    fused, _ = twins(up_block(cross))
    inputs = up_inputs(cross)
    inputs["res_hidden_states_tuple"][-1].requires_grad_()
    with torch.enable_grad():
        fused(**inputs).sum().backward()
    assert ran("cat") == 0
    assert inputs["res_hidden_states_tuple"][-1].grad is not None


@both
def test_too_few_skips_are_an_error(cross):
    fused, _ = twins(up_block(cross))
    inputs = up_inputs(cross)
    inputs["res_hidden_states_tuple"] = ()
    with pytest.raises(IndexError, match="tuple index out of range"):
        fused(**inputs)


def test_deprecated_arguments_run_upstreams_forward(ran):
    fused, stock = twins(up_block(True))
    options = {"cross_attention_kwargs": {"scale": 0.5}}
    agree(fused(**up_inputs(True), **options), stock(**up_inputs(True), **options), 5e-5)
    fused, stock = twins(up_block(False))
    with pytest.warns(FutureWarning, match="scale"):
        agree(fused(**up_inputs(False), scale=1.0), stock(**up_inputs(False)), 5e-5)
    assert ran("cat") == 0


# --- whole models -------------------------------------------------------------------------------------------------------------------------


def unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(8, 16), norm_num_groups=1, layers_per_block=1, cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def vae() -> nn.Module:
    return AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=1, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def call(model: nn.Module, size: int) -> Tensor:
    x = image(1, 4, size, size)
    if isinstance(model, AutoencoderKL):
        return model.decode(x).sample
    return model(x, 10, image(1, 3, 12, 1, seed=1)[..., 0]).sample


@pytest.mark.parametrize("build", [unet, vae])
def test_a_whole_model(ran, build):
    fused, stock = twins(build())
    y = call(fused, 4)
    agree(y, call(stock, 4), 5e-5)
    assert ran("add") > 5
    assert not vars(y)
    assert statistics.take_statistics(y) is None


@pytest.mark.parametrize(
    ("build", "alone", "handed"),
    [
        # What is left: the norm behind conv_in, and those between two convolutions.
        pytest.param(unet, 12, 1 + 3, id="unet"),
        # And the norms in the attention and behind it.
        pytest.param(vae, 14, 1 + 6 + 2, id="vae-decoder"),
    ],
)
def test_fewer_passes_for_statistics_in_a_whole_model(build, alone, handed, monkeypatch, launches):
    """Nothing is launched, so that the sizes may be those at which a norm reads x for its statistics and once more."""
    fused = sdfastgn.optimize(build().to(WHERE["device"]))
    counts, launches.runs = [], False
    for pays in (False, True):
        monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW, pays=pays: pays)
        launches.clear()
        call(fused, 64)
        counts.append(counted(launches))
    assert [c["statistics"] for c in counts] == [alone, handed]
    plain, told = counts
    assert (plain["add"], plain["cat"], told["add alone"], told["cat alone"]) == (0, 0, 0, 0)
    assert (plain["add alone"], plain["cat alone"]) == (told["add"], told["cat"])
