"""``sfastgn.GroupNorm``: the module form of ``sfastgn.group_norm``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sfastgn.kernels.activations import ACTIVATIONS
from sfastgn.kernels.group_norm import group_norm

__all__ = ["GroupNorm"]


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` with a fused activation: the same constructor, attributes and state_dict.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``torch.nn.GroupNorm``.
        activation: ``identity``, ``relu``, ``silu``, ``gelu`` (exact) or ``gelu_tanh``.

    Shapes: (N, C, *spatial) -> the same. Dtypes, layout, gradients and errors of the call: ``sfastgn.group_norm``.
    Raises: ValueError if num_groups does not divide num_channels or the activation is unknown.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str = "identity",
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"sfastgn.GroupNorm: unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        if num_groups == 0:
            raise ZeroDivisionError("sfastgn.GroupNorm: num_groups must be positive, got 0")
        if num_groups < 0 or num_channels % num_groups:
            raise ValueError(
                f"sfastgn.GroupNorm: num_groups={num_groups} must be a positive divisor of num_channels={num_channels}"
            )
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:  # torch 2.11's constructor has no such argument
            self.register_parameter("bias", None)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
