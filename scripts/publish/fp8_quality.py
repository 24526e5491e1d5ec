"""Measure the quality of ``optimize(model, precision="fp8")`` with models trained on handwritten digits.

python -m scripts.publish.fp8_quality --json benchmarks/by_hand/fp8_quality.json \\
    --png docs/images/fp8_transformer.png

- ``unet``: the pipeline in ``scripts/digits``, in fp16.
- ``transformer``: a small transformer of Stable Diffusion 3's kind, in bf16, which is trained first
  (``scripts/publish/digits_transformer.py``). Its FP8 matrix products have a scale for each row.
- ``lora``: the same transformer with a LoRA that makes it draw mirrored digits. The LoRA is added to the
  weights.
- ``outliers``: the same transformer, but two rows of some weights are 65536 times as large, and the gates
  that multiply their results are 65536 times smaller. In exact arithmetic it computes the same as
  ``transformer``.

Each model draws the same images in fp32, in its own dtype, with sdfastgn, and in FP8. All images are compared
with the images in fp32, and a classifier reads the digits. The output of one step is compared too, with
latents of scans that the transformer was not trained with. The transformers are also measured with one scale
for each tensor instead of each row. To emulate this, inputs and weights are rounded to E4M3, and the matrix
products are computed in the model's own dtype.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sdfastgn
from scripts.digits.train import HELD_OUT, Digits
from scripts.publish import digits_transformer as flow
from scripts.publish.runs import finite, release_memory
from scripts.publish.tables.fp8 import ONE_SCALE, QUALITY, TRAINED, VARIANTS, QualityRow
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import psnr, row_errors, ssim
from sdfastgn.cli import digits, digits_pipeline
from sdfastgn.kernels.common.e4m3 import E4M3, LARGEST
from sdfastgn.models.architectures import DTYPES
from sdfastgn.models.pipelines import load_pipeline
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.plans.install import kind_of_model
from sdfastgn.plans.rewrite.e4m3 import FEWEST_ROWS

# Number of images in a call of the pipeline.
BATCH = 50
# Seeds of the images that are drawn first, so that FP8 learns its scales. The images that are compared have
# other seeds.
OTHERS = range(1000, 1000 + BATCH)
# Number of images in each row of the picture that ``--png`` writes.
SHOWN = 10


class Size(NamedTuple):
    """How much is trained and measured.

    Attributes:
        images, steps: number of images that each model draws, and number of denoising steps of an image.
        latents: number of encoded images with which the transformer is trained.
        training, lora, batch: number of training steps of the transformer, number of training steps of the
            LoRA, and number of images in a training step.
        held_out: number of latents in the step that is compared.
        changes: arguments that replace those of the transformer's configuration.
    """

    images: int = 200
    steps: int = 30
    latents: int = 65536
    training: int = 2000
    lora: int = 400
    batch: int = 256
    held_out: int = 256
    changes: dict[str, Any] = {}  # noqa: RUF012


TINY = Size(
    images=10, steps=3, latents=64, training=4, lora=2, batch=16, held_out=16,
    changes={
        "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "caption_projection_dim": 32
    },
)  # fmt: skip


class Step(NamedTuple):
    """The inputs of one step, and what it should compute.

    Attributes:
        latents, noise: (N, 4, 8, 8), of images that no transformer was trained with.
        times: (N,), how much of the step's input is noise, between 0 and 1.
        which: (N,), the index of each image's prompt in ``flow.every_prompt``.
    """

    latents: Tensor
    noise: Tensor
    times: Tensor
    which: Tensor


class Model(NamedTuple):
    """A trained model in one dtype.

    Attributes:
        target: the model or pipeline that is given to ``optimize``.
        draw: a function (numbers of images, steps) -> images (N, 64, 64, 3) in [0, 1].
        step: a function that runs one step. Returns (its output, what the output should be), both in fp32.
    """

    target: Any
    draw: Callable[[range, int], np.ndarray]
    step: Callable[[], tuple[Tensor, Tensor]]


def asked(number: int) -> tuple[int, str]:
    """Returns the digit that the image with this number should show, and the image's prompt."""
    digit, inks = number % len(digits_pipeline.NUMERALS), list(digits_pipeline.INKS)
    return digit, digits_pipeline.prompt_of(digit, inks[number % len(inks)])


def noise_of(numbers: Sequence[int], device: str) -> Tensor:
    """The noise of images, (N, 4, 8, 8) in fp32. Each number is the seed of its image's noise."""
    # The noise is drawn on the CPU, so that it is the same on every device.
    return torch.stack(
        [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(number)) for number in numbers]
    ).to(device)


