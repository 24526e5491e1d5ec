"""Finds inputs whose mean is far larger than their deviation, for which PyTorch's norms lose digits.

PyTorch computes x * a + b with a = weight / deviation and b = bias - mean * a. Both terms are as large as
|mean| / deviation, so their rounding errors are too, while the result is small. For example, in fp32 the
error is 0.5 if all values of a group are 3e4. The plain forms of this package therefore subtract the mean
first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch

# |mean| / deviation above which the mean is subtracted first. Below it, the error is a few units in the
# last place.
_FAR = 16.0


def is_far(u: Tensor, mean: Tensor, rstd: Tensor) -> bool:
    """True if |mean| / deviation is above ``_FAR`` in any group of ``u``.

    Args:
        u: the norm's input, of any shape.
        mean, rstd: mean and 1 / deviation of each group, of equal shape.

    Always False for GPU tensors and for traced ones, because their values cannot be read. PyTorch's rounding
    error then remains.
    """
    if not (u.is_cpu and dispatch.is_untraced(u, ())):
        return False
    # A group with NaN is ignored, because the other groups need the check too. The maximum is computed as an
    # infinity norm, because a comparison would allocate memory of the size of ``ratio``.
    ratio = torch.nan_to_num(mean.detach() * rstd.detach())
    return ratio.numel() > 0 and float(torch.linalg.vector_norm(ratio, torch.inf)) > _FAR
