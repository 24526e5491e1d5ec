"""Backward of GroupNorm + activation: the op ``sdfastgn::group_norm_backward``.

With u, z, y as in ``group_norm/op.py``, a = 1 + ada_scale, dz the gradient of the activation's argument, xhat = (u - mean) * rstd and
w' = weight * a:

    d ada_shift = sum_hw dz                     d bias   = sum_n,hw dz * a
    d ada_scale = sum_hw dz * (xhat * weight + bias)   d weight = sum_n,hw dz * a * xhat
    du = rstd * (dz w' - mean_group(dz w') - xhat * mean_group(dz w' xhat)),   d shift = sum_hw du

On a GPU the kernels of ``group_norm/backward_kernels.py`` run, from x and the mean and rstd that the forward saved; everywhere else,
and for a second derivative, ``reference_group_norm_grads``, which takes the statistics of x again.

Source: the chain rule; the grouping of sums is that of Wu and He, "Group Normalization", 2018, as PyTorch implements it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.double_backward import second_derivative
from sdfastgn.kernels.common.layout import dense_is_channels_last, empty_dense_like
from sdfastgn.kernels.group_norm.backward_plans import launch_group_norm_grads

__all__ = ["group_norm_grads", "reference_group_norm_grads"]


def reference_group_norm_grads(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    ada_scale: Tensor | None,
    ada_shift: Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, weight, bias, shift, ada_scale, ada_shift) in plain PyTorch, each in its tensor's shape and dtype.

    None where not ``wanted``. Every step is a differentiable op, so that a second derivative is right too. Computed in fp32 (fp64 for
    fp64 input).

    Shapes: dy and x (N, C, *spatial); weight, bias (C,); shift, ada_scale, ada_shift (N, C), (1, C) or (C,). The gradient of x has
    the strides of x if x is without gaps.
    """
    N, C = x.shape[:2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    grouped = (N, num_groups, C // num_groups, math.prod(x.shape[2:]))

    def per_channel(t: Tensor) -> Tensor:
        return t.to(dtype).reshape(-1, num_groups, C // num_groups, 1)

    u = x.to(dtype).reshape(grouped)
    u = u if shift is None else u + per_channel(shift)
    u = u - u.detach()[:, :, :1, :1]  # exact where values are close; no derivative depends on it
    var, mean = torch.var_mean(u, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    xhat = (u - mean) * rstd
    affine = xhat if weight is None else xhat * per_channel(weight)
    affine = affine if bias is None else affine + per_channel(bias)
    z = affine if ada_scale is None else affine * (1 + per_channel(ada_scale))
    z = z if ada_shift is None else z + per_channel(ada_shift)
    dz = ACTIVATION_GRADS[activation](dy.to(dtype).reshape(grouped), z)
    d_affine = dz if ada_scale is None else dz * (1 + per_channel(ada_scale))
    d_xhat = d_affine if weight is None else d_affine * per_channel(weight)

    def summed(t: Tensor, like: Tensor | None) -> Tensor | None:
        """Sum over HW and over every axis along which ``like`` was broadcast."""
        if like is None:
            return None
        per_sample = t.sum(dim=3).reshape(N, C)
        rows = like.shape[0] if like.dim() == 2 else 0
        total = per_sample if rows == N else per_sample.sum(dim=0)
        return total.reshape(like.shape).to(like.dtype)

    du = dx = None
    if wanted[0] or wanted[3]:
        along_mean = d_xhat.mean(dim=(2, 3), keepdim=True)
        along_var = (d_xhat * xhat).mean(dim=(2, 3), keepdim=True)
        du = rstd * (d_xhat - along_mean - xhat * along_var)
    if wanted[0] and du is not None:
        dx = du.reshape(x.shape).to(x.dtype)
        # Sums and products have the strides of dy.
        dx = dx.movedim(1, -1).contiguous().movedim(-1, 1) if dense_is_channels_last(x) else dx.contiguous()
    return (
        dx,
        summed(d_affine * xhat, weight) if wanted[1] else None,
        summed(d_affine, bias) if wanted[2] else None,
        summed(du, shift) if wanted[3] and du is not None else None,
        summed(dz * affine, ada_scale) if wanted[4] else None,
        summed(dz, ada_shift) if wanted[5] else None,
    )


# --- op -----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
# The result has one tensor for each of x, weight, bias, shift, ada_scale and ada_shift that is wanted, in this order.
_LIBRARY.define(
    "group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? shift, "
    "Tensor? ada_scale, Tensor? ada_shift, int num_groups, float eps, str activation, bool tokens, bool[] wanted) -> Tensor[]"
)


def _backward_impl(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    ada_scale: Tensor | None,
    ada_shift: Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
    tokens: bool,
    wanted: list[bool],
) -> list[Tensor]:
    params = (weight, bias, shift, ada_scale, ada_shift)
    if x.numel() == 0:
        return [torch.zeros_like(t) for t in _wanted((x, *params), wanted)]
    if dispatch.runs_in_triton(x):
        found = launch_group_norm_grads(
            dy, x, mean, rstd, params, num_groups, activation, tokens, tuple(wanted)
        )
        return list(_wanted(found, wanted))
    dy = dy.movedim(-1, 1).reshape(x.shape) if tokens else dy
    grads = reference_group_norm_grads(dy, x, *params, num_groups, eps, activation, tuple(wanted))
    return list(_wanted(grads, wanted))


def _wanted(tensors: tuple[Tensor | None, ...], wanted: list[bool]) -> Iterator[Tensor]:
    return (t for t, want in zip(tensors, wanted, strict=True) if want and t is not None)


def _backward_fake(dy: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
    params, wanted = args[2:7], args[-1]
    like = (empty_dense_like(x, x.dtype), *(None if t is None else t.new_empty(t.shape) for t in params))
    return list(_wanted(like, wanted))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, x, _, _, *params, ctx.num_groups, ctx.eps, ctx.activation, ctx.tokens, ctx.wanted = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, *params)


_DIFFERENTIABLE = (0, 1, 4, 5, 6, 7, 8)  # dy, x, weight, bias, shift, ada_scale, ada_shift


def _double_backward(ctx: Any, dgrads: list[Tensor | None]) -> tuple[Any, ...]:
    """mean and rstd count as what they are, functions of x."""

    def gradients(dy: Tensor, x: Tensor, *params: Tensor | None) -> Iterator[Tensor]:
        weight, bias, shift, ada_scale, ada_shift = params
        flat = dy.movedim(-1, 1).reshape(x.shape) if ctx.tokens else dy
        how = (ctx.num_groups, ctx.eps, ctx.activation, tuple(ctx.wanted))
        return _wanted(
            reference_group_norm_grads(flat, x, weight, bias, shift, ada_scale, ada_shift, *how), ctx.wanted
        )

    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    d_dy, dx, *d_params = second_derivative(gradients, ctx.saved_tensors, dgrads, needs)
    return d_dy, dx, None, None, *d_params, None, None, None, None, None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("group_norm_backward", _backward_impl, _key)
torch.library.register_fake("sdfastgn::group_norm_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "sdfastgn::group_norm_backward", _double_backward, setup_context=_setup_context, lib=_LIBRARY
)


def group_norm_grads(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    params: tuple[Tensor | None, ...],
    num_groups: int,
    eps: float,
    activation: str,
    tokens: bool,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, shift, ada_scale and ada_shift, None where not ``wanted``.

    Shapes: dy (N, C, *spatial), or (N, HW, C) if ``tokens``; mean and rstd (N, G) of the forward; ``params`` as in ``group_norm``.
    """
    if not any(wanted):
        return (None,) * 6
    if x.numel() and dispatch.is_plain_inference(x, (dy, *params)):
        return launch_group_norm_grads(dy, x, mean, rstd, params, num_groups, activation, tokens, wanted)
    found = iter(
        torch.ops.sdfastgn.group_norm_backward(
            dy, x, mean, rstd, *params, num_groups, eps, activation, tokens, list(wanted)
        )
    )
    return tuple(next(found) if want else None for want in wanted)
