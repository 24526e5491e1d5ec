"""Computes 3-D convolutions as 2-D convolutions of images that have the channels of several frames."""

from __future__ import annotations

import torch
from torch import Tensor

from sdfastgn.kernels.common import gpu


def windows_pay(
    device: torch.device,
    dtype: torch.dtype,
    weight: torch.Size | tuple[int, ...],
    stride: int,
    dilation: int,
    groups: int,
) -> bool:
    """True if ``convolve_windows`` is faster than a 3-D convolution with a weight of this shape.

    ``weight``: (C_out, C, k, height, width), where k is the number of frames that the convolution reads for
    one frame. ``stride`` and ``dilation`` are those along time.

    It is faster on Hopper if the number C of channels is a multiple of 32 but not of 64, such as the 96
    channels of Wan's largest frames. For these numbers cuDNN's 3-D convolutions use code for the previous GPU
    generation.
    """
    return (
        gpu.is_hopper(device)
        and dtype in (torch.float16, torch.bfloat16)
        and weight[1] % 64 == 32
        and weight[0] % 32 == 0
        and (weight[2] > 1, stride, dilation, groups) == (True, 1, 1, 1)
    )


def convolve_windows(
    windows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """Computes a 3-D convolution of C channels and one group, by a 2-D convolution of each frame.

    Stride and dilation along time are 1.

    Args:
        windows: (N, k C, T, H, W), channels-last. Frame t has the channels of the k frames that the
            convolution reads for frame t of the result, as ``pad_frames`` writes them.
        weight: (C_out, C, k, height, width).
        bias: (C_out,) or None.
        stride, dilation: those along height and width.
        padding: numbers of zeros above and below, and left and right, of each frame.

    Returns:
        (N, C_out, T, H', W'), channels-last.
    """
    # The weight of the 2-D convolution, (C_out, k C, height, width), is channels-last as cuDNN wants it.
    images = weight.permute(0, 3, 4, 2, 1).flatten(3).contiguous().movedim(-1, 1)
    frames = windows.movedim(2, 1).flatten(0, 1)
    y = torch.ops.aten.conv2d.default(frames, images, bias, stride, padding, dilation)
    return y.unflatten(0, (windows.shape[0], -1)).movedim(2, 1)
