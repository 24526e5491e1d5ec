"""The fused ``Upsample2D``: where it runs in sdfastgn's op, where it must be diffusers' own."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.upsampling import Upsample2D
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.kernels.upsample import conv as upsample_conv
from sdfastgn.patches.fusions import upsample_2d
from sdfastgn.patches.layers import upsampling
from tests.kernels import samples as kernel_samples
from tests.patches.cases import agree, image

pytestmark = pytest.mark.fused_on_cpu

X = image(2, 12, 5, 6)


def twins(channels=12, **options):
    """(fused, stock) with the same weights."""
    torch.manual_seed(2)
    stock = Upsample2D(channels, **{"use_conv": True, **options}).eval()
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    assert [e.fusion for e in sdfastgn.report(fused).fused] == ["upsample_2d"]
    return fused, stock


@pytest.fixture
def ran(monkeypatch):
    """Runs as on a GPU. A list that says by which of three ways each image was upsampled."""
    ways = []

    def note(way, function):
        return lambda *args, **kwargs: (ways.append(way), function(*args, **kwargs))[1]

    for module in (upsample_2d, upsampling):
        monkeypatch.setattr(module, "upsample_nearest_2x", note("op", module.upsample_nearest_2x))
    monkeypatch.setattr(upsampling, "upsample_conv2d", note("phases", upsampling.upsample_conv2d))
    monkeypatch.setattr(F, "interpolate", note("interpolate", F.interpolate))
    with kernel_samples.kernels(direct=True):
        yield ways


@pytest.fixture
def low(monkeypatch):
    """Images of any size are convolved at low resolution if that is possible."""
    monkeypatch.setattr(upsample_conv, "phases_pay", lambda *sizes: True)


@kernel_samples.interpreted
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="conv"),
        pytest.param({"use_conv": False}, id="alone"),
        pytest.param({"out_channels": 20}, id="more-channels"),
        pytest.param({"name": "Conv2d_0", "bias": False}, id="other-name"),
        pytest.param({"kernel_size": 1, "padding": 0}, id="conv-1x1"),
        pytest.param({"kernel_size": 5, "padding": 2}, id="conv-5x5"),
    ],
)
@pytest.mark.parametrize("x", [X, image(64, 12, 2, 3)], ids=["usual", "batch-64"])
@pytest.mark.parametrize("trains", [True, False], ids=["gradients", "small"])
def test_runs_in_the_op(ran, options, x, trains):
    """Upstream's guard against batches of 64 is needed for PyTorch's kernel only."""
    fused, stock = twins(**options)
    with torch.set_grad_enabled(trains):
        y = fused(x)
        assert ran == ["op"]
        agree(y, stock(x))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        pytest.param(X, {"output_size": (9, 11)}, id="another-size"),
        pytest.param(X.contiguous(), {}, id="channels-first"),
        pytest.param(X[:, :, ::2], {}, id="gaps"),
        pytest.param(image(64, 12, 2, 3).contiguous(), {}, id="batch-64-channels-first"),
        pytest.param(X, {"scale": 1.0}, id="deprecated-scale"),
        pytest.param(X.double(), {}, id="fp64"),
    ],
)
def test_runs_upstreams_forward(ran, x, options):
    fused, stock = (model.to(x.dtype) for model in twins())
    agree(fused(x, **options), stock(x, **options))
    assert ran == ["interpolate"] * 2


@kernel_samples.interpreted
@pytest.mark.parametrize("size", [(10, 12), torch.Size((10, 12))], ids=["tuple", "size"])
def test_twice_the_size_may_be_asked_for(ran, size):
    fused, stock = twins()
    agree(fused(X, size), stock(X))
    assert ran == ["op", "interpolate"]


@pytest.mark.without_kernels
def test_without_a_gpu_it_is_upstreams_forward(monkeypatch):
    fused, stock = twins()
    for module in (upsample_2d, upsampling):
        monkeypatch.setattr(module, "upsample_nearest_2x", lambda x: pytest.fail("ran in the op"))
    assert torch.equal(fused(X), stock(X))


def test_wrong_channels_are_upstreams_error(ran):
    for model in twins():
        with pytest.raises(AssertionError):
            model(image(2, 8, 5, 6))


def test_an_option_that_changes_later_counts(ran):
    fused, stock = twins()
    for model in (fused, stock):
        model.interpolate = False
    agree(fused(X), stock(X))
    assert ran == []


@kernel_samples.interpreted
def test_gradients(ran):
    def gradients(model, x):
        x = x.clone().requires_grad_()
        loss = model(x).square().mean()
        return torch.autograd.grad(loss, (x, *model.parameters()))

    fused, stock = (model.train() for model in twins())
    for a, b in zip(gradients(fused, X), gradients(stock, X), strict=True):
        agree(a, b)
    assert ran == ["op", "interpolate"]


@kernel_samples.interpreted
def test_hooks_on_the_convolution(ran):
    fused, stock = twins()
    seen = []
    for model in (fused, stock):
        model.conv.register_forward_hook(
            lambda module, args, output: seen.extend((args[0], output)) or output + 1
        )
    with torch.no_grad():
        agree(fused(X), stock(X))
    assert [t.shape[2:] for t in seen] == [(10, 12)] * 4
    agree(seen[0], seen[2])
    agree(seen[1], seen[3])


# --- the convolution at low resolution ------------------------------------------------------------


@kernel_samples.interpreted
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="conv"),
        pytest.param({"out_channels": 20}, id="more-channels"),
        pytest.param({"name": "Conv2d_0", "bias": False}, id="other-name"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_convolves_at_low_resolution(ran, low, options, dtype):
    fused, stock = (model.to(dtype) for model in twins(**options))
    with torch.no_grad():
        y = fused(X.to(dtype))
        assert ran == ["phases"]
        expected = stock.float()(X.to(dtype).float())
    bound = 5e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(y.float(), expected, atol=bound, rtol=bound)
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=torch.channels_last)


@kernel_samples.interpreted
def test_edits_of_the_weights_count_at_once(ran, low):
    fused, stock = twins()
    edits = [
        lambda conv: conv.weight.mul_(2),
        lambda conv: conv.weight.data.copy_(torch.flip(conv.weight, (2,))),
        lambda conv: conv.load_state_dict({k: v + 0.5 for k, v in conv.state_dict().items()}),
        lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight.detach() * 3 + 1)),
        lambda conv: setattr(conv, "bias", None),
    ]
    with torch.no_grad():
        before = fused(X)
        for edit in edits:
            for model in (fused, stock):
                edit(model.conv)
            y = fused(X)
            assert not torch.allclose(y, before)
            torch.testing.assert_close(y, stock(X), atol=1e-4, rtol=1e-5)
            before = y
    assert ran == ["phases"] + ["phases", "interpolate"] * len(edits)


@kernel_samples.interpreted
def test_fused_lora_counts(ran, low):
    """A LoRA is merged by the call. After peft has merged and removed it, the convolution is plain."""
    fused, stock = twins()
    config = LoraConfig(r=2, target_modules=["conv"], init_lora_weights=False)
    for model in (fused, stock):
        torch.manual_seed(3)
        inject_adapter_in_model(config, model)
    with torch.no_grad():
        agree(fused(X), stock(X))
        for model in (fused, stock):
            model.conv.merge()
            model.conv = model.conv.get_base_layer()
        y = fused(X)
        agree(y, stock(X))
    assert ran == ["phases", "interpolate", "phases", "interpolate"]


def around(x, weight, bias):
    """A convolution with circular padding, which code for seamless tiling puts into instances."""
    return F.conv2d(F.pad(x, 4 * [1], mode="circular"), weight, bias)


@kernel_samples.interpreted
@pytest.mark.parametrize(
    ("options", "edit"),
    [
        pytest.param({"kernel_size": 1, "padding": 0}, None, id="1x1"),
        pytest.param({"kernel_size": 5, "padding": 2}, None, id="5x5"),
        pytest.param({}, lambda conv: setattr(conv, "padding_mode", "circular"), id="circular"),
        pytest.param({}, lambda conv: setattr(conv, "_conv_forward", around), id="conv-forward"),
        pytest.param({}, lambda conv: setattr(conv, "stride", (2, 2)), id="stride"),
        pytest.param({}, lambda conv: vars(conv).update(dilation=(2, 2), padding=(2, 2)), id="dilation"),
        pytest.param({"padding": 0}, None, id="no-padding"),
        pytest.param(
            {}, lambda conv: conv.register_forward_pre_hook(lambda m, args: (args[0] * 2,)), id="hook"
        ),
        pytest.param({}, lambda conv: setattr(conv, "forward", lambda x: x - 1), id="foreign-forward"),
        pytest.param({}, lambda conv: nn.utils.parametrizations.weight_norm(conv), id="parametrization"),
    ],
)
def test_other_convolutions_run_as_they_are(ran, low, options, edit):
    fused, stock = twins(**options)
    if edit is not None:
        for model in (fused, stock):
            edit(model.conv)
    with torch.no_grad():
        agree(fused(X), stock(X))
    assert ran == ["op", "interpolate"]


@kernel_samples.interpreted
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen-weights", "weights"])
def test_where_gradients_are_wanted_it_is_the_convolution_itself(ran, low, frozen):
    fused, _ = twins()
    fused.requires_grad_(not frozen)
    x = X.clone().requires_grad_(frozen)
    fused(x).sum().backward()
    with torch.no_grad():
        fused(x)
    assert ran == ["op", "phases"]


@kernel_samples.interpreted
def test_autocast_to_another_dtype_runs_the_convolution_itself(ran, low, monkeypatch):
    fused, _ = twins()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    for dtype in (torch.float16, torch.float32):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
        with torch.no_grad():
            fused(X)
    assert ran == ["op", "phases"]


def decoder(**options):
    torch.manual_seed(4)
    options = {"up_block_types": ("UpDecoderBlock2D",) * 3, "block_out_channels": (8, 16, 16), **options}
    return Decoder(**options, layers_per_block=1, norm_num_groups=4, mid_block_add_attention=False).eval()


@pytest.mark.drawn(1)
@kernel_samples.interpreted
@pytest.mark.parametrize("pays", [True, False], ids=["phases", "op"])
def test_no_interpolation_in_an_optimized_decoder(ran, monkeypatch, pays):
    monkeypatch.setattr(upsample_conv, "phases_pay", lambda *sizes: pays)
    stock = decoder()
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    latents = torch.randn(1, 3, 4, 6)
    with torch.no_grad():
        y = fused(latents)
        assert ran == (["phases"] if pays else ["op"]) * 2
        torch.testing.assert_close(y, stock(latents), atol=2e-4, rtol=2e-4)
        ran.clear()
        assert torch.equal(sdfastgn.restore(fused)(latents), stock(latents))
    assert ran == ["interpolate"] * 4


@kernel_samples.interpreted
def test_error_of_a_whole_decoder_is_stocks(ran, low, monkeypatch):
    """The low-resolution weights are rounded once more, which is little beside a decoder's 50 roundings."""

    def convolve(conv, x, weight, bias):
        # As on a GPU, where the bias is a separate pass after the convolution.
        y = F.conv2d(x, weight, None, conv.stride, conv.padding)
        return y if bias is None else y + bias.view(-1, 1, 1)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", convolve)
    stock = decoder(block_out_channels=(16, 16, 32)).half()
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    latents = torch.randn(1, 3, 5, 6).half()
    with torch.no_grad():
        truth = copy.deepcopy(stock).double()(latents.double())
        ours, theirs = (kernel_samples.error(model(latents), truth) for model in (fused, stock))
    assert ran == ["interpolate"] * 2 + ["phases"] * 2 + ["interpolate"] * 2
    assert 0 < ours < 1.05 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_conv", [True, False], ids=["conv", "alone"])
def test_on_a_gpu(dtype, autocast, use_conv):
    fused, stock = (model.to("cuda", dtype) for model in twins(64, use_conv=use_conv))
    x = image(2, 64, 133, 135).to("cuda", dtype)  # large enough for phases
    with (
        torch.no_grad(),
        torch.autocast("cuda", autocast or dtype, enabled=autocast is not None),
        mock.patch.object(F, "interpolate", side_effect=F.interpolate) as interpolate,
    ):
        y = fused(x)
        interpolated = interpolate.call_count
        expected = stock(x)
    assert interpolated == 0 or autocast is not None
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
