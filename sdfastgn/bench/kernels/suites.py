"""The suites of ``sdfastgn kernels``, each an entry of ``SUITES``, and their providers (implementations)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sdfastgn
from sdfastgn.bench import stable_fast
from sdfastgn.bench.environment import cuda_package_reason
from sdfastgn.bench.kernels.batch_norm import BATCH_NORM
from sdfastgn.bench.kernels.suite import (
    BOTH,
    COPY,
    ERROR_BOUNDS,
    FORWARD,
    INFERENCE,
    TRAINING,
    Call,
    Operation,
    Provider,
    Shape,
    Suite,
    both_layouts,
    fixed,
    inductor,
    per_channel,
    rivals,
)
from sdfastgn.kernels.attention.wide_heads import wide_attention
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x

GROUPS = 32
EPS = 1e-5
# The number that selects SiLU in the arguments of the package gnnhwc, a competitor's GroupNorm.
_GNNHWC_SILU = 2
# For images of at most this number of pixels, apex's layer uses its one-pass kernel (on sm_80 and later).
_APEX_ONE_PASS = 1024


def _with_statistics(
    task: str, sizes: Callable[[Shape], dict[str, Shape]], plain: Call, ours: Call
) -> Operation:
    """An operation with two implementations: ``plain``, and ``ours``, which also computes statistics of y.

    A GroupNorm that is given these statistics need not read y to compute them. The table shows
    what the statistics cost. ``task``: the name of the task, such as "add". The implementation ``plain``
    has this name too. The implementation ``ours`` has this name with "_with_statistics" at the end.
    """
    others = fixed(f"{task}_with_statistics", lambda *pair: ours(*pair)[0])
    tensors = 3 if task == "add" else 2
    return Operation(sizes, plain, (fixed(task, plain), others), task=task, tensors=tensors, baseline=task)


# ---- GroupNorm


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def _group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(_group_norm(x, weight, bias))


def _ours_silu(x: Tensor, weight: Tensor, bias: Tensor, statistics: Any = None) -> Tensor:
    return sdfastgn.group_norm(x, GROUPS, weight, bias, EPS, activation="silu", statistics=statistics)


def _given_statistics(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    return functools.partial(_ours_silu, statistics=sdfastgn.channel_statistics(x))


def _stable_fast(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    forward = stable_fast.group_norm_silu()
    return lambda x, weight, bias: forward(x, GROUPS, weight, bias, EPS)


def _gnnhwc(*operands: Tensor) -> Call:
    # gnnhwc is the package of the project channels-last-groupnorm. Its first import compiles its kernels.
    apply = importlib.import_module("gnnhwc").GN_NHWC_Func.apply
    return lambda x, weight, bias: apply(x, weight, bias, GROUPS, EPS, _GNNHWC_SILU)


def _apex(x: Tensor, *others: Tensor) -> Call:
    """Returns a function that calls the kernel that apex's layer uses for an ``x`` of this shape."""
    module = importlib.import_module("apex.contrib.group_norm.group_norm")
    one_pass = x.shape[2] * x.shape[3] <= _APEX_ONE_PASS
    kernel = module.cuda_group_norm_nhwc_one_pass if one_pass else module.cuda_group_norm_nhwc_two_pass
    return lambda x, weight, bias: kernel(x, GROUPS, weight, bias, EPS, "silu")


def _built_by_hand(name: str, build: Callable[..., Call]) -> Provider:
    return Provider(name, build, functools.partial(cuda_package_reason, name), by_default=False)


