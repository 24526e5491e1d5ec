"""diffusers' ``ResnetBlock2D``: both norms with their activations, and the sum at its end.

conv1's bias and the time embedding are constants per (n, c). norm2's kernel adds them while it reads,
which saves two passes over the tensor. One kernel (``act_linear``) activates and projects the embedding
and adds the bias to it. The sum at the end takes conv2's bias and the output scale, and stores the
statistics of what it writes. ``nonlinearity`` stays a module of its own, since the block also applies it
to the time embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.core.convolution import bias_can_move, conv_without_bias, pointwise
from sdfastgn.patches.core.fusion import ClassSwap, activation_reason
from sdfastgn.patches.core.linear import fused_linear, linear_of
from sdfastgn.patches.core.statistics import add
from sdfastgn.patches.core.tested_sources import tested
from sdfastgn.patches.fusions.group_norm import can_fuse, norm_act

__all__ = ["FUSION", "FusedResnetBlock2D"]


class FusedResnetBlock2D(ResnetBlock2D):
    """``ResnetBlock2D`` with fused normalizations.

    input_tensor (N, C, H, W), temb (N, temb_channels) or None -> (N, C_out, H', W').
    """

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        # Upstream warns about deprecated arguments.
        if args or kwargs or not dispatch.has_kernels(input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)
        h = norm_act(self.norm1, self.nonlinearity, input_tensor)
        input_tensor, h = self._resample(input_tensor, h)
        h = self._conv1_norm2_act(h, temb)
        h, bias = conv_without_bias(self.conv2, self.dropout(h))
        if self.conv_shortcut is not None:
            input_tensor = pointwise(self.conv_shortcut, input_tensor)
        return add(h, input_tensor, bias, self.output_scale_factor)

    def _resample(self, input_tensor: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        resample = self.upsample if self.upsample is not None else self.downsample
        if resample is None:
            return input_tensor, h
        # diffusers' guard: channels-last upsampling failed for large batches.
        if self.upsample is not None and h.shape[0] >= 64:
            input_tensor, h = input_tensor.contiguous(), h.contiguous()
        return resample(input_tensor), resample(h)

    def _conv1_norm2_act(self, h: Tensor, temb: Tensor | None) -> Tensor:
        """From conv1's input and the time embedding to conv2's input."""
        N, C = h.shape[0], self.out_channels  # not conv1's: a LoRA layer may stand in its place
        scale_shift = self.time_embedding_norm == "scale_shift"
        fuses = can_fuse(self.norm2, self.nonlinearity)
        # cuDNN adds a bias in a pass of its own; the normalization adds it for nothing.
        bias = self.conv1.bias if fuses and dispatch.runs_in_triton(h) and bias_can_move(self.conv1) else None
        temb, has_bias = self._project(temb, h, bias)
        if self.time_embedding_norm not in ("default", "scale_shift"):
            temb = None  # upstream ignores it
        if scale_shift and temb is None:
            raise ValueError(
                "sdfastgn: temb must not be None for a ResnetBlock2D with "
                f"time_embedding_norm={self.time_embedding_norm!r}"
            )
        fits = temb is None or (
            temb.dtype == h.dtype and tuple(temb.shape) == (N, 2 * C if scale_shift else C)
        )
        if not (fits and fuses):
            return self._unfused(self.conv1(h), temb)
        operands: dict[str, Tensor | None] = {}
        if scale_shift and temb is not None:
            operands["ada_scale"], operands["ada_shift"] = torch.chunk(temb, 2, dim=1)
        else:
            operands["shift"] = temb
        if bias is None:
            h = self.conv1(h)
        else:
            h = self.conv1._conv_forward(h, self.conv1.weight, None)
            if not has_bias:
                shift = operands.get("shift")
                operands["shift"] = bias if shift is None else shift + bias
        return norm_act(self.norm2, self.nonlinearity, h, **operands)

    def _project(self, temb: Tensor | None, h: Tensor, bias: Tensor | None) -> tuple[Tensor | None, bool]:
        """The projected time embedding, and whether ``bias`` is in it. h: conv1's input."""
        if self.time_emb_proj is None:
            return temb, False
        act = None if self.skip_time_act else self.nonlinearity
        if (
            bias is not None
            and temb is not None
            and self.time_embedding_norm == "default"
            and (temb.dtype, temb.shape[0]) == (h.dtype, h.shape[0])
        ):
            shift = fused_linear(self.time_emb_proj, act, temb, bias)
            if shift is not None:
                return shift, True
        return linear_of(self.time_emb_proj, act, temb), False

    def _unfused(self, h: Tensor, temb: Tensor | None) -> Tensor:
        if temb is not None and self.time_emb_proj is not None:
            temb = temb[:, :, None, None]
        if self.time_embedding_norm == "scale_shift" and temb is not None:
            ada_scale, ada_shift = torch.chunk(temb, 2, dim=1)
            return self.nonlinearity(self.norm2(h) * (1 + ada_scale) + ada_shift)
        return norm_act(self.norm2, self.nonlinearity, h if temb is None else h + temb)


FUSION = ClassSwap(
    "resnet_block",
    ResnetBlock2D,
    FusedResnetBlock2D,
    # Before 0.37 the shortcut's input becomes channels-first, with the same values.
    sources=(
        tested(ResnetBlock2D, __init__="f6111697ab9ce6fc", forward="27d3601251620ffd 8d4e47f410843292"),
    ),
    check=lambda block: activation_reason(block.nonlinearity),
)
