"""The suites of ``sdfastgn kernels --suite``: shapes, operations and providers. One suite is one entry of ``SUITES``.

``training`` is GroupNorm+SiLU with its gradients on the shapes of inference; ``issue_28201`` has the two shapes of PyTorch's issue
of that number (channels-last GroupNorm, its slowness); ``instance_norm`` images of three dimensions; ``layer_norm`` from few long
rows to many short ones, the tokens of SD1.5's and SDXL's UNets, and a residual and a bias added on the way; ``upsample`` doubles
images, with a convolution behind it or none; ``attention`` is that of a VAE's mid block, one head of 512 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.bench.kernels import providers
from sdfastgn.bench.kernels.cells import Shape
from sdfastgn.bench.kernels.providers import COPY, YARDSTICK, Call, Provider
from sdfastgn.bench.kernels.run import EPS, ERROR_BOUNDS, GROUPS, SHAPE_SETS
from sdfastgn.bench.kernels.suites import BACKWARD, BOTH, FORWARD, TRAINING, Operation, Suite

INFERENCE = "inference"

# Tasks: the norm itself, and the norm of a sum.
NORM, ADD = "", "add"


def _fixed(call: Call) -> Call:
    """A ``build`` of what needs no preparation."""
    return lambda *operands: call


def _compiled(call: Call) -> Call:
    """A ``build`` of ``call`` under torch.compile."""

    def build(*operands: Tensor) -> Call:
        import torch._functorch.config as config

        compiled = providers.compiled(call)

        def run(*tensors: Tensor) -> Any:
            # A backward that is timed alone runs many times over one forward, whose saved tensors must then not be reused.
            with config.patch(donated_buffer=False):
                return compiled(*tensors)

        return run

    return build


def _needs_ours(name: str) -> Any:
    """The reason of a provider that calls ``sdfastgn.name``."""

    def reason(device: torch.device) -> str | None:
        import sdfastgn

        return None if hasattr(sdfastgn, name) else f"this sdfastgn has no {name}"

    return reason


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _copied(sizes: Any) -> Operation:
    """The yardstick for an operation with these operands: one read and one write of x."""
    return Operation(COPY, lambda shape: {"x": sizes(shape)["x"]}, lambda x: x, (FORWARD,))


_COPY = Provider(YARDSTICK, providers.always, _fixed(_copy), task=COPY)


# ---- GroupNorm


def _group_norm_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {"x": shape, "weight": (shape[1],), "bias": (shape[1],)}


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def _group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(_group_norm(x, weight, bias))


def _our_group_norm(activation: str) -> Call:
    import sdfastgn

    return lambda x, weight, bias: sdfastgn.group_norm(x, GROUPS, weight, bias, EPS, activation=activation)


def _module(make: Any) -> Call:
    """A ``build`` of a GroupNorm module whose parameters are then given at each call, as everyone's are."""

    def build(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
        module = make(GROUPS, weight, bias, EPS)
        return lambda x, weight, bias: torch.func.functional_call(
            module, {"weight": weight, "bias": bias}, (x,)
        )

    return build


DIVISIBLE = f"with C divisible by {GROUPS}"


def divisible(shape: Shape) -> bool:
    """Whether GroupNorm's groups are whole."""
    return shape[1] % GROUPS == 0


_TRAINING = Suite(
    name="training",
    title=f"GroupNorm({GROUPS}) + SiLU with gradients of x, weight and bias",
    axes="NxCxHxW",
    shape_sets=SHAPE_SETS,
    operations=(
        _copied(_group_norm_sizes),
        Operation(NORM, _group_norm_sizes, _group_norm_silu, (TRAINING, BOTH)),
    ),
    providers=(
        _COPY,
        Provider("eager_nchw", providers.always, _fixed(_group_norm_silu), channels_last=False, task=NORM),
        Provider("eager_nhwc", providers.always, _fixed(_group_norm_silu), task=NORM),
        Provider("sdfastgn", providers.always, lambda *operands: _our_group_norm("silu"), task=NORM),
        Provider(
            "inductor", providers.inductor_reason, _compiled(_group_norm_silu), by_default=False, task=NORM
        ),
        Provider("gnnhwc", providers.gnnhwc_reason, _module(providers.gnnhwc), task=NORM),
        Provider("apex", providers.apex_reason, _module(providers.apex), task=NORM),
    ),
    ours=("sdfastgn",),
    baseline="eager_nchw",
    fits=divisible,
    rule=DIVISIBLE,
)

_ISSUE_28201 = Suite(
    name="issue_28201",
    title=f"GroupNorm({GROUPS}) of PyTorch's issue 28201",
    axes="NxCxHxW",
    shape_sets={"all": ((128, 256, 28, 28), (256, 512, 56, 56))},
    operations=(
        _copied(_group_norm_sizes),
        Operation(NORM, _group_norm_sizes, _group_norm, (TRAINING, BACKWARD, BOTH)),
    ),
    providers=(
        _COPY,
        Provider("eager_nchw", providers.always, _fixed(_group_norm), channels_last=False, task=NORM),
        Provider("eager_nhwc", providers.always, _fixed(_group_norm), task=NORM),
        Provider(
            "sdfastgn_nchw",
            providers.always,
            lambda *operands: _our_group_norm("identity"),
            channels_last=False,
            task=NORM,
        ),
        Provider("sdfastgn_nhwc", providers.always, lambda *operands: _our_group_norm("identity"), task=NORM),
        Provider(
            "inductor_nchw",
            providers.inductor_reason,
            _compiled(_group_norm),
            channels_last=False,
            by_default=False,
            task=NORM,
        ),
        Provider(
            "inductor_nhwc", providers.inductor_reason, _compiled(_group_norm), by_default=False, task=NORM
        ),
    ),
    ours=("sdfastgn_nchw", "sdfastgn_nhwc"),
    baseline="eager_nchw",
    dtype="fp32",
    fits=divisible,
    rule=DIVISIBLE,
)


# ---- InstanceNorm


def _instance_norm_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    N, *spatial, C = shape
    return {"x": (N, C, *spatial), "weight": (C,), "bias": (C,)}


def _instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)


