"""The suite of BatchNorm: beside cuDNN's and ATen's, which PyTorch runs where cuDNN is off."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import sdfastgn
from sdfastgn.bench.kernels.providers import per_channel
from sdfastgn.bench.kernels.suite import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Call,
    Operation,
    Provider,
    Shape,
    Suite,
)

__all__ = ["BATCH_NORM"]

# Running averages: about those of the operands, which have mean 0.5 and deviation 1.5.
_MEAN, _VAR = 0.5, 2.0


def _averages(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, var = (torch.full(x.shape[1:2], value, dtype=dtype, device=x.device) for value in (_MEAN, _VAR))
    return mean, var


def _stock(
    x: Tensor, weight: Tensor, bias: Tensor, *, averages: tuple[Tensor, Tensor], training: bool
) -> Tensor:
    return F.batch_norm(x, *averages, weight, bias, training)


def _ours(
    x: Tensor, weight: Tensor, bias: Tensor, *, averages: tuple[Tensor, Tensor], training: bool
) -> Tensor:
    return sdfastgn.batch_norm(x, *averages, weight, bias, training)


def _stock_add(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *, averages: tuple[Tensor, Tensor]
) -> Tensor:
    return F.silu(F.batch_norm(x, *averages, weight, bias, True) + residual)


def _ours_add(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *, averages: tuple[Tensor, Tensor]
) -> Tensor:
    return sdfastgn.batch_norm(x, *averages, weight, bias, True, activation="silu", residual=residual)


def _with_averages(call: Call, **options: bool) -> Call:
    """``call`` with averages of its own: the reference of every dtype."""
    return lambda x, *others: call(x, *others, averages=_averages(x), **options)


def _without_cudnn(call: Call) -> Call:
    # The backward is that of the forward which ran.
    return torch.backends.cudnn.flags(enabled=False)(call)


def _providers(stock: Call, ours: Call, *layouts: str, **options: bool) -> tuple[Provider, ...]:
    """cuDNN, ATen and this package in each of ``layouts``, each with averages that its calls update."""

    def provider(name: str, call: Call, layout: str) -> Provider:
        return Provider(
            f"{name}_{layout}",
            lambda x, *_: functools.partial(call, averages=_averages(x), **options),
            channels_last=layout == "nhwc",
        )

    calls = {"cudnn": stock, "aten": _without_cudnn(stock), "sdfastgn": ours}
    return tuple(provider(name, call, layout) for layout in layouts for name, call in calls.items())


def _operation(training: bool, passes: tuple[str, ...], task: str = "") -> Operation:
    return Operation(
        lambda shape: per_channel(shape, shape[1]),
        _with_averages(_stock, training=training),
        _providers(_stock, _ours, "nhwc", "nchw", training=training),
        passes,
        task=task,
        full=("weight", "bias"),
    )


# ResNet-50 with 32 images of 224 x 224.
_RESNET: tuple[Shape, ...] = (
    (32, 64, 112, 112),
    *((32, C, 56, 56) for C in (64, 128, 256)),
    *((32, C, 28, 28) for C in (128, 256, 512)),
    *((32, C, 14, 14) for C in (256, 512, 1024)),
    *((32, C, 7, 7) for C in (512, 2048)),
)
# From few to many of each of samples, channels and positions, as far as fp64 copies fit into memory.
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
        _operation(True, (TRAINING, BACKWARD)),
        _operation(False, (FORWARD,), task="inference"),
        # Not ReLU: at its kink the rounding of stock's sum decides over a whole element of the gradient,
        # which in fp16 is an error of 1 %, the gate's bound.
        Operation(
            lambda shape: {**per_channel(shape, shape[1]), "residual": shape},
            _with_averages(_stock_add),
            _providers(_stock_add, _ours_add, "nhwc"),
            (TRAINING, BACKWARD),
            task="add + silu",
            tensors=3,
            full=("weight", "bias"),
        ),
    ),
    baseline="cudnn_nhwc",
    round_seconds=0.01,
)
