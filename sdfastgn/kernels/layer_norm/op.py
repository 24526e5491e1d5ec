"""LayerNorm over the last dimension, alone and after a residual add: the ops ``sdfastgn::layer_norm`` and ``sdfastgn::add_layer_norm``.

Formula, with u of shape (..., D), u = x or u = x + residual + add_bias as rounded to the dtype of x:

    y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias          (per row of D; var divided by D)

The sum is returned beside y: as it was normalised, or with a bias on top (``total_bias``), of which the norm knows nothing. Whatever is
added to the sum next then needs no pass for its bias. Only the kernels know of it; the op does not, and where the op is called or a
gradient is wanted, plain PyTorch makes that sum.

On a GPU the kernels of ``layer_norm/kernels.py`` run; everywhere else ``reference_layer_norm``. Layout and numerics contract: there.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016. The interface follows torch.nn.functional.layer_norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import as_eps, check_input, check_operand
from sdfastgn.kernels.layer_norm.backward import layer_norm_grads
from sdfastgn.kernels.layer_norm.kernels import find_plan, launch_layer_norm, make_plan, plan_key
from sdfastgn.kernels.layer_norm.plain import plain_layer_norm

__all__ = ["add_layer_norm", "layer_norm", "reference_add", "reference_layer_norm"]


def reference_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): fallback without a GPU and truth of the tests (in fp64)."""
    return _reference(x, weight, bias, eps, out_dtype)[0]


def _reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, centre, rstd)"""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = u.mean(-1, keepdim=True)
    d = u - mean
    d = d - d.mean(-1, keepdim=True)  # what the rounding of the mean left
    rstd = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    y = d * rstd
    y = y if weight is None else y * weight.to(u.dtype)
    y = y if bias is None else y + bias.to(u.dtype)
    centre = (mean - u[..., :1]).squeeze(-1).contiguous()
    return y.to(out_dtype or x.dtype).contiguous(), centre, rstd.squeeze(-1).contiguous()


def reference_add(x: Tensor, residual: Tensor, *biases: Tensor | None) -> Tensor:
    """x + residual + biases, each of these (D,) or None, in plain PyTorch: rounded once, to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    for bias in biases:
        total = total if bias is None else total + bias.to(wide)
    return total.to(x.dtype).contiguous()


# --- ops ----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
# The results: y, total where there is one, and for the backward (...) in fp32 (fp64 for fp64 input): the mean of each row less its
# first element, and 1 / deviation.
_LIBRARY.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? add_bias, float eps, "
    "ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _layer_norm_impl(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        y, centre, rstd = _layer_norm_fake(x, weight, bias, eps, out_dtype)
        return y, centre.zero_(), rstd.zero_()
    if not dispatch.runs_in_triton(x):
        return _reference(x, weight, bias, eps, out_dtype)
    centre, rstd = _empty_saved(x), _empty_saved(x)
    y, _ = _in_triton(x, None, (weight, bias, None, None), eps, out_dtype, (centre, rstd))
    return y, centre, rstd


