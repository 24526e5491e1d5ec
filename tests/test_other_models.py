"""The relatives of SD1.5 and SDXL: video UNets and VAEs (5-D tensors), scale-shift UNets,
IP-Adapter, CPU offload.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    UNet2DConditionModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.models.architectures import build_unet, randomize, unet_inputs
from sdfastgn.models.pipelines import build_pipeline
from tests.patches.cases import ip_adapter_weights
from tests.small_pipelines import SIZE, generate

pytestmark = pytest.mark.fused_on_cpu

SMALL = {"sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def svd():
    unet = UNetSpatioTemporalConditionModel(
        **SMALL,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        num_frames=3,
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
    )
    return unet, lambda: unet(noise(1, 3, 8, 8, 8), 10, noise(1, 1, 16, seed=1), torch.ones(1, 3)).sample


def animate_diff():
    unet = UNetMotionModel(
        **SMALL,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        num_attention_heads=2,
        motion_num_attention_heads=2,
    )
    return unet, lambda: unet(noise(1, 4, 3, 8, 8), 10, noise(3, 5, 16, seed=1)).sample


def text_to_video():
    unet = UNet3DConditionModel(
        **SMALL,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8,
    )
    return unet, lambda: unet(noise(1, 4, 3, 8, 8), 10, noise(1, 5, 16, seed=1)).sample


def svd_vae():
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1
    )
    return vae, lambda: vae.decode(noise(3, 4, 8, 8), num_frames=3).sample


def scale_shift():
    unet = UNet2DConditionModel(
        **SMALL,
        norm_num_groups=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        attention_head_dim=8,
        resnet_time_scale_shift="scale_shift",
    )
    return unet, lambda: unet(noise(2, 4, 8, 8), 10, noise(2, 5, 16, seed=1)).sample


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("build", "fusions"),
    [
        pytest.param(svd, {"temporal_resnet_block", "resnet_block", "conv_norm_out"}, id="svd"),
        pytest.param(animate_diff, {"transformer_2d", "resnet_block", "conv_norm_out"}, id="animatediff"),
        pytest.param(text_to_video, {"sequential", "transformer_2d", "resnet_block"}, id="text-to-video"),
        pytest.param(svd_vae, {"temporal_resnet_block", "resnet_block", "conv_norm_out"}, id="svd-vae"),
        pytest.param(scale_shift, {"resnet_block", "conv_norm_out"}, id="scale-shift"),
    ],
)
def test_same_output_and_exact_restore(build, fusions):
    model, call = build()
    randomize(model, 3).eval()
    with torch.no_grad():
        before = call()
        sdfastgn.optimize(model)
        report, after = sdfastgn.report(model), call()
        assert fusions <= {e.fusion for e in report.fused}
        assert not report.skipped
        torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
        assert after.stride() in (before.stride(), before.contiguous().stride())  # plans return the latter
        sdfastgn.restore(model)
        assert torch.equal(call(), before)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_ip_adapter_and_its_scale(when):
    unet = build_unet("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(unet)
    inputs = unet_inputs("tiny", size=64, batch=2, dtype=torch.float32, device="cpu", seed=0)

    def call(model):
        with torch.no_grad():
            return model(**inputs, added_cond_kwargs={"image_embeds": [noise(2, 1, 24, seed=7)]}).sample

    if when == "after":
        sdfastgn.optimize(unet)
    for model in (unet, stock):
        model._load_ip_adapter_weights([ip_adapter_weights(model)])
    if when == "before":
        sdfastgn.optimize(unet)
    outputs = []
    for scale in (1.0, 0.2):
        for model in (unet, stock):
            for processor in model.attn_processors.values():
                if hasattr(processor, "scale"):
                    processor.scale = [scale]
        torch.testing.assert_close(call(unet), call(stock), atol=2e-5, rtol=2e-4)
        outputs.append(call(unet))
    assert not torch.allclose(*outputs, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_cpu_offload_on_the_gpu(offload, when):
    pipe = build_pipeline("tiny", dtype=torch.float16, device="cuda")
    expected = generate(pipe, **SIZE)
    pipe.to("cpu")
    if when == "after":
        sdfastgn.optimize(pipe)
    getattr(pipe, offload)()
    if when == "before":
        sdfastgn.optimize(pipe)
    image = generate(pipe, **SIZE)
    assert np.isfinite(image).all()
    assert psnr(image, expected) > 35
