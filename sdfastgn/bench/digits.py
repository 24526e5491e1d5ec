"""A small pixel diffusion model trained on handwritten digits, stock and optimised, from the same weights on the same batches.

The network is diffusers' own UNet2DModel, with a GroupNorm in front of every convolution, the data are the 1797 digits that
scikit-learn brings along. Everything random is drawn from seeds: runs of one data seed see the same images, timesteps and noise.

Source: Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020, for the loss; Song, Meng and Ermon, "Denoising Diffusion
Implicit Models", 2020, for the samples.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
from torch import Tensor

import sdfastgn
from sdfastgn.bench import timing

__all__ = [
    "DTYPES",
    "SIZES",
    "Comparison",
    "DigitsConfig",
    "Run",
    "build_model",
    "compare",
    "first_gradients",
    "gradient_verdict",
    "load_images",
    "patched_copy",
    "sample",
    "sklearn_reason",
    "smoothed",
    "train",
]

DTYPES = ("fp32", "bf16")
SIZES = (8, 16, 32)
GROUPS = 8
TRAIN_TIMESTEPS = 1000
SAMPLING_STEPS = 50
# A window of a twentieth of the run, at most this long: timesteps and noise make single losses jump by half.
LONGEST_WINDOW = 100
WARMUP_STEPS = 20

# The first gradient's relative error: without TF32 two orders of additions; in bf16 both are compared with stock fp32, and ours may
# be this much farther off, which is how far two roundings of so small a network differ.
GRADIENT_BOUND = 1e-3
BF16_GRADIENT_FACTOR = 1.25
# Largest relative difference of the smoothed curves where no second stock run says what noise is. Adam amplifies a rounding within
# some hundred steps, but both runs see the same noise, which most of a loss comes from.
CURVE_BOUNDS = {"fp32": 0.03, "bf16": 0.05}


@dataclass(frozen=True)
class DigitsConfig:
    """One experiment.

    Attributes:
        size: pixels of the square image: 8, as the digits are, or 16 or 32, to which they are enlarged.
        width: channels of the first level, a multiple of 8; the others have twice as many.
        dtype: ``"fp32"`` (without TF32), or ``"bf16"`` for autocast over fp32 weights.
    """

    steps: int
    batch_size: int
    size: int
    width: int
    dtype: str
    device: str
    seed: int = 0
    learning_rate: float = 5e-4

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class Run:
    """One training.

    Attributes:
        losses: of each step.
        steps_per_s: from the median time of a step, warm-up left out.
        peak_mib: MiB that PyTorch's CUDA allocator held at most after the warm-up; None on the CPU.
        step_mib: the same over what weights, optimizer and data occupy between steps.
    """

    name: str
    data_seed: int
    losses: list[float] = field(repr=False)
    step_ms: float
    steps_per_s: float
    peak_mib: float | None
    step_mib: float | None


@dataclass
class Comparison:
    """Two loss curves: relative differences of the smoothed ones, and of single steps where these mean something (fp32)."""

    window: int
    smoothed_max: float
    smoothed_mean: float
    step_max: float | None = None
    step_mean: float | None = None
    steps: list[float] | None = field(default=None, repr=False)


def sklearn_reason() -> str | None:
    """None where the digits can be loaded, else why not."""
    try:
        import sklearn as _  # noqa: F401
    except ImportError:
        return "the digits come with scikit-learn, which is not installed (pip install 'sdfastgn[train]')"
    return None


def load_images(size: int, device: torch.device) -> Tensor:
    """The digits as (1797, 1, size, size) in [-1, 1]."""
    from sklearn.datasets import load_digits

    pixels = torch.from_numpy(load_digits().images.astype(np.float32))[:, None] / 8 - 1  # 0 to 16 in the data
    return F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).to(device)


def build_model(config: DigitsConfig) -> UNet2DModel:
    """The stock model in train mode; the same weights for the same seed, drawn on the CPU."""
    inner = 1 if config.size == 8 else 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = UNet2DModel(
            sample_size=config.size,
            in_channels=1,
            out_channels=1,
            layers_per_block=2,
            block_out_channels=(config.width, *(2 * config.width,) * inner),
            norm_num_groups=GROUPS,
            down_block_types=("DownBlock2D", *("AttnDownBlock2D",) * inner),
            up_block_types=(*("AttnUpBlock2D",) * inner, "UpBlock2D"),
        )
    return model.to(config.torch_device).train()


def _batches(config: DigitsConfig, images: Tensor, data_seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(clean images, noise, timesteps), without end."""
    generator = torch.Generator(config.torch_device).manual_seed(data_seed)
    shape, device = (config.batch_size,), config.torch_device
    while True:
        clean = images[torch.randint(len(images), shape, generator=generator, device=device)]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        yield clean, noise, torch.randint(TRAIN_TIMESTEPS, shape, generator=generator, device=device)


