"""What is timed: a UNet step, a VAE decode, a full pipeline, each as a target and a call of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sdfastgn.bench import images
from sdfastgn.bench.documents import first_line
from sdfastgn.bench.models import architectures
from sdfastgn.bench.timing import global_switches

T = TypeVar("T")

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PROMPT = "a photograph of an astronaut riding a horse"
GUIDANCE = 7.5

# Largest relative error of a variant's output against stock eager's. Two roundings of a deep
# network differ by about 0.2 % in fp16 and eight times that in bf16; stable-fast, with fp16
# accumulation, by 1.2 %.
ERROR_BOUNDS = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-3}
# The same in fp32 on a GPU, whose convolutions run in TF32 with 10 bits of mantissa.
TF32_BOUND = 1e-2
# Least PSNR in dB of a pipeline's images: steps with guidance amplify a rounding.
PSNR_BOUNDS = {"fp16": 30.0, "bf16": 25.0, "fp32": 40.0}
# How much worse than stock eager's a variant's gradients may be against fp32: those of two
# roundings differ by as much as each from the truth.
GRADIENT_FACTOR = 1.05


class WeightsError(ValueError):
    """Weights that the user named and that cannot be loaded."""


@dataclass(frozen=True)
class BenchConfig:
    """One part of one model at one size.

    Attributes:
        model: a name of ``architectures.MODELS``.
        part: ``"unet"`` (one step), ``"vae"`` (one decode), ``"pipeline"`` (text encoder, ``steps``
            steps, decode) or ``"train"`` (forward and backward of the UNet).
        size: pixels of the square image, divisible by 8.
        batch: of the UNet or the VAE, or the pipeline's images a call.
        dtype: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        weights: ``"random"``, a local path or a Hub id.
        profile: also record where a call's time goes, once it is timed.
    """

    model: str
    part: str
    size: int
    batch: int
    dtype: str
    device: str
    repeats: int
    steps: int = 30
    weights: str = "random"
    seed: int = 0
    fp32_reference: bool = False
    profile: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class Workload:
    """A stock model, a call of it, and how its output is judged.

    Attributes:
        target: what variants are applied to.
        call: runs ``target`` on fixed inputs; returns a tensor (N, C, H, W), images (N, H, W, 3) in
            [0, 1], or the ``training.Gradients`` of a training step.
        fp32_output: the same weights and inputs in fp32 without TF32; None for pipelines.
        memory: of a training step, values for the row's fields ``step_mib`` and ``saved_mib``.
    """

    target: Any
    call: Callable[[], Any]
    fp32_output: Callable[[], Any] | None
    memory: Callable[[], dict[str, float | None]] | None = None


@dataclass(frozen=True)
class Judgement:
    """A variant's output against stock eager's. ``reason`` is empty where it is within the bound."""

    error: float
    psnr_db: float | None
    reason: str


def gate_text(config: BenchConfig) -> str:
    """The correctness gate in words, for tables and JSON."""
    if config.part == "pipeline":
        return f"PSNR against eager's image at least {PSNR_BOUNDS[config.dtype]:g} dB"
    if config.part == "train":
        least = f", or at most {ERROR_BOUNDS['fp32']:g}" if config.dtype == "fp32" else ""
        factor = f"{GRADIENT_FACTOR:g} times stock eager's{least}"
        return f"gradients' relative error against fp32 at most {factor}"
    return f"relative error against eager at most {_error_bound(config):g}"


def _error_bound(config: BenchConfig) -> float:
    tf32 = config.dtype == "fp32" and config.torch_device.type == "cuda"
    return TF32_BOUND if tf32 else ERROR_BOUNDS[config.dtype]


def judge(config: BenchConfig, output: Any, reference: Any) -> Judgement:
    """Compares with the config's bound. Not-finite values are never within it."""
    if tuple(output.shape) != tuple(reference.shape):
        reason = f"shape {tuple(output.shape)}, eager's is {tuple(reference.shape)}"
        return Judgement(float("nan"), None, reason)
    output, reference = torch.as_tensor(output), torch.as_tensor(reference)
    error = images.relative_error(output, reference)
    # Written so that a NaN, which is neither above nor below, is outside.
    if config.part != "pipeline":
        bound = _error_bound(config)
        reason = "" if error <= bound else f"relative error {error:.3g} is above {bound:g}"
        return Judgement(error, None, reason)
    decibel, bound = images.psnr(output, reference), PSNR_BOUNDS[config.dtype]
    reason = "" if decibel >= bound else f"PSNR {decibel:.1f} dB is below {bound:g} dB"
    return Judgement(error, decibel, reason)


