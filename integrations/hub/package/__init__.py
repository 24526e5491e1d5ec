"""GroupNorm, channel norm, LayerNorm, BatchNorm and GEGLU as Triton kernels, forward and backward.

sdfastgn's scripts/build_hub_kernels.py writes this package. Each function's docstring has its shapes, dtypes
and errors. The functions use plain PyTorch if no kernel can run, as on a CPU or in fp64.
"""

from . import layers
from .batch_norm.op import batch_norm
from .channel_norm.op import channel_norm
from .geglu.op import geglu
from .group_norm.instance_norm import instance_norm
from .group_norm.op import group_norm
from .layer_norm.op import add_layer_norm, layer_norm
from .statistics.op import add_with_statistics, cat_with_statistics, channel_statistics
from .upsample.nearest import upsample_nearest_2x

__all__ = [
    "add_layer_norm",
    "add_with_statistics",
    "batch_norm",
    "cat_with_statistics",
    "channel_norm",
    "channel_statistics",
    "geglu",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "layers",
    "upsample_nearest_2x",
]
