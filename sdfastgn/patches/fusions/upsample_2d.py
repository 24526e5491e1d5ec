"""diffusers' ``Upsample2D``: upsampling by two and the convolution behind it, as one where that is faster.

Elsewhere it upsamples in a kernel that reads and writes channels-last in vectors, then calls the
convolution: in training, under autocast to another dtype, where the convolution is not a plain one (LoRA
layers, hooks), and where images are small. Only the usual call of a UNet or decoder is fused: no norm
before it, no transposed convolution, twice the size. PyTorch's own channels-last kernel goes element by
element and fails for large tensors, for which upstream makes the image channels-first.

What adds the bias stores the statistics of what it writes. Nothing is kept between calls: each makes the
weights at low resolution from the convolution's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.upsample.conv import runs_in_phases, upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.core.convolution import conv_without_bias, keeps_size
from sdfastgn.patches.core.fusion import ClassSwap, is_unhooked
from sdfastgn.patches.core.statistics import add_bias, emits, store_statistics
from sdfastgn.patches.core.tested_sources import tested

__all__ = ["FUSION", "FusedUpsample2D", "convolves_at_low_resolution"]


class FusedUpsample2D(Upsample2D):
    """``Upsample2D``. hidden_states (N, C, H, W) -> (N, C_out, 2H, 2W), channels-last.

    Everywhere but on a channels-last image on a GPU it is upstream's forward, under a compiler too.
    """

    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not _runs_fused(self, hidden_states, output_size):
            return super().forward(hidden_states, output_size, *args, **kwargs)
        conv = _conv_of(self)
        if conv is None:
            if torch.is_autocast_enabled("cuda"):  # it interpolates in fp32
                return super().forward(hidden_states)
            return upsample_nearest_2x(hidden_states)
        if not convolves_at_low_resolution(conv, hidden_states):
            return add_bias(*conv_without_bias(conv, upsample_nearest_2x(hidden_states)))
        if not emits(conv.out_channels, 4 * math.prod(hidden_states.shape[2:])):
            return upsample_conv2d(hidden_states, conv.weight, conv.bias)
        return store_statistics(*upsample_conv2d(hidden_states, conv.weight, conv.bias, with_statistics=True))


def convolves_at_low_resolution(conv: Any, x: Tensor) -> bool:
    """True if ``upsample_conv2d`` computes what ``conv`` makes of the upsampled x, and faster."""
    return (
        type(conv) is nn.Conv2d
        and is_unhooked(conv)
        and keeps_size(conv)
        and (conv.groups, conv.in_channels) == (1, x.shape[1])
        and conv.weight.dtype == x.dtype
        and (conv.bias is None or conv.bias.dtype == x.dtype)
        and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != x.dtype)
        and dispatch.is_plain_inference(x, (conv.weight, conv.bias))
        and runs_in_phases(x, conv.weight)
    )


def _conv_of(module: Any) -> Any:
    """The convolution behind the upsampling, under either of upstream's names; None without one."""
    return (module.conv if module.name == "conv" else module.Conv2d_0) if module.use_conv else None


def _runs_fused(module: Any, x: Tensor, output_size: Any) -> bool:
    return (
        not torch.compiler.is_compiling()
        and _is_nearest(module)
        and x.dim() == 4
        and x.shape[1] == module.channels  # else upstream's own error
        and (output_size is None or tuple(output_size) == (2 * x.shape[2], 2 * x.shape[3]))
        and dispatch.runs_in_triton(x)
        and dispatch.has_kernels(x)
        and is_channels_last(x)
    )


def _is_nearest(module: Any) -> bool:
    return module.norm is None and not module.use_conv_transpose and module.interpolate


# With a norm, a transposed convolution or no interpolation it is another operation.
FUSION = ClassSwap(
    "upsample_2d",
    Upsample2D,
    FusedUpsample2D,
    sources=(tested(Upsample2D, __init__="8be1e93fd9fb5c47", forward="a7b7f16a892af3a3"),),
    covers=_is_nearest,
)