def _loss(
    config: DigitsConfig, model: UNet2DModel, scheduler: DDPMScheduler, batch: tuple[Tensor, ...]
) -> Tensor:
    clean, noise, timesteps = batch
    noisy = scheduler.add_noise(clean, noise, timesteps)
    with torch.autocast(config.torch_device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
        predicted = model(noisy, timesteps).sample
    return F.mse_loss(predicted.float(), noise)


class _Marks:
    """The ends of steps, on the device's clock, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between one mark and the next."""
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self._seconds, self._seconds[1:], strict=False)]


def train(
    config: DigitsConfig,
    model: UNet2DModel,
    images: Tensor,
    *,
    name: str,
    data_seed: int,
    on_step: Callable[[str, int], object] = lambda name, step: None,
) -> Run:
    """Trains ``model`` in place with AdamW for ``config.steps`` steps on the batches of ``data_seed``.

    ``on_step`` is called with ``name`` and the number of steps behind, the GPU's work on the last ones not awaited.
    """
    device = config.torch_device
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    scheduler = DDPMScheduler(TRAIN_TIMESTEPS)
    warmup = min(WARMUP_STEPS, config.steps // 4)
    losses, marks, held = [], _Marks(device), 0
    with timing.device_scope(device), timing.global_switches(cudnn_tf32=False):
        for step, batch in zip(range(config.steps), _batches(config, images, data_seed), strict=False):
            optimizer.zero_grad()
            if step == warmup:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                marks.mark()
            loss = _loss(config, model, scheduler, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step >= warmup:
                marks.mark()
            on_step(name, step + 1)
        step_ms = timing.Timing.of(marks.milliseconds()).median_ms
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return Run(
        name=name,
        data_seed=data_seed,
        losses=torch.stack(losses).tolist(),
        step_ms=step_ms,
        steps_per_s=1e3 / step_ms,
        peak_mib=None if peak is None else peak / 2**20,
        step_mib=None if peak is None else (peak - held) / 2**20,
    )


def first_gradients(config: DigitsConfig, model: UNet2DModel, images: Tensor) -> Tensor:
    """The gradient of the first step's loss over all parameters, flat, in fp64 on the CPU. Leaves ``model`` as it was."""
    batch = next(_batches(config, images, config.seed))
    with timing.device_scope(config.torch_device), timing.global_switches(cudnn_tf32=False):
        gradients = torch.autograd.grad(
            _loss(config, model, DDPMScheduler(TRAIN_TIMESTEPS), batch), list(model.parameters())
        )
    return torch.cat([gradient.double().cpu().reshape(-1) for gradient in gradients])


def gradient_verdict(dtype: str, stock: Tensor, patched: Tensor, fp32: Tensor) -> tuple[float, float]:
    """(relative error of the patched model's first gradient, the bound that it must keep)."""
    norm = fp32.norm()
    error = float((patched - fp32).norm() / norm)
    if dtype == "fp32":
        return error, GRADIENT_BOUND
    return error, BF16_GRADIENT_FACTOR * float((stock - fp32).norm() / norm)


def smoothed(losses: list[float], window: int) -> np.ndarray:
    """Running mean over ``window`` steps, without the steps that lack neighbours."""
    return np.convolve(np.asarray(losses, dtype=np.float64), np.full(window, 1 / window), mode="valid")


def compare(config: DigitsConfig, run: Run, reference: Run) -> Comparison:
    """``run`` against ``reference``. Losses that are not finite differ by infinity."""
    window = max(1, min(LONGEST_WINDOW, config.steps // 20))
    a, b = np.asarray(run.losses), np.asarray(reference.losses)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Comparison(window, float("inf"), float("inf"))
    smooth_a, smooth_b = smoothed(run.losses, window), smoothed(reference.losses, window)
    relative = np.abs(smooth_a - smooth_b) / smooth_b
    comparison = Comparison(window, float(relative.max()), float(relative.mean()))
    if config.dtype == "fp32" and run.data_seed == reference.data_seed:
        steps = np.abs(a - b) / b
        comparison.steps = steps.tolist()
        comparison.step_max, comparison.step_mean = float(steps.max()), float(steps.mean())
    return comparison


def patched_copy(model: UNet2DModel) -> UNet2DModel:
    """A copy with the same weights, optimised."""
    return sdfastgn.optimize(copy.deepcopy(model), strict=True)


@torch.no_grad()
def sample(config: DigitsConfig, model: UNet2DModel, count: int) -> Tensor:
    """``count`` images (count, 1, size, size) in [0, 1] by DDIM from the trained ``model``, from noise drawn on the CPU."""
    scheduler = DDIMScheduler.from_config(DDPMScheduler(TRAIN_TIMESTEPS).config)
    scheduler.set_timesteps(SAMPLING_STEPS)
    generator = torch.Generator().manual_seed(config.seed)
    images = torch.randn(count, 1, config.size, config.size, generator=generator).to(config.torch_device)
    model.eval()
    for timestep in scheduler.timesteps:
        with torch.autocast(config.torch_device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            predicted = model(images, timestep).sample
        images = scheduler.step(predicted.float(), timestep, images).prev_sample
    model.train()
    return (images / 2 + 0.5).clamp(0, 1).cpu()
