"""InstanceNorm with a fused activation: ``group_norm`` with a group for each channel.

``group_norm/op.py`` has the formula, ``group_norm/kernels.py`` the layouts and numerics. If x is
channels-last, a program normalizes several neighboring channels (``each_channel`` in
``group_norm/config.py``). With a single 16-bit channel, a program would use only two bytes of each 32 bytes
that memory delivers.

Source: Ulyanov, Vedaldi and Lempitsky, "Instance Normalization: The Missing Ingredient for Fast
Stylization", 2016.
"""

from __future__ import annotations

import math

from torch import Tensor

from sdfastgn.kernels.common.checks import as_eps, check_input
from sdfastgn.kernels.group_norm.op import GROUP_NORM, NO_MORE, GroupNormCall


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
) -> Tensor:
    """InstanceNorm followed by an activation, fused into Triton kernels on NVIDIA GPUs.

    Args:
        x: (N, C, *spatial), with at least one spatial dimension. The number of positions, which is the
            product of the spatial sizes, may be 0 or more than 1, but not 1.
        weight, bias: (C,) or None, independently of each other.
        eps: added to the variance of each channel of each sample.
        activation: a key of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.

    Shapes: the output has the shape of x.
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. weight and bias may have any of
        these dtypes. The output has the dtype of x, also under autocast.
    Layout: any. The output has the strides of x if x is channels-first or channels-last. Else it is
        channels-last if the channels of x have stride 1, and channels-first otherwise.
    Grad: every tensor has gradients. Second derivatives, the transforms of torch.func (vmap, jacrev) and
        forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: a tensor is not strided or has another dtype, or another argument has the wrong type.
        ValueError: a shape, a device or the activation's name does not fit, or there is only one position,
            as in PyTorch.

    Source: torch.nn.functional.instance_norm (without running statistics) for the interface;
    Ulyanov et al., 2016, for the formula.
    """
    name = "sdfastgn.instance_norm"
    try:
        fits = x.dim() >= 3 and math.prod(x.shape[2:]) != 1
    except (AttributeError, RuntimeError):  # x is no tensor or is nested: ``check_input`` raises
        fits = False
    if not fits:
        check_input(name, "x", x)
        raise ValueError(
            f"{name}: x must be (N, C, *spatial), not with exactly one spatial element, "
            f"got shape {tuple(x.shape)}"
        )
    eps = eps if type(eps) is float else as_eps(name, eps)
    num_groups = x.shape[1] or 1  # 1 if x has no channels: the result is empty, as in PyTorch
    return GROUP_NORM(GroupNormCall(x, num_groups, weight, bias, eps, activation, *NO_MORE), name)
