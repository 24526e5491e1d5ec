"""What the fusions of models for video share."""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch

__all__ = ["is_plain_inference"]


def is_plain_inference(x: Tensor, dim: int = 5) -> bool:
    """True if kernels take x, and there is no gradient, compiler, trace, mode or autocast.

    ``dim``: the rank that x must have: 5 for videos (N, C, T, H, W), 4 for their frames (N * T, C, H, W).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (dim, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )
