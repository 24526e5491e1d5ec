"""Measures how much images and tensors differ: PSNR, SSIM, relative errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

# The window of SSIM, from its paper: pixels along a side, and standard deviation of the Gaussian weights.
WINDOW, SIGMA = 11, 1.5
# Constants that SSIM adds to its numerators and denominators, for values in [0, 1]. Without C2 a denominator
# would be zero in areas of one color, and without C1 in black areas.
C1, C2 = 0.01**2, 0.03**2


def psnr(a: ArrayLike, b: ArrayLike) -> float:
    """PSNR in dB between two float images or batches in [0, 1]. Inf if equal, NaN if a value is not finite.

    Raises ValueError if the shapes differ.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"psnr: shapes differ: {x.shape} and {y.shape}")
    error = float(np.mean((x - y) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error) if math.isfinite(error) else math.nan


def ssim(a: ArrayLike, b: ArrayLike) -> float:
    """Mean SSIM of two float images or batches (..., H, W, channels) in [0, 1]; 1 if equal.

    All channels have the same weight. The image is not padded: every window lies inside of it. Raises
    ValueError if the shapes differ or an image is smaller than a window of ``WINDOW`` x ``WINDOW`` pixels.

    Source: Wang, Bovik, Sheikh and Simoncelli, "Image Quality Assessment: From Error Visibility to
    Structural Similarity", 2004.
    """
    x, y = (torch.as_tensor(np.asarray(each, dtype=np.float64)) for each in (a, b))
    if x.shape != y.shape:
        raise ValueError(f"ssim: shapes differ: {tuple(x.shape)} and {tuple(y.shape)}")
    if x.ndim < 3 or min(x.shape[-3:-1]) < WINDOW:
        wanted = f"images of at least {WINDOW}x{WINDOW} pixels"
        raise ValueError(f"ssim: expected {wanted} with channels, got shape {tuple(x.shape)}")
    weights = torch.exp(-((torch.arange(WINDOW, dtype=x.dtype) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    weights /= weights.sum()

    def mean(values: Tensor) -> Tensor:
        planes = values.movedim(-1, -3).reshape(-1, 1, *values.shape[-3:-1])
        return F.conv2d(F.conv2d(planes, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))

    mean_x, mean_y = mean(x), mean(y)
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float((luminance * (2 * covariance + C2) / (variances + C2)).mean())


def relative_error(a: Tensor | Mapping[str, Tensor], b: Tensor | Mapping[str, Tensor]) -> float:
    """Computes ‖a - b‖ / ‖b‖ in fp64. NaN if a value is NaN, or if all of ``b`` is zero.

    The norm of a dict of tensors is the norm of all elements of all tensors.

    Raises ValueError if the shapes differ.
    """
    ours, theirs = ({"": each} if isinstance(each, Tensor) else each for each in (a, b))
    difference = norm = 0.0
    # Only one tensor at a time is converted to fp64, because SDXL's gradients have 2.6 billion values.
    for name, expected in theirs.items():
        found = ours[name]
        if found.shape != expected.shape:
            raise ValueError(
                f"relative_error: shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}"
            )
        truth = expected.to(found.device).double()
        difference += float((found.double() - truth).square().sum())
        norm += float(truth.square().sum())
    return math.sqrt(difference / norm) if norm else math.nan


def row_errors(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The median and the 95th percentile of the relative errors of the rows of ``a`` against those of ``b``.

    A row is the vector of all channels at one position. The channels are the last axis, or axis 1 in images
    and videos (N, C, ..., H, W). A row's error is ||a - b|| / ||b||. Both results are NaN if a value is NaN.

    Raises ValueError if the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"row_errors: shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    axis = 1 if b.dim() >= 4 else -1
    truth = b.to(a.device).float()
    difference = (a.float() - truth).norm(dim=axis).flatten()
    errors = torch.where(difference == 0, 0.0, difference / truth.norm(dim=axis).flatten())
    if errors.isnan().any():
        return math.nan, math.nan
    median, most = (errors.kthvalue(math.ceil(share * len(errors))).values for share in (0.5, 0.95))
    return float(median), float(most)
