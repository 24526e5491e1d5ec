"""Matrix products of E4M3 tensors in PyTorch. ``common/e4m3.py`` explains E4M3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import private


def scaled_product(x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Computes ``(scales[0] * x) @ (scales[1] * weight).T``.

    Args:
        x: (rows, depth), contiguous, in E4M3.
        weight: (columns, depth), contiguous, in E4M3. columns and depth are multiples of 16.
        scales: the scales of x and weight, (1,) fp32.
        dtype: the dtype of the result: fp16 or bf16.

    Returns (rows, columns). On NVIDIA's Hopper GPUs sums have fewer bits than fp32, which is faster. For
    random numbers the relative error is the same as with sums in fp32.
    """
    scaled_mm: Any = private.scaled_mm
    scale_x, scale_weight = scales
    return scaled_mm(
        x, weight.t(), scale_a=scale_x, scale_b=scale_weight, out_dtype=dtype, use_fast_accum=True
    )


def linear_e4m3(x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Computes ``scaled_product`` of x (..., depth). Returns (..., columns)."""
    y = scaled_product(x.view(-1, x.shape[-1]), weight, scales, dtype)
    return y.view(*x.shape[:-1], len(weight))


def add_linear_e4m3_(total: Tensor, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> None:
    """Adds ``scaled_product`` of x and weight to ``total`` (rows, columns), in place."""
    total.add_(scaled_product(x, weight, scales, total.dtype))
