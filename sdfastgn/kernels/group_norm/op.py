"""GroupNorm with a fused activation, for channels-last and channels-first tensors: the op ``sdfastgn::group_norm``.

Formula, with x of shape (N, C, *spatial), HW = product of the spatial sizes, G groups of CG = C / G channels:

    u = x + shift[n, c]
    z = (u - mean(u)) / sqrt(var(u) + eps) * weight[c] + bias[c]          (per (n, g); var divided by CG * HW)
    y = activation(z * (1 + ada_scale[n, c]) + ada_shift[n, c])

On a GPU the kernels of ``group_norm/kernels.py`` run; everywhere else ``reference_group_norm``. Layout and numerics contract: there.

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
from sdfastgn.kernels.group_norm.backward import group_norm_grads
from sdfastgn.kernels.group_norm.plain import plain_group_norm
from sdfastgn.kernels.group_norm.plans import find_plan, launch_group_norm, make_plan, plan_key

__all__ = ["call_group_norm", "group_norm", "reference_group_norm"]


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
    """The same function in plain PyTorch: fallback without a GPU, truth of the tests (in fp64) and baseline of the benchmarks.

    Computes in fp32 (fp64 for fp64 input).
    """
    operands = shift, ada_scale, ada_shift
    return _reference(x, num_groups, weight, bias, eps, activation, *operands, tokens, out_dtype)[0]


def _reference(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    shift: Tensor | None,
    ada_scale: Tensor | None,
    ada_shift: Tensor | None,
    tokens: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)"""
    dtype = torch.promote_types(x.dtype, torch.float32)
    u = x.to(dtype)
    u = u if shift is None else u + _per_channel(shift.to(dtype), x)
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    z, mean, rstd = plain_group_norm(u, num_groups, weight, bias, eps)
    z = z if ada_scale is None else z * (1 + _per_channel(ada_scale.to(dtype), x))
    z = z if ada_shift is None else z + _per_channel(ada_shift.to(dtype), x)
    y = ACTIVATIONS[activation](z).to(out_dtype or x.dtype)
    if not tokens:
        return like_dense(y, x), mean, rstd
    return y.movedim(1, -1).reshape(x.shape[0], math.prod(x.shape[2:]), x.shape[1]).contiguous(), mean, rstd


def _per_channel(operand: Tensor, x: Tensor) -> Tensor:
    """(N, C) or (C,) -> (N or 1, C, 1, ...), broadcastable over ``x``."""
    return operand.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


# --- op -----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
# The result: y, and mean and rstd of the groups, (N, G) in fp32 (fp64 for fp64 input), which the backward takes.
_LIBRARY.define(
    "group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, str activation, "
    "Tensor? shift, Tensor? ada_scale, Tensor? ada_shift, Tensor? statistics, bool tokens, ScalarType? out_dtype) "
    "-> (Tensor, Tensor, Tensor)"
)


