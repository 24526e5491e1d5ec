"""GroupNorm with a fused activation, channels-last or channels-first: ``sdfastgn::group_norm``.

Formula, with x of shape (N, C, *spatial), HW = product of the spatial sizes, G groups of CG = C / G channels:

    u = x + shift[n, c]
    z = (u - mean(u)) / sqrt(var(u) + eps) * weight[c] + bias[c]          (per (n, g); var divided by CG * HW)
    y = activation(z * (1 + ada_scale[n, c]) + ada_shift[n, c])

On a GPU the kernels of ``group_norm/kernels.py`` run; everywhere else ``reference_group_norm``.
Layout and numerics contract: there.

Source: Wu and He, "Group Normalization", 2018. The interface follows torch.nn.functional.group_norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import (
    as_eps,
    as_index,
    check_activation,
    check_device,
    check_floating,
    check_input,
    check_operand,
)
from sdfastgn.kernels.common.layout import empty_dense_like, like_dense
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.group_norm.backward import GROUP_NORM_BACKWARD
from sdfastgn.kernels.group_norm.backward_plans import GroupNormGradCall, GroupNormGrads
from sdfastgn.kernels.group_norm.plain import plain_group_norm
from sdfastgn.kernels.group_norm.plans import GroupNormCall, GroupNormPlan, empty_saved

__all__ = ["GROUP_NORM", "group_norm", "reference_group_norm"]


def reference_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    *,
    shift: Tensor | None = None,
    ada_scale: Tensor | None = None,
    ada_shift: Tensor | None = None,
    tokens: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same function in plain PyTorch: the fallback, and truth of the tests (fp64).

    Computes in fp32 (fp64 for fp64 input).
    """
    operands = shift, ada_scale, ada_shift
    call = GroupNormCall(x, num_groups, weight, bias, eps, activation, *operands, None, tokens, out_dtype)
    return _reference(call)[0]


