"""Computes an upsampling by two and the convolution after it as one convolution at low resolution.

If this is not possible or not faster, a kernel upsamples the image, and then the convolution is called.
Examples are training, autocast to another dtype, a convolution with hooks or with an adapter that is not
merged, and small images. The fusions for diffusers and for ComfyUI both use this file.

Where it saves time, the kernel that writes the result also computes the result's statistics. The weights of
the low-resolution convolution are computed from the module's weight at each call, so changes of the weight
take effect at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.upsample.conv import runs_in_phases, upsample_conv2d
from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
from sdfastgn.patches.layers.convolution import conv_without_bias, is_plain_conv, keeps_size
from sdfastgn.patches.layers.statistics import add_bias, emits, store_statistics
from sdfastgn.patches.lora.merging import plain_layer


def conv_of_upsampled(conv: Any, x: Tensor) -> Tensor:
    """Upsamples x (N, C, H, W), channels-last, by two (nearest neighbor), and applies ``conv``."""
    conv = plain_layer(conv)
    if not convolves_at_low_resolution(conv, x):
        return add_bias(*conv_without_bias(conv, upsample_nearest_2x(x)))
    if not emits(conv.out_channels, 4 * math.prod(x.shape[2:])):
        return upsample_conv2d(x, conv.weight, conv.bias)
    return store_statistics(*upsample_conv2d(x, conv.weight, conv.bias, with_statistics=True))


def convolves_at_low_resolution(conv: Any, x: Tensor) -> bool:
    """True if ``upsample_conv2d`` computes the same as ``conv(upsampled x)``, and is faster."""
    return (
        is_plain_conv(conv)
        and keeps_size(conv)
        and (conv.groups, conv.in_channels) == (1, x.shape[1])
        and conv.weight.dtype == x.dtype
        and (conv.bias is None or conv.bias.dtype == x.dtype)
        and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != x.dtype)
        and dispatch.is_plain_inference(x, (conv.weight, conv.bias))
        and runs_in_phases(x, conv.weight)
    )
