"""Every public op with operands that are strided, expanded, offset or transposed, and with mixed dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sdfastgn
from sdfastgn.kernels.act_linear.op import act_linear
from sdfastgn.kernels.attention.wide_heads import wide_attention
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from sdfastgn.kernels.upsample.conv import upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from tests.kernels.samples import interpreted, kernels


def every_second(t: Tensor) -> Tensor:
    return torch.stack((t, t + 100), -1).flatten(-2)[..., ::2]


def expanded(t: Tensor) -> Tensor:
    return t[..., :1].expand(t.shape)


def expanded_from_the_first(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def offset(t: Tensor) -> Tensor:
    return torch.cat((torch.full((3,), 100.0, dtype=t.dtype), t.flatten()))[3:].view(t.shape)


def transposed(t: Tensor) -> Tensor:
    # A vector becomes a column of a matrix.
    return (
        t.transpose(0, -1).contiguous().transpose(0, -1)
        if t.dim() > 1
        else torch.stack((t + 100, t), -1)[:, 1]
    )


def channels_last(t: Tensor) -> Tensor:
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t


PLACES = [every_second, expanded, expanded_from_the_first, offset, transposed, channels_last]


def per_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


def true_group_norm(x, weight, bias, shift=None, ada_scale=None, ada_shift=None):
    z = F.group_norm(x if shift is None else x + per_channel(shift, x), 3, weight, bias)
    z = z if ada_scale is None else z * (1 + per_channel(ada_scale, x)) + per_channel(ada_shift, x)
    return F.silu(z)


def true_instance_norm(x, weight, bias):
    return F.instance_norm(x, None, None, weight, bias)


def true_layer_norm(x, weight, bias):
    return F.layer_norm(x, (8,), weight, bias)


def true_statistics(x):
    return reference_channel_statistics(x.detach(), sdfastgn.channel_statistics(x).shape[2])


def true_geglu(x, bias):
    value, gate = (x + bias).chunk(2, -1)
    return value * F.gelu(gate)


def true_upsample(x):
    return x.repeat_interleave(2, -1).repeat_interleave(2, -2)


def module(made: nn.Module) -> Callable[..., Any]:
    def call(x, weight, bias):
        return torch.func.functional_call(made, {"weight": weight, "bias": bias}, (x,))

    return call


IMAGE, LAST = (2, 12, 5, 6), {"x": (3, 5, 8), "weight": (8,), "bias": (8,)}
AFFINE = {"x": IMAGE, "weight": (12,), "bias": (12,)}
HEADS = dict.fromkeys(("q", "k", "v"), (2, 2, 5, 8))

# name -> (shapes of the operands, ours, the truth). The first operand decides the dtype of the result.
OPS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., Any], Callable[..., Any]]] = {
    "group_norm": (
        {**AFFINE, "shift": (2, 12), "ada_scale": (2, 12), "ada_shift": (12,)},
        lambda x, weight, bias, **more: sdfastgn.group_norm(x, 3, weight, bias, activation="silu", **more),
        true_group_norm,
    ),
    "group_norm-tokens": (
        AFFINE,
        lambda x, weight, bias: sdfastgn.group_norm(x, 3, weight, bias, activation="silu", tokens=True),
        lambda **operands: true_group_norm(**operands).flatten(2).mT,
    ),
    "group_norm-bias-alone": (
        {"x": IMAGE, "bias": (12,)},
        lambda x, bias: sdfastgn.group_norm(x, 3, bias=bias, activation="silu"),
        lambda x, bias: true_group_norm(x, torch.ones_like(bias), bias),
    ),
    "instance_norm": (AFFINE, sdfastgn.instance_norm, true_instance_norm),
    "layer_norm": (LAST, sdfastgn.layer_norm, true_layer_norm),
    "add_layer_norm": (
        {**LAST, "residual": (3, 5, 8), "add_bias": (8,), "total_bias": (8,)},
        lambda x, residual, **more: sdfastgn.add_layer_norm(x, residual, **more),
        lambda x, residual, weight, bias, add_bias, total_bias: (
            F.layer_norm(x + residual + add_bias, (8,), weight, bias), x + residual + add_bias + total_bias,
        ),
    ),
    "geglu": ({"x": (3, 5, 8), "bias": (8,)}, sdfastgn.geglu, true_geglu),
    "act_linear": (
        {"x": (3, 8), "weight": (10, 8), "bias": (10,), "extra_bias": (10,)},
        lambda x, weight, bias, extra_bias: act_linear(x, weight, bias, "silu", extra_bias=extra_bias),
        lambda x, weight, bias, extra_bias: F.linear(F.silu(x), weight, bias) + extra_bias,
    ),
    "channel_statistics": (
        {"x": IMAGE}, sdfastgn.channel_statistics, true_statistics
    ),
    "add_with_statistics": (
        {"x": IMAGE, "residual": IMAGE, "bias": (12,)},
        lambda x, residual, bias: sdfastgn.add_with_statistics(x, residual, bias, scale=0.5)[0],
        lambda x, residual, bias: (x + residual + per_channel(bias, x)) * 0.5,
    ),
    "cat_with_statistics": (
        {"a": IMAGE, "b": (2, 5, 5, 6)},
        lambda a, b: sdfastgn.cat_with_statistics(a, b)[0],
        lambda a, b: torch.cat((a, b), 1),
    ),
    "upsample_nearest_2x": ({"x": IMAGE}, upsample_nearest_2x, true_upsample),
    "upsample_conv2d": (
        {"x": IMAGE, "weight": (6, 12, 3, 3), "bias": (6,)},
        upsample_conv2d,
        lambda x, weight, bias: F.conv2d(true_upsample(x), weight, bias, padding=1),
    ),
    "wide_attention": (HEADS, wide_attention, lambda q, k, v: (q @ k.mT * 8**-0.5).softmax(-1) @ v),
    "GroupNorm": (AFFINE, module(sdfastgn.GroupNorm(3, 12, activation="silu")), true_group_norm),
    "InstanceNorm": (
        AFFINE, module(sdfastgn.InstanceNorm(12, affine=True)), true_instance_norm
    ),
    "LayerNorm": (LAST, module(sdfastgn.LayerNorm(8)), true_layer_norm),
}  # fmt: skip
each_op = pytest.mark.parametrize("op", OPS)


@contextlib.contextmanager
def registered():
    """The public functions call the registered ops, which on the CPU run in plain PyTorch."""
    with mock.patch.object(dispatch, "has_kernels", return_value=True):
        yield


WAYS = [
    pytest.param(contextlib.nullcontext, id="plain"),
    pytest.param(registered, id="op"),
    pytest.param(kernels, id="interpreter", marks=interpreted),
    pytest.param(lambda: kernels(direct=True), id="interpreter-without-dispatcher", marks=interpreted),
]


def results_of(call: Callable[..., Any], operands: dict[str, Tensor]) -> tuple[Tensor, ...]:
    found = call(**operands)
    return found if isinstance(found, tuple) else (found,)


def outputs_and_gradients(call: Callable[..., Any], operands: dict[str, Tensor]) -> list[Tensor]:
    outputs = results_of(call, operands)
    if not outputs[0].requires_grad:
        return list(outputs)
    # Values that each dtype can hold.
    along = [(torch.arange(y.numel()) % 37 / 32 - 0.5).view(y.shape).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, list(operands.values()), along)]


def operands_of(op: str, dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = OPS[op][0]
    return {
        name: (torch.randn(shape, generator=g, dtype=torch.float64) + 1).to(dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(shapes.items())
    }


def compare(op: str, operands: dict[str, Tensor], bound: float) -> None:
    _, ours, truth = OPS[op]
    doubles = {
        name: t.detach().double().contiguous().clone().requires_grad_() for name, t in operands.items()
    }
    want = outputs_and_gradients(truth, doubles)
    got = outputs_and_gradients(ours, {name: t.detach().requires_grad_() for name, t in operands.items()})
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # A layer's gradient may be nothing but rounding: where the input is the same all over.
        assert (a.double() - b).norm() <= bound * max(b.norm().item(), 1.0), i


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@each_op
def test_operands_may_lie_anywhere(op, place, way):
    operands = operands_of(op, [torch.float32])
    cases = [{name: place(t) for name, t in operands.items()}]
    if way is contextlib.nullcontext:
        cases += [{**operands, name: place(t)} for name, t in operands.items()]
    with way():
        for case in cases:
            compare(op, case, 3e-5)


# Of the operands in turn. These ops take parameters of other dtypes than x.
MIXED = {
    "float64": [torch.float64],
    "half-with-float32": [torch.float16, torch.float32],
    "float32-with-bfloat16": [torch.float32, torch.bfloat16, torch.float64],
}
TAKE_MIXED = [
    "group_norm",
    "group_norm-bias-alone",
    "instance_norm",
    "layer_norm",
    "geglu",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtypes", MIXED)
@pytest.mark.parametrize("op", TAKE_MIXED)
def test_operands_may_have_other_dtypes(op, dtypes, way):
    operands = operands_of(op, MIXED[dtypes])
    bound = 2e-2 if torch.bfloat16 in MIXED[dtypes] else 2e-3 if torch.float16 in MIXED[dtypes] else 1e-12
    with way():
        for place in (lambda t: t, every_second):
            compare(op, {name: place(t) for name, t in operands.items()}, bound)


@each_op
def test_operands_in_fp64_are_exact(op):
    bound = 1e-6 if "statistics" in op else 1e-11
    for place in PLACES:
        compare(op, {name: place(t) for name, t in operands_of(op, [torch.float64]).items()}, bound)
