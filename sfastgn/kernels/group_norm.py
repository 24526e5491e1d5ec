"""GroupNorm with a fused activation, for channels-last and channels-first tensors: the op ``sfastgn::group_norm``.

Formula, with x of shape (N, C, *spatial), HW = product of the spatial sizes, G groups of CG = C / G channels:

    u = x + shift[n, c]
    z = (u - mean(u)) / sqrt(var(u) + eps) * weight[c] + bias[c]          (per (n, g); var divided by CG * HW)
    y = activation(z * (1 + ada_scale[n, c]) + ada_shift[n, c])

On a GPU the kernels of ``group_norm_kernels.py`` run; everywhere else ``reference_group_norm``. Layout and numerics contract: there.

Source: Wu and He, "Group Normalization", 2018. The interface follows torch.nn.functional.group_norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfastgn.kernels.activations import ACTIVATIONS
from sfastgn.kernels.dispatch import is_plain, is_transformed, runs_in_triton, wants_gradient
from sfastgn.kernels.group_norm_backward import group_norm_grads
from sfastgn.kernels.group_norm_plans import find_plan, launch_group_norm, make_plan, plan_key
from sfastgn.kernels.layout import empty_dense_like, is_channels_last

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

    Computes in fp32 (fp64 for fp64 input) on a channels-first copy: PyTorch's CPU kernel for channels-last input loses the variance
    when the mean is large.
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
    N, C, HW = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    dtype = torch.promote_types(x.dtype, torch.float32)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # PyTorch's backward fails with a bias and no weight
    u = x.to(dtype).contiguous()
    u = u if shift is None else u + _per_channel(shift.to(dtype), x)
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    z, mean, rstd = torch.native_group_norm(u, weight, bias, N, C, HW, num_groups, eps)
    z = z if ada_scale is None else z * (1 + _per_channel(ada_scale.to(dtype), x))
    z = z if ada_shift is None else z + _per_channel(ada_shift.to(dtype), x)
    y = ACTIVATIONS[activation](z).to(out_dtype or x.dtype)
    if tokens:
        y = y.movedim(1, -1).reshape(N, HW, C).contiguous()
    elif is_channels_last(x) and not is_channels_last(y):
        y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y, mean, rstd


def _per_channel(operand: Tensor, x: Tensor) -> Tensor:
    """(N, C) or (C,) -> (N or 1, C, 1, ...), broadcastable over ``x``."""
    return operand.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))


# --- op -----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sfastgn", "FRAGMENT")
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
    if runs_in_triton(x):
        mean, rstd = _empty_saved(x, num_groups), _empty_saved(x, num_groups)
        key = plan_key(x, num_groups, eps, activation, params, statistics, tokens, out_dtype, saves=True)
        plan = find_plan(key) or make_plan(key, x, num_groups, eps, activation, params, statistics, tokens)
        return launch_group_norm(plan, x, params, statistics, out_dtype, (mean, rstd)), mean, rstd
    y, mean, rstd = _reference(x, num_groups, weight, bias, eps, activation, *params[2:], tokens, out_dtype)
    y = y if tokens or y.stride() == x.stride() else empty_dense_like(x, y.dtype).copy_(y)
    return y, mean.reshape(x.shape[0], num_groups), rstd.reshape(x.shape[0], num_groups)


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
    x, ctx.num_groups, weight, bias, ctx.eps, ctx.activation, shift, ada_scale, ada_shift, _, ctx.tokens, _ = inputs
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
torch.library.register_fake("sfastgn::group_norm", _group_norm_fake, lib=_LIBRARY)
torch.library.register_autograd("sfastgn::group_norm", _backward, setup_context=_setup_context, lib=_LIBRARY)


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
        num_groups: G, a divisor of C.
        weight, bias: (C,) or None, independently of each other.
        eps: added to the variance.
        activation: ``identity``, ``relu``, ``silu``, ``gelu`` (exact) or ``gelu_tanh``.
        shift: (N, C), (1, C) or (C,), added to x before the statistics (a convolution's bias, a time embedding).
        ada_scale, ada_shift: like shift; adaptive GroupNorm: ``z * (1 + ada_scale) + ada_shift`` before the activation.
        statistics: (2, N, P, C) fp32, P >= 1: ``sfastgn.channel_statistics(x)`` or what ``add_with_statistics`` or
            ``cat_with_statistics`` returned beside x. They must be those of x, without ``shift``; that is not checked. They save the
            pass over x that would compute them. Plain PyTorch (no GPU, fp64) computes its own instead.
        tokens: return (N, HW, C) tokens, contiguous, as attention takes them; HW is the product of the spatial sizes.

    Shapes: the output has the shape of x, or (N, HW, C).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); every other tensor any floating dtype. The output has the dtype of x,
        or fp32 under CUDA autocast, as torch.nn.functional.group_norm has.
    Layout: the output has the strides of x if x is without gaps, channels-last or channels-first; else C stays innermost if it was.
    Grad: with respect to every tensor but ``statistics``, which count as the function of x that they are. Between forward and
        backward x is kept and two fp32 values a group. A second derivative, the transforms of torch.func (vmap, jacrev) and
        forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: x is not a floating tensor, or another argument has the wrong type.
        ValueError: a shape, the number of groups, a device or the activation's name does not fit.
        ZeroDivisionError: num_groups is 0, as in PyTorch.

    Source: torch.nn.functional.group_norm for the interface; Wu and He, 2018, for the formula.
    """
    params = (weight, bias, shift, ada_scale, ada_shift)
    return call_group_norm(
        "sfastgn.group_norm", x, num_groups, eps, activation, params, statistics, tokens, _autocast_dtype(x)
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
    # A key that can be looked up first; whatever else is wrong misses there and is then checked.
    if type(activation) is str and type(num_groups) is int and type(eps) is float and is_plain(x, params):
        training = wants_gradient(x, params)
        key = plan_key(x, num_groups, eps, activation, params, statistics, tokens, out_dtype, training)
        plan = find_plan(key)
        if plan is None:
            _check(name, x, num_groups, eps, activation, params, statistics, tokens)
            plan = make_plan(key, x, num_groups, eps, activation, params, statistics, tokens)
        if not training:
            return launch_group_norm(plan, x, params, statistics, out_dtype)
        if plan.programs:
            return _GroupNorm.apply(x, *params, statistics, (plan, num_groups, eps, activation, tokens, out_dtype))
    _check(name, x, num_groups, eps, activation, params, statistics, tokens)
    weight, bias, *operands = params
    if not torch.compiler.is_compiling() and is_transformed():
        names = ("shift", "ada_scale", "ada_shift")
        how: dict[str, Any] = dict(zip(names, operands, strict=True), tokens=tokens, out_dtype=out_dtype)
        return reference_group_norm(x, num_groups, weight, bias, float(eps), activation, **how)
    return torch.ops.sfastgn.group_norm(
        x, num_groups, weight, bias, float(eps), activation, *operands, statistics, tokens, out_dtype
    )[0]


def _autocast_dtype(x: Any) -> torch.dtype | None:
    """Eager's rule: under CUDA autocast GroupNorm computes in and returns fp32."""
    return torch.float32 if torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and runs_in_triton(x) else None


def _check(
    name: str,
    x: Any,
    num_groups: Any,
    eps: Any,
    activation: Any,
    params: tuple[Any, ...],
    statistics: Any,
    tokens: Any,
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must have a floating dtype, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"{name}: x must be (N, C, *spatial), got shape {tuple(x.shape)}")
    if not isinstance(num_groups, int) or isinstance(num_groups, bool):
        raise TypeError(f"{name}: num_groups must be an int, got {num_groups!r}")
    if num_groups == 0:
        raise ZeroDivisionError(f"{name}: num_groups must be positive, got 0")
    C = x.shape[1]
    if num_groups < 0 or C % num_groups:
        raise ValueError(
            f"{name}: num_groups={num_groups} must be a positive divisor of C={C}, x has shape {tuple(x.shape)}"
        )
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"{name}: eps must be a number, got {eps!r}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{name}: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    for label, t in zip(("weight", "bias", "shift", "ada_scale", "ada_shift"), params, strict=True):
        if t is None:
            continue
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(
                f"{name}: {label} must be a floating torch.Tensor, got {getattr(t, 'dtype', type(t).__name__)}"
            )
        per_sample = label in ("shift", "ada_scale", "ada_shift")
        if tuple(t.shape) != (C,) and not (per_sample and tuple(t.shape) in ((1, C), (x.shape[0], C))):
            allowed = f"({C},)" + (f", (1, {C}) or ({x.shape[0]}, {C})" if per_sample else "")
            raise ValueError(f"{name}: {label} must have shape {allowed}, got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name}: {label} is on {t.device}, x on {x.device}")
    if not isinstance(tokens, bool):
        raise TypeError(f"{name}: tokens must be a bool, got {tokens!r}")
    if statistics is not None:
        _check_statistics(name, x, statistics)


def _check_statistics(name: str, x: Tensor, statistics: Any) -> None:
    if not isinstance(statistics, Tensor) or statistics.dtype != torch.float32:
        got = getattr(statistics, "dtype", type(statistics).__name__)
        raise TypeError(f"{name}: statistics must be an fp32 torch.Tensor, got {got}")
    shape = tuple(statistics.shape)
    if len(shape) != 4 or shape[0] != 2 or shape[2] < 1 or (shape[1], shape[3]) != tuple(x.shape[:2]):
        raise ValueError(f"{name}: statistics must have shape (2, {x.shape[0]}, P, {x.shape[1]}), got {shape}")
    if statistics.device != x.device:
        raise ValueError(f"{name}: statistics is on {statistics.device}, x on {x.device}")
