"""Layers whose ``forward`` ``kernels.kernelize`` gives to a model's own.

They have no state: weights and settings are those of the layer that takes the ``forward``.
"""

from __future__ import annotations

from torch import Tensor, nn

from .group_norm.op import group_norm
from .layer_norm.op import layer_norm


class GroupNorm(nn.Module):
    """For ``torch.nn.GroupNorm``. input (N, C, *spatial) -> the same."""

    can_torch_compile: bool = True
    num_groups: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class GroupNormSiLU(nn.Module):
    """For a subclass of ``torch.nn.GroupNorm`` that returns SiLU of what it normalizes."""

    can_torch_compile: bool = True
    num_groups: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, "silu")


class LayerNorm(nn.Module):
    """For ``torch.nn.LayerNorm``. input (*, *normalized_shape) -> the same."""

    can_torch_compile: bool = True
    normalized_shape: tuple[int, ...]
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        dims = len(self.normalized_shape)
        if input.shape[-dims:] != self.normalized_shape:
            raise ValueError(
                f"sdfastgn.layers.LayerNorm: input must end in {tuple(self.normalized_shape)}, "
                f"got shape {tuple(input.shape)}"
            )
        if dims == 1:
            return layer_norm(input, self.weight, self.bias, self.eps)
        # Several dimensions are normalized as one.
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        return layer_norm(input.flatten(-dims), weight, bias, self.eps).view(input.shape)
