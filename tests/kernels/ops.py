"""Every public op once: how it is called, what it computes in PyTorch's own functions, its operands."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.attention.wide_heads import wide_attention
from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.geglu.op import geglu
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Op:
    """One way to call a public function.

    Args:
        function: takes the operands and the options by name.
        truth: the same in PyTorch's own functions, in the dtype of the operands.
        shapes: of the operands. The first operand decides the dtype of the result.
        options: the other arguments.
        mixed: operands may have other dtypes than the first one.
        differentiable: False for what is meant for inference alone.
        compared: how many of the function's results ``truth`` computes; the rest are statistics.
        on_gpu: shapes for a GPU, each for another way through the kernels.
        gpu_options: the other arguments there, where they differ.
    """

    function: Callable[..., Any]
    truth: Callable[..., Any]
    shapes: Shapes
    options: dict[str, Any] = field(default_factory=dict)
    mixed: bool = False
    differentiable: bool = True
    compared: int | None = None
    on_gpu: tuple[Shapes, ...] = ()
    gpu_options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self):
        """What errors call it: as users import it."""
        name = self.function.__name__
        return f"sdfastgn.{name}" if hasattr(sdfastgn, name) else f"{self.function.__module__}.{name}"

    def call(self, **operands):
        return as_tuple(self.function(**operands, **self.options))[: self.compared]

    def true(self, **operands):
        return as_tuple(self.truth(**operands, **self.options))

    def operands(self, *dtypes, batch=None):
        """Operands of a mean away from zero, with ``dtypes`` in turn and the first axis of size ``batch``."""
        return random_operands(self.shapes, *dtypes, batch=batch)


def as_tuple(found):
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def random_operands(shapes, *dtypes, batch=None):
    g = torch.Generator().manual_seed(0)
    N = next(iter(shapes.values()))[0]
    made = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if batch is not None and len(shape) > 1 and shape[0] == N:
            shape = (batch, *shape[1:])
        made[name] = (torch.randn(shape, generator=g, dtype=torch.float64) + 1).to(dtypes[i % len(dtypes)])
    return made


# --- what the ops compute -----------------------------------------------------


def per_channel(t, x):
    return t.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


def true_group_norm(
    x, num_groups, weight=None, bias=None, eps=1e-5, activation="identity", *,
    shift=None, ada_scale=None, ada_shift=None, tokens=False,
):  # fmt: skip
    # Contiguous: PyTorch's CPU kernel for channels-last squares the values themselves.
    u = (x if shift is None else x + per_channel(shift, x)).contiguous()
    weight = torch.ones_like(bias) if weight is None and bias is not None else weight
    z = F.group_norm(u, num_groups, weight, bias, eps)
    z = z if ada_scale is None else z * (1 + per_channel(ada_scale, x))
    z = z if ada_shift is None else z + per_channel(ada_shift, x)
    y = ACTIVATIONS[activation](z)
    return y.flatten(2).mT if tokens else y


def true_instance_norm(x, weight=None, bias=None, eps=1e-5, activation="identity"):
    return ACTIVATIONS[activation](F.instance_norm(x.contiguous(), None, None, weight, bias, eps=eps))


def true_batch_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5,
    activation="identity", *, residual=None,
):  # fmt: skip
    z = F.batch_norm(x.contiguous(), running_mean, running_var, weight, bias, training, momentum, eps)
    return ACTIVATIONS[activation](z if residual is None else z + residual)


def in_eval(batch_norm):
    """With running averages of the dtype and on the device of x."""

    def call(x, weight, bias, residual, **options):
        channels = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return batch_norm(x, channels / 4, channels / 8 + 0.5, weight, bias, residual=residual, **options)

    return call


def true_channel_norm(x, weight=None, bias=None, scale=1.0, eps=1e-12, activation="identity"):
    z = F.normalize(x, dim=1, eps=eps) * scale
    z = z if weight is None else z * per_channel(weight, x)
    z = z if bias is None else z + per_channel(bias, x)
    return ACTIVATIONS[activation](z)


def true_layer_norm(x, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def true_add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, add_bias=None, total_bias=None):
    total = x + residual if add_bias is None else x + residual + add_bias
    y = F.layer_norm(total, x.shape[-1:], weight, bias, eps)
    return y, total if total_bias is None else total + total_bias


def true_geglu(x, bias=None):
    value, gate = (x if bias is None else x + bias).chunk(2, -1)
    return value * F.gelu(gate)


def true_act_linear(x, weight, bias=None, activation="identity", extra_bias=None):
    y = F.linear(ACTIVATIONS[activation](x), weight, bias)
    return y if extra_bias is None else y + extra_bias


def true_statistics(x):
    return reference_channel_statistics(x.detach(), sdfastgn.channel_statistics(x).shape[2])


def true_add(x, residual, bias=None, *, scale=1.0):
    total = x + residual
    return (total if bias is None else total + per_channel(bias, x)) * scale


def true_upsample(x):
    return x.repeat_interleave(2, -1).repeat_interleave(2, -2)


def true_upsample_conv2d(x, weight, bias=None):
    return F.conv2d(true_upsample(x), weight, bias, padding=1)


def true_attention(q, k, v, scale=None):
    return (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1) @ v


def of_module(module):
    """The module as a function of its input and its parameters."""

    def call(x, weight, bias):
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    return call


# --- the registry -------------------------------------------------------------


def affine(*shape):
    """Of x (N, C, *spatial), and of weight and bias."""
    return {"x": shape, "weight": shape[1:2], "bias": shape[1:2]}


def rows(*shape):
    """Of x (..., D), and of weight and bias."""
    return {"x": shape, "weight": shape[-1:], "bias": shape[-1:]}


def add_rows(*shape, total=False):
    names = ("weight", "bias", "add_bias", *(("total_bias",) if total else ()))
    return {"x": shape, "residual": shape, **dict.fromkeys(names, shape[-1:])}


def linear(N, C, K):
    return {"x": (N, K), "weight": (C, K), "bias": (C,), "extra_bias": (C,)}


def pair(*shape):
    return {"x": shape, "residual": shape, "bias": shape[1:2]}


def added(*shape):
    return {**affine(*shape), "residual": shape}


IMAGE = (2, 6, 3, 4)
SMALL_ON_GPU, SPLIT_ON_GPU = (2, 320, 16, 16), (2, 320, 64, 64)
NORMS_ON_GPU = (affine(*SMALL_ON_GPU), affine(*SPLIT_ON_GPU))
SILU = {"activation": "silu"}

OPS = {
    "group_norm": Op(
        sdfastgn.group_norm, true_group_norm,
        {**affine(*IMAGE), "shift": (2, 6), "ada_scale": (2, 6), "ada_shift": (6,)},
        {"num_groups": 3, **SILU}, mixed=True, on_gpu=NORMS_ON_GPU, gpu_options={"num_groups": 32, **SILU},
    ),
    "group_norm-tokens": Op(
        sdfastgn.group_norm, true_group_norm, affine(*IMAGE), {"num_groups": 3, **SILU, "tokens": True},
    ),
    "group_norm-bias-alone": Op(
        sdfastgn.group_norm, true_group_norm, {"x": IMAGE, "bias": (6,)}, {"num_groups": 3, **SILU},
        mixed=True,
    ),
    "instance_norm": Op(
        sdfastgn.instance_norm, true_instance_norm, affine(*IMAGE), mixed=True, on_gpu=NORMS_ON_GPU,
    ),
    "batch_norm": Op(
        sdfastgn.batch_norm, true_batch_norm, added(*IMAGE), {"training": True, **SILU}, mixed=True,
        # No residual: stock rounds before it adds one.
        on_gpu=(affine(2, 64, 8, 8), affine(*SPLIT_ON_GPU), affine(16, 2, 64, 64)),
    ),
    "batch_norm-alone": Op(sdfastgn.batch_norm, true_batch_norm, {"x": IMAGE}, {"training": True}),
    "batch_norm-eval": Op(
        in_eval(sdfastgn.batch_norm), in_eval(true_batch_norm), added(*IMAGE), SILU, mixed=True,
    ),
    "channel_norm": Op(
        channel_norm, true_channel_norm, affine(*IMAGE), {"scale": 6**0.5, **SILU}, mixed=True,
        on_gpu=NORMS_ON_GPU,
    ),
    "layer_norm": Op(
        sdfastgn.layer_norm, true_layer_norm, rows(3, 5, 8), mixed=True,
        on_gpu=(rows(512, 320), rows(3, 40000)),
    ),
    "add_layer_norm": Op(
        sdfastgn.add_layer_norm, true_add_layer_norm, add_rows(3, 5, 8, total=True),
        on_gpu=(add_rows(512, 320), add_rows(3, 40000)),
    ),
    "geglu": Op(
        geglu, true_geglu, {"x": (3, 5, 8), "bias": (8,)}, mixed=True,
        on_gpu=({"x": (512, 640), "bias": (640,)},),
    ),
    "act_linear": Op(
        act_linear, true_act_linear, linear(3, 10, 8), SILU, differentiable=False,
        on_gpu=(linear(2, 1280, 1280),),
    ),
    "channel_statistics": Op(
        sdfastgn.channel_statistics, true_statistics, {"x": IMAGE}, differentiable=False,
        on_gpu=({"x": SPLIT_ON_GPU},),
    ),
    "add_with_statistics": Op(
        sdfastgn.add_with_statistics, true_add, pair(*IMAGE), {"scale": 0.5}, compared=1,
        on_gpu=(pair(*SPLIT_ON_GPU),),
    ),
    "cat_with_statistics": Op(
        sdfastgn.cat_with_statistics, lambda a, b: torch.cat((a, b), 1), {"a": IMAGE, "b": (2, 5, 3, 4)},
        compared=1,
        on_gpu=({"a": SPLIT_ON_GPU, "b": (2, 64, 64, 64)},),
    ),
    "upsample_nearest_2x": Op(
        upsample_nearest_2x, true_upsample, {"x": IMAGE}, on_gpu=({"x": SMALL_ON_GPU},),
    ),
    "upsample_conv2d": Op(
        upsample_conv2d, true_upsample_conv2d, {"x": IMAGE, "weight": (4, 6, 3, 3), "bias": (4,)},
        on_gpu=({"x": (1, 256, 64, 64), "weight": (256, 256, 3, 3), "bias": (256,)},),
    ),
    "wide_attention": Op(
        wide_attention, true_attention, dict.fromkeys("qkv", (2, 2, 5, 8)), differentiable=False,
        on_gpu=(dict.fromkeys("qkv", (1, 1, 4096, 512)),),
    ),
    "GroupNorm": Op(
        of_module(sdfastgn.GroupNorm(3, 6, activation="silu")),
        lambda **operands: true_group_norm(**operands, num_groups=3, activation="silu"),
        affine(*IMAGE), mixed=True,
    ),
    "InstanceNorm": Op(
        of_module(sdfastgn.InstanceNorm(6, affine=True)), true_instance_norm, affine(*IMAGE), mixed=True,
    ),
    "BatchNorm": Op(
        of_module(sdfastgn.BatchNorm(6, track_running_stats=False, activation="relu")),
        lambda **operands: true_batch_norm(**operands, training=True, activation="relu"),
        affine(*IMAGE), mixed=True,
    ),
    "LayerNorm": Op(of_module(sdfastgn.LayerNorm(8)), true_layer_norm, rows(3, 5, 8), mixed=True),
}  # fmt: skip
# The public functions alone, without modules and further ways to call one of them.
FUNCTIONS = {name: op for name, op in OPS.items() if op.function.__name__ == name}


def each_op_where(keep):
    return pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items() if keep(op)])


each_op = each_op_where(lambda op: True)
each_function = pytest.mark.parametrize("op", FUNCTIONS.values(), ids=FUNCTIONS)
each_derivative = each_op_where(lambda op: op.differentiable)
