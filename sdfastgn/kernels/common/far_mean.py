"""Whether the mean is so far above the spread that PyTorch's own norms lose digits.

PyTorch computes x * a + b with a = weight / deviation and b = bias - mean * a. Both products are as
large as |mean| / deviation, and so is the rounding error of their difference: 0.5 where all values
of a group are 3e4, in fp32. Such an input is centered first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch

# Deviations between the mean and zero from which on the input is centered. Below it, the error is a
# few units in the last place.
_FAR = 16.0


def is_far(u: Tensor, mean: Tensor, rstd: Tensor) -> bool:
    # The check reads values, so it is made for CPU tensors alone. For others PyTorch's error remains.
    if not (u.is_cpu and dispatch.is_untraced(u, ())):
        return False
    # Without the NaN that one group may have: the others have means of their own. To compare tensors with
    # a number would make a copy.
    ratio = torch.nan_to_num(mean.detach() * rstd.detach())
    return ratio.numel() > 0 and float(torch.linalg.vector_norm(ratio, torch.inf)) > _FAR