def _add_impl(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    add_bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        y, total, centre, rstd = _add_fake(x, residual, weight, bias, add_bias, eps, out_dtype)
        return y, total, centre.zero_(), rstd.zero_()
    if not dispatch.runs_in_triton(x):
        total = reference_add(x, residual, add_bias)
        y, centre, rstd = _reference(total, weight, bias, eps, out_dtype)
        return y, total, centre, rstd
    centre, rstd = _empty_saved(x), _empty_saved(x)
    y, total = _in_triton(x, residual, (weight, bias, add_bias, None), eps, out_dtype, (centre, rstd))
    return y, total, centre, rstd


def _in_triton(
    x: Tensor,
    residual: Tensor | None,
    params: tuple[Tensor | None, ...],
    eps: float,
    out_dtype: torch.dtype | None,
    saved: tuple[Tensor, Tensor],
) -> tuple[Tensor, Any]:
    key = plan_key(x, residual, params, eps, out_dtype, saves=True)
    plan = find_plan(key) or make_plan(key, x, residual, params, eps)
    return launch_layer_norm(plan, x, residual, params, out_dtype, saved)


def _empty_saved(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


def _layer_norm_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=args[-1] or x.dtype), _empty_saved(x), _empty_saved(x)


def _add_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, centre, rstd = _layer_norm_fake(x, *args)
    return y, x.new_empty(x.shape), centre, rstd


def _keep(
    ctx: Any, x: Tensor, centre: Tensor, rstd: Tensor, params: tuple[Tensor | None, ...], eps: float
) -> None:
    """What the backward needs; of the bias and of what is added, only the dtype."""
    weight, bias, add_bias = params
    ctx.eps = eps
    ctx.bias_dtypes = tuple(None if t is None else t.dtype for t in (bias, add_bias))
    ctx.mark_non_differentiable(centre, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, centre, rstd, weight)


def _grads(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of x (and of the residual), weight, bias, add_bias."""
    x, centre, rstd, weight = ctx.saved_tensors
    bias, add_bias = ctx.bias_dtypes
    found = (x.dtype, None if weight is None else weight.dtype, bias, add_bias)
    dtypes = tuple(dtype if want else None for dtype, want in zip(found, wanted, strict=True))
    return layer_norm_grads(dy, dtotal, x, centre, rstd, weight, ctx.eps, dtypes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, eps, _ = inputs
    _, centre, rstd = output
    _keep(ctx, x, centre, rstd, (weight, bias, None), eps)


def _backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return *_grads(ctx, dy, None, (*ctx.needs_input_grad[:3], False))[:3], None, None


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *params, eps, _ = inputs
    _, total, centre, rstd = output
    _keep(ctx, total, centre, rstd, tuple(params), eps)


def _add_backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    x, residual, *params = ctx.needs_input_grad[:5]
    dx, *d_params = _grads(ctx, dy, dtotal, (x or residual, *params))
    return dx if x else None, dx if residual else None, *d_params, None, None


class _LayerNorm(torch.autograd.Function):
    """The ops' autograd at a fifth of the CPU time: for calls of which the dispatcher has nothing else to know."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: tuple[Any, ...]
    ) -> Tensor:
        plan, eps, out_dtype = how
        saved = _empty_saved(x), _empty_saved(x)
        y, _ = launch_layer_norm(plan, x, None, (weight, bias, None, None), out_dtype, saved)
        _keep(ctx, x, *saved, (weight, bias, None), eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dy)[:4]


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        add_bias: Tensor | None,
        how: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor | None]:
        plan, eps, out_dtype = how
        saved = _empty_saved(x), _empty_saved(x)
        params = (weight, bias, add_bias)
        y, total = launch_layer_norm(plan, x, residual, (*params, None), out_dtype, saved)
        _keep(ctx, total, *saved, params, eps)  # type: ignore[arg-type]  # with a residual there is a total
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        return _add_backward(ctx, dy, dtotal)[:6]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("layer_norm", _layer_norm_impl, _key)
    _LIBRARY.impl("add_layer_norm", _add_impl, _key)
