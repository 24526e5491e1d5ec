"""diffusers' ``Upsample2D``: upsampling by two and its convolution are one convolution where that is faster.

Only the usual module of a UNet or decoder is fused: it doubles the size, has no norm, and its convolution is
not transposed. PyTorch's own channels-last upsampling is slow, because it copies element by element. For
large tensors PyTorch's kernel fails, so diffusers makes large tensors channels-first.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.layers.upsampling import conv_of_upsampled
from sdfastgn.patches.swap.fusion import ClassSwap
from sdfastgn.patches.swap.tested_sources import tested


class FusedUpsample2D(Upsample2D):
    """``Upsample2D``. hidden_states (N, C, H, W) -> (N, C_out, 2H, 2W), channels-last.

    Only calls with a channels-last image on a GPU are fused. Other calls, and all calls under a compiler, run
    diffusers' forward.
    """

    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not _runs_fused(self, hidden_states, output_size):
            return super().forward(hidden_states, output_size, *args, **kwargs)
        conv = _conv_of(self)
        if conv is None:
            if torch.is_autocast_enabled("cuda"):
                return super().forward(hidden_states)  # under autocast diffusers interpolates in fp32
            return upsample_nearest_2x(hidden_states)
        return conv_of_upsampled(conv, hidden_states)


def _conv_of(module: Any) -> Any:
    """Returns the convolution after the upsampling; None if the module has none."""
    return (module.conv if module.name == "conv" else module.Conv2d_0) if module.use_conv else None


def _runs_fused(module: Any, x: Tensor, output_size: Any) -> bool:
    return (
        not torch.compiler.is_compiling()
        and _is_nearest(module)
        and x.dim() == 4
        # For another number of channels, diffusers' forward must run, because it raises the right error.
        and x.shape[1] == module.channels
        and (output_size is None or tuple(output_size) == (2 * x.shape[2], 2 * x.shape[3]))
        and dispatch.has_kernels(x)
        and is_channels_last(x)
    )


def _is_nearest(module: Any) -> bool:
    return module.norm is None and not module.use_conv_transpose and module.interpolate


# An ``Upsample2D`` with a norm, with a transposed convolution or without interpolation is not fused: it
# computes something else than an upsampling and a convolution.
FUSION = ClassSwap(
    "upsample_2d",
    Upsample2D,
    FusedUpsample2D,
    sources=(tested(Upsample2D, "__init__", "forward"),),
    covers=_is_nearest,
)
