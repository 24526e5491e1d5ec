"""What the fusions of autoencoders for video share."""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch

__all__ = ["is_plain_inference"]


def is_plain_inference(x: Tensor) -> bool:
    """True if kernels take x (N, C, T, H, W), and there is no gradient, compiler, trace, mode or autocast."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and dispatch.is_untraced(x, ())
        and (x.dim(), x.numel() > 0) == (5, True)
        and dispatch.has_kernels(x)
        and not torch.is_autocast_enabled(x.device.type)
    )
