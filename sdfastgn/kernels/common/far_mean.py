"""Finds inputs whose mean is far larger than their deviation. PyTorch's norms lose digits for such inputs.

PyTorch computes x * a + b with a = weight / deviation and b = bias - mean * a. If the mean is large, x * a
and b are both about as large as |mean| / deviation, but their sum is small. So the rounding errors of x * a
and of b are large compared with the sum. For example, in fp32 the error is 0.5 if all values of a group are
3e4. For such inputs this package's functions in plain PyTorch first subtract the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch

# If |mean| / deviation is larger than this number, functions in plain PyTorch subtract the mean before they
# multiply. If it is smaller, the error of x * a + b, PyTorch's formula, is a few units in the last place.
_FAR = 16.0


def is_far(u: Tensor, mean: Tensor, rstd: Tensor) -> bool:
    """True if |mean| / deviation of any group of ``u`` is so large that PyTorch's norms lose digits.

    The limit is ``_FAR``.

    Args:
        u: the norm's input, of any shape.
        mean, rstd: mean and 1 / deviation of each group, of equal shape.

    Always False for tensors on a GPU, where reading a value would wait for the GPU, and for traced tensors,
    which have no values. For such tensors the result of PyTorch's norm keeps its rounding error.
    """
    if not (u.is_cpu and dispatch.is_untraced(u, ())):
        return False
    # In a group with NaN the ratio |mean| / deviation is replaced by 0. NaN would hide the ratios of other
    # groups. The maximum is computed as an infinity norm, because a comparison would allocate memory of the
    # size of ``ratio``.
    ratio = torch.nan_to_num(mean.detach() * rstd.detach())
    return ratio.numel() > 0 and float(torch.linalg.vector_norm(ratio, torch.inf)) > _FAR
