"""The benchmark suite of BatchNorm. Its competitors are cuDNN, and ATen's kernels (PyTorch without cuDNN)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sdfastgn
from sdfastgn.bench.kernels.suite import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Call,
    Operation,
    Provider,
    Shape,
    Suite,
    per_channel,
)

# Initial running mean and variance. They are close to the mean (0.5) and the variance (2.25) of the inputs.
_MEAN, _VAR = 0.5, 2.0


def _averages(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, var = (torch.full(x.shape[1:2], value, dtype=dtype, device=x.device) for value in (_MEAN, _VAR))
    return mean, var


def _stock(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    averages: tuple[Tensor, Tensor],
    training: bool,
) -> Tensor:
    y = F.batch_norm(x, *averages, weight, bias, training)
    # The activation is SiLU, because ReLU might fail the check against fp64. ReLU's derivative jumps from
    # zero to one at zero, and stock rounds the sum y + residual. If this rounding moves a sum to the other
    # side of zero, an element of the gradient is wrong. In fp16 such elements make a relative error of 1 %,
    # the maximum that is accepted.
    return y if residual is None else F.silu(y + residual)


def _ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, **options: Any) -> Tensor:
    mean, var = options["averages"]
    activation = "identity" if residual is None else "silu"
    return sdfastgn.batch_norm(
        x, mean, var, weight, bias, options["training"], activation=activation, residual=residual
    )


def _in_aten(*operands: Any, **options: Any) -> Tensor:
    """Runs PyTorch's BatchNorm (``_stock``) in ATen's kernels, without cuDNN. Its backward is ATen's too."""
    before = torch.backends.cudnn.enabled
    # ``torch.backends.cudnn.flags(enabled=False)`` would also read PyTorch's TF32 switches. Reading them
    # raises an error if other code has set them by PyTorch's new API.
    torch.backends.cudnn.enabled = False
    try:
        return _stock(*operands, **options)
    finally:
        torch.backends.cudnn.enabled = before


def _operation(
    task: str, passes: tuple[str, ...], *layouts: str, training: bool = True, residual: bool = False
) -> Operation:
    """A BatchNorm that cuDNN, ATen and sdfastgn compute, each in all of ``layouts`` ("nchw", "nhwc").

    Each of these implementations has its own running averages, because a forward in training writes into
    them.
    """

    def with_averages(call: Call) -> Callable[..., Call]:
        return lambda x, *_: functools.partial(call, averages=_averages(x), training=training)

    calls = {"cudnn": _stock, "aten": _in_aten, "sdfastgn": _ours}
    return Operation(
        lambda shape: {**per_channel(shape), **({"residual": shape} if residual else {})},
        lambda x, *others: with_averages(_stock)(x)(x, *others),
        tuple(
            Provider(f"{name}_{layout}", with_averages(call), channels_last=layout == "nhwc")
            for layout in layouts
            for name, call in calls.items()
        ),
        passes,
        task=task,
        tensors=3 if residual else 2,
        full=("weight", "bias"),
    )


# Shapes of the inputs of ResNet-50's norms, for 32 images of 224 x 224 pixels.
_RESNET: tuple[Shape, ...] = (
    (32, 64, 112, 112),
    *((32, C, 56, 56) for C in (64, 128, 256)),
    *((32, C, 28, 28) for C in (128, 256, 512)),
    *((32, C, 14, 14) for C in (256, 512, 1024)),
    *((32, C, 7, 7) for C in (512, 2048)),
)
# Shapes with few and many samples (N), channels (C) and pixels. For larger shapes the reference in fp64 does
# not fit into memory.
_GRID: tuple[Shape, ...] = (
    *((N, C, 4, 4) for N in (8, 128) for C in (2, 64, 1024)),
    *((N, C, 32, 32) for N in (8, 128) for C in (2, 64, 1024)),
    *((8, C, 320, 320) for C in (2, 64, 256)),
    *((128, C, 320, 320) for C in (2, 16)),
)

BATCH_NORM = Suite(
    name="batch_norm",
    title="BatchNorm, alone and with a residual add and SiLU; weight and bias in fp32",
    axes="NxCxHxW",
    shape_sets={"resnet50": _RESNET, "grid": _GRID, "all": _RESNET + _GRID},
    operations=(
        _operation("", (TRAINING, BACKWARD), "nhwc", "nchw"),
        _operation("inference", (FORWARD,), "nhwc", "nchw", training=False),
        _operation("add + silu", (TRAINING, BACKWARD), "nhwc", residual=True),
    ),
    baseline="cudnn_nhwc",
    round_seconds=0.01,
)
