"""Backward of GroupNorm + activation in plain PyTorch ops, from the saved inputs alone.

With u, z, y as in ``group_norm.py``, a = 1 + ada_scale, dz the gradient of the activation's argument, xhat = (u - mean) * rstd and
w' = weight * a:

    d ada_shift = sum_hw dz                     d bias   = sum_n,hw dz * a
    d ada_scale = sum_hw dz * (xhat * weight + bias)   d weight = sum_n,hw dz * a * xhat
    du = rstd * (dz w' - mean_group(dz w') - xhat * mean_group(dz w' xhat)),   d shift = sum_hw du

Every step is a differentiable op, so that a second derivative is right too. Computed in fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfastgn.kernels.activations import ACTIVATION_GRADS
from sfastgn.kernels.layout import dense

__all__ = ["group_norm_grads"]


def group_norm_grads(
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
    """Gradients of (x, weight, bias, shift, ada_scale, ada_shift), None where not ``wanted``; each in its tensor's shape and dtype.

    Shapes: dy and x (N, C, *spatial); weight, bias (C,); shift, ada_scale, ada_shift (N, C), (1, C) or (C,). The gradient of x has
    the strides of x if x is without gaps.
    """
    N, C = x.shape[:2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    grouped = (N, num_groups, C // num_groups, x.shape[2:].numel())

    def per_channel(t: Tensor) -> Tensor:
        return t.to(dtype).reshape(-1, num_groups, C // num_groups, 1)

    u = x.to(dtype).reshape(grouped)
    u = u if shift is None else u + per_channel(shift)
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

    du = None
    if wanted[0] or wanted[3]:
        along_mean = d_xhat.mean(dim=(2, 3), keepdim=True)
        along_var = (d_xhat * xhat).mean(dim=(2, 3), keepdim=True)
        du = rstd * (d_xhat - along_mean - xhat * along_var)
    dx = None
    if wanted[0] and du is not None:
        dx = du.reshape(x.shape).to(x.dtype)
        if dense(x).stride() != dx.stride():
            dx = dx.movedim(1, -1).contiguous().movedim(-1, 1)
    return (
        dx,
        summed(d_affine * xhat, weight) if wanted[1] else None,
        summed(d_affine, bias) if wanted[2] else None,
        summed(du, shift) if wanted[3] and du is not None else None,
        summed(dz * affine, ada_scale) if wanted[4] else None,
        summed(dz, ada_shift) if wanted[5] else None,
    )
