"""InstanceNorm with a fused activation: GroupNorm with one channel a group, which the kernels know (``each_channel``).

Formula, layout and numerics: ``group_norm.py``. Channels-last, a program normalises a block of neighbouring channels side by side; one
channel a program would use two bytes of every 32 that memory delivers.

Source: Ulyanov, Vedaldi and Lempitsky, "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016.
"""

from __future__ import annotations

import math

from torch import Tensor

from sfastgn.kernels.group_norm import call_group_norm

__all__ = ["instance_norm"]


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
) -> Tensor:
    """InstanceNorm followed by an activation, fused into Triton kernels on NVIDIA GPUs.

    Args:
        x: (N, C, *spatial), one spatial dimension at least.
        weight, bias: (C,) or None, independently of each other.
        eps: added to the variance of each channel of each sample.
        activation: ``identity``, ``relu``, ``silu``, ``gelu`` (exact) or ``gelu_tanh``.

    Shapes: the output has the shape of x.
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); weight and bias any floating dtype. The output has the dtype of x.
    Layout, Grad: as ``sfastgn.group_norm``.
    Raises:
        TypeError: x is not a floating tensor, or another argument has the wrong type.
        ValueError: a shape, a device or the activation's name does not fit, or there is one position only, as in PyTorch.

    Source: torch.nn.functional.instance_norm (without running statistics) for the interface; Ulyanov et al., 2016, for the formula.
    """
    name = "sfastgn.instance_norm"
    if isinstance(x, Tensor) and (x.dim() < 3 or math.prod(x.shape[2:]) == 1):
        raise ValueError(
            f"{name}: x must be (N, C, *spatial) with more than one spatial element, got shape {tuple(x.shape)}"
        )
    num_groups = x.shape[1] if isinstance(x, Tensor) else 1
    return call_group_norm(name, x, num_groups, eps, activation, (weight, bias, None, None, None), None, False, None)