# Shapes of the inputs of norms in the UNets of SD1.5 at 512 x 512 pixels and SDXL at 1024 x 1024 pixels. With
# guidance, the batch is 2. The last three are inputs of norms in the VAE's layers of low resolution.
_UNET: tuple[Shape, ...] = (
    *((2, C, 8, 8) for C in (1280, 2560)),
    *((2, C, 16, 16) for C in (1280, 1920, 2560)),
    *((2, C, 32, 32) for C in (640, 1280, 1920, 2560)),
    *((2, C, 64, 64) for C in (320, 640, 960, 1280)),
    *((2, C, 128, 128) for C in (320, 640, 960)),
    *((1, 512, pixels, pixels) for pixels in (64, 128, 256)),
)
# Shapes of the inputs of norms near the VAE's output, and last a UNet's shape with a large batch.
_LARGE: tuple[Shape, ...] = ((1, 256, 512, 512), (1, 512, 512, 512), (1, 128, 1024, 1024), (16, 320, 64, 64))

_TRAINING = Suite(
    name="training",
    title=f"GroupNorm({GROUPS}) + SiLU with gradients of x, weight and bias",
    axes="NxCxHxW",
    shape_sets={"unet": _UNET, "large": _LARGE, "all": _UNET + _LARGE},
    operations=(
        Operation(per_channel, _group_norm_silu, rivals(_group_norm_silu, _ours_silu), (TRAINING, BOTH)),
    ),
    baseline="eager_nchw",
    divisor=GROUPS,
)