torch.library.register_fake("sdfastgn::layer_norm", _layer_norm_fake, lib=_LIBRARY)
torch.library.register_fake("sdfastgn::add_layer_norm", _add_fake, lib=_LIBRARY)
torch.library.register_autograd("sdfastgn::layer_norm", _backward, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd(
    "sdfastgn::add_layer_norm", _add_backward, setup_context=_add_setup, lib=_LIBRARY
)


# --- public functions -----------------------------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension, in Triton kernels on NVIDIA GPUs.

    Args:
        x: (..., D), at least rank 1.
        weight, bias: (D,) or None, independently of each other.
        eps: added to the variance: a number of Python or NumPy, or a tensor without dimensions.

    Shapes: the output has the shape of x.
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); weight and bias any of these. The output has the dtype of x, or
        fp32 under CUDA autocast, as torch.nn.functional.layer_norm has.
    Layout: rows are read where they lie if they are without gaps and equally far apart, else from a copy. The output is contiguous.
    Grad: with respect to every tensor. Between forward and backward x is kept and two fp32 values a row. A second derivative, the
        transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or another argument has the wrong type.
        ValueError: a shape or a device does not fit.

    Source: torch.nn.functional.layer_norm for the interface; Ba, Kiros and Hinton, 2016, for the formula.
    """
    params = (weight, bias, None, None)
    out_dtype = _autocast_dtype(x)
    if type(eps) is not float:
        eps = as_eps("sdfastgn.layer_norm", eps)
    # A key that can be looked up first; whatever else is wrong misses there and is then checked.
    if dispatch.is_plain(x, params):
        try:
            training = dispatch.wants_gradient(x, params)
            key = plan_key(x, None, params, eps, out_dtype, training)
            plan = find_plan(key)
            if plan is None:
                _check("sdfastgn.layer_norm", x, params)
                plan = make_plan(key, x, None, params, eps)
            if not training:
                return launch_layer_norm(plan, x, None, params, out_dtype)[0]
            if plan.programs:
                return _LayerNorm.apply(x, weight, bias, (plan, eps, out_dtype))
        except RuntimeError:  # a tensor that has no strides or no memory
            _check("sdfastgn.layer_norm", x, params)
            raise
    _check("sdfastgn.layer_norm", x, params)
    if not dispatch.needs_op(x):
        return _plain(x, weight, bias, eps, out_dtype)
    return torch.ops.sdfastgn.layer_norm(x, weight, bias, eps, out_dtype)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    add_bias: Tensor | None = None,
    total_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x + residual + add_bias and its LayerNorm in one pass over memory: what stands between two parts of a transformer block.

    Args:
        x: (..., D), at least rank 1.
        residual: shape, dtype and device of x.
        weight, bias, eps: as in ``layer_norm``.
        add_bias: (D,) or None, a dtype as weight's: a linear layer's bias, left to the next kernel.
        total_bias: (D,) or None, likewise: the bias of what will be added to total next. The norm does
            not see it.

    Returns:
        (y, total): y is the ``layer_norm`` of the sum as rounded to the dtype of x. total is the sum and total_bias, rounded once from
        fp32 to the dtype of x, in memory of its own: it may be written to.

    Shapes: both have the shape of x. Dtypes: total has that of x, y too, or fp32 under CUDA autocast. Layout: both are contiguous; x
        and residual are read as in ``layer_norm``.
    Grad: with respect to every tensor, through both results, as in ``layer_norm``; the sum is kept for the backward. A total_bias then
        costs passes in plain PyTorch, and memory for a second sum.
    Raises:
        TypeError: a tensor is not dense, or none of these dtypes, or the dtypes of x and residual differ.
        ValueError: a shape or a device does not fit.

    Source: as ``layer_norm``; the sum goes with the norm since the first pre-norm transformers' fused kernels.
    """
    params = (weight, bias, add_bias, total_bias)
    out_dtype = _autocast_dtype(x)
    if type(eps) is not float:
        eps = as_eps("sdfastgn.add_layer_norm", eps)
    if residual is not None and dispatch.is_plain(x, (residual, *params)):
        try:
            training = dispatch.wants_gradient(x, (residual, *params))
            key = plan_key(x, residual, params, eps, out_dtype, training)
            plan = find_plan(key)
            if plan is None:
                _check_add(x, residual, params)
                plan = make_plan(key, x, residual, params, eps)
            if not training:
                return launch_layer_norm(plan, x, residual, params, out_dtype)  # type: ignore[return-value]
            if plan.programs and total_bias is None:
                return _AddLayerNorm.apply(x, residual, *params[:3], (plan, eps, out_dtype))
        except RuntimeError:
            _check_add(x, residual, params)
            raise
    _check_add(x, residual, params)
    if total_bias is not None:
        y, _ = add_layer_norm(x, residual, weight, bias, eps, add_bias=add_bias)
        return y, reference_add(x, residual, add_bias, total_bias)
    if not dispatch.needs_op(x):
        total = reference_add(x, residual, add_bias)
        return _plain(total, weight, bias, eps, out_dtype), total
    return torch.ops.sdfastgn.add_layer_norm(x, residual, weight, bias, add_bias, eps, out_dtype)[:2]


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> Tensor:
    """``layer_norm`` by PyTorch's own, where that is right."""
    if x.numel() == 0 or not dispatch.is_untraced(x, (weight, bias)):
        return reference_layer_norm(x, weight, bias, eps, out_dtype=out_dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    return plain_layer_norm(x.to(wide), weight, bias, eps).to(out_dtype or x.dtype)


def _autocast_dtype(x: Any) -> torch.dtype | None:
    """Eager's rule: under CUDA autocast LayerNorm computes in and returns fp32."""
    return (
        torch.float32
        if torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and dispatch.runs_in_triton(x)
        else None
    )


def _check(name: str, x: Any, params: tuple[Any, ...]) -> None:
    check_input(name, "x", x)
    if x.dim() < 1:
        raise ValueError(f"{name}: x must be (..., D), got shape {tuple(x.shape)}")
    for label, t in zip(("weight", "bias", "add_bias", "total_bias"), params, strict=True):
        check_operand(name, label, t, x, (x.shape[-1],))


def _check_add(x: Any, residual: Any, params: tuple[Any, ...]) -> None:
    name = "sdfastgn.add_layer_norm"
    _check(name, x, params)
    check_input(name, "residual", residual)
    if residual.dtype != x.dtype:
        raise TypeError(f"{name}: residual must have the dtype {x.dtype}, got {residual.dtype}")
    check_operand(name, "residual", residual, x, tuple(x.shape))
