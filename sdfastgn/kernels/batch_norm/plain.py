"""Functions that BatchNorm and its gradients in plain PyTorch share.

They compute in fp32, or in fp64 for fp64 input. Every step can be differentiated, so derivatives of
any order are right.
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
    """Reshapes ``t`` from (C,) to (1, C, 1, ...), which broadcasts to ``x``, and casts it to fp32 or fp64."""
    return t.to(torch.promote_types(x.dtype, torch.float32)).reshape(1, -1, *[1] * (x.dim() - 2))


def centered(x: Tensor, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x - mean, the mean and the variance. If ``mean`` or ``var`` is None, both are computed from x.

    ``mean``, ``var``: (C,) or None. The returned mean and variance have the shape (1, C, 1, ...).
    """
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    if mean is not None and var is not None:
        return u - per_channel(mean, x), per_channel(mean, x), per_channel(var, x)
    dims = [0, *range(2, x.dim())]
    pivot = u.detach()
    for dim in dims:
        pivot = pivot.narrow(dim, 0, 1)
    # ``torch.var_mean`` is not used, because its gradient is NaN if all values are equal. A second mean is
    # subtracted to remove the rounding error of the first.
    d = u - pivot
    first = d.mean(dims, keepdim=True)
    d = d - first
    rest = d.mean(dims, keepdim=True)
    d = d - rest
    return d, pivot + first + rest, d.square().mean(dims, keepdim=True)


def empty_moments(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns uninitialized memory for mean and variance: (size,) in fp32, or in fp64 for fp64 input."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(size, dtype=dtype), x.new_empty(size, dtype=dtype)


def like_x(t: Tensor, call: Any) -> Tensor:
    """Returns ``t``, which has the shape of x, in the layout that x has when it is made dense.

    That is channels-last or channels-first. ``t`` is copied if it has another layout.
    """
    is_last = dense_is_channels_last(call.x)
    if is_channels_last(t) if is_last else is_channels_first(t):
        return t
    return laid_out(t, is_last)