def _in_batches(draw: Callable[[Sequence[int], int], np.ndarray]) -> Callable[[range, int], np.ndarray]:
    def every(numbers: range, steps: int) -> np.ndarray:
        return np.concatenate(
            [draw(numbers[first : first + BATCH], steps) for first in range(0, len(numbers), BATCH)]
        )

    return every


def unet(step: Step, device: str, dtype: torch.dtype) -> Model:
    pipe = load_pipeline("digits", str(digits_pipeline.FOLDER), dtype, device)
    pipe.set_progress_bar_config(disable=True)

    def draw(numbers: Sequence[int], steps: int) -> np.ndarray:
        found = pipe(
            [asked(number)[1] for number in numbers],
            latents=noise_of(numbers, device).to(dtype),
            num_inference_steps=steps,
            guidance_scale=digits_pipeline.GUIDANCE,
            output_type="np",
        )
        return np.asarray(found.images)

    @torch.no_grad()
    def one() -> tuple[Tensor, Tensor]:
        times = (step.times * pipe.scheduler.config.num_train_timesteps).long()
        noisy = pipe.scheduler.add_noise(step.latents, step.noise, times).to(dtype)
        tokens = flow.every_prompt(pipe).tokens[step.which].to(dtype)
        return pipe.unet(noisy, times, tokens, return_dict=False)[0].float(), step.noise

    return Model(pipe, _in_batches(draw), one)


def transformer(
    network: nn.Module, pipe: Any, prompts: flow.Prompts, step: Step, dtype: torch.dtype, *, mirrored: bool
) -> Model:
    """A copy of the trained transformer ``network`` in ``dtype``, with functions that run it.

    ``mirrored``: True if the network draws mirrored digits. Then its images are mirrored back. ``pipe``: the
    pipeline of digits in fp32, whose autoencoder decodes the images.
    """
    # The weights are first rounded to bf16, so that the model in fp32 has the same values.
    network = copy.deepcopy(network).bfloat16().to(dtype)
    device = str(step.latents.device)

    @torch.no_grad()
    def draw(numbers: Sequence[int], steps: int) -> np.ndarray:
        inks = len(digits_pipeline.INKS)
        which = [asked(number)[0] * inks + number % inks for number in numbers]
        latents = flow.drawn(network, noise_of(numbers, device), prompts.of(which), prompts.of([-1]), steps)
        images = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        images = images.flip(-1) if mirrored else images
        return (images / 2 + 0.5).clamp(0, 1).movedim(1, -1).cpu().numpy()

    @torch.no_grad()
    def one() -> tuple[Tensor, Tensor]:
        noisy = flow.mixed(step.latents, step.noise, step.times)
        return flow.velocity(network, noisy, step.times, prompts.of(step.which)), step.noise - step.latents

    return Model(network, _in_batches(draw), one)


def _rounded(t: Tensor) -> Tensor:
    """Returns ``t`` rounded to E4M3 with one scale for the whole tensor, in the dtype of ``t``."""
    scale = t.float().abs().amax().clamp(min=2.0**-126) / LARGEST
    return ((t.float() / scale).to(E4M3).float() * scale).to(t.dtype)


def round_with_one_scale(network: nn.Module) -> None:
    """Makes linear layers compute as if in E4M3 with one scale for each tensor.

    These are the layers that ``optimize`` runs in E4M3 if its ``precision`` is FP8.
    """
    found = {id(weight) for weight in kind_of_model(network).in_rows}

    def round_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        has_many_rows = inputs[0].shape[:-1].numel() >= FEWEST_ROWS
        return (_rounded(inputs[0]),) if has_many_rows else None

    for layer in network.modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) in found:
            layer.weight.copy_(_rounded(layer.weight))
            layer.register_forward_pre_hook(round_input)


def measured(
    name: str, make: Callable[[torch.dtype], Model], size: Size
) -> Iterator[tuple[QualityRow, np.ndarray]]:
    """Yields (row, images) for stock in fp32, for stock in the model's own dtype, and for sdfastgn."""
    exact = make(torch.float32)
    truth = exact.draw(range(size.images), size.steps), exact.step()[0]
    yield _row(name, "fp32", exact, size, truth)
    model = make(DTYPES[TRAINED[name].dtype])
    yield _row(name, "half", model, size, truth)
    for variant in VARIANTS:
        if variant == "sdfastgn_fp8" and fp8.device_reason(truth[1].device) is not None:
            continue
        sdfastgn.optimize(model.target, precision="fp8" if variant == "sdfastgn_fp8" else None)
        model.draw(OTHERS, size.steps)  # FP8 learns its scales for whole tensors while these images are drawn
        yield _row(name, variant, model, size, truth)
    sdfastgn.restore(model.target)
    if isinstance(model.target, nn.Module):
        round_with_one_scale(model.target)
        yield _row(name, ONE_SCALE, model, size, truth)


