"""BatchNorm and its gradients in plain PyTorch, computed in fp32 (fp64 for fp64 input).

Every step is a differentiable op, so that derivatives of any order are right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.batch_norm.plans import BatchNormCall, empty_moments
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import like_dense

__all__ = ["centered", "per_channel", "reference_batch_norm"]


def per_channel(t: Tensor, x: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...), in the dtype to compute in."""
    return t.to(torch.promote_types(x.dtype, torch.float32)).reshape(1, -1, *[1] * (x.dim() - 2))


def centered(x: Tensor, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x less the mean, mean, variance), the latter of the batch where None is given."""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    if mean is not None and var is not None:
        return u - per_channel(mean, x), per_channel(mean, x), per_channel(var, x)
    dims = [0, *range(2, x.dim())]
    pivot = u.detach()
    for dim in dims:
        pivot = pivot.narrow(dim, 0, 1)
    # Not var_mean: its gradient is NaN where there is no spread. The first mean leaves its rounding.
    d = u - pivot
    first = d.mean(dims, keepdim=True)
    d = d - first
    rest = d.mean(dims, keepdim=True)
    d = d - rest
    return d, pivot + first + rest, d.square().mean(dims, keepdim=True)


def reference_batch_norm(call: BatchNormCall) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, var), the latter (C,) of the batch, or empty where they are given."""
    x, residual = call.x, call.residual
    if x.numel() == 0:
        d, mean, var = x.to(torch.promote_types(x.dtype, torch.float32)), *empty_moments(x, x.shape[1])
        mean, var = mean.zero_(), var.zero_()
    else:
        d, mean, var = centered(x, call.mean, call.var)
    z = d * torch.rsqrt(per_channel(var, x) + call.eps)
    z = z if call.weight is None else z * per_channel(call.weight, x)
    z = z if call.bias is None else z + per_channel(call.bias, x)
    z = z if residual is None else z + residual.to(z.dtype)
    y = like_dense(ACTIVATIONS[call.activation](z).to(x.dtype), x)
    if call.mean is not None:
        return y, *empty_moments(x, 0)
    return y, mean.reshape(-1), var.reshape(-1)