def _our_instance_norm(*operands: Tensor) -> Call:
    import sdfastgn

    function: Any = getattr(sdfastgn, "instance_norm")  # noqa: B009  # a name that mypy need not know
    return lambda x, weight, bias: function(x, weight, bias, EPS)


_INSTANCE_NORM = Suite(
    name="instance_norm",
    title="InstanceNorm of three-dimensional images",
    axes="NxDxHxWxC",
    shape_sets={
        "all": ((2, 128, 128, 128, 32), (4, 64, 64, 64, 64), (8, 32, 32, 32, 128), (8, 32, 32, 32, 256))
    },
    operations=(
        _copied(_instance_norm_sizes),
        Operation(NORM, _instance_norm_sizes, _instance_norm, (FORWARD, BOTH)),
    ),
    providers=(
        _COPY,
        Provider("eager_ncdhw", providers.always, _fixed(_instance_norm), channels_last=False, task=NORM),
        Provider("eager_ndhwc", providers.always, _fixed(_instance_norm), task=NORM),
        Provider(
            "sdfastgn_ncdhw", _needs_ours("instance_norm"), _our_instance_norm, channels_last=False, task=NORM
        ),
        Provider("sdfastgn_ndhwc", _needs_ours("instance_norm"), _our_instance_norm, task=NORM),
        Provider(
            "inductor_ndhwc",
            providers.inductor_reason,
            _compiled(_instance_norm),
            by_default=False,
            task=NORM,
        ),
    ),
    ours=("sdfastgn_ncdhw", "sdfastgn_ndhwc"),
    baseline="eager_ncdhw",
)


