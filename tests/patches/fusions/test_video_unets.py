"""UNets for video: each block runs fused with stock's values, or runs stock's code."""

import copy

import pytest
import torch
from diffusers.models.attention import TemporalBasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.transformers.transformer_temporal import (
    TransformerSpatioTemporalModel,
    TransformerTemporalModel,
)
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from peft import LoraConfig, inject_adapter_in_model

import sdfastgn
from sdfastgn.kernels.attention.over_frames import attend_over_frames
from sdfastgn.patches.fusions import spatio_temporal_transformer, temporal_resnet_block, temporal_transformer
from tests import video_unets
from tests.coverage import families as coverage
from tests.coverage import relatives
from tests.kernels.samples import kernels
from tests.patches.cases import WHERE, agree, compiles_to_stocks_graph, gradients

pytestmark = pytest.mark.fused_on_cpu
NAMES = [pytest.param(name, id=name) for name in video_unets.UNETS]
# Which blocks over frames a UNet has.
OVER_FRAMES = {
    "svd": TransformerSpatioTemporalModel,
    "animatediff": AnimateDiffTransformer3D,
    "text_to_video": TransformerTemporalModel,
    "i2vgen": TransformerTemporalModel,
}


def twins(name):
    """(optimized UNet, stock UNet with the same weights)"""
    unet, stock = (video_unets.original(name).copy() for _ in range(2))
    return sdfastgn.optimize(unet, cuda_graphs=False), stock


def call(unet, name, **options):
    with torch.no_grad():
        return unet(**video_unets.inputs(name, **options)).sample


def blocks(unet, name):
    return [module for module in unet.modules() if isinstance(module, OVER_FRAMES[name])]


@pytest.fixture
def fused(monkeypatch):
    """A list with an entry for each block over frames that ran fused."""
    found = []
    for module in (temporal_transformer, spatio_temporal_transformer):
        run = module._over_frames
        monkeypatch.setattr(
            module, "_over_frames", lambda block, *args, run=run: found.append(block) or run(block, *args)
        )
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "options", [{}, {"batch": 1, "frames": 5}, {"frames": 1}, {"size": (6, 10)}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_same_values_and_exact_restore(name, options, fused):
    unet, stock = twins(name)
    expected = call(stock, name, **options)
    agree(call(unet, name, **options), expected)
    assert len(fused) == len(blocks(unet, name)) > 3
    sdfastgn.restore(unet)
    assert torch.equal(call(unet, name, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svd", "animatediff"])
def test_same_values_in_the_kernels(name, launches, statistics_always_pay):
    unet, stock = twins(name)
    options = {"batch": 2, "frames": 2, "size": (2, 2)}
    with kernels(direct=True):
        agree(call(unet, name, **options), call(stock, name, **options), 5e-5)
    assert {"rows", "statistics", "geglu"} <= {launched for launched, *_ in launches}


def no_single_token(unet, values):
    values["encoder_hidden_states"] = video_unets.noise(2, 3, 32)


def other_processor(unet, values):
    for module in blocks(unet, "svd"):
        module.temporal_transformer_blocks[0].attn2.set_processor(AttnProcessor())


def hooked_out(unet, values):
    unet.seen = []
    for module in blocks(unet, "svd"):
        layer = module.transformer_blocks[0].attn2.to_out[0]
        layer.register_forward_hook(lambda m, i, o: unet.seen.append(o.shape))


def hooked_query(unet, values):
    unet.seen = []
    for module in blocks(unet, "svd"):
        query = module.transformer_blocks[0].attn2.to_q
        query.register_forward_hook(lambda m, i, o: unet.seen.append(o))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [no_single_token, other_processor, hooked_query, hooked_out])
def test_attention_to_one_token_needs_plain_layers(change, fused):
    unet, stock = twins("svd")
    values = video_unets.inputs("svd")
    for model in (unet, stock):
        change(model, values)
    with torch.no_grad():
        agree(unet(**values).sample, stock(**values).sample)
    assert len(fused) == len(blocks(unet, "svd"))
    if change is hooked_query:
        assert len(unet.seen) == len(stock.seen) > 0
    if change is hooked_out:
        assert unet.seen == stock.seen


def hooked_block(module):
    for child in module.modules():
        if type(child).__name__ in ("BasicTransformerBlock", "TemporalBasicTransformerBlock"):
            child.register_forward_hook(lambda m, i, o: 1.5 * o)


def hooked_attention(module):
    for child in module.modules():
        if type(child).__name__ == "Attention":
            child.register_forward_pre_hook(lambda m, i: None)


def hooked_layers(module):
    """Hooks that see what stock's code passes."""
    for name, child in module.named_modules():
        if name.endswith(("attn1.to_q", "attn2.to_out.0", "ff.net.2")):
            child.seen = []
            child.register_forward_hook(lambda m, i, o: m.seen.append((i[0].shape, o.shape)))


def chunks(module):
    for child in module.modules():
        if (
            isinstance(child, TemporalBasicTransformerBlock)
            or type(child).__name__ == "BasicTransformerBlock"
        ):
            child.set_chunk_feed_forward(1, dim=1)


def other_attention(module):
    for child in module.modules():
        if type(child).__name__ == "Attention":
            child.set_processor(AttnProcessor())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("change", [hooked_block, hooked_attention, hooked_layers, chunks, other_attention])
@pytest.mark.parametrize("name", ["svd", "animatediff", "text_to_video"])
def test_what_is_not_plain_runs_stocks_code(name, change, fused):
    unet, stock = twins(name)
    for model in (unet, stock):
        for module in blocks(model, name):
            change(module)
    agree(call(unet, name), call(stock, name))
    assert not fused
    found, expected = (
        [module.seen for module in model.modules() if hasattr(module, "seen")] for model in (unet, stock)
    )
    assert found == expected


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["svd", "animatediff"])
def test_a_lora_on_the_attention_over_frames(name, fused):
    unet, stock = twins(name)
    config = LoraConfig(r=2, target_modules=["to_q", "to_out.0", "net.2"], init_lora_weights=False)
    for model in (unet, stock):
        torch.manual_seed(5)
        inject_adapter_in_model(config, model)
    agree(call(unet, name), call(stock, name))
    assert len(fused) == len(blocks(unet, name))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, fused):
    unet, stock = twins(name)
    values = video_unets.inputs(name, frames=2)
    found = [gradients(model, **values, return_dict=False) for model in map(First, (unet, stock))]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=2e-3)
    assert not fused