def usable_reference(config: BenchConfig, reference: Any) -> str:
    """Why stock eager's own output cannot be compared with; empty where it can."""
    values = torch.as_tensor(reference).float()
    if not bool(torch.isfinite(values).all()):
        return f"stock eager's own output in {config.dtype} is not finite, so nothing can be compared with it"
    if float(values.std()) == 0.0:
        return "stock eager's own output is constant, so nothing can be compared with it"
    return ""


def to_fp32(value: Any) -> Any:
    """Floating tensors, also those in dicts, as fp32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_fp32(entry) for key, entry in value.items()}
    return value


def load(option: str, weights: str, model: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """A pipeline from a path or a Hub id. Raises WeightsError with one line that names ``option``."""
    # Pipelines import transformers, which random weights of one network do without.
    from sdfastgn.bench.models import pipelines

    try:
        return pipelines.load_pipeline(weights, model, dtype, device)
    except ValueError as error:
        first = first_line(error)
        raise WeightsError(f"{option}: {first.removeprefix('load_pipeline: ')}") from error


def component(config: BenchConfig, name: str) -> tuple[Any, int]:
    """The module ``"unet"`` or ``"vae"`` with the config's weights, and the pixels of a latent."""
    dtype, device = config.torch_dtype, config.torch_device
    if config.weights == "random":
        build = architectures.build_unet if name == "unet" else architectures.build_vae
        scale = architectures.latent_scale(architectures.VAES[config.model])
        return build(config.model, dtype, device, seed=config.seed), scale
    pipe = load("--weights", config.weights, config.model, dtype, device)
    component = getattr(pipe, name, None)
    if component is None:
        raise WeightsError(f"--weights: the pipeline in {config.weights!r} has no {name}")
    return component, latent_scale(pipe)


def latent_scale(pipe: Any) -> int:
    """Pixels on a side for one latent of a loaded pipeline."""
    vae = getattr(pipe, "vae", None)
    return architectures.latent_scale(None if vae is None else vae.config)


def step_inputs(config: BenchConfig, unet: Any, scale: int, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of one UNet step; ``changes`` are other sizes or batches than the config's."""
    # By the UNet's own configuration: loaded weights need not be those of --model.
    where = {"size": config.size, "batch": config.batch, "scale": scale, **changes}
    return architectures.unet_inputs(unet.config, **_drawn(config), **where)


def _drawn(config: BenchConfig) -> dict[str, Any]:
    return {"dtype": config.torch_dtype, "device": config.torch_device, "seed": config.seed}


def in_fp32(module: Any, call: Callable[[Any], T]) -> T:
    """``call`` of a copy of ``module`` in fp32 without TF32."""
    with global_switches(cudnn_tf32=False, matmul_tf32=False):
        return call(copy.deepcopy(module).float())


def build_unet(config: BenchConfig) -> Workload:
    """One step of the UNet."""
    unet, scale = component(config, "unet")
    unet.eval()
    inputs = step_inputs(config, unet, scale)

    def fp32_output() -> torch.Tensor:
        return in_fp32(unet, lambda exact: exact(**to_fp32(inputs), return_dict=False)[0])

    return Workload(unet, lambda: unet(**inputs, return_dict=False)[0], fp32_output)


def build_vae(config: BenchConfig) -> Workload:
    """One decode by the VAE."""
    vae = component(config, "vae")[0].eval()
    latents = architectures.vae_latents(vae.config, size=config.size, batch=config.batch, **_drawn(config))

    def fp32_output() -> torch.Tensor:
        return in_fp32(vae, lambda exact: exact.decode(latents.float(), return_dict=False)[0])

    return Workload(vae, lambda: vae.decode(latents, return_dict=False)[0], fp32_output)


def build_pipeline(config: BenchConfig) -> Workload:
    """From prompt to image."""
    dtype, device = config.torch_dtype, config.torch_device
    if config.weights == "random":
        from sdfastgn.bench.models import pipelines

        pipe = pipelines.build_pipeline(config.model, dtype=dtype, device=device, seed=config.seed)
    else:
        pipe = load("--weights", config.weights, config.model, dtype, device)
    pipe.set_progress_bar_config(disable=True)
    # A distilled UNet has its guidance within, and its pipeline a default that it was made for.
    guidance = {} if getattr(pipe.unet.config, "time_cond_proj_dim", None) else {"guidance_scale": GUIDANCE}

    def call() -> Any:
        return pipe(
            prompt=[PROMPT] * config.batch,
            num_inference_steps=config.steps,
            height=config.size,
            width=config.size,
            # A CPU generator gives the same initial noise on every device.
            generator=torch.Generator("cpu").manual_seed(config.seed),
            output_type="np",
            **guidance,
        ).images

    return Workload(pipe, call, None)
