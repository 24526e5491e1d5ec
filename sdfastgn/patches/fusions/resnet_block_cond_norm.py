"""diffusers' ``ResnetBlockCondNorm2D``: both norms with their activations, and the sum at the block's end.

Its norms read the time embedding (``AdaGroupNorm``). The kernel of the second norm adds the bias of the
convolution before it. The kernel of the sum also adds conv2's bias, divides by the output scale, and stores
the statistics of its result. Norms that read the latents (``SpatialNorm``) run diffusers' code. Only
autoencoders have such norms, and an autoencoder usually runs as a plan: a traced list of kernels that
replaces the Python of its forward.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.resnet import ResnetBlockCondNorm2D
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.fusions import ada_group_norm
from sdfastgn.patches.layers.convolution import conv_without_bias, pointwise
from sdfastgn.patches.layers.statistics import add, add_bias
from sdfastgn.patches.swap.fusion import ClassSwap, activation_reason, dropped_out, layer_of
from sdfastgn.patches.swap.tested_sources import tested


class FusedResnetBlockCondNorm2D(ResnetBlockCondNorm2D):
    """``ResnetBlockCondNorm2D``. input_tensor (N, C, H, W) -> (N, C_out, H, W).

    ``temb``: the time embedding (N, temb_channels), or the latents (N, temb_channels, h, w).
    """

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        resamples = self.upsample is not None or self.downsample is not None
        # Extra arguments are deprecated. With them diffusers' forward runs, because it warns of them.
        if args or kwargs or resamples or not dispatch.has_kernels(input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)
        h = self._norm_act("norm1", input_tensor, temb, None)
        h, bias = conv_without_bias(layer_of(self, "conv1"), h)
        h = self._norm_act("norm2", h, temb, bias)
        h, bias = conv_without_bias(layer_of(self, "conv2"), dropped_out(layer_of(self, "dropout"), h))
        shortcut = layer_of(self, "conv_shortcut")
        if shortcut is not None:
            input_tensor = pointwise(shortcut, input_tensor)
        return add(h, input_tensor, bias, self.output_scale_factor)

    def _norm_act(self, name: str, x: Tensor, temb: Tensor, bias: Tensor | None) -> Tensor:
        """Computes ``act(norm(x + bias, temb))`` with the norm in the attribute ``name``.

        One kernel computes all of this if possible.
        """
        norm, act = layer_of(self, name), layer_of(self, "nonlinearity")
        y = ada_group_norm.ada_norm_act(norm, act, x, temb, bias)
        return act(norm(add_bias(x, bias), temb)) if y is None else y


FUSION = ClassSwap(
    "resnet_block_cond_norm",
    ResnetBlockCondNorm2D,
    FusedResnetBlockCondNorm2D,
    sources=(tested(ResnetBlockCondNorm2D, "__init__", "forward"), ada_group_norm.SOURCE),
    check=lambda block: activation_reason(block.nonlinearity),
)