def _row(
    name: str, variant: str, model: Model, size: Size, truth: tuple[np.ndarray, Tensor]
) -> tuple[QualityRow, np.ndarray]:
    images = model.draw(range(size.images), size.steps)
    step, target = model.step()
    found = digits_pipeline.read(images)
    read = sum(a == asked(number)[0] for number, a in enumerate(found))
    row = QualityRow(variant, len(images), read, model=name, loss=finite(float(F.mse_loss(step, target))))
    if variant != "fp32":
        each = np.array([psnr(a, b) for a, b in zip(images, truth[0], strict=True)])
        median, most = row_errors(step, truth[1])
        row = replace(
            row,
            psnr_db=finite(psnr(images, truth[0])),
            median_psnr_db=finite(float(np.median(each))),
            low_psnr_db=finite(float(np.quantile(each, 0.05))),
            least_psnr_db=finite(float(each.min())),
            ssim=ssim(images, truth[0]),
            row_error=finite(median),
            high_row_error=finite(most),
        )
    for state in sdfastgn.report(model.target).fp8:
        row = replace(
            row,
            products=state.products,
            in_e4m3=state.in_e4m3,
            error=finite(state.error),
            beyond=state.beyond,
        )
    return row, images


def models(size: Size, device: str) -> Iterator[tuple[str, Callable[[torch.dtype], Model]]]:
    """Yields each model's name, and a function that makes it in a dtype."""
    torch.manual_seed(0)
    pipe = load_pipeline("digits", str(digits_pipeline.FOLDER), torch.float32, device)
    prompts = flow.every_prompt(pipe)
    scans, unseen = Digits(device, slice(None, -HELD_OUT)), Digits(device, slice(-HELD_OUT, None))

    def step_of(mirrored: bool) -> Step:
        found = flow.encoded(pipe.vae, unseen, size.held_out, mirrored=mirrored)
        times = torch.rand(size.held_out, device=device)
        return Step(found.latents, torch.randn_like(found.latents), times, found.which)

    step = step_of(False)
    yield "unet", lambda dtype: unet(step, device, dtype)

    data = flow.encoded(pipe.vae, scans, size.latents)
    network = flow.trained(data, prompts, size.training, size.batch, **size.changes)

    def made(network: nn.Module, step: Step, mirrored: bool = False) -> Callable[[torch.dtype], Model]:
        return lambda dtype: transformer(network, pipe, prompts, step, dtype, mirrored=mirrored)

    yield "transformer", made(network, step)
    with_lora, others = (
        copy.deepcopy(network),
        flow.encoded(pipe.vae, scans, size.latents // 4, mirrored=True),
    )
    change = flow.add_lora(with_lora, others, prompts, size.lora, size.batch)
    print(f"the LoRA changes the weights by {change:.2f} of their norm", flush=True)
    yield "lora", made(with_lora, step_of(True), mirrored=True)
    flow.add_outliers(network)
    yield "outliers", made(network, step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.fp8_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--png", type=Path, help="file for a picture of ten images of the transformer")
    parser.add_argument("--tiny", action="store_true", help="train little, and draw few images")
    parser.add_argument("--device", default="cuda", help="device of the models")
    options = parser.parse_args(arguments)
    device, start, size = torch.device(options.device), time.monotonic(), TINY if options.tiny else Size()
    rows: list[QualityRow] = []
    with timing.global_switches(cudnn_tf32=False) as switches:  # with TF32, images in fp32 would not be exact
        where = environment(device, switches)
        for name, make in models(size, options.device):
            shown: dict[str, np.ndarray] = {}
            for row, images in measured(name, make, size):
                rows.append(row)
                shown[row.variant] = images[:SHOWN]
                print(f"{time.monotonic() - start:5.0f} s  {row}", flush=True)
                # The file is written after each row, so that an interrupted run keeps its results.
                content = documents.document(QUALITY, where, {**size._asdict()}, rows)
                documents.write_json(options.json, content)
            if options.png is not None and name == "transformer" and "sdfastgn_fp8" in shown:
                prompts = [asked(number)[1] for number in range(min(SHOWN, size.images))]
                pair = {"stock, fp32": shown["fp32"], "FP8": shown["sdfastgn_fp8"]}
                digits.grid(prompts, pair).save(options.png)
            release_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())
