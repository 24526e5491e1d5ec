"""diffusers' ``ResnetBlock2D``: fuses both norms with their activations, and the sum at the block's end.

``layers/residual.py`` has the code between the two convolutions. The kernel of the sum also adds conv2's
bias, divides by the output scale, and stores the mean and variance of its result for the next norm. The
module ``nonlinearity`` is not changed, because the block also applies this module to the time embedding.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.convolution import conv_without_bias, pointwise
from sdfastgn.patches.layers.group_norm import norm_act
from sdfastgn.patches.layers.residual import NO_EMBEDDING, Embedding, conv_norm_act
from sdfastgn.patches.layers.statistics import add
from sdfastgn.patches.swap.fusion import (
    ClassSwap,
    activation_reason,
    dropped_out,
    drops_nothing,
    layer_of,
)
from sdfastgn.patches.swap.tested_sources import tested


class FusedResnetBlock2D(ResnetBlock2D):
    """``ResnetBlock2D``, with each norm and the activation after it in one kernel.

    input_tensor (N, C, H, W), temb (N, temb_channels) or None -> (N, C_out, H', W').
    """

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        # Extra arguments are deprecated. With them diffusers' forward runs, because it warns of them.
        if args or kwargs or not dispatch.has_kernels(input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)
        resamples = self.upsample is not None or self.downsample is not None
        reader = None if resamples else layer_of(self, "conv1")
        h = norm_act(layer_of(self, "norm1"), layer_of(self, "nonlinearity"), input_tensor, reader)
        input_tensor, h = self._resample(input_tensor, h)
        h = self._conv1_norm2_act(h, temb)
        h, bias = conv_without_bias(layer_of(self, "conv2"), dropped_out(layer_of(self, "dropout"), h))
        shortcut = layer_of(self, "conv_shortcut")
        if shortcut is not None:
            input_tensor = pointwise(shortcut, input_tensor)
        return add(h, input_tensor, bias, self.output_scale_factor)

    def _resample(self, input_tensor: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        resample = self.upsample if self.upsample is not None else self.downsample
        if resample is None:
            return input_tensor, h
        # Large batches become channels-first before the upsampling, as in diffusers, because PyTorch's
        # channels-last upsampling failed for them.
        if self.upsample is not None and h.shape[0] >= 64:
            input_tensor, h = input_tensor.contiguous(), h.contiguous()
        return resample(input_tensor), resample(h)

    def _conv1_norm2_act(self, h: Tensor, temb: Tensor | None) -> Tensor:
        """Computes the input of conv2, before dropout, from ``h``, the input of conv1, (N, C, H, W).

        ``temb``: the time embedding.
        """
        scales = self.time_embedding_norm == "scale_shift"
        if scales and temb is None:
            raise ValueError(
                "sdfastgn: temb must not be None for a ResnetBlock2D with "
                f"time_embedding_norm={self.time_embedding_norm!r}"
            )
        act = layer_of(self, "nonlinearity")
        # With a ``time_embedding_norm`` other than "default" and "scale_shift" diffusers ignores temb.
        embedding = NO_EMBEDDING
        if scales or self.time_embedding_norm == "default":
            linear_act = None if self.skip_time_act else act
            embedding = Embedding(temb, layer_of(self, "time_emb_proj"), linear_act, scales)
        # The block's ``out_channels`` are read and not conv1's, because conv1 may be a LoRA's wrapper around
        # the convolution.
        conv1, norm2 = layer_of(self, "conv1"), layer_of(self, "norm2")
        reader = layer_of(self, "conv2") if drops_nothing(layer_of(self, "dropout")) else None
        return conv_norm_act(h, conv1, norm2, act, self.out_channels, embedding, reader)


FUSION = ClassSwap(
    "resnet_block",
    ResnetBlock2D,
    FusedResnetBlock2D,
    # Two versions of the ``forward`` of ``ResnetBlock2D`` were tested. They compute the same values. The
    # version before diffusers 0.37 also makes the shortcut's input channels-first, which changes no value.
    sources=(tested(ResnetBlock2D, "__init__", "forward"),),
    check=lambda block: activation_reason(block.nonlinearity),
)
