"""The correctness gate: a variant is only timed if its output is close enough to stock eager's output.

A variant is a way to run a model, such as with torch.compile. Stock eager is the model without sdfastgn and
without torch.compile. An output is a tensor, an array of images, or for a training step a dict of gradients
by parameter name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sdfastgn.bench import images
from sdfastgn.bench.documents import OK
from sdfastgn.bench.workload import BenchConfig

# Maximum relative error of a variant's output against stock eager's output, by dtype. Two runs of a deep
# network that round differently differ by about 0.2 % in fp16, and by eight times as much in bf16.
# stable-fast accumulates in fp16 and differs by 1.2 %.
ERROR_BOUNDS = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-3}
# Maximum relative error in fp32 on a GPU. Convolutions of fp32 run in TF32 there, with 10 bits of mantissa.
TF32_BOUND = 1e-2
# Minimum PSNR in dB of a pipeline's images against stock eager's images, by dtype.
# These bounds are low because denoising steps with guidance amplify rounding errors.
PSNR_BOUNDS = {"fp16": 30.0, "bf16": 25.0, "fp32": 40.0}
# Maximum ratio of the error of a variant's gradients to the error of the gradients of stock eager (the model
# without sdfastgn and torch.compile). Both errors are against fp32 gradients. A variant's gradients are not
# compared with stock eager's gradients, because stock eager's gradients have large errors themselves.
GRADIENT_FACTOR = 1.05


@dataclass(frozen=True)
class Reference:
    """The output of stock eager (the unchanged model), with which the outputs of all variants are compared.

    Attributes:
        output: the output of the first call.
        first_call_s: seconds of the first call.
        fp32: the output in fp32 without TF32. None if neither the user nor the gate needs it.
        fp32_error: the relative error of ``output`` against ``fp32``; NaN without ``fp32``.
        status: ``"ok"`` if outputs can be compared with ``output``. Otherwise ``reason`` says why not.
        images: name of a variant, or ``"fp32"`` -> the first image of its batch. Each variant of a pipeline
            adds its image if its output is right.
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
    """The errors of a variant (a way to run a model), and whether the correctness gate accepts them.

    ``reason``: why the gate rejects the variant; empty if the gate accepts it.

    ``error`` and ``psnr_db`` compare the variant's output with stock eager's output. The fields ``fp32_...``
    compare it with stock's output in fp32. They are NaN or None if this output was not computed.

    ``rows``: the median and the 95th percentile of the relative errors of a network's output against fp32, at
    single positions of the output.
    """

    error: float
    psnr_db: float | None
    reason: str
    fp32_error: float = math.nan
    fp32_psnr_db: float | None = None
    fp32_ssim: float | None = None
    rows: tuple[float | None, float | None] = (None, None)


def gate_text(config: BenchConfig) -> str:
    """Describes the bound of the correctness gate in words, for tables and JSON."""
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
    """Return ``output`` if it is a dict of gradients, else ``{"": output}`` with ``output`` as a tensor."""
    return output if isinstance(output, dict) else {"": torch.as_tensor(output)}


def kept(output: Any) -> Any:
    """Return ``output`` with its tensors copied, because a later replay of a CUDA graph may overwrite them.

    An array of images is returned as it is: it is on the CPU, where no replay writes.
    """
    if isinstance(output, dict):  # gradients go to the CPU: on the GPU they would raise the peak memory
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in output.items()}
    return output.detach().clone() if isinstance(output, torch.Tensor) else output


def problem(config: BenchConfig, output: Any) -> str:
    """Why stock eager's ``output`` cannot be used for comparisons; empty if it can be used."""
    ends = [torch.stack(tensor.float().aminmax()) for tensor in tensors(output).values()]
    lowest, highest = min(float(each[0]) for each in ends), max(float(each[1]) for each in ends)
    whose = "gradients are" if config.part == "train" else f"output in {config.dtype} is"
    if not all(bool(torch.isfinite(each).all()) for each in ends):
        return f"stock eager's own {whose} not finite, so nothing can be compared with it"
    return (
        f"stock eager's own {whose} constant, so nothing can be compared with it" if lowest == highest else ""
    )


def judge(config: BenchConfig, output: Any, stock: Reference, slack: float = 1.0) -> Judgement:
    """Compare a variant's ``output`` with stock's. An output with NaN or infinity is never accepted.

    ``slack``: the error may exceed the bound by this factor. Training steps ignore this factor.
    """
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
    reason = _reason(config, error, decibel, exact, stock.fp32_error, slack)
    rows: tuple[float | None, float | None] = (None, None)
    if config.part not in ("pipeline", "train") and stock.fp32 is not None:
        rows = images.row_errors(output, stock.fp32)
    return Judgement(error, decibel, reason, exact, fp32_psnr_db, fp32_ssim, rows)


def _reason(
    config: BenchConfig,
    error: float,
    psnr_db: float | None,
    fp32_error: float,
    stock_fp32_error: float,
    slack: float,
) -> str:
    """Why the gate rejects the output; empty if the gate accepts it. An error of NaN is always rejected."""
    if psnr_db is not None:
        bound = PSNR_BOUNDS[config.dtype] - 20 * math.log10(slack)
        return "" if psnr_db >= bound else f"PSNR {psnr_db:.1f} dB is below {bound:.3g} dB"
    if config.part != "train":
        bound = slack * _error_bound(config)
        return "" if error <= bound else f"relative error {error:.3g} is above {bound:g}"
    # In fp32 stock's error may be almost zero, and then 1.05 times this error is too strict a bound. So any
    # relative error up to 1e-3 is accepted as well.
    least = ERROR_BOUNDS["fp32"] if config.dtype == "fp32" else 0.0
    bound = max(GRADIENT_FACTOR * stock_fp32_error, least)
    text = f"the gradients' relative error {fp32_error:.3g} against fp32 is above {bound:.3g}"
    return "" if fp32_error <= bound else text
