"""Backward of GroupNorm + activation: the op ``sdfastgn::group_norm_backward``.

With u, z, y as in ``group_norm/op.py``, a = 1 + ada_scale, dz the gradient of the activation's
argument, xhat = (u - mean) * rstd and w' = weight * a:

    d ada_shift = sum_hw dz                     d bias   = sum_n,hw dz * a
    d ada_scale = sum_hw dz * (xhat * weight + bias)   d weight = sum_n,hw dz * a * xhat
    du = rstd * (dz w' - mean_group(dz w') - xhat * mean_group(dz w' xhat)),   d shift = sum_hw du

On a GPU the kernels of ``group_norm/backward_kernels.py`` run, from x and the mean and rstd that
the forward saved; everywhere else, and for a second derivative, ``reference_group_norm_grads``,
which takes the statistics of x again.

Source: the chain rule; the grouping of sums is that of Wu and He, "Group Normalization", 2018, as
PyTorch implements it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.double_backward import derivative_of, save_all
from sdfastgn.kernels.common.layout import dense_is_channels_last, empty_dense_like, laid_out
from sdfastgn.kernels.common.op import Op
from sdfastgn.kernels.group_norm.backward_plans import (
    GroupNormGradCall,
    GroupNormGrads,
    Wanted,
    launch_group_norm_grads,
)

__all__ = ["group_norm_grads", "reference_group_norm_grads"]


def reference_group_norm_grads(call: GroupNormGradCall) -> GroupNormGrads:
    """Gradients in plain PyTorch, computed in fp32 (fp64 for fp64 input).

    Every step is a differentiable op, so that a second derivative is right too. The gradient of x has
    the strides of x if x is without gaps.
    """
    x, weight, bias, shift = call.x, call.weight, call.bias, call.shift
    num_groups, wanted = call.num_groups, call.wanted
    (N, C), dtype = x.shape[:2], torch.promote_types(x.dtype, torch.float32)
    grouped = (N, num_groups, C // num_groups, math.prod(x.shape[2:]))

    def per_channel(t: Tensor) -> Tensor:
        return t.to(dtype).reshape(-1, num_groups, C // num_groups, 1)

    dy = call.dy.movedim(-1, 1) if call.tokens else call.dy
    u = x.to(dtype).reshape(grouped)
    u = u if shift is None else u + per_channel(shift)
    u = u - u.detach()[:, :, :1, :1]  # exact where values are close; no derivative depends on it
    var, mean = torch.var_mean(u, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(var + call.eps)
    xhat = (u - mean) * rstd
    affine = xhat if weight is None else xhat * per_channel(weight)
    affine = affine if bias is None else affine + per_channel(bias)
    z = affine if call.ada_scale is None else affine * (1 + per_channel(call.ada_scale))
    z = z if call.ada_shift is None else z + per_channel(call.ada_shift)
    dz = ACTIVATION_GRADS[call.activation](dy.to(dtype).reshape(grouped), z)
    d_affine = dz if call.ada_scale is None else dz * (1 + per_channel(call.ada_scale))
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
    if wanted.x or wanted.shift:
        along_mean = d_xhat.mean(dim=(2, 3), keepdim=True)
        along_var = (d_xhat * xhat).mean(dim=(2, 3), keepdim=True)
        du = rstd * (d_xhat - along_mean - xhat * along_var)
    if wanted.x and du is not None:
        dx = du.reshape(x.shape).to(x.dtype)
        # Sums and products have the strides of dy.
        dx = laid_out(dx, dense_is_channels_last(x))
    return GroupNormGrads(
        dx,
        summed(d_affine * xhat, weight) if wanted.weight else None,
        summed(d_affine, bias) if wanted.bias else None,
        summed(du, shift) if wanted.shift and du is not None else None,
        summed(dz * affine, call.ada_scale) if wanted.ada_scale else None,
        summed(dz, call.ada_shift) if wanted.ada_shift else None,
    )


# --- op ---------------------------------------------------------------------------------------------


@dispatch.retried
def _run(call: GroupNormGradCall) -> list[Tensor]:
    if call.x.numel() == 0:
        return [grad.zero_() for grad in _fake(call)]
    call = call._replace(wanted=Wanted(*call.wanted))
    grads = launch_group_norm_grads if dispatch.runs_in_triton(call.x) else reference_group_norm_grads
    return [grad for grad in grads(call) if grad is not None]


def _fake(call: GroupNormGradCall) -> list[Tensor]:
    x = call.x
    operands = (call.weight, call.bias, call.shift, call.ada_scale, call.ada_shift)
    found = (empty_dense_like(x, x.dtype), *(None if t is None else t.new_empty(t.shape) for t in operands))
    return [grad for grad, want in zip(found, call.wanted, strict=True) if want and grad is not None]


def _gradients(call: GroupNormGradCall) -> GroupNormGrads:
    return reference_group_norm_grads(call._replace(wanted=Wanted(*call.wanted)))


_GROUP_NORM_BACKWARD = Op(
    # One tensor for each of x, weight, bias, shift, ada_scale and ada_shift that is wanted, in this order.
    "group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? shift, Tensor? ada_scale, Tensor? ada_shift, int num_groups, float eps, str activation, "
    "bool tokens, bool[] wanted) -> Tensor[]",
    GroupNormGradCall,
    _run,
    _fake,
    save=save_all,
    backward=derivative_of(_gradients),
)


@dispatch.retried
def group_norm_grads(call: GroupNormGradCall) -> GroupNormGrads:
    """The gradients that are wanted, by the kernels where they run."""
    if not any(call.wanted):
        return GroupNormGrads(*[None] * len(call.wanted))
    if dispatch.is_batched(call.dy):
        return reference_group_norm_grads(call)
    if call.x.numel() and dispatch.is_plain_inference(call.x, call[:-1]):
        return launch_group_norm_grads(call)
    *arguments, wanted = call
    found = iter(_GROUP_NORM_BACKWARD.through_dispatcher((*arguments, list(wanted))))
    return GroupNormGrads(*(next(found) if want else None for want in wanted))
