"""What BatchNorm and its gradients in plain PyTorch share, computed in fp32 (fp64 for fp64 input).

Every step is a differentiable op, so that derivatives of any order are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common.layout import (
    dense_is_channels_last,
    is_channels_first,
    is_channels_last,
    laid_out,
)


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


def empty_moments(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Memory for mean and variance of the batch: (size,) in fp32, fp64 for fp64 input."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(size, dtype=dtype), x.new_empty(size, dtype=dtype)


def like_x(t: Tensor, call: Any) -> Tensor:
    """``t``, in shape as ``call.x``, in the layout of ``dense(call.x)``; copies only if needed."""
    is_last = dense_is_channels_last(call.x)
    if is_channels_last(t) if is_last else is_channels_first(t):
        return t
    return laid_out(t, is_last)
