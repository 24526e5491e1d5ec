"""Layers for ``kernels.kernelize``, which gives the ``forward`` of these classes to a model's layers.

The classes have no weights or settings. ``forward`` reads the weights and settings of the model's layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from .group_norm.op import group_norm
from .layer_norm.op import layer_norm


class GroupNorm(nn.Module):
    """Replaces ``torch.nn.GroupNorm``. input (N, C, *spatial) -> a tensor of the same shape."""

    can_torch_compile: bool = True
    num_groups: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class GroupNormSiLU(nn.Module):
    """Replaces a subclass of ``torch.nn.GroupNorm`` that applies SiLU after the norm."""

    can_torch_compile: bool = True
    num_groups: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, "silu")


class LayerNorm(nn.Module):
    """Replaces ``torch.nn.LayerNorm``. input (*, *normalized_shape) -> a tensor of the same shape."""

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
        # Several normalized dimensions are flattened into one.
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        return layer_norm(input.flatten(-dims), weight, bias, self.eps).view(input.shape)
