"""Pipelines built offline are complete: they generate, save, and load again."""

from __future__ import annotations

import socket
from unittest import mock

import numpy as np
import pytest
import torch

from sdfastgn.bench.images import psnr
from sdfastgn.bench.run import run
from sdfastgn.bench.variants import VARIANTS
from sdfastgn.bench.workload import BenchConfig
from sdfastgn.bench.workload import build_pipeline as build_workload
from sdfastgn.models import configurations, saved
from sdfastgn.models.pipelines import build_pipeline, build_tokenizer, load_pipeline
from sdfastgn.program import OptionError

pytestmark = pytest.mark.fused_on_cpu


def generate(pipe):
    generator = torch.Generator().manual_seed(0)
    return pipe(
        "a cat", num_inference_steps=1, height=64, width=64, generator=generator, output_type="np"
    ).images


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_from_pretrained_gives_the_same_image(model, tmp_path):
    pipe = build_pipeline(model, dtype=torch.float32, device="cpu")
    before = generate(pipe)
    assert before.shape == (1, 64, 64, 3)
    assert before.std() > 0.05
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline("--weights", str(tmp_path), torch.float32, "cpu")
    assert type(loaded) is type(pipe)
    assert np.array_equal(generate(loaded), before)


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "[Errno -2] Name or service not known"),
        (TimeoutError(), "TimeoutError"),
        (type("OfflineModeIsEnabled", (ConnectionError,), {})("long text"), "HF_HUB_OFFLINE is set"),
    ],
)
@pytest.mark.parametrize("read", [saved.unet_config, lambda *where: load_pipeline(*where, torch.half, "cpu")])
def test_without_a_network_the_error_says_so(read, cause, why, monkeypatch):
    """diffusers wraps the cause in an OSError, which only says that a file is missing."""

    def no_network(*_, **__):
        try:
            raise cause
        except OSError:
            raise OSError("some/model does not appear to have a file named config.json")  # noqa: B904

    monkeypatch.setattr("diffusers.UNet2DConditionModel.load_config", no_network)
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", no_network)
    with pytest.raises(OptionError) as caught:
        read("--weights", "some/model")
    lacks = "--weights: 'some/model' is not fully in the local cache, and the Hub cannot be reached"
    assert str(caught.value) == f"{lacks} ({why})"


def test_tokenizer_pads_prompts_to_77_tokens():
    tokenizer = build_tokenizer()
    ids = tokenizer("an astronaut", padding="max_length", max_length=77, truncation=True).input_ids
    assert len(ids) == 77
    assert (ids[0], ids[-1]) == (512, 513)
    assert "astronaut" in tokenizer.decode(ids, skip_special_tokens=True)


def pipeline_config(**changes):
    return BenchConfig("tiny", "pipeline", 64, 1, "bf16", "cpu", repeats=1, steps=1, **changes)


def test_the_fp32_pipeline_has_the_same_weights_and_leaves_them():
    workload = build_workload(pipeline_config())
    before = workload.call()
    exact = workload.fp32_output()
    assert 20 < psnr(before, exact) < 100
    assert {p.dtype for p in workload.target.unet.parameters()} == {torch.bfloat16}
    assert np.array_equal(workload.call(), before)


def test_the_fp32_pipeline_starts_from_the_same_noise(monkeypatch):
    workload = build_workload(pipeline_config())
    found, stock = [], workload.target.prepare_latents

    def prepare_latents(*args, **kwargs):
        found.append(kwargs["latents"] if "latents" in kwargs else args[-1])
        return stock(*args, **kwargs)

    monkeypatch.setattr(workload.target, "prepare_latents", prepare_latents)
    workload.call()
    workload.fp32_output()
    half, full = found
    assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(half, full.to(torch.bfloat16))


FEW_STEPS = {
    "lcm": ({"time_cond_proj_dim": 16}, "StableDiffusionPipeline", "AutoencoderKL"),
    "sd_turbo": ({}, "StableDiffusionImg2ImgPipeline", "AutoencoderTiny"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "kind", "vae"), [(k, *v) for k, v in FEW_STEPS.items()])
def test_pipelines_of_few_steps(name, changes, kind, vae, monkeypatch):
    for table in (configurations.UNETS, configurations.TEXT_ENCODERS):
        monkeypatch.setitem(table, name, table["tiny"])
    monkeypatch.setitem(configurations.UNETS, name, {**configurations.UNETS["tiny"], **changes})
    if vae == "AutoencoderKL":
        monkeypatch.setitem(configurations.VAES, name, configurations.VAES["tiny"])
    config = BenchConfig(name, "pipeline", 64, 2, "fp32", "cpu", repeats=1, steps=2, guidance=0.0)
    workload = build_workload(config)
    assert type(workload.target).__name__ == kind
    assert type(workload.target.vae).__name__ == vae
    calls = []
    workload.target.unet.register_forward_hook(lambda *call: calls.append(1))
    images = workload.call()
    assert images.shape == (2, 64, 64, 3)
    assert len(calls) == 2  # as many as steps
    # What it starts from is drawn before, as calls are timed, and no call changes it.
    monkeypatch.setattr("sdfastgn.bench.workload.model_inputs.randn", mock.Mock(side_effect=AssertionError))
    assert np.array_equal(workload.call(), images)
    (row,) = run(config, [VARIANTS["sdfastgn"]], workload=workload)
    assert (row.status, row.reason, row.steps) == ("ok", "", 2)


def test_large_batches_are_decoded_one_by_one(monkeypatch):
    assert not build_workload(pipeline_config()).target.vae.use_slicing
    monkeypatch.setattr("sdfastgn.bench.workload.MOST_DECODED_PIXELS", 64 * 64 - 1)
    assert build_workload(pipeline_config()).target.vae.use_slicing


def test_a_pipeline_has_the_scheduler_prompt_and_guidance_that_were_asked_for():
    plain = build_workload(pipeline_config()).call()
    for changes in ({"scheduler": "DDIMScheduler"}, {"prompt": "a dog"}, {"guidance": 1.0}):
        assert not np.array_equal(build_workload(pipeline_config(**changes)).call(), plain), changes


def test_a_scheduler_that_cannot_be_made_is_named():
    with pytest.raises(OptionError, match=r"^--scheduler: cannot make 'VQDiffusionScheduler': TypeError: "):
        build_workload(pipeline_config(scheduler="VQDiffusionScheduler"))