def _reference(call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)"""
    x = call.x
    dtype = torch.promote_types(x.dtype, torch.float32)

    def per_channel(operand: Tensor) -> Tensor:
        """(N, C) or (C,) -> (N or 1, C, 1, ...), broadcastable over ``x``."""
        return operand.to(dtype).reshape(-1, x.shape[1], *[1] * (x.dim() - 2))

    u = x.to(dtype)
    u = u if call.shift is None else u + per_channel(call.shift)
    weight, bias = (None if t is None else t.to(dtype) for t in (call.weight, call.bias))
    z, mean, rstd = plain_group_norm(u, call.num_groups, weight, bias, call.eps)
    z = z if call.ada_scale is None else z * (1 + per_channel(call.ada_scale))
    z = z if call.ada_shift is None else z + per_channel(call.ada_shift)
    y = ACTIVATIONS[call.activation](z).to(call.out_dtype or x.dtype)
    if not call.tokens:
        return like_dense(y, x), mean, rstd
    return y.movedim(1, -1).reshape(x.shape[0], math.prod(x.shape[2:]), x.shape[1]).contiguous(), mean, rstd


# --- op ---------------------------------------------------------------------------------------------


def _fake(call: GroupNormCall) -> tuple[Tensor, Tensor, Tensor]:
    x, dtype = call.x, call.out_dtype or call.x.dtype
    y = empty_dense_like(x, dtype)
    if call.tokens:
        y = x.new_empty((x.shape[0], math.prod(x.shape[2:]), x.shape[1]), dtype=dtype)
    return y, empty_saved(call), empty_saved(call)


def _save(ctx: Any, call: GroupNormCall, results: tuple[Tensor, Tensor, Tensor]) -> None:
    _, mean, rstd = results
    ctx.set_materialize_grads(False)
    ctx.settings = call.num_groups, call.eps, call.activation, call.tokens
    operands = (call.weight, call.bias, call.shift, call.ada_scale, call.ada_shift)
    ctx.save_for_backward(call.x, mean, rstd, *operands)


def _backward(ctx: Any, needs: Any, dy: Tensor | None, *_: None) -> dict[str, Tensor | None]:
    if dy is None:
        return {}
    wanted = [needs.x, needs.weight, needs.bias, needs.shift, needs.ada_scale, needs.ada_shift]
    grads = GROUP_NORM_BACKWARD(GroupNormGradCall(dy, *ctx.saved_tensors, *ctx.settings, *wanted))
    return dict(zip(GroupNormGrads._fields, grads, strict=True))


def _check(name: str, call: GroupNormCall) -> None:
    x, num_groups = call.x, call.num_groups
    check_input(name, "x", x)
    if x.dim() < 2:
        raise ValueError(f"{name}: x must be (N, C, *spatial), got shape {tuple(x.shape)}")
    if num_groups == 0:
        raise ZeroDivisionError(f"{name}: num_groups must be positive, got 0")
    N, C = x.shape[:2]
    if num_groups < 0 or C % num_groups:
        raise ValueError(
            f"{name}: num_groups={num_groups} must be a positive divisor of C={C}, "
            f"x has shape {tuple(x.shape)}"
        )
    check_activation(name, call.activation)
    for label in ("weight", "bias"):
        check_operand(name, label, getattr(call, label), x, (C,))
    for label in ("shift", "ada_scale", "ada_shift"):
        check_operand(name, label, getattr(call, label), x, (C,), (1, C), (N, C))
    if not isinstance(call.tokens, bool):
        raise TypeError(f"{name}: tokens must be a bool, got {call.tokens!r}")
    if call.statistics is not None:
        _check_statistics(name, x, call.statistics)


def _check_statistics(name: str, x: Tensor, statistics: Any) -> None:
    if not isinstance(statistics, Tensor) or statistics.dtype != torch.float32:
        found = statistics.dtype if isinstance(statistics, Tensor) else type(statistics).__name__
        raise TypeError(f"{name}: statistics must be an fp32 torch.Tensor, got {found}")
    check_floating(name, "statistics", statistics)
    shape = tuple(statistics.shape)
    if len(shape) != 4 or shape[0] != 2 or shape[2] < 1 or (shape[1], shape[3]) != tuple(x.shape[:2]):
        raise ValueError(
            f"{name}: statistics must have shape (2, {x.shape[0]}, P, {x.shape[1]}), got {shape}"
        )
    check_device(name, "statistics", statistics, x)


GROUP_NORM = PlannedOp(
    # y, then mean and rstd of the groups, (N, G) in fp32 (fp64 for fp64 input), for the backward.
    "group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, str activation, "
    "Tensor? shift, Tensor? ada_scale, Tensor? ada_shift, Tensor? statistics, bool tokens, "
    "ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)",
    GroupNormCall,
    plan=GroupNormPlan,
    reference=_reference,
    fake=_fake,
    save=_save,
    backward=_backward,
    check=_check,
    hidden=2,
)


# --- public function --------------------------------------------------------------------------------


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    *,
    shift: Tensor | None = None,
    ada_scale: Tensor | None = None,
    ada_shift: Tensor | None = None,
    statistics: Tensor | None = None,
    tokens: bool = False,
) -> Tensor:
    """GroupNorm followed by an activation, fused into Triton kernels on NVIDIA GPUs.

    Args:
        x: (N, C, *spatial), N from 0 up, any number of spatial dimensions.
        num_groups: G, a divisor of C: whatever has ``__index__``, less bools, as in PyTorch.
        weight, bias: (C,) or None, independently of each other.
        eps: added to the variance: a number of Python or NumPy, or a tensor without dimensions.
        activation: any of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.
        shift: (N, C), (1, C) or (C,), added to x before the statistics (a convolution's bias, a
            time embedding).
        ada_scale, ada_shift: like shift; adaptive GroupNorm: ``z * (1 + ada_scale) + ada_shift``
            before the activation.
        statistics: (2, N, P, C) fp32, P >= 1: ``sdfastgn.channel_statistics(x)`` or what
            ``add_with_statistics`` or ``cat_with_statistics`` returned beside x. They must be those
            of x, without ``shift``; that is not checked. They save the pass over x that would
            compute them. Plain PyTorch (no GPU, fp64) computes its own instead.
        tokens: return (N, HW, C) tokens, contiguous, as attention takes them; HW is the product of
            the spatial sizes.

    Shapes: the output has the shape of x, or (N, HW, C).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); every other tensor any of these. The
        output has the dtype of x, or fp32 under CUDA autocast, as torch.nn.functional.group_norm
        has.
    Layout: the output has the strides of x if x is without gaps, channels-last or channels-first;
    else C stays innermost if it was.
    Grad: with respect to every tensor but ``statistics``, which count as the function of x that
        they are. Between forward and backward x is kept and two fp32 values a group. A second
        derivative, the transforms of torch.func (vmap, jacrev) and forward-mode AD run in plain
        PyTorch.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or another argument has the wrong type.
        ValueError: a shape, the number of groups, a device or the activation's name does not fit.
        ZeroDivisionError: num_groups is 0, as in PyTorch.

    Source: torch.nn.functional.group_norm for the interface; Wu and He, 2018, for the formula.
    """
    name = "sdfastgn.group_norm"
    if type(num_groups) is not int or type(eps) is not float:
        check_input(name, "x", x)
        num_groups, eps = as_index(name, "num_groups", num_groups), as_eps(name, eps)
    dtype = dispatch.autocast_dtype(x)
    call = GroupNormCall(
        x, num_groups, weight, bias, eps, activation, shift, ada_scale, ada_shift, statistics, tokens, dtype
    )
    if type(tokens) is not bool:  # in a plan's key, 1 would be True
        _check(name, call)
    return GROUP_NORM(call)
