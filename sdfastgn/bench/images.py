"""Comparing images and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor


def psnr(a: ArrayLike, b: ArrayLike) -> float:
    """PSNR in dB of two float images or batches in [0, 1]; inf if equal, nan if not finite.

    Raises ValueError if the shapes differ.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"psnr: shapes differ: {x.shape} and {y.shape}")
    error = float(np.mean((x - y) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error) if math.isfinite(error) else math.nan


def relative_error(a: Tensor | Mapping[str, Tensor], b: Tensor | Mapping[str, Tensor]) -> float:
    """‖a - b‖ / ‖b‖ in fp64, of tensors by name over all of them; nan if anything is.

    Raises ValueError if the shapes differ.
    """
    ours, theirs = ({"": each} if isinstance(each, Tensor) else each for each in (a, b))
    difference = norm = 0.0
    for name, expected in theirs.items():  # one after the other: SDXL's gradients have 2.6 billion values
        found = ours[name]
        if found.shape != expected.shape:
            raise ValueError(
                f"relative_error: shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}"
            )
        truth = expected.to(found.device).double()
        difference += float((found.double() - truth).square().sum())
        norm += float(truth.square().sum())
    return math.sqrt(difference / norm) if norm else math.nan
