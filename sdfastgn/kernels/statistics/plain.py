"""Mean and sum of squared deviations of each channel and chunk of positions, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdfastgn.kernels.common.sizes import ceil_div


def reference_channel_statistics(x: Tensor, chunks: int) -> Tensor:
    """Computes the statistics of ``x`` (N, C, *spatial) over ``chunks`` chunks of positions.

    Returns (2, N, chunks, C), the mean and the sum of squared deviations (M2), in fp32, or in fp64 for fp64
    input. This function runs where no kernel can run. Tests compare the kernel with this function.
    """
    N, C = x.shape[:2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    u = x.to(dtype).reshape(N, C, -1)
    rows = ceil_div(u.shape[2], chunks)
    u = torch.ops.aten.constant_pad_nd.default(u, [0, rows * chunks - u.shape[2]]).view(N, C, chunks, rows)
    inside = (torch.arange(rows * chunks, device=x.device) < math.prod(x.shape[2:])).view(chunks, rows)
    count = inside.sum(1)
    mean = u.sum(3) / count.clamp(min=1)
    m2 = torch.where(inside, u - mean[..., None], 0).square().sum(3)
    return torch.stack((mean, m2)).transpose(2, 3).contiguous()
