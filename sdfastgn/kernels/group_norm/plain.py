"""PyTorch's own GroupNorm, and also right where the mean is far above the spread (``common/far_mean.py``).

Its channels-last kernel for CPUs takes the variance as a difference of squares, which is worse
(PyTorch 2.13), and its backward crashes where x needs no gradient and a parameter does. So an input
goes through a channels-first copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.far_mean import is_far
from sdfastgn.kernels.common.private import suggest_memory_format


def plain_group_norm(
    u: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(z, mean, rstd): z as ``u`` (N, C, *spatial), channels-first, mean and rstd (N, G). Parameters
    (C,) of the dtype of u, or None.
    """
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # PyTorch's backward fails with a bias and no weight
    # PyTorch reads parameters as if they were contiguous.
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    u = u.contiguous()
    if u.numel() == 0:  # PyTorch's backward has NaN where there are no positions
        z = u.clone()  # not the input itself, which a caller may not write to
        for t, combine in ((weight, torch.mul), (bias, torch.add)):
            z = z if t is None else combine(z, t.view(-1, *[1] * (u.dim() - 2)))
        return z, u.new_zeros(u.shape[0], num_groups), u.new_zeros(u.shape[0], num_groups)
    z, mean, rstd = _native_group_norm(u, num_groups, weight, bias, eps)
    if is_far(u, mean, rstd):
        # A constant: no derivative of the result with respect to it is other than zero.
        centre = mean.detach()
        centered = (u.view(*mean.shape, -1) - centre[..., None]).view(u.shape)
        z, mean, rstd = _native_group_norm(centered, num_groups, weight, bias, eps)
        mean = mean + centre
    return z, mean, rstd


def channels_last_group_norm(
    u: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a stock ``nn.GroupNorm`` computes of a channels-last ``u`` on a CPU; None where that is far
    from right, or cannot be.

    Less exact than ``plain_group_norm``, and faster by the copies: for who wants stock's own bits.
    """
    if not (u.is_cpu and dispatch.is_untraced(u, (weight, bias)) and is_channels_last_to_pytorch(u)):
        return None
    if dispatch.wants_gradient(u, (weight, bias)) and not u.requires_grad:
        return None
    u = u.contiguous(memory_format=torch.channels_last if u.dim() == 4 else torch.channels_last_3d)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    found = _native_group_norm(u, num_groups, weight, bias, eps)
    return None if is_far(u, *found[1:]) else found


def is_channels_last_to_pytorch(u: Tensor) -> bool:
    """True if PyTorch picks a channels-last kernel for ``u`` on a CPU: strides alone decide."""
    if u.is_contiguous() or u.dim() not in (4, 5):
        return False
    return suggest_memory_format(u) is not torch.contiguous_format


def _native_group_norm(
    u: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    N, C = u.shape[:2]
    return torch.native_group_norm(u, weight, bias, N, C, math.prod(u.shape[2:]), num_groups, eps)