# ---- LayerNorm


def _layer_norm_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {"x": shape, "weight": shape[-1:], "bias": shape[-1:]}


def _add_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {"x": shape, "residual": shape, "weight": shape[-1:], "bias": shape[-1:], "add_bias": shape[-1:]}


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, add_bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual + add_bias
    return _layer_norm(total, weight, bias), total


def _our_layer_norm(*operands: Tensor) -> Call:
    import sdfastgn

    function: Any = getattr(sdfastgn, "layer_norm")  # noqa: B009  # a name that mypy need not know
    return lambda x, weight, bias: function(x, weight, bias, EPS)


def _our_add_layer_norm(*operands: Tensor) -> Call:
    import sdfastgn

    function: Any = getattr(sdfastgn, "add_layer_norm")  # noqa: B009  # a name that mypy need not know
    return lambda x, residual, weight, bias, add_bias: function(
        x, residual, weight, bias, EPS, add_bias=add_bias
    )


_ROWS: tuple[Shape, ...] = tuple((10**power, 10 ** (8 - power)) for power in range(1, 8))
_TOKENS: tuple[Shape, ...] = ((8192, 320), (2048, 640), (8192, 640), (2048, 1280))

_LAYER_NORM = Suite(
    name="layer_norm",
    title="LayerNorm, alone and of x + residual + add_bias",
    axes="rowsxD",
    shape_sets={"rows": _ROWS, "unet": _TOKENS, "all": _ROWS + _TOKENS},
    operations=(
        _copied(_layer_norm_sizes),
        Operation(NORM, _layer_norm_sizes, _layer_norm, (FORWARD, BOTH)),
        Operation(ADD, _add_sizes, _add_layer_norm, (FORWARD,), outputs=("y", "total"), tensors=4),
    ),
    providers=(
        _COPY,
        Provider("eager", providers.always, _fixed(_layer_norm), task=NORM),
        Provider("sdfastgn", _needs_ours("layer_norm"), _our_layer_norm, task=NORM),
        Provider("inductor", providers.inductor_reason, _compiled(_layer_norm), by_default=False, task=NORM),
        Provider("eager", providers.always, _fixed(_add_layer_norm), task=ADD),
        Provider("sdfastgn", _needs_ours("add_layer_norm"), _our_add_layer_norm, task=ADD),
        Provider(
            "inductor", providers.inductor_reason, _compiled(_add_layer_norm), by_default=False, task=ADD
        ),
    ),
    ours=("sdfastgn",),
    baseline="eager",
)

# ---- upsampling by two, and the convolution behind it

UPSAMPLE, CONV = "upsample", "upsample + conv"


def _conv_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    C = shape[1]
    return {"x": shape, "weight": (C, C, 3, 3), "bias": (C,)}


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _upsample_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(_upsample(x), weight, bias, padding=1)


def _our_upsample(x: Tensor) -> Call:
    import sdfastgn

    return sdfastgn.upsample_nearest_2x


def _our_upsample_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    import sdfastgn

    return sdfastgn.upsample_conv2d


