"""A small pixel diffusion model trained on handwritten digits, stock and optimized, from one seed.

The network is diffusers' own UNet2DModel, with a GroupNorm in front of every convolution. The data
are the 1797 digits that scikit-learn brings along. Weights, images, timesteps and noise come from
the seed, so both runs see the same. All is fp32 without TF32, so that only the order of additions
differs.

Source: Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020, for the loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor

import sdfastgn
from sdfastgn.bench import documents, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.options import OptionError
from sdfastgn.bench.terminal import Blocks, console, print_lines, watched

# Pixels of the square image, to which the digits are enlarged.
SIZE = 16
# Channels of the first level, a multiple of GROUPS; the other levels have twice as many.
WIDTH = 32
GROUPS = 8
TIMESTEPS = 1000
LEARNING_RATE = 5e-4

# Most steps that a smoothed loss is the mean of: single losses jump by half.
LONGEST_WINDOW = 100
# Largest relative error of the first gradient.
GRADIENT_BOUND = 1e-3
# Largest relative difference of the smoothed losses: Adam amplifies roundings within hundreds of steps.
CURVE_BOUND = 0.03


@dataclass(frozen=True)
class DigitsConfig:
    """One experiment."""

    steps: int
    batch_size: int
    device: str
    seed: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class Run:
    """One training: the loss of each step, and the median milliseconds of a step."""

    name: str
    losses: list[float]
    step_ms: float


def load_images(device: torch.device) -> Tensor:
    """The digits as (1797, 1, SIZE, SIZE) in [-1, 1]. Raises OptionError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        what = "scikit-learn, which is not installed (pip install 'sdfastgn[train]')"
        raise OptionError(f"the digits come with {what}") from None
    pixels = torch.from_numpy(load_digits().images.astype(np.float32))[:, None] / 8 - 1  # 0 to 16
    return F.interpolate(pixels, size=(SIZE, SIZE), mode="bilinear", align_corners=False).to(device)


def build_model(config: DigitsConfig) -> UNet2DModel:
    """The stock model in train mode; the same weights for the same seed, drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=2,
            block_out_channels=(WIDTH, 2 * WIDTH, 2 * WIDTH),
            norm_num_groups=GROUPS,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )
    return model.to(config.torch_device).train()


def _batches(config: DigitsConfig, images: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(clean images, noise, timesteps), without end."""
    device, shape = config.torch_device, (config.batch_size,)
    generator = torch.Generator(device).manual_seed(config.seed)
    while True:
        clean = images[torch.randint(len(images), shape, generator=generator, device=device)]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        yield clean, noise, torch.randint(TIMESTEPS, shape, generator=generator, device=device)


def _loss(model: UNet2DModel, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    clean, noise, timesteps = batch
    noisy = DDPMScheduler(TIMESTEPS).add_noise(clean, noise, timesteps)
    return F.mse_loss(model(noisy, timesteps).sample, noise)


def first_gradient(config: DigitsConfig, model: UNet2DModel, images: Tensor) -> Tensor:
    """The gradient of the first step's loss, all parameters in one vector, in fp64 on the CPU."""
    loss = _loss(model, next(_batches(config, images)))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.double().cpu().reshape(-1) for gradient in gradients])


def train(
    config: DigitsConfig, model: UNet2DModel, images: Tensor, name: str, on_step: Callable[[], object]
) -> Run:
    """Trains ``model`` in place with AdamW; ``on_step`` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches, losses = _batches(config, images), []

    def step() -> None:
        optimizer.zero_grad()
        loss = _loss(model, next(batches))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        on_step()

    timed = timing.time_callable(step, config.torch_device, repeats=config.steps, warmup=0)
    return Run(name, torch.stack(losses).tolist(), timed.median_ms)


def curve_difference(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference of the smoothed losses; nan where one is not finite."""
    window = max(1, min(LONGEST_WINDOW, len(reference) // 20))
    mean = np.full(window, 1 / window)
    ours, theirs = (np.convolve(np.asarray(each), mean, mode="valid") for each in (losses, reference))
    return float(np.abs((ours - theirs) / theirs).max())


def run(config: DigitsConfig, images: Tensor, *, json: Path | None) -> int:
    """Trains both, prints and writes; returns 0, or 1 where the two do not learn alike."""
    device, out = config.torch_device, console()
    with timing.device_scope(device), timing.global_switches(cudnn_tf32=False) as switches:
        where = environment(device, switches)
        stock = build_model(config)
        models = {"stock": stock, "sdfastgn": sdfastgn.optimize(copy.deepcopy(stock), strict=True)}
        exact, ours = (first_gradient(config, model, images) for model in models.values())
        timing.spin_up(device)
        with watched(2 * config.steps) as (on_start, on_done):
            runs = []
            for name, model in models.items():
                on_start(name)
                runs.append(train(config, model, images, name, lambda: on_done("")))
    checks = {
        "first gradient's relative error": (float((ours - exact).norm() / exact.norm()), GRADIENT_BOUND),
        "smoothed losses' difference": (curve_difference(runs[1].losses, runs[0].losses), CURVE_BOUND),
    }
    # `not <=` because a NaN is neither above nor below.
    reasons = [
        f"{what} {value:.3g} is above {bound:g}"
        for what, (value, bound) in checks.items()
        if not value <= bound
    ]
    title = f"{SIZE}x{SIZE} digits, batch {config.batch_size}, {config.steps} steps on {config.device}"
    body = [[each.name, f"{each.step_ms:.4g}", f"{each.losses[-1]:.5f}"] for each in runs]
    out.print(Blocks(("run", "step ms", "last loss"), body, title))
    print_lines(out, [f"{what} {value:.2e}, bound {bound:g}" for what, (value, bound) in checks.items()])
    for reason in reasons:
        out.print(f"DISAGREES: {reason}", style="bold red")
    if not reasons:
        out.print("the patched model learns as the stock one does", style="green")
    if json is not None:
        content = documents.document("train_digits", where, asdict(config), runs)
        for row in content["rows"]:  # JSON has no NaN and no infinity
            row["losses"] = [loss if math.isfinite(loss) else None for loss in row["losses"]]
        documents.write_json(json, {**content, "reasons": reasons})
        print_lines(out, [f"wrote {json}"])
    return 1 if reasons else 0
