"""Pipelines of one to four steps, in which what the CPU does between the models counts."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionImg2ImgPipeline,
)

import sdfastgn
from sdfastgn.bench.images import psnr
from sdfastgn.models.architectures import UNETS, randomize
from tests.small_pipelines import IMAGE, SIZE, generate, pipeline, same_image_and_exact_restore, waits


def sdxl_turbo():
    """One step of Euler a without guidance."""
    pipe = pipeline("tiny_xl")
    pipe.scheduler = EulerAncestralDiscreteScheduler(timestep_spacing="trailing")
    return pipe


def lcm():
    """Latent consistency: the guidance is an embedding of the UNet."""
    with patch.dict(UNETS, tiny={**UNETS["tiny"], "time_cond_proj_dim": 16}):
        pipe = pipeline()
    pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    return pipe


def sd_turbo():
    """From image to image, with TAESD's autoencoder."""
    pipe = StableDiffusionImg2ImgPipeline(**pipeline().components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = EulerDiscreteScheduler(timestep_spacing="trailing")
    channels = {f"{half}coder_block_out_channels": (8, 8, 8, 8) for half in ("en", "de")}
    pipe.vae = randomize(AutoencoderTiny(**channels), 0).eval()
    return pipe


PIPELINES = [
    pytest.param(
        sdxl_turbo, {**SIZE, "num_inference_steps": 1, "guidance_scale": 0.0}, id="sdxl-turbo-1-step"
    ),
    pytest.param(lcm, {**SIZE, "num_inference_steps": 4, "guidance_scale": 8.0}, id="lcm-4-steps"),
    pytest.param(
        sd_turbo,
        {"image": IMAGE, "num_inference_steps": 2, "strength": 0.5, "guidance_scale": 0.0},
        id="sd-turbo-img2img",
    ),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("build", "extra"), PIPELINES)
def test_same_image_and_exact_restore(build, extra):
    components = {"unet", "vae", "image_processor", "scheduler", "pipeline"}
    same_image_and_exact_restore(build(), extra, components)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "build", [sdxl_turbo, lcm, lambda: pipeline("tiny_xl")], ids=["euler-a", "lcm", "euler"]
)
def test_no_step_waits_for_the_gpu(build):
    """As many waits an image with two steps as with six: what is left is before and behind them."""
    pipe = sdfastgn.optimize(build().to("cuda", torch.float16))
    counts = []
    for steps in (2, 6):
        call = partial(generate, pipe, **SIZE, num_inference_steps=steps)
        for _ in range(3):
            call()
        counts.append(waits(call))
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("build", "extra"), PIPELINES)
def test_same_image_on_the_gpu_in_fp16(build, extra):
    pipe = build().to("cuda", torch.float16)
    before = generate(pipe, **extra)
    sdfastgn.optimize(pipe)
    for _ in range(3):  # eager, captured, replayed
        assert psnr(generate(pipe, **extra), before) > 35
