"""PyTorch's GroupNorm, for tensors for which no kernel of sdfastgn runs.

PyTorch's channels-last kernel for CPUs has two faults (PyTorch 2.13). It computes the variance as a
difference of squares, which is less exact. And its backward crashes if x needs no gradient but a parameter
does. So ``plain_group_norm`` makes the input channels-first. If x has one channel or one position, x is
contiguous in both layouts, and PyTorch chooses its kernel by the strides of x. So ``plain_group_norm`` makes
these strides channels-first too.

``plain_group_norm`` also corrects results where the mean is far above the deviation (``common/far_mean.py``).
``channels_last_group_norm`` runs PyTorch's channels-last kernel all the same, so that a module of sdfastgn
gives the bits of ``nn.GroupNorm``. It returns None where one of the two faults would matter.
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
    """Computes GroupNorm of ``u``: the result z, and mean and 1 / deviation (rstd) of each group.

    Args:
        u: (N, C, *spatial), any floating dtype and layout.
        weight, bias: (C,) in the dtype of u, or None.

    Returns:
        z (N, C, *spatial), channels-first; mean and rstd (N, G). All in the dtype of u.
    """
    if weight is None and bias is not None:
        # PyTorch's backward fails with a bias and no weight, so the weight becomes a tensor of ones.
        weight = torch.ones_like(bias)
    # Weight and bias are made contiguous, because PyTorch reads them as if they were.
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    u = u.contiguous().flatten().view(u.shape)
    # PyTorch's GroupNorm has NaN gradients if u is empty, so it is not called then.
    if u.numel() == 0:
        z = u.clone()  # z is a copy of u, because the caller may write to z
        for t, combine in ((weight, torch.mul), (bias, torch.add)):
            z = z if t is None else combine(z, t.view(-1, *[1] * (u.dim() - 2)))
        return z, u.new_zeros(u.shape[0], num_groups), u.new_zeros(u.shape[0], num_groups)
    z, mean, rstd = _native_group_norm(u, num_groups, weight, bias, eps)
    if is_far(u, mean, rstd):
        # The mean is subtracted without a gradient: the norm does not change if a value is subtracted from
        # all of u, so the derivative with respect to that value is 0.
        centre = mean.detach()
        centered = (u.view(*mean.shape, -1) - centre[..., None]).view(u.shape)
        z, mean, rstd = _native_group_norm(centered, num_groups, weight, bias, eps)
        mean = mean + centre
    return z, mean, rstd


def channels_last_group_norm(
    u: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Computes GroupNorm with exactly the bits of ``nn.GroupNorm``, for a channels-last ``u`` on a CPU.

    Returns the result, and mean and 1 / deviation of each group. This function makes fewer copies than
    ``plain_group_norm``, and is less exact. It returns None if the result would be inaccurate because the
    mean is far above the deviation, if PyTorch's backward would crash, if u is not channels-last on a CPU, or
    if torch.compile or another tool traces the call.
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
    """True if PyTorch runs its channels-last kernel for ``u`` on a CPU. Only the strides decide."""
    if u.is_contiguous() or u.dim() not in (4, 5):
        return False
    return suggest_memory_format(u) is not torch.contiguous_format


def _native_group_norm(
    u: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    N, C = u.shape[:2]
    return torch.native_group_norm(u, weight, bias, N, C, math.prod(u.shape[2:]), num_groups, eps)