_INFERENCE = replace(
    _TRAINING,
    name=INFERENCE,
    title=f"GroupNorm({GROUPS}) + SiLU",
    operations=(
        Operation(
            per_channel,
            _group_norm_silu,
            # stable-fast comes last, because its import changes Triton for the whole process.
            (
                *rivals(_group_norm_silu, _ours_silu),
                _built_by_hand("gnnhwc", _gnnhwc),
                _built_by_hand("apex", _apex),
                Provider("stable_fast", _stable_fast, stable_fast.reason),
            ),
        ),
    ),
    extras=(
        Operation(
            per_channel,
            _group_norm_silu,
            (Provider("sdfastgn_given", _given_statistics),),
            task="statistics given",
            baseline=COPY,
        ),
        _with_statistics(
            "add",
            lambda shape: dict.fromkeys(("x", "residual"), shape),
            torch.add,
            sdfastgn.add_with_statistics,
        ),
        _with_statistics(
            "cat",
            lambda shape: dict.fromkeys(("x", "skip"), (shape[0], shape[1] // 2, *shape[2:])),
            lambda *pair: torch.cat(pair, dim=1),
            sdfastgn.cat_with_statistics,
        ),
    ),
    repeats=20,
    round_seconds=0.05,
)


# ---- InstanceNorm


def _instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)


_INSTANCE_NORM = Suite(
    name="instance_norm",
    title="InstanceNorm of three-dimensional images",
    axes="NxDxHxWxC",
    shape_sets={
        "all": ((2, 128, 128, 128, 32), (4, 64, 64, 64, 64), (8, 32, 32, 32, 128), (8, 32, 32, 32, 256))
    },
    operations=(
        Operation(
            lambda shape: per_channel((shape[0], shape[-1], *shape[1:-1])),
            _instance_norm,
            (
                *both_layouts("eager", _instance_norm, "ncdhw", "ndhwc"),
                *both_layouts(
                    "sdfastgn", functools.partial(sdfastgn.instance_norm, eps=EPS), "ncdhw", "ndhwc"
                ),
                inductor(_instance_norm, "inductor_ndhwc"),
            ),
            (FORWARD, BOTH),
        ),
    ),
    baseline="eager_ncdhw",
)


# ---- LayerNorm


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, add_bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual + add_bias
    return _layer_norm(total, weight, bias), total


# Shapes (rows, D), where D is the normalized dimension. ``_ROWS``: from few long rows to many short rows.
# ``_TOKENS``: inputs of LayerNorm in the UNets of SD1.5 and SDXL, a row for each token.
_ROWS: tuple[Shape, ...] = tuple((10**power, 10 ** (8 - power)) for power in range(1, 8))
_TOKENS: tuple[Shape, ...] = ((8192, 320), (2048, 640), (8192, 640), (2048, 1280))

_LAYER_NORM = Suite(
    name="layer_norm",
    title="LayerNorm, alone and of x + residual + add_bias",
    axes="rowsxD",
    shape_sets={"rows": _ROWS, "unet": _TOKENS, "all": _ROWS + _TOKENS},
    operations=(
        Operation(
            functools.partial(per_channel, axis=-1),
            _layer_norm,
            rivals(_layer_norm, functools.partial(sdfastgn.layer_norm, eps=EPS), layouts=False),
            (FORWARD, BOTH),
        ),
        Operation(
            lambda shape: {"x": shape, "residual": shape, **per_channel(shape, "add_bias", axis=-1)},
            _add_layer_norm,
            rivals(
                _add_layer_norm,
                lambda x, residual, weight, bias, add_bias: sdfastgn.add_layer_norm(
                    x, residual, weight, bias, EPS, add_bias=add_bias
                ),
                layouts=False,
            ),
            task="add",
            outputs=("y", "total"),
            tensors=4,
        ),
    ),
    baseline="eager",
)


# ---- upsampling by two, and the convolution after it


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _upsample_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(_upsample(x), weight, bias, padding=1)


# ``_DECODER``: shapes of the tensors that the VAE's decoder upsamples, if it makes an image of 512 x 512 or
# 1024 x 1024 pixels. ``_DOUBLED``: shapes of the tensors that the UNets of SD1.5 and SDXL upsample.
_DECODER: tuple[Shape, ...] = (
    *((1, 512, pixels, pixels) for pixels in (64, 128, 256)),
    *((1, 256, pixels, pixels) for pixels in (256, 512)),
)
_DOUBLED: tuple[Shape, ...] = (
    *((2, 1280, pixels, pixels) for pixels in (8, 16, 32)),
    *((2, 640, pixels, pixels) for pixels in (32, 64)),
)

_UPSAMPLE = Suite(
    name="upsample",
    title="Nearest-neighbor upsampling by two, alone and with a 3 x 3 convolution behind it",
    axes="NxCxHxW",
    shape_sets={"vae": _DECODER, "unet": _DOUBLED, "all": (*_DOUBLED, *_DECODER, (2, 320, 128, 128))},
    operations=(
        Operation(
            lambda shape: {"x": shape},
            _upsample,
            rivals(_upsample, upsample_nearest_2x),
            task="upsample",
            tensors=5,
        ),
        Operation(
            lambda shape: {"x": shape, "weight": (shape[1], shape[1], 3, 3), "bias": (shape[1],)},
            _upsample_conv,
            rivals(_upsample_conv, upsample_conv2d),
            task="upsample + conv",
            tensors=5,
            # In fp32 the convolution runs in TF32, whose mantissa has only as many bits as fp16's. So this
            # operation's error bound for fp32 is larger than that of other operations.
            bounds={**ERROR_BOUNDS, "fp32": 2e-3},
        ),
    ),
    baseline="eager_nchw",
)


# ---- attention with one wide head

_ATTENTION = Suite(
    name="attention",
    title="Attention of one wide head, as in the middle of a VAE",
    axes="NxheadsxLxD",
    shape_sets={"all": tuple((1, 1, length, 512) for length in (1024, 4096, 9216, 16384))},
    operations=(
        Operation(
            lambda shape: dict.fromkeys(("x", "key", "value"), shape),
            F.scaled_dot_product_attention,
            (
                fixed("sdpa", F.scaled_dot_product_attention, channels_last=False),
                fixed("sdfastgn", wide_attention, channels_last=False),
            ),
            tensors=4,
        ),
    ),
    baseline="sdpa",
)

_EVERY = (_INFERENCE, _TRAINING, _INSTANCE_NORM, _LAYER_NORM, BATCH_NORM, _UPSAMPLE, _ATTENTION)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _EVERY}