def _high_resolution(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    import sdfastgn

    return lambda x, weight, bias: F.conv2d(sdfastgn.upsample_nearest_2x(x), weight, bias, padding=1)


def _phases(with_statistics: bool) -> Any:
    def build(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
        from sdfastgn.kernels.upsample.conv import convolve_phases

        return lambda x, weight, bias: convolve_phases(x, weight, bias, with_statistics=with_statistics)[0]

    return build


def _phases_reason(device: torch.device) -> str | None:
    return (
        None
        if device.type == "cuda"
        else "the phases are interleaved by a Triton kernel, which needs an NVIDIA GPU"
    )


# Those that the VAE decodes 512 x 512 and 1024 x 1024 from, those of SD1.5's and SDXL's UNets, and 20 MB.
_DECODER: tuple[Shape, ...] = (
    (1, 512, 64, 64),
    (1, 512, 128, 128),
    (1, 512, 256, 256),
    (1, 256, 256, 256),
    (1, 256, 512, 512),
)
_DOUBLED: tuple[Shape, ...] = (
    (2, 1280, 8, 8),
    (2, 1280, 16, 16),
    (2, 640, 32, 32),
    (2, 1280, 32, 32),
    (2, 640, 64, 64),
)

_UPSAMPLE = Suite(
    name="upsample",
    title="Nearest-neighbour upsampling by two, alone and with a 3 x 3 convolution behind it",
    axes="NxCxHxW",
    shape_sets={"vae": _DECODER, "unet": _DOUBLED, "all": (*_DOUBLED, *_DECODER, (2, 320, 128, 128))},
    operations=(
        _copied(_conv_sizes),
        Operation(UPSAMPLE, lambda shape: {"x": shape}, _upsample, (FORWARD,), tensors=5),
        # Convolutions of fp32 run in TF32, whose mantissa is that of fp16.
        Operation(
            CONV, _conv_sizes, _upsample_conv, (FORWARD,), tensors=5, bounds={**ERROR_BOUNDS, "fp32": 2e-3}
        ),
    ),
    providers=(
        _COPY,
        Provider("eager_nchw", providers.always, _fixed(_upsample), channels_last=False, task=UPSAMPLE),
        Provider("eager_nhwc", providers.always, _fixed(_upsample), task=UPSAMPLE),
        Provider("sdfastgn", _needs_ours("upsample_nearest_2x"), _our_upsample, task=UPSAMPLE),
        Provider(
            "inductor", providers.inductor_reason, _compiled(_upsample), by_default=False, task=UPSAMPLE
        ),
        Provider("eager_nchw", providers.always, _fixed(_upsample_conv), channels_last=False, task=CONV),
        Provider("eager_nhwc", providers.always, _fixed(_upsample_conv), task=CONV),
        Provider("sdfastgn", _needs_ours("upsample_conv2d"), _our_upsample_conv, task=CONV),
        Provider("sdfastgn_high", _needs_ours("upsample_nearest_2x"), _high_resolution, task=CONV),
        Provider("sdfastgn_phases", _phases_reason, _phases(False), task=CONV),
        Provider("sdfastgn_phases_statistics", _phases_reason, _phases(True), task=CONV),
        Provider(
            "inductor", providers.inductor_reason, _compiled(_upsample_conv), by_default=False, task=CONV
        ),
    ),
    ours=("sdfastgn", "sdfastgn_high", "sdfastgn_phases", "sdfastgn_phases_statistics"),
    baseline="eager_nchw",
)

# ---- attention with one wide head


def _attention_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("x", "key", "value"), shape)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _our_attention(*operands: Tensor) -> Call:
    import sdfastgn

    return sdfastgn.wide_attention


_ATTENTION = Suite(
    name="attention",
    title="Attention of one wide head, as in the middle of a VAE",
    axes="NxheadsxLxD",
    shape_sets={"all": ((1, 1, 1024, 512), (1, 1, 4096, 512), (1, 1, 9216, 512), (1, 1, 16384, 512))},
    operations=(
        _copied(_attention_sizes),
        Operation(NORM, _attention_sizes, _attention, (FORWARD,), tensors=4),
    ),
    providers=(
        _COPY,
        Provider("sdpa", providers.always, _fixed(_attention), channels_last=False, task=NORM),
        Provider("sdfastgn", _needs_ours("wide_attention"), _our_attention, channels_last=False, task=NORM),
    ),
    ours=("sdfastgn",),
    baseline="sdpa",
)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (_TRAINING, _INSTANCE_NORM, _LAYER_NORM, _ISSUE_28201, _UPSAMPLE, _ATTENTION)
}
NAMES: tuple[str, ...] = (INFERENCE, *SUITES)