def _group_norm_impl(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    shift: Tensor | None,
    ada_scale: Tensor | None,
    ada_shift: Tensor | None,
    statistics: Tensor | None,
    tokens: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    params = (weight, bias, shift, ada_scale, ada_shift)
    if x.numel() == 0:
        y, mean, rstd = _group_norm_fake(x, num_groups, tokens, out_dtype)
        return y, mean.zero_(), rstd.zero_()
    if dispatch.runs_in_triton(x):
        mean, rstd = _empty_saved(x, num_groups), _empty_saved(x, num_groups)
        key = plan_key(x, num_groups, eps, activation, params, statistics, tokens, out_dtype, saves=True)
        plan = find_plan(key) or make_plan(key, x, num_groups, eps, activation, params, statistics, tokens)
        return launch_group_norm(plan, x, params, statistics, out_dtype, (mean, rstd)), mean, rstd
    return _reference(x, num_groups, weight, bias, eps, activation, *params[2:], tokens, out_dtype)


def _empty_saved(x: Tensor, num_groups: int) -> Tensor:
    return x.new_empty((x.shape[0], num_groups), dtype=torch.promote_types(x.dtype, torch.float32))


def _group_norm_fake(x: Tensor, num_groups: int, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, out_dtype = args[-2:]
    if tokens:
        y = x.new_empty((x.shape[0], math.prod(x.shape[2:]), x.shape[1]), dtype=out_dtype or x.dtype)
    else:
        y = empty_dense_like(x, out_dtype or x.dtype)
    return y, _empty_saved(x, num_groups), _empty_saved(x, num_groups)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    (
        x,
        ctx.num_groups,
        weight,
        bias,
        ctx.eps,
        ctx.activation,
        shift,
        ada_scale,
        ada_shift,
        _,
        ctx.tokens,
        _,
    ) = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, rstd, weight, bias, shift, ada_scale, ada_shift)


def _backward(ctx: Any, dy: Tensor | None, _mean: None, _rstd: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 12
    x, mean, rstd, *params = ctx.saved_tensors
    wanted = tuple(ctx.needs_input_grad[i] for i in (0, 2, 3, 6, 7, 8))
    dx, dweight, dbias, *d_operands = group_norm_grads(
        dy, x, mean, rstd, tuple(params), ctx.num_groups, ctx.eps, ctx.activation, ctx.tokens, wanted
    )
    return dx, None, dweight, dbias, None, None, *d_operands, None, None, None


class _GroupNorm(torch.autograd.Function):
    """The op's autograd at a fifth of the CPU time: for calls of which the dispatcher has nothing else to know."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shift: Tensor | None,
        ada_scale: Tensor | None,
        ada_shift: Tensor | None,
        statistics: Tensor | None,
        how: tuple[Any, ...],
    ) -> Tensor:
        plan, ctx.num_groups, ctx.eps, ctx.activation, ctx.tokens, out_dtype = how
        mean, rstd = _empty_saved(x, ctx.num_groups), _empty_saved(x, ctx.num_groups)
        params = (weight, bias, shift, ada_scale, ada_shift)
        ctx.save_for_backward(x, mean, rstd, *params)
        return launch_group_norm(plan, x, params, statistics, out_dtype, (mean, rstd))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *params = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:6]
        grads = group_norm_grads(
            dy, x, mean, rstd, tuple(params), ctx.num_groups, ctx.eps, ctx.activation, ctx.tokens, wanted
        )
        return *grads, None, None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("group_norm", _group_norm_impl, _key)
torch.library.register_fake("sdfastgn::group_norm", _group_norm_fake, lib=_LIBRARY)
torch.library.register_autograd("sdfastgn::group_norm", _backward, setup_context=_setup_context, lib=_LIBRARY)


# --- public function ------------------------------------------------------------------------------------------------------------


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
        activation: ``identity``, ``relu``, ``silu``, ``gelu`` (exact) or ``gelu_tanh``.
        shift: (N, C), (1, C) or (C,), added to x before the statistics (a convolution's bias, a time embedding).
        ada_scale, ada_shift: like shift; adaptive GroupNorm: ``z * (1 + ada_scale) + ada_shift`` before the activation.
        statistics: (2, N, P, C) fp32, P >= 1: ``sdfastgn.channel_statistics(x)`` or what ``add_with_statistics`` or
            ``cat_with_statistics`` returned beside x. They must be those of x, without ``shift``; that is not checked. They save the
            pass over x that would compute them. Plain PyTorch (no GPU, fp64) computes its own instead.
        tokens: return (N, HW, C) tokens, contiguous, as attention takes them; HW is the product of the spatial sizes.

    Shapes: the output has the shape of x, or (N, HW, C).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); every other tensor any of these. The output has the dtype of x,
        or fp32 under CUDA autocast, as torch.nn.functional.group_norm has.
    Layout: the output has the strides of x if x is without gaps, channels-last or channels-first; else C stays innermost if it was.
    Grad: with respect to every tensor but ``statistics``, which count as the function of x that they are. Between forward and
        backward x is kept and two fp32 values a group. A second derivative, the transforms of torch.func (vmap, jacrev) and
        forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or another argument has the wrong type.
        ValueError: a shape, the number of groups, a device or the activation's name does not fit.
        ZeroDivisionError: num_groups is 0, as in PyTorch.

    Source: torch.nn.functional.group_norm for the interface; Wu and He, 2018, for the formula.
    """
    params = (weight, bias, shift, ada_scale, ada_shift)
    return call_group_norm(
        "sdfastgn.group_norm", x, num_groups, eps, activation, params, statistics, tokens, _autocast_dtype(x)
    )


def call_group_norm(
    name: str,
    x: Tensor,
    num_groups: int,
    eps: float,
    activation: str,
    params: tuple[Tensor | None, ...],
    statistics: Tensor | None,
    tokens: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``group_norm`` for a public function called ``name``: checks, then the kernels, by way of the dispatcher where it is of use."""
    if type(num_groups) is not int or type(eps) is not float:
        check_input(name, "x", x)
        num_groups, eps = as_index(name, "num_groups", num_groups), as_eps(name, eps)
    # Keys compare by value, and 1 == True, so the types come first. What else is wrong finds no plan
    # and is then checked.
    if type(activation) is str and (tokens is False or tokens is True) and dispatch.is_plain(x, params):
        try:
            training = dispatch.wants_gradient(x, params)
            key = plan_key(x, num_groups, eps, activation, params, statistics, tokens, out_dtype, training)
            plan = find_plan(key)
            if plan is None:
                _check(name, x, num_groups, activation, params, statistics, tokens)
                plan = make_plan(key, x, num_groups, eps, activation, params, statistics, tokens)
            if not training:
                return launch_group_norm(plan, x, params, statistics, out_dtype)
            if plan.programs:
                return _GroupNorm.apply(
                    x, *params, statistics, (plan, num_groups, eps, activation, tokens, out_dtype)
                )
        except (AttributeError, RuntimeError):  # no tensor, or one that has no strides or no memory
            _check(name, x, num_groups, activation, params, statistics, tokens)
            raise
    _check(name, x, num_groups, activation, params, statistics, tokens)
    weight, bias, *operands = params
    if not dispatch.needs_op(x):
        shift, ada_scale, ada_shift = operands
        how = (eps, activation, shift, ada_scale, ada_shift, tokens, out_dtype)
        return _reference(x, num_groups, weight, bias, *how)[0]
    return torch.ops.sdfastgn.group_norm(
        x, num_groups, weight, bias, eps, activation, *operands, statistics, tokens, out_dtype
    )[0]


def _autocast_dtype(x: Any) -> torch.dtype | None:
    """Eager's rule: under CUDA autocast GroupNorm computes in and returns fp32."""
    return (
        torch.float32
        if torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and dispatch.runs_in_triton(x)
        else None
    )


def _check(
    name: str,
    x: Any,
    num_groups: int,
    activation: Any,
    params: tuple[Any, ...],
    statistics: Any,
    tokens: Any,
) -> None:
    check_input(name, "x", x)
    if x.dim() < 2:
        raise ValueError(f"{name}: x must be (N, C, *spatial), got shape {tuple(x.shape)}")
    if num_groups == 0:
        raise ZeroDivisionError(f"{name}: num_groups must be positive, got 0")
    N, C = x.shape[:2]
    if num_groups < 0 or C % num_groups:
        raise ValueError(
            f"{name}: num_groups={num_groups} must be a positive divisor of C={C}, x has shape {tuple(x.shape)}"
        )
    check_activation(name, activation)
    for label, t in zip(("weight", "bias"), params, strict=False):
        check_operand(name, label, t, x, (C,))
    for label, t in zip(("shift", "ada_scale", "ada_shift"), params[2:], strict=True):
        check_operand(name, label, t, x, (C,), (1, C), (N, C))
    if not isinstance(tokens, bool):
        raise TypeError(f"{name}: tokens must be a bool, got {tokens!r}")
    if statistics is not None:
        _check_statistics(name, x, statistics)


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
