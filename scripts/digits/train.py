"""Train the small text-to-image pipeline of ``sdfastgn demo``, which draws handwritten digits in six inks.

python scripts/digits/train.py --output /tmp/digits

The script uses stock diffusers. It first trains an autoencoder, then a UNet and a text encoder together, as
in the paper below. (Stable Diffusion itself was trained with a frozen text encoder.) The script also trains a
classifier on the same digits. At the end the pipeline draws 100 images, and the classifier reads the digit in
each image. The exit code is 1 if the classifier reads the digit of the prompt in fewer than 90 images.
Training takes minutes on a GPU. On a CPU try --steps 50.

Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998, doi:10.24432/C50P49, CC BY 4.0. Only its test set is used, which scikit-learn contains.
Source: Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from sdfastgn.cli import digits_pipeline
from sdfastgn.cli.checks import folder, folder_file
from sdfastgn.cli.digits_pipeline import INKS, NUMERALS, SIZE, prompt_of
from sdfastgn.models.pipelines import build_tokenizer, write_tokenizer
from sdfastgn.program import OptionError

LEARNING_RATE = 1e-3
# Number of steps in which the learning rate rises to its maximum. Afterwards it falls to 0.
WARM_UP = 100
# Weight of the KL divergence in the autoencoder's loss, as for Stable Diffusion.
# The other term of the loss, the mean error of a pixel, has the weight 1.
KL_WEIGHT = 1e-6
# Fraction of the training images whose prompt is replaced by an empty one. So the UNet also learns to draw
# without a prompt, which guidance needs.
EMPTY_PROMPTS = 0.1
# Number of scans that test the classifier, and with which it is not trained.
HELD_OUT = 297
# IMAGES: number of images that the classifier reads at the end. LEAST_READ: minimum number of images in which
# it must read the digit of the prompt.
IMAGES, LEAST_READ = 100, 90
VAE = {
    "block_out_channels": (16, 32, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 8,
    "sample_size": SIZE,
    "force_upcast": False,
}
UNET = {
    "sample_size": SIZE // 8,
    "block_out_channels": (64, 128),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "attention_head_dim": 4,
    "cross_attention_dim": 64,
}
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


class Digits:
    """The scanned digits, from which random training images are made.

    Args:
        device: where the images are made.
        scans: the scans to use; all by default.

    Attributes:
        pixels: the scans, (N, 1, 8, 8) in [0, 1]; 1 is ink.
        values: (N,) int64, the digits 0 to 9 that the scans show.
        inks: (colors, 3), the RGB values of ``INKS``.
    """

    def __init__(self, device: str, scans: slice = slice(None)) -> None:
        loaded = load_digits()
        self.pixels = torch.as_tensor(loaded.images[scans], dtype=torch.float32, device=device)[:, None] / 16
        self.values = torch.as_tensor(loaded.target[scans], dtype=torch.long, device=device)
        self.inks = torch.tensor(list(INKS.values()), device=device)

    # Autocast is off, because rounding to bf16 would move the positions in ``grid`` by a tenth of a pixel.
    @torch.autocast("cuda", enabled=False)
    def draw(self, which: Tensor) -> Tensor:
        """Returns scans as ink (N, 1, SIZE, SIZE) in [0, 1], slightly turned, moved and scaled at random.

        ``which``: (N,), indices of the scans in ``pixels``.
        """
        turned, stretched, right, down = (torch.rand(4, len(which), device=which.device) * 2 - 1).unbind()
        angle, zoom = turned * math.radians(10), 1.25 + 0.1 * stretched
        cos, sin = zoom * angle.cos(), zoom * angle.sin()
        rows = torch.stack([cos, -sin, 0.08 * right, sin, cos, 0.08 * down], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(rows, [len(which), 1, SIZE, SIZE], align_corners=False)
        ink = F.grid_sample(self.pixels[which], grid, mode="bicubic", align_corners=False)
        # The edges of strokes are blurred in the scans. The following lines make them sharper.
        ink = ((ink - 0.2) / 0.4).clamp(0, 1)
        return ink.square() * (3 - 2 * ink)

    def paint(self, ink: Tensor, colors: Tensor) -> Tensor:
        """Returns images (N, 3, SIZE, SIZE) in [-1, 1]: ``ink`` on white paper.

        ``colors``: (N,), indices into INKS.
        """
        return 1 - 2 * ink * (1 - self.inks[colors][:, :, None, None])

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns (``count`` random images, the index of each image's prompt)."""
        which = torch.randint(len(self.values), (count,), device=self.values.device)
        colors = torch.randint(len(INKS), (count,), device=self.values.device)
        return self.paint(self.draw(which), colors), self.values[which] * len(INKS) + colors


