"""Each of ComfyUI's blocks with the kernels that run on a GPU, in Triton's interpreter, beside stock."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from tests.patches import cases
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.ops  # noqa: E402
from comfy.ldm.modules.attention import BasicTransformerBlock, FeedForward, SpatialTransformer  # noqa: E402
from comfy.ldm.modules.diffusionmodules import model as vae  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, Upsample  # noqa: E402
from comfy.ops import disable_weight_init  # noqa: E402

from sdfastgn.patches.comfyui.inject import eject, inject  # noqa: E402
from sdfastgn.patches.comfyui.layers import has_steady_weights  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from sdfastgn.patches.layout import channels_last  # noqa: E402
from tests.patches.children import are_called_as_in_stock, each_place  # noqa: E402
from tests.patches.comfyui.comfy_models import snapshot  # noqa: E402

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures(
        "attention_of_pytorch", "on_each_device", "without_gradients", "statistics_always_pay"
    ),
]

C = 32
CONFIG = {
    "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
IMAGE, EMB, TOKENS, TEXT = (2, C, 6, 4), (2, 20), (2, 24, C), (2, 5, 12)


def shapes(*inputs):
    return lambda: [cases.noise(*shape, seed=i) for i, shape in enumerate(inputs)]


BLOCKS = {
    "resblock": (lambda: ResBlock(C, 20, 0.0), shapes(IMAGE, EMB)),
    "resblock-wider": (lambda: ResBlock(C, 20, 0.0, out_channels=2 * C), shapes(IMAGE, EMB)),
    "resblock-conv": (lambda: ResBlock(C, 20, 0.0, out_channels=2 * C, use_conv=True), shapes(IMAGE, EMB)),
    "resblock-scale": (lambda: ResBlock(C, 20, 0.0, use_scale_shift_norm=True), shapes(IMAGE, EMB)),
    "resblock-up": (lambda: ResBlock(C, 20, 0.0, up=True), shapes(IMAGE, EMB)),
    "resblock-down": (lambda: ResBlock(C, 20, 0.0, down=True), shapes(IMAGE, EMB)),
    "resblock-no-emb": (lambda: ResBlock(C, 20, 0.0, skip_t_emb=True), shapes(IMAGE, EMB)),
    "transformer": (lambda: SpatialTransformer(C, 2, 16, context_dim=12), shapes(IMAGE, TEXT)),
    "transformer-linear": (
        lambda: SpatialTransformer(C, 2, 16, depth=2, context_dim=12, use_linear=True),
        shapes(IMAGE, TEXT),
    ),
    "tokens": (lambda: BasicTransformerBlock(C, 2, 16, context_dim=12), shapes(TOKENS, TEXT)),
    "tokens-cross": (
        lambda: BasicTransformerBlock(C, 2, 16, context_dim=12, disable_self_attn=True),
        shapes(TOKENS, TEXT),
    ),
    "tokens-gelu": (
        lambda: BasicTransformerBlock(C, 2, 16, context_dim=12, gated_ff=False),
        shapes(TOKENS, TEXT),
    ),
    "upsample": (lambda: Upsample(C, True), shapes(IMAGE)),
    "vae-resnet": (lambda: vae.ResnetBlock(in_channels=C, temb_channels=0), shapes(IMAGE)),
    "vae-resnet-wider": (
        lambda: vae.ResnetBlock(in_channels=C, out_channels=2 * C, temb_channels=0),
        shapes(IMAGE),
    ),
    "vae-resnet-conv": (
        lambda: vae.ResnetBlock(in_channels=C, out_channels=2 * C, conv_shortcut=True, temb_channels=0),
        shapes(IMAGE),
    ),
    "vae-attention": (lambda: vae.AttnBlock(C), shapes(IMAGE)),
    "vae-upsample": (lambda: vae.Upsample(C, True), shapes(IMAGE)),
}


def twins(name):
    """(injected, stock, inputs). The image is channels-last, as inside of a model."""
    make, inputs = BLOCKS[name]
    torch.manual_seed(1)
    stock = make().eval().to(cases.WHERE["device"])
    for p in stock.parameters():
        nn.init.normal_(p, std=0.3, mean=float(p.dim() == 1))
    fused = copy.deepcopy(stock)
    inject(fused)
    tensors = inputs()
    if tensors[0].dim() == 4:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    return fused, stock, tensors


@pytest.mark.parametrize("name", BLOCKS)
def test_as_stock(name, launches):
    fused, stock, tensors = twins(name)
    assert type(fused) is not type(stock)
    assert not parts_of(fused)[1]
    found = fused(*tensors)
    assert launches
    cases.agree(found, stock(*tensors), 2e-4)
    if found.dim() == 4:
        assert found.is_contiguous(memory_format=torch.channels_last)
    eject(fused)
    assert torch.equal(fused(*tensors), stock(*tensors))
    assert [type(m) for m in fused.modules()] == [type(m) for m in stock.modules()]


@pytest.mark.parametrize("name", BLOCKS)
@each_place
def test_children_are_called_as_in_stock(name, place, launches):
    launches.runs = False  # only the calls are compared
    _, stock, tensors = twins(name)
    are_called_as_in_stock(stock, inject, lambda m: m(*tensors), place)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("casts", ["all", "norms", "fp8"])
def test_layers_that_cast(name, casts, launches):
    plain, stock, tensors = twins(name)
    plain(*tensors)
    expected = kernels_in(launches)
    for layer in layers_of(stock):
        layer.comfy_cast_weights = casts != "norms" or is_norm(layer)
        if layer.comfy_cast_weights:
            layer.to(torch.float8_e4m3fn if casts == "fp8" else torch.float64)
    fused = copy.deepcopy(stock)
    inject(fused)
    assert not parts_of(fused)[1]
    launches.clear()
    cases.agree(fused(*tensors), stock(*tensors), 2e-4)
    assert kernels_in(launches) == expected
    eject(fused)
    assert torch.equal(fused(*tensors), stock(*tensors))
    assert [vars(m).keys() for m in fused.modules()] == [vars(m).keys() for m in stock.modules()]


def test_the_product_of_a_layer_that_casts_is_added_to_the_sum(monkeypatch):
    _, stock, tensors = twins("tokens")
    for layer in layers_of(stock):
        layer.double().comfy_cast_weights = True
    fused = copy.deepcopy(stock)
    inject(fused)
    expected = stock(*tensors)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: 1 / 0)
    cases.agree(fused(*tensors), expected, 2e-4)


def layers_of(block):
    return [module for module in block.modules() if hasattr(module, "comfy_cast_weights")]


def is_norm(layer):
    return type(layer).__name__ in ("GroupNorm", "LayerNorm")


def kernels_in(launches):
    return Counter(name for name, *_ in launches)


@pytest.mark.parametrize("name", BLOCKS)
def test_functions_on_weights(name, launches):
    """A LoRA with low VRAM is such a function. ComfyUI calls it with a copy of the weight at each call."""
    _, stock, tensors = twins(name)
    for layer in layers_of(stock):
        layer.weight_function = [lambda weight: weight.mul_(0.5), lambda weight: weight + 0.1]
        if layer.bias is not None:
            layer.bias_function = [lambda bias: bias.sub_(1)]
    fused = copy.deepcopy(stock)
    inject(fused)
    for _ in range(2):
        cases.agree(fused(*tensors), stock(*tensors), 2e-4)
    assert launches
    assert not all(has_steady_weights(module) for module in fused.modules())


@pytest.mark.parametrize("name", ["resblock", "tokens", "vae-attention"])
def test_low_vram_leaves_all_as_it_is(name):
    """ComfyUI sets both attributes of a layer whose weights stay in main memory."""
    _, stock, _ = twins(name)
    layer = layers_of(stock)[0]
    layer.prev_comfy_cast_weights, layer.comfy_cast_weights = False, True
    before = snapshot(stock)
    inject(stock)
    assert snapshot(stock) == before


def test_an_unknown_cast_is_left_alone(monkeypatch):
    cast = comfy.ops.cast_bias_weight
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lambda *args, **kwargs: cast(*args, **kwargs))
    _, stock, tensors = twins("resblock")
    for layer in layers_of(stock):
        layer.comfy_cast_weights = is_norm(layer)
    fused = copy.deepcopy(stock)
    inject(fused)
    reason = "comfy.ops.cast_bias_weight of this ComfyUI is not a version that sdfastgn was tested with"
    assert parts_of(fused)[1] == {reason: {"group norms": 2}}
    assert not all(has_steady_weights(module) for module in fused.modules())
    cases.agree(fused(*tensors), stock(*tensors), 2e-4)


def test_a_hooked_layer_that_casts_is_called():
    _, stock, tensors = twins("resblock")
    for layer in layers_of(stock):
        layer.double().comfy_cast_weights = True
        layer.register_forward_hook(lambda layer, args, output: output * 2)
    fused = copy.deepcopy(stock)
    inject(fused)
    cases.agree(fused(*tensors), stock(*tensors), 2e-4)


def test_a_convolution_adds_no_bias_and_hands_statistics_over(ran):
    """Two blocks in inference mode, as in ComfyUI: the second takes the statistics of the first's sum."""
    decoder = vae.Decoder(**{**CONFIG, "ch": C, "ch_mult": [1], "num_res_blocks": 1}).eval()
    decoder.to(cases.WHERE["device"])
    for p in decoder.parameters():
        nn.init.normal_(p, std=0.1, mean=float(p.dim() == 1))
    stock = copy.deepcopy(decoder)
    inject(decoder)
    latent = cases.noise(1, 4, 6, 4)
    with torch.inference_mode():
        cases.agree(decoder(latent), stock(latent), 2e-4)
    # Of four residual blocks and one attention each sum has the statistics for the norm behind it.
    assert (ran("add"), ran("add alone")) == (5, 0)


def test_a_model_without_known_blocks_stays_as_it_is():
    model = nn.Sequential(disable_weight_init.Linear(4, 4), disable_weight_init.GroupNorm(2, 4), nn.SiLU())
    classes = [type(module) for module in model.modules()]
    inject(model)
    assert [type(module) for module in model.modules()] == classes


def test_a_failure_leaves_nothing_behind(monkeypatch):
    model = ResBlock(C, 20, 0.0)
    classes = [type(module) for module in model.modules()]
    monkeypatch.setattr(channels_last, "apply", lambda root: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inject(model)
    assert [type(module) for module in model.modules()] == classes
