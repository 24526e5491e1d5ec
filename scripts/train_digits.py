"""Train a small diffusion model on digits twice, stock and optimized, and check that both learn the same.

python scripts/train_digits.py --steps 300

The network is diffusers' UNet2DModel. The data are the 1797 digits of scikit-learn, which the extra
``train`` installs. Both runs have the same seed and so the same initial weights, images, timesteps and
noise. They compute in fp32 without TF32, so their results differ only by rounding. The exit code is 1 if
the runs disagree.

Source: Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020, for the loss.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch import Tensor

import sdfastgn
from sdfastgn.bench import timing

# Width and height of the training images in pixels. The digits are enlarged to this size.
SIZE = 16
TIMESTEPS = 1000
LEARNING_RATE = 5e-4
# Maximum number of successive steps whose losses are averaged before the runs are compared ("smoothed
# losses"). Losses of single steps vary too much.
LONGEST_WINDOW = 100
# Maximum relative difference between the first gradients of the two runs.
GRADIENT_BOUND = 1e-3
# Maximum relative difference between the smoothed losses of the two runs.
# It is large, because Adam amplifies rounding errors over hundreds of steps.
CURVE_BOUND = 0.03


def build_model(width: int, seed: int) -> Any:
    """Returns the stock model in train mode. Its weights depend only on the seed and the width."""
    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(width, 2 * width, 2 * width),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).train()


def losses_of(model: Any, images: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Yields the losses of ``model`` for random batches, without end. Batches depend only on the seed."""
    generator = torch.Generator(images.device).manual_seed(options.seed)
    where: dict[str, Any] = {"generator": generator, "device": images.device}
    while True:
        clean = images[torch.randint(len(images), (options.batch_size,), **where)]
        noise = torch.randn(clean.shape, **where)
        timesteps = torch.randint(TIMESTEPS, (options.batch_size,), **where)
        noisy = DDPMScheduler(TIMESTEPS).add_noise(clean, noise, timesteps)
        yield F.mse_loss(model(noisy, timesteps).sample, noise)


def train(name: str, model: Any, images: Tensor, options: argparse.Namespace) -> tuple[Tensor, list[float]]:
    """Trains ``model`` in place. Returns (the gradient before the first step as a vector, all losses)."""
    gradients = torch.autograd.grad(next(losses_of(model, images, options)), list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches, losses = losses_of(model, images, options), []

    def step() -> None:
        optimizer.zero_grad()
        loss = next(batches)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    timed = timing.time_callable(step, images.device, repeats=options.steps, warmup=0)
    print(f"{name}: {timed.median_ms:.4g} ms a step, last loss {losses[-1]:.5f}", flush=True)
    return torch.cat([one.double().flatten() for one in gradients]), torch.stack(losses).tolist()


def curve_difference(losses: list[float], reference: list[float]) -> float:
    """Returns the maximum relative difference between the smoothed losses of two runs.

    It is infinite or NaN if any loss is not finite.
    """
    window = max(1, min(LONGEST_WINDOW, len(reference) // 20))
    ours, theirs = (np.convolve(each, np.full(window, 1 / window), "valid") for each in (losses, reference))
    return float(np.abs((ours - theirs) / theirs).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each run")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--width", type=int, default=32, help="channels of the first level, divisible by 8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.steps, options.batch_size) < 1:
        numbers = f"{options.steps} and {options.batch_size}"
        parser.error(f"--steps and --batch-size: must be positive whole numbers, got {numbers}")
    # scikit-learn's pixels have values from 0 to 16. The model gets values from -1 to 1.
    pixels = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    images = F.interpolate(pixels, size=(SIZE, SIZE), mode="bilinear").to(options.device)
    stock = build_model(options.width, options.seed).to(options.device)
    ours = sdfastgn.optimize(copy.deepcopy(stock), strict=True)
    with timing.global_switches(cudnn_tf32=False):
        exact, theirs = train("stock", stock, images, options)
        gradient, losses = train("sdfastgn", ours, images, options)
    checks = {
        "first gradient's relative error": (float((gradient - exact).norm() / exact.norm()), GRADIENT_BOUND),
        "smoothed losses' difference": (curve_difference(losses, theirs), CURVE_BOUND),
    }
    for what, (value, bound) in checks.items():
        print(f"{what} {value:.2e}, bound {bound:g}")
    # A NaN counts as disagreement, because ``NaN <= bound`` is false.
    agree = all(value <= bound for value, bound in checks.values())
    print("the optimized model learns as the stock one does" if agree else "DISAGREES")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
