"""The trained pipeline of digits: its quality, and what people do with real weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    AutoPipelineForInpainting,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import sdfastgn
from sdfastgn.bench.documents import OK
from sdfastgn.bench.images import psnr
from sdfastgn.cli import digits_pipeline
from sdfastgn.cli.digits_pipeline import FOLDER, INKS, NUMERALS, SIZE, generate, prompt_of
from sdfastgn.models.pipelines import load_pipeline
from tests.command_line import exit_code, invoke
from tests.kernels.samples import interpreted, kernels

pytestmark = pytest.mark.fused_on_cpu

# The fewest that draw every digit in its ink.
FEW_STEPS = 5
# dB between stock's images and the optimized ones in fp32.
LEAST_PSNR = 60


def load(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    pipe = load_pipeline("digits", str(FOLDER), dtype, device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def asked(count: int) -> tuple[list[int], list[str]]:
    """Digits, and their prompts in every ink."""
    digits, inks = [number % len(NUMERALS) for number in range(count)], list(INKS)
    return digits, [prompt_of(digit, inks[number % len(inks)]) for number, digit in enumerate(digits)]


def draw(pipe: Any, count: int, **options: Any) -> tuple[np.ndarray, int]:
    """Images, and how many of them show the digit that was asked for."""
    digits, prompts = asked(count)
    images = generate(pipe, prompts, **options)
    return images, sum(a == b for a, b in zip(digits_pipeline.read(images), digits, strict=True))


# --- quality --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_are_legible_and_inks_as_asked() -> None:
    pipe = load()
    stock, read = draw(pipe, 30, num_inference_steps=FEW_STEPS)
    assert read >= 27
    optimized, read = draw(sdfastgn.optimize(pipe), 30, num_inference_steps=FEW_STEPS)
    assert read >= 27
    assert psnr(optimized, stock) > LEAST_PSNR
    inks = np.array(list(INKS.values()))
    # The darkest pixel of an image is inside a stroke.
    darkest = np.stack([image[image.sum(-1) == image.sum(-1).min()][0] for image in optimized])
    nearest = np.abs(darkest[:, None] - inks).sum(-1).argmin(1)
    assert np.sum(nearest == np.arange(30) % len(INKS)) >= 27


@pytest.mark.slow
@interpreted
def test_a_digit_drawn_by_the_kernels_is_legible() -> None:
    """The last of two steps, and the decoder: the interpreter takes its time."""
    pipe, options = load(), {"num_inference_steps": 2, "guidance_scale": 1.0}
    stock = generate(pipe, [prompt_of(3)], **options)
    sdfastgn.optimize(pipe)
    with contextlib.ExitStack() as stack:

        def switch_kernels_on(pipe: Any, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                stack.enter_context(kernels(direct=True))
            return tensors

        optimized = generate(pipe, [prompt_of(3)], callback_on_step_end=switch_kernels_on, **options)
    assert digits_pipeline.read(optimized) == digits_pipeline.read(stock) == [3]
    assert LEAST_PSNR < psnr(optimized, stock) < np.inf


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_90_of_100_images_show_their_digit(dtype: torch.dtype) -> None:
    pipe = load("cuda", dtype)
    assert draw(pipe, 100)[1] >= 90
    assert draw(sdfastgn.optimize(pipe), 100)[1] >= 90


# --- image to image, inpainting -------------------------------------------------------------------


def image_to_image(pipe: Any, image: Tensor) -> Any:
    """From the folder, as users load it."""
    pipe = StableDiffusionImg2ImgPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"image": image, "strength": 0.6}


def inpainting(pipe: Any, image: Tensor) -> Any:
    """Of a pipeline that is there, sharing its components; the lower half is new."""
    pipe = AutoPipelineForInpainting.from_pipe(pipe)
    pipe.set_progress_bar_config(disable=True)
    mask = torch.zeros(1, 1, SIZE, SIZE)
    mask[:, :, SIZE // 2 :] = 1
    return pipe, {"image": image, "mask_image": mask, "height": SIZE, "width": SIZE}


@pytest.mark.slow
@pytest.mark.parametrize("build", [image_to_image, inpainting])
def test_a_given_image_becomes_another(build: Any) -> None:
    first = load()
    given = generate(first, [prompt_of(7)], num_inference_steps=FEW_STEPS)
    pipe, options = build(first, torch.from_numpy(given).movedim(-1, 1))

    def result() -> np.ndarray:
        return generate(pipe, [prompt_of(7, "green")], num_inference_steps=FEW_STEPS, **options)

    stock = result()
    assert stock.shape == given.shape
    assert psnr(stock, given) < 30
    sdfastgn.optimize(pipe)
    assert LEAST_PSNR < psnr(result(), stock) < np.inf
    sdfastgn.restore(pipe)
    assert np.array_equal(result(), stock)


# --- LoRA -----------------------------------------------------------------------------------------


def batch_of(pipe: Any) -> tuple[Tensor, Tensor]:
    """Latents of red digits, and the text of prompts for black ones: what the LoRA shall learn."""
    images = generate(pipe, [prompt_of(digit, "red") for digit in range(4)], num_inference_steps=FEW_STEPS)
    with torch.no_grad():
        latents = pipe.vae.encode(torch.from_numpy(images).movedim(-1, 1) * 2 - 1).latent_dist.mode()
        text, _ = pipe.encode_prompt([prompt_of(digit) for digit in range(4)], "cpu", 1, False)
    return latents * pipe.vae.config.scaling_factor, text


def train_lora(pipe: Any, latents: Tensor, text: Tensor, steps: int = 8) -> list[float]:
    """Losses of a few steps; the adapter stays in ``pipe.unet``."""
    torch.manual_seed(0)
    pipe.unet.requires_grad_(False)
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "conv1"]))
    optimizer = torch.optim.AdamW((p for p in pipe.unet.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    noise, timesteps = torch.randn_like(latents), torch.tensor([200, 400, 600, 800])
    noisy = pipe.scheduler.add_noise(latents, noise, timesteps)
    for _ in range(steps):
        loss = F.mse_loss(pipe.unet(noisy, timesteps, text).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_lora_is_trained_saved_loaded_and_unloaded(tmp_path: Path) -> None:
    pipe = load()
    batch = batch_of(pipe)
    stock_losses = train_lora(copy.deepcopy(pipe), *batch)
    trained = sdfastgn.optimize(copy.deepcopy(pipe))
    assert train_lora(trained, *batch) == pytest.approx(stock_losses, rel=1e-3)
    assert stock_losses[-1] < 0.8 * stock_losses[0]
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(trained.unet))
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)

    def image(pipe: Any) -> np.ndarray:
        return generate(pipe, [prompt_of(2)], num_inference_steps=FEW_STEPS)

    optimized = sdfastgn.optimize(copy.deepcopy(pipe))
    before = image(optimized)
    for each in (pipe, optimized):
        each.load_lora_weights(tmp_path)
    changed = image(optimized)
    assert psnr(changed, before) < 30
    assert psnr(changed, image(pipe)) > LEAST_PSNR
    optimized.unload_lora_weights()
    assert np.array_equal(image(optimized), before)


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_folder_verifies() -> None:
    result = invoke("verify", str(FOLDER), "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "right" in result.output


@pytest.mark.slow
def test_the_folder_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    chosen = ("--weights", str(FOLDER), "--part", "unet", "--part", "pipeline", "--steps", "1")
    where = ("--device", "cpu", "--repeats", "1", "--json", str(path))
    result = invoke("bench", *chosen, "--variants", "eager,sdfastgn", *where)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["model"], row["size"], row["status"]) for row in rows] == [("digits", SIZE, OK)] * 4


# --- the script that trained it -------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few steps teach nothing, which its exit code says; the files are those of the folder."""
    pytest.importorskip("sklearn")
    output = tmp_path / "digits"
    few = ("--steps", "5", "--batch-size", "8", "--device", "cpu")
    monkeypatch.setattr(digits_pipeline, "generate", functools.partial(generate, num_inference_steps=1))
    assert exit_code(monkeypatch, "digits/train.py", "--output", str(output), *few) == 1
    assert "of 100 images as their prompts say" in capsys.readouterr().out
    files = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.*") if path.parent.name != "__pycache__"}
    files -= {Path("README.md"), Path("train.py")}
    assert {path.relative_to(output) for path in output.rglob("*.*")} == files
    for path in files:
        if path.suffix == ".safetensors":
            trained, shipped = (load_file(folder / path) for folder in (output, FOLDER))
            assert {k: (v.dtype, v.shape) for k, v in trained.items()} == {
                k: (v.dtype, v.shape) for k, v in shipped.items()
            }
    # Other words would be other prompts than those that the weights know.
    vocabulary = Path("tokenizer") / "vocab.json"
    assert (output / vocabulary).read_bytes() == (FOLDER / vocabulary).read_bytes()


def test_a_folder_that_cannot_be_made_is_told_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    assert exit_code(monkeypatch, "digits/train.py", "--output", "/proc/x") == 2
    assert "--output: cannot make a folder at '/proc/x'" in capsys.readouterr().err