def fit(
    name: str,
    models: Iterable[nn.Module],
    steps: int,
    loss_of: Callable[[], Tensor],
    rate: float = LEARNING_RATE,
) -> None:
    """Trains ``models`` in place to minimize ``loss_of()``. Prints the mean loss about ten times.

    ``rate``: the highest learning rate.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    device = parameters[0].device.type
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * math.cos(math.pi / 2 * step / steps) ** 2
    )
    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % max(1, steps // 10) == 0:
            mean, seconds = float(torch.stack(losses).mean()), time.perf_counter() - start
            print(f"{name}: step {step}, loss {mean:.5f}, {seconds:.0f} s", flush=True)
            losses.clear()


def train_classifier(digits: Digits, options: argparse.Namespace) -> nn.Module:
    classifier = digits_pipeline.build_classifier().to(options.device)
    count = len(digits.values) - HELD_OUT

    def loss_of() -> Tensor:
        which = torch.randint(count, (options.batch_size,), device=options.device)
        return F.cross_entropy(classifier(digits.draw(which)), digits.values[which])

    fit("classifier", [classifier], options.steps // 5, loss_of)
    held_out = torch.arange(count, len(digits.values), device=options.device)
    with torch.inference_mode():
        right = classifier(digits.draw(held_out)).argmax(dim=1) == digits.values[held_out]
    print(f"classifier: reads {int(right.sum())} of the {HELD_OUT} digits held out", flush=True)
    return classifier


def train_autoencoder(digits: Digits, options: argparse.Namespace) -> Any:
    vae = AutoencoderKL(**VAE).to(options.device)

    def loss_of() -> Tensor:
        # A batch of images is smaller than a batch of latents, because images need more memory.
        images, _ = digits.sample(options.batch_size // 4)
        latents = vae.encode(images).latent_dist
        return F.l1_loss(vae.decode(latents.sample()).sample, images) + KL_WEIGHT * latents.kl().mean()

    fit("autoencoder", [vae], options.steps // 2, loss_of)
    return vae.eval().requires_grad_(False)


def encode(vae: Any, digits: Digits, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns the UNet's training data: (latents of random images, the index of each latent's prompt).

    Sets the autoencoder's ``scaling_factor``, and multiplies the latents by it. It is chosen so that the
    standard deviation of the products is 1.
    """
    latents, prompts = [], []
    for _ in range(max(1, options.steps // 50)):
        images, prompt = digits.sample(options.batch_size)
        with torch.inference_mode():
            latents.append(vae.encode(images).latent_dist.mode())
        prompts.append(prompt)
    encoded = torch.cat(latents)
    factor = 1 / float(encoded.std())
    vae.register_to_config(scaling_factor=factor)
    return encoded * factor, torch.cat(prompts)


def train_diffusion(
    latents: Tensor, prompts: Tensor, tokenizer: Any, options: argparse.Namespace
) -> tuple[Any, Any]:
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPTextConfig(**TEXT, **special, pad_token_id=tokenizer.pad_token_id, vocab_size=len(tokenizer))
    text_encoder = CLIPTextModel(config).to(options.device).train()
    unet = UNet2DConditionModel(**UNET).to(options.device).train()
    scheduler = DDIMScheduler(**SCHEDULER)
    texts = [*(prompt_of(digit, ink) for digit in range(len(NUMERALS)) for ink in INKS), ""]
    ids = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids.to(options.device)

    def loss_of() -> Tensor:
        which = torch.randint(len(latents), (options.batch_size,), device=options.device)
        clean, noise = latents[which], torch.randn_like(latents[which])
        timesteps = torch.randint(scheduler.config.num_train_timesteps, which.shape, device=options.device)
        empty = torch.rand(which.shape, device=options.device) < EMPTY_PROMPTS
        # A step encodes each possible prompt once, because a batch has many more images than there are
        # prompts.
        context = text_encoder(ids).last_hidden_state[prompts[which].where(~empty, len(texts) - 1)]
        noisy = scheduler.add_noise(clean, noise, timesteps)
        return F.mse_loss(unet(noisy, timesteps, context).sample.float(), noise)

    fit("diffusion", [unet, text_encoder], options.steps, loss_of)
    return unet.eval(), text_encoder.eval()


def save(output: Path, classifier: nn.Module, vae: Any, unet: Any, text_encoder: Any, tokenizer: Any) -> None:
    """Saves the pipeline and the classifier so that every supported release of transformers can load them.

    UNet and autoencoder are saved in fp16, and the text encoder in fp32.
    """
    pipe = StableDiffusionPipeline(
        vae=vae.half(),
        unet=unet.half(),
        # The text encoder is saved in fp32, because all models of the pipeline must have the same dtype when
        # they are loaded: transformers 5 loads weights in the dtype of their file, and diffusers loads the
        # UNet and the autoencoder in fp32.
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(output)
    for path in (output / "tokenizer").iterdir():
        path.unlink()
    write_tokenizer(output / "tokenizer", digits_pipeline.WORDS)
    # transformers 5 may write the names of weights without the prefix "text_model.", but transformers 4
    # cannot load them without it.
    path = output / "text_encoder" / "model.safetensors"
    weights = {
        f"text_model.{name.removeprefix('text_model.')}": each for name, each in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    save_file(classifier.cpu().state_dict(), output / digits_pipeline.CLASSIFIER)


def count_read(output: Path, device: str) -> int:
    """Draws IMAGES images with the saved pipeline.

    Returns the number of images in which the classifier reads the digit of the prompt.
    """
    pipe = DiffusionPipeline.from_pretrained(output).to(device)
    pipe.set_progress_bar_config(disable=True)
    asked = [number % len(NUMERALS) for number in range(IMAGES)]
    inks = list(INKS)
    prompts = [prompt_of(digit, inks[number % len(inks)]) for number, digit in enumerate(asked)]
    found = digits_pipeline.read(digits_pipeline.generate(pipe, prompts), output)
    return sum(a == b for a, b in zip(asked, found, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument(
        "--steps",
        type=int,
        default=4500,
        help="training steps of the UNet; the other parts take fewer, in proportion",
    )
    parser.add_argument("--batch-size", type=int, default=1024, help="latents per step, divisible by 4")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        folder_file("--output", folder("--output", str(options.output)), digits_pipeline.CLASSIFIER)
    except OptionError as error:
        parser.error(str(error))
    torch.manual_seed(options.seed)
    digits = Digits(options.device)
    classifier = train_classifier(digits, options)
    vae = train_autoencoder(digits, options)
    latents, prompts = encode(vae, digits, options)
    tokenizer = build_tokenizer(digits_pipeline.WORDS)
    unet, text_encoder = train_diffusion(latents, prompts, tokenizer, options)
    save(options.output, classifier, vae, unet, text_encoder, tokenizer)
    read = count_read(options.output, options.device)
    print(f"wrote {options.output}; the classifier reads {read} of {IMAGES} images as their prompts say")
    return 0 if read >= LEAST_READ else 1


if __name__ == "__main__":
    sys.exit(main())
