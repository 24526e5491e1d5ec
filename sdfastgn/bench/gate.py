"""The correctness gate: a variant's output against stock eager's, before any time.

Outputs are a tensor, images, or the gradients of a training step by parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sdfastgn.bench import images
from sdfastgn.bench.documents import OK
from sdfastgn.bench.workload import BenchConfig

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


@dataclass(frozen=True)
class Reference:
    """Stock eager's output, the seconds of its first call, and the fp32 output where that was asked
    for or is the gate.

    ``fp32_error`` is stock eager's own error against it. Where nothing can be compared with the
    output, ``status`` is not ``"ok"`` and ``reason`` says why. ``images`` gets a pipeline's first
    image by variant, and ``"fp32"``.
    """

    output: Any = None
    first_call_s: float = 0.0
    fp32: Any = None
    fp32_error: float = math.nan
    status: str = OK
    reason: str = ""
    images: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """A variant's errors against stock eager's. ``reason`` is empty where it is within the bound.

    Those named fp32 are against the fp32 output, where there is one.
    """

    error: float
    psnr_db: float | None
    reason: str
    fp32_error: float = math.nan
    fp32_psnr_db: float | None = None
    fp32_ssim: float | None = None


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


def tensors(output: Any) -> dict[str, torch.Tensor]:
    """An output by name: of gradients their parameters', else one that is empty."""
    return output if isinstance(output, dict) else {"": torch.as_tensor(output)}


def kept(output: Any) -> Any:
    """A copy that the next call cannot overwrite, as variants with CUDA graphs of their own do."""
    if isinstance(output, dict):  # gradients: what is held on the GPU is what is measured
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in output.items()}
    return output.detach().clone() if isinstance(output, torch.Tensor) else output


def problem(config: BenchConfig, output: Any) -> str:
    """Why stock eager's own output cannot be compared with; empty where it can."""
    ends = [torch.stack(tensor.float().aminmax()) for tensor in tensors(output).values()]
    lowest, highest = min(float(each[0]) for each in ends), max(float(each[1]) for each in ends)
    whose = "gradients are" if config.part == "train" else f"output in {config.dtype} is"
    if not all(bool(torch.isfinite(each).all()) for each in ends):
        return f"stock eager's own {whose} not finite, so nothing can be compared with it"
    return (
        f"stock eager's own {whose} constant, so nothing can be compared with it" if lowest == highest else ""
    )


def judge(config: BenchConfig, output: Any, stock: Reference) -> Judgement:
    """Compares with the config's bound. Not-finite values are never within it."""
    ours, theirs = tensors(output), tensors(stock.output)
    for name in {**theirs, **ours}:
        found, expected = (tuple(each[name].shape) if name in each else None for each in (ours, theirs))
        if found != expected:
            of = name and f" of {name}"
            return Judgement(math.nan, None, f"shape{of} {found}, eager's is {expected}")
    error = images.relative_error(ours, theirs)
    exact = math.nan if stock.fp32 is None else images.relative_error(ours, tensors(stock.fp32))
    decibel = images.psnr(ours[""], theirs[""]) if config.part == "pipeline" else None
    fp32_psnr_db = fp32_ssim = None
    if decibel is not None and stock.fp32 is not None:
        fp32_psnr_db, fp32_ssim = images.psnr(output, stock.fp32), images.ssim(output, stock.fp32)
    # `not <=` because a NaN is neither above nor below.
    reason = ""
    if decibel is not None:
        bound = PSNR_BOUNDS[config.dtype]
        reason = "" if decibel >= bound else f"PSNR {decibel:.1f} dB is below {bound:g} dB"
    elif config.part != "train":
        bound = _error_bound(config)
        reason = "" if error <= bound else f"relative error {error:.3g} is above {bound:g}"
    else:
        # Stock's own is next to nothing in fp32 without TF32.
        least = ERROR_BOUNDS["fp32"] if config.dtype == "fp32" else 0.0
        bound = max(GRADIENT_FACTOR * stock.fp32_error, least)
        what = f"the gradients' relative error {exact:.3g} against fp32"
        reason = "" if exact <= bound else f"{what} is above {bound:.3g}"
    return Judgement(error, decibel, reason, exact, fp32_psnr_db, fp32_ssim)
