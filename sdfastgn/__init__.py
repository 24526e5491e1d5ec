"""sdfastgn: one line that makes Stable Diffusion in diffusers faster, with the same images and an exact undo.

``sdfastgn.optimize(pipe)`` makes a pipeline channels-last and fuses its GroupNorm (+ activation) calls into Triton kernels;
``sdfastgn.restore(pipe)`` gives back exactly what went in. Importing this package needs neither diffusers nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdfastgn.api import optimize, optimized, report, restore
    from sdfastgn.kernels.act_linear.op import act_linear
    from sdfastgn.kernels.attention.wide_heads import wide_attention
    from sdfastgn.kernels.geglu.op import geglu
    from sdfastgn.kernels.group_norm.instance_norm import instance_norm
    from sdfastgn.kernels.group_norm.op import group_norm
    from sdfastgn.kernels.layer_norm.op import add_layer_norm, layer_norm
    from sdfastgn.kernels.statistics.op import add_with_statistics, cat_with_statistics, channel_statistics
    from sdfastgn.kernels.upsample.conv import upsample_conv2d
    from sdfastgn.kernels.upsample.nearest import upsample_nearest_2x
    from sdfastgn.modules import GroupNorm, InstanceNorm, LayerNorm

__version__ = "0.1.0"
__all__ = [
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "__version__",
    "act_linear",
    "add_layer_norm",
    "add_with_statistics",
    "cat_with_statistics",
    "channel_statistics",
    "geglu",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "optimize",
    "optimized",
    "report",
    "restore",
    "upsample_conv2d",
    "upsample_nearest_2x",
    "wide_attention",
]

# Public names and the modules that hold them, imported at first use (PEP 562).
_LAZY = {
    "optimize": "sdfastgn.api",
    "optimized": "sdfastgn.api",
    "report": "sdfastgn.api",
    "restore": "sdfastgn.api",
    "act_linear": "sdfastgn.kernels.act_linear.op",
    "add_with_statistics": "sdfastgn.kernels.statistics.op",
    "cat_with_statistics": "sdfastgn.kernels.statistics.op",
    "channel_statistics": "sdfastgn.kernels.statistics.op",
    "geglu": "sdfastgn.kernels.geglu.op",
    "group_norm": "sdfastgn.kernels.group_norm.op",
    "instance_norm": "sdfastgn.kernels.group_norm.instance_norm",
    "add_layer_norm": "sdfastgn.kernels.layer_norm.op",
    "layer_norm": "sdfastgn.kernels.layer_norm.op",
    "upsample_conv2d": "sdfastgn.kernels.upsample.conv",
    "upsample_nearest_2x": "sdfastgn.kernels.upsample.nearest",
    "wide_attention": "sdfastgn.kernels.attention.wide_heads",
    "GroupNorm": "sdfastgn.modules",
    "InstanceNorm": "sdfastgn.modules",
    "LayerNorm": "sdfastgn.modules",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sdfastgn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
