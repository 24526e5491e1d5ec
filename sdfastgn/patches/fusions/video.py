"""What the fusions of models for video share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common import dispatch, gpu

__all__ = ["convolve_windows", "is_faster_in_2d", "is_plain_inference"]


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


def is_faster_in_2d(conv: Any, x: Tensor) -> bool:
    """True if a 2-D convolution of windows of frames is faster than ``conv``, a 3-D convolution.

    So it is on Hopper for channels that are a multiple of 32 but not of 64, such as the 96 of Wan's largest
    frames. For these cuDNN's 3-D convolutions run code of the GPU generation before.
    """
    return (
        gpu.is_hopper(x.device)
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[1] % 64 == 32
        and conv.out_channels % 32 == 0
        and (conv.kernel_size[0] > 1, conv.stride[0], conv.dilation[0], conv.groups) == (True, 1, 1, 1)
    )


def convolve_windows(conv: Any, windows: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """``conv`` of frames, computed as a 2-D convolution.

    Args:
        conv: a 3-D convolution of C channels with stride and dilation 1 along time and one group.
        windows: (N, k C, T, H, W), channels-last: for each frame of the result the k frames that ``conv``
            reads, as ``pad_frames`` writes them.
        bias: (C_out,) or None.
        padding: zeros above and below, left and right of each frame.

    Returns:
        (N, C_out, T, H', W'), channels-last.
    """
    # (C_out, k C, height, width), channels-last as cuDNN wants it.
    weight = conv.weight.permute(0, 3, 4, 2, 1).flatten(3).contiguous().movedim(-1, 1)
    images = windows.movedim(2, 1).flatten(0, 1)
    y = F.conv2d(images, weight, bias, conv.stride[1:], padding, conv.dilation[1:])
    return y.unflatten(0, (windows.shape[0], -1)).movedim(2, 1)