class First(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **options):
        return self.model(**options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svd", "animatediff"])
def test_compiles_to_stocks_graph_of_blocks_over_frames(name):
    stock = blocks(video_unets.built(name), name)[0]
    fused = copy.deepcopy(stock)
    fusions = {"svd": spatio_temporal_transformer.FUSION, "animatediff": temporal_transformer.MOTION}
    fusions[name].apply(fused)
    image = video_unets.noise(6, 32, 2, 3)
    options = (
        {"num_frames": 3}
        if name == "animatediff"
        else {
            "encoder_hidden_states": video_unets.noise(6, 1, 32),
            "image_only_indicator": torch.zeros(2, 3),
            "return_dict": False,
        }
    )

    def run(model):
        with torch.no_grad():
            found = model(image, **options)
        return found if isinstance(found, torch.Tensor) else found[0]

    compiles_to_stocks_graph((fused, stock), run)


def test_images_among_the_frames():
    """A factor of its own for each frame, in both kinds of blocks."""
    unet, stock = twins("svd")
    indicator = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    values = {"image_only_indicator": indicator}
    text, temb = video_unets.noise(6, 1, 32), video_unets.noise(6, 128)
    with torch.no_grad():
        for path, image, options in (
            ("mid_block.attentions.0", video_unets.noise(6, 64, 2, 3), {"encoder_hidden_states": text}),
            ("down_blocks.0.resnets.0", video_unets.noise(6, 32, 2, 3), {"temb": temb}),
        ):
            found, expected = (
                model.get_submodule(path)(image, **options, **values) for model in (unet, stock)
            )
            agree(getattr(found, "sample", found), getattr(expected, "sample", expected))


def test_the_sum_of_a_residual_block_and_the_mix_are_one_pass(monkeypatch):
    unet, stock = twins("svd")
    found = []
    blend = temporal_resnet_block.blend
    monkeypatch.setattr(temporal_resnet_block, "blend", lambda *args: found.append(args) or blend(*args))
    mixed = [module for module in unet.modules() if type(module).__name__ == "SpatioTemporalResBlock"]
    agree(call(unet, "svd"), call(stock, "svd"))
    assert len(found) == len(mixed) > 5
    mixed[0].temporal_res_block.register_forward_hook(lambda m, i, o: None)
    found.clear()
    agree(call(unet, "svd"), call(stock, "svd"))
    assert len(found) == len(mixed) - 1


@pytest.mark.parametrize("N", [1, 2])
def test_attention_over_frames(N):
    heads, frames, pixels, D = 2, 3, 5, 4
    qkv = video_unets.noise(N, frames * pixels, 3 * heads, D).transpose(1, 2)
    q, k, v = qkv.chunk(3, 1)
    found = attend_over_frames(q, k, v, frames)
    for p in range(pixels):
        of_pixel = [t[:, :, p::pixels] for t in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*of_pixel)
        agree(found[:, p::pixels], expected.transpose(1, 2).flatten(2))


def draw_frames(pipe):
    size = {"num_frames": 5, "height": 8, "width": 8}
    # On a GPU the UNet runs eagerly in the first step, and as a CUDA graph in the others.
    steps = 1 if pipe.device.type == "cpu" else 4
    inputs = {"num_inference_steps": steps, "guidance_scale": 1.0, "output_type": "latent"}
    return pipe("a cat", **size, **inputs, generator=torch.Generator().manual_seed(0)).frames


@pytest.mark.slow
@pytest.mark.parametrize("order", ["optimize enable disable restore", "enable optimize disable restore"])
def test_animatediff_with_free_noise_and_split_inference(order, on_each_device, launches):
    """Split inference replaces layers by modules that split the tensors that are passed by keyword."""
    stock = coverage.built(relatives.video, "AnimateDiff").obj.to(WHERE["device"])
    pipe = type(stock)(**copy.deepcopy(stock.components))
    for each in (stock, pipe):
        each.set_progress_bar_config(disable=True)
    is_cpu = WHERE["device"] == "cpu"
    first, *_ = order.split()
    for step in order.split():
        if step in ("optimize", "restore"):
            getattr(sdfastgn, step)(pipe)
        for each in (stock, pipe):
            if step == "enable":
                each.enable_free_noise(context_length=4, context_stride=2)
                each.enable_free_noise_split_inference(spatial_split_size=2, temporal_split_size=3)
            elif step == "disable":
                each.disable_free_noise()
        if step != first or not is_cpu:  # in the interpreter a video takes seconds
            launches.clear()
            agree(draw_frames(pipe), draw_frames(stock), 2e-5 if is_cpu else 1e-3)
            assert bool(launches) == (step != "restore") or not is_cpu  # a graph launches nothing
