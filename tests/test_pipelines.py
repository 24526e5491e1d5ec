"""optimize and restore on whole diffusers pipelines, and beside the features that people use with
them.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig

import sdfastgn
from sdfastgn.bench.images import psnr, relative_error
from sdfastgn.models.architectures import UNETS, VAES, build_unet, build_vae, unet_inputs, vae_latents
from sdfastgn.models.pipelines import build_pipeline
from tests.controlnet import build_controlnet
from tests.patches import cases
from tests.small_pipelines import IMAGE, SIZE, generate, pipeline, same_image_and_exact_restore, waits

pytestmark = pytest.mark.fused_on_cpu


def controlnet_pipeline():
    stock = pipeline()
    controlnet = build_controlnet("tiny", torch.float32, "cpu")
    parts = {**stock.components, "controlnet": controlnet}
    pipe = StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def derived(cls):
    pipe = cls(**pipeline().components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES = [
    pytest.param(pipeline, SIZE, {"unet", "vae"}, id="text2img"),
    pytest.param(
        lambda: derived(StableDiffusionImg2ImgPipeline),
        {"image": IMAGE, "strength": 0.9},
        {"unet", "vae"},
        id="img2img",
    ),
    pytest.param(lambda: pipeline("tiny_xl"), SIZE, {"unet", "vae"}, id="sdxl"),
    pytest.param(
        controlnet_pipeline, {"image": IMAGE, **SIZE}, {"unet", "vae", "controlnet"}, id="controlnet"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "extra", "patched"), PIPELINES)
def test_same_image_and_exact_restore(build, extra, patched):
    components = patched | {"image_processor", "scheduler", "pipeline"}
    same_image_and_exact_restore(build(), extra, components)


def test_pipelines_that_share_components_share_the_state():
    first = pipeline()
    second = StableDiffusionImg2ImgPipeline(**first.components, requires_safety_checker=False)
    sdfastgn.optimize(first)
    assert sdfastgn.report(second).fused
    sdfastgn.restore(second)
    # What is its own.
    assert {e.component for e in sdfastgn.report(first).fused} == {"image_processor", "pipeline"}
    assert not sdfastgn.report(sdfastgn.restore(first)).fused


# --- the layout of real architectures -------------------------------------------------------------


def channels_first_inputs(root, call) -> tuple[int, int]:
    """(convolutions that saw an input that is not channels-last, convolutions called)."""
    seen = []
    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    hooks = [
        m.register_forward_hook(
            lambda m, i, o: seen.append(i[0].is_contiguous(memory_format=torch.channels_last))
        )
        for m in root.modules()
        if isinstance(m, kinds)
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return seen.count(False), len(seen)


NARROW = {"norm_num_groups": 8, "attention_head_dim": 4}
NARROW_UNETS = {
    "sd15": {**UNETS["sd15"], **NARROW, "block_out_channels": (16, 32, 40, 40), "cross_attention_dim": 8},
    "sdxl": {
        **UNETS["sdxl"],
        **NARROW,
        "block_out_channels": (16, 32, 40),
        "cross_attention_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 256 + 8,
    },
}
NARROW_VAE = {**VAES["sd15"], "block_out_channels": (16, 32, 40, 40), "norm_num_groups": 8}


def _unet(model, device="cpu"):
    """The real architecture, block for block, with few channels."""
    unet = UNet2DConditionModel(**NARROW_UNETS[model]).to(device).eval()
    text = torch.randn(2, 5, 8, device=device)
    added = {"text_embeds": text[:, 0], "time_ids": torch.ones(2, 6, device=device)}
    sample = torch.randn(2, 4, 16, 16, device=device)
    return unet, lambda: unet(sample, 10, text, added_cond_kwargs=added)


def _vae():
    vae = AutoencoderKL(**NARROW_VAE).eval()
    return vae, lambda: vae(torch.randn(1, 3, 32, 32))


def _controlnet():
    config = {k: v for k, v in NARROW_UNETS["sd15"].items() if k not in ("sample_size", "up_block_types")}
    controlnet = ControlNetModel(**config).eval()
    sample, text, image = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 8), torch.randn(2, 3, 128, 128)
    return controlnet, lambda: controlnet(sample, 10, text, image)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("build", "convolutions"),
    [
        pytest.param(lambda: _unet("sd15"), 98, id="unet-sd15"),
        pytest.param(lambda: _unet("sdxl"), 51, id="unet-sdxl"),
        pytest.param(_vae, 64, id="vae"),
        pytest.param(_controlnet, 61, id="controlnet-sd15"),
        pytest.param(lambda: _unet("sd15", "cuda"), 98, id="unet-sd15-gpu", marks=pytest.mark.gpu),
        pytest.param(lambda: _unet("sdxl", "cuda"), 51, id="unet-sdxl-gpu", marks=pytest.mark.gpu),
    ],
)
def test_no_convolution_sees_a_channels_first_input(build, convolutions):
    module, call = build()
    module.to(memory_format=torch.channels_last)
    by_memory_format_alone, _ = channels_first_inputs(module, call)
    module.to(memory_format=torch.contiguous_format)
    sdfastgn.optimize(module)
    assert channels_first_inputs(module, call) == (0, convolutions)
    assert by_memory_format_alone > 0  # so that the test can fail


# --- beside other features ------------------------------------------------------------------------


@pytest.fixture
def twins():
    """A UNet, an identical stock one, and a call of either."""
    unet = build_unet("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(unet)
    inputs = unet_inputs("tiny", size=64, batch=2, dtype=torch.float32, device="cpu", seed=0)

    def call(model):
        with torch.no_grad():
            return model(**inputs).sample

    return unet, stock, call


def add_lora(unet):
    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "conv1", "conv2"], init_lora_weights=False)
    torch.manual_seed(5)
    unet.add_adapter(config)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_convolutions_and_attention(twins, when):
    unet, stock, call = twins
    plain = call(stock)
    if when == "after":
        sdfastgn.optimize(unet)
    for model in (unet, stock):
        add_lora(model)
    if when == "before":
        sdfastgn.optimize(unet)
    assert not torch.allclose(call(unet), plain, atol=1e-3)
    cases.agree(call(unet), call(stock), 1e-4)
    for step in ("disable_adapters", "enable_adapters", "fuse_lora", "unfuse_lora"):
        for model in (unet, stock):
            getattr(model, step)()
        cases.agree(call(unet), call(stock), 1e-4)
    for model in (unet, stock):
        model.delete_adapters("default")
    cases.agree(call(unet), plain, 1e-4)
    sdfastgn.restore(unet)
    cases.agree(call(unet), plain, 1e-4)


def test_change_of_dtype_after_optimize(twins):
    unet, stock, _ = twins
    sdfastgn.optimize(unet).to(torch.bfloat16)
    stock.to(torch.bfloat16)
    inputs = unet_inputs("tiny", size=64, batch=2, dtype=torch.bfloat16, device="cpu", seed=0)
    with torch.no_grad():
        expected, actual = stock(**inputs).sample, unet(**inputs).sample
        assert actual.dtype is torch.bfloat16
        assert relative_error(actual, expected) < 0.05
        assert torch.equal(sdfastgn.restore(unet)(**inputs).sample, expected)
    assert [p.stride() for p in unet.parameters()] == [p.stride() for p in stock.parameters()]


def test_accelerate_offload_hooks_that_were_there_before(twins):
    """Sequential offload puts a forward into every module with weights, whose weights are on meta
    between calls.
    """
    unet, stock, call = twins
    cpu_offload(unet, execution_device=torch.device("cpu"), offload_buffers=True)
    sdfastgn.optimize(unet)
    assert any("accelerate's hooks" in e.reason for e in sdfastgn.report(unet).skipped)
    cases.agree(call(unet), call(stock), 1e-4)


@pytest.mark.slow
def test_change_of_dtype_in_the_middle_of_a_call():
    """SDXL upcasts its VAE to fp32 for the decode, and back."""
    pipe = pipeline("tiny_xl").to(torch.float16)
    assert isinstance(pipe, StableDiffusionXLPipeline)
    pipe.vae.register_to_config(force_upcast=True)
    before = generate(pipe, **SIZE)
    sdfastgn.optimize(pipe)
    for _ in range(4):
        assert psnr(generate(pipe, **SIZE), before) > 40
        assert pipe.vae.dtype is torch.float16
    report = sdfastgn.report(pipe)
    assert report.fused
    (planned,) = (p for p in report.plans if p.calls or p.own)
    assert (planned.path, planned.traces, planned.calls) == ("vae.decoder", 1, 4)
    sdfastgn.restore(pipe)
    assert np.array_equal(generate(pipe, **SIZE), before)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_pipeline_on_the_gpu_in_fp16(model):
    pipe = build_pipeline(model, dtype=torch.float16, device="cuda")
    before = generate(pipe, **SIZE)
    sdfastgn.optimize(pipe)
    assert "Triton" in sdfastgn.report(pipe).backend
    assert psnr(generate(pipe, **SIZE), before) > 35
    sdfastgn.restore(pipe)
    assert np.array_equal(generate(pipe, **SIZE), before)


@pytest.mark.gpu
def test_the_report_of_an_offloaded_pipeline():
    """Its weights wait on the CPU, and its kernels and the UNet's graphs run on the GPU."""
    pipe = sdfastgn.optimize(build_pipeline("tiny", dtype=torch.float16, device="cpu"))
    assert not sdfastgn.report(pipe).runs_kernels
    pipe.enable_model_cpu_offload()
    generate(pipe, num_inference_steps=12, **SIZE)  # the scheduler calls the UNet once more
    report = sdfastgn.report(pipe)
    assert report.runs_kernels
    assert report.backend.startswith("Triton")
    assert report.layout_copies_removed > 0
    assert "CUDA graphs of unet: 0 alive, 7 calls replayed" in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_the_host_waits_no_more_often_than_in_diffusers(model):
    pipe = build_pipeline(model, dtype=torch.float16, device="cuda")
    call = partial(generate, pipe, **SIZE)
    call()
    stock = waits(call)
    assert stock > 0  # the image has to be fetched
    sdfastgn.optimize(pipe)
    for _ in range(3):
        call()
    assert waits(call) <= stock


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["unet", "vae"])
def test_cuda_graph_of_an_optimized_model(part):
    if part == "unet":
        module = build_unet("tiny", torch.float16, "cuda")
        inputs = unet_inputs("tiny", size=64, batch=2, dtype=torch.float16, device="cuda", seed=0)
        tensor, call = inputs["sample"], lambda: module(**inputs).sample
    else:
        module = build_vae("tiny", torch.float16, "cuda")
        tensor = vae_latents("tiny", size=64, batch=1, dtype=torch.float16, device="cuda", seed=0)
        call = lambda: module.decode(tensor).sample  # noqa: E731
    sdfastgn.optimize(module)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        tensor.normal_()
        graph.replay()
        torch.testing.assert_close(output, call(), atol=2e-2, rtol=2e-2)
