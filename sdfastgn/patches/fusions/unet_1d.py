"""Blocks of diffusers' ``UNet1DModel``: each GroupNorm and the activation after it in one kernel.

The kernel also adds the bias of the convolution before the norm.
"""

from __future__ import annotations

from diffusers.models.resnet import Conv1dBlock
from diffusers.models.unets.unet_1d_blocks import OutConv1DBlock, ResConvBlock
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import conv_without_bias
from sdfastgn.patches.layers.group_norm import fused_activation, fused_norm
from sdfastgn.patches.swap.fusion import ClassSwap, activation_reason
from sdfastgn.patches.swap.tested_sources import tested

__all__ = ["FUSIONS"]


def _conv_norm_act(conv: nn.Module, norm: nn.Module, act: nn.Module, x: Tensor) -> Tensor | None:
    """Computes ``act(norm(conv(x)))`` for x (N, C, L). None if stock's code has to run."""
    name = fused_activation(norm, act)
    if name is None or x.dim() != 3 or not dispatch.has_kernels(x):
        return None
    h, bias = conv_without_bias(conv, x)
    return fused_norm(norm, h, name, None, {"shift": bias})


class FusedConv1dBlock(Conv1dBlock):
    """``Conv1dBlock``. inputs (N, C, L) -> (N, C_out, L)."""

    def forward(self, inputs: Tensor) -> Tensor:
        y = _conv_norm_act(self.conv1d, self.group_norm, self.mish, inputs)
        return super().forward(inputs) if y is None else y


class FusedOutConv1DBlock(OutConv1DBlock):
    """``OutConv1DBlock``. hidden_states (N, C, L) -> (N, C_out, L). As in stock, ``temb`` is not used."""

    def forward(self, hidden_states: Tensor, temb: Tensor | None = None) -> Tensor:
        layers = self.final_conv1d_1, self.final_conv1d_gn, self.final_conv1d_act
        y = _conv_norm_act(*layers, hidden_states)
        return super().forward(hidden_states, temb) if y is None else self.final_conv1d_2(y)


class FusedResConvBlock(ResConvBlock):
    """``ResConvBlock``. hidden_states (N, C, L) -> (N, C_out, L)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        h = _conv_norm_act(self.conv_1, self.group_norm_1, self.gelu_1, hidden_states)
        if h is None:
            return super().forward(hidden_states)
        residual = self.conv_skip(hidden_states) if self.has_conv_skip else hidden_states
        if self.is_last:
            return self.conv_2(h) + residual
        y = _conv_norm_act(self.conv_2, self.group_norm_2, self.gelu_2, h)
        return (self.gelu_2(self.group_norm_2(self.conv_2(h))) if y is None else y) + residual


FUSIONS = (
    ClassSwap(
        "conv_1d_block",
        Conv1dBlock,
        FusedConv1dBlock,
        sources=(tested(Conv1dBlock, "__init__", "forward"),),
        check=lambda block: activation_reason(block.mish),
    ),
    ClassSwap(
        "out_conv_1d_block",
        OutConv1DBlock,
        FusedOutConv1DBlock,
        sources=(tested(OutConv1DBlock, "__init__", "forward"),),
        check=lambda block: activation_reason(block.final_conv1d_act),
    ),
    ClassSwap(
        "res_conv_block",
        ResConvBlock,
        FusedResConvBlock,
        sources=(tested(ResConvBlock, "__init__", "forward"),),
        check=lambda block: activation_reason(block.gelu_1),
    ),
)
