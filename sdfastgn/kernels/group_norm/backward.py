"""Gradients of GroupNorm + activation in plain PyTorch: the reference of ``sdfastgn::group_norm_backward``.

With u = x + shift as in ``group_norm/op.py``, xhat = (u - mean) * rstd, a = 1 + ada_scale, w' = weight * a,
and dz the gradient of the activation's argument:

    d ada_shift = sum_hw dz                     d bias   = sum_n,hw dz * a
    d ada_scale = sum_hw dz * (xhat * weight + bias)   d weight = sum_n,hw dz * a * xhat
    du = rstd * (dz w' - mean_group(dz w') - xhat * mean_group(dz w' xhat)),   d shift = sum_hw du

If all samples share ada_shift, ada_scale or shift, its gradient is also summed over n.

On a GPU the kernels of ``group_norm/backward_kernels.py`` run. They use the mean and rstd that the forward
saved. Everywhere else, and for second derivatives, ``reference_group_norm_grads`` runs. That function
computes mean and variance of x again.

Source: the chain rule, applied to Wu and He, "Group Normalization", 2018.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATION_GRADS
from sdfastgn.kernels.common.declaration import Gradients
from sdfastgn.kernels.common.layout import dense_is_channels_last, laid_out


def reference_group_norm_grads(call: Any) -> Gradients:
    """Computes the gradients in plain PyTorch, in fp32 (fp64 for fp64 input).

    Args:
        call: its fields are dy (N, C, *spatial), or (N, HW, C) if the forward returned tokens; the arguments
            of ``GroupNormCall``; mean and rstd (N, G) of the forward, which are not used; and for each
            gradient (``dx``, ``dweight`` ...) whether it is wanted.

    Returns:
        The wanted gradients in the shapes and dtypes of their operands. The gradient of x has the layout of
        x if x is channels-first or channels-last.

    Every step can be differentiated, so second derivatives are right.
    """
    x, weight, bias, shift = call.x, call.weight, call.bias, call.shift
    num_groups = call.num_groups
    (N, C), dtype = x.shape[:2], torch.promote_types(x.dtype, torch.float32)
    grouped = (N, num_groups, C // num_groups, math.prod(x.shape[2:]))

    def per_channel(t: Tensor) -> Tensor:
        return t.to(dtype).reshape(-1, num_groups, C // num_groups, 1)

    dy = call.dy.movedim(-1, 1) if call.tokens else call.dy
    u = x.to(dtype).reshape(grouped)
    u = u if shift is None else u + per_channel(shift)
    # Subtracting the group's first value changes no gradient, and reduces rounding errors of large means.
    u = u - u.detach()[:, :, :1, :1]
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
        """Sums ``t`` to the gradient of ``like``: over positions, and over samples if all share ``like``."""
        if like is None:
            return None
        per_sample = t.sum(dim=3).reshape(N, C)
        rows = like.shape[0] if like.dim() == 2 else 0
        total = per_sample if rows == N else per_sample.sum(dim=0)
        return total.reshape(like.shape).to(like.dtype)

    du = dx = None
    if call.dx or call.dshift:
        mean_d_xhat = d_xhat.mean(dim=(2, 3), keepdim=True)
        mean_product = (d_xhat * xhat).mean(dim=(2, 3), keepdim=True)
        du = rstd * (d_xhat - mean_d_xhat - xhat * mean_product)
    if call.dx and du is not None:
        # The gradient of x is ``du`` in the layout of x. ``du`` may have the strides of dy.
        dx = laid_out(du.reshape(x.shape).to(x.dtype), dense_is_channels_last(x))
    return {
        "x": dx,
        "weight": summed(d_affine * xhat, weight) if call.dweight else None,
        "bias": summed(d_affine, bias) if call.dbias else None,
        "shift": summed(du, shift) if call.dshift and du is not None else None,
        "ada_scale": summed(dz * affine, call.ada_scale) if call.dada_scale else None,
        "ada_shift": summed(dz, call.ada_shift) if call.dada_shift else None,
    }
