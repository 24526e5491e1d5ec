"""Layers for ``kernels.kernelize``, which gives a model's layers the ``forward`` of one of these classes.

The classes have no weights or settings: ``self`` is the model's layer, whose weights and settings are read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .channel_norm.op import channel_norm
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


class ChannelNorm(nn.Module):
    """Replaces diffusers' ``WanRMS_norm`` and its copies in other models: RMSNorm over the channels.

    x (N, C, *spatial), or (*, C) if ``channel_first`` is False -> a tensor of the same shape.
    """

    can_torch_compile: bool = True
    channel_first: bool
    scale: float
    gamma: Tensor
    bias: Tensor | float

    def forward(self, x: Tensor) -> Tensor:
        return _channel_norm(self, x, "identity")


class ChannelNormSiLU(nn.Module):
    """Replaces a subclass of ``WanRMS_norm`` that applies SiLU after the norm."""

    can_torch_compile: bool = True
    channel_first: bool
    scale: float
    gamma: Tensor
    bias: Tensor | float

    def forward(self, x: Tensor) -> Tensor:
        return _channel_norm(self, x, "silu")


def _channel_norm(norm: Any, x: Tensor, activation: str) -> Tensor:
    # ``WanRMS_norm`` without a bias has the number 0 as ``bias``.
    bias = norm.bias.flatten() if isinstance(norm.bias, Tensor) else None
    channels_second = x if norm.channel_first else x.flatten(0, -2)
    y = channel_norm(channels_second, norm.gamma.flatten(), bias, norm.scale, activation=activation)
    return y if norm.channel_first else y.view(x.shape)


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
        # ``layer_norm`` normalizes only the last dimension, so several dimensions are flattened into one.
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        return layer_norm(input.flatten(-dims), weight, bias, self.eps).view(input.shape)
