"""sfastgn: one line that makes Stable Diffusion in diffusers faster, with the same images and an exact undo.

``sfastgn.optimize(pipe)`` makes a pipeline channels-last and fuses its GroupNorm (+ activation) calls into Triton kernels;
``sfastgn.restore(pipe)`` gives back exactly what went in. Importing this package needs neither diffusers nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfastgn.api import optimize, optimized, report, restore
    from sfastgn.kernels.act_linear import act_linear
    from sfastgn.kernels.channel_statistics import add_with_statistics, cat_with_statistics, channel_statistics
    from sfastgn.kernels.geglu import geglu
    from sfastgn.kernels.group_norm import group_norm
    from sfastgn.kernels.instance_norm import instance_norm
    from sfastgn.kernels.layer_norm import add_layer_norm, layer_norm
    from sfastgn.kernels.upsample import upsample_nearest_2x
    from sfastgn.kernels.upsample_conv import upsample_conv2d
    from sfastgn.kernels.wide_attention import wide_attention
    from sfastgn.modules import GroupNorm, InstanceNorm, LayerNorm

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
    "optimize": "sfastgn.api",
    "optimized": "sfastgn.api",
    "report": "sfastgn.api",
    "restore": "sfastgn.api",
    "act_linear": "sfastgn.kernels.act_linear",
    "add_with_statistics": "sfastgn.kernels.channel_statistics",
    "cat_with_statistics": "sfastgn.kernels.channel_statistics",
    "channel_statistics": "sfastgn.kernels.channel_statistics",
    "geglu": "sfastgn.kernels.geglu",
    "group_norm": "sfastgn.kernels.group_norm",
    "instance_norm": "sfastgn.kernels.instance_norm",
    "add_layer_norm": "sfastgn.kernels.layer_norm",
    "layer_norm": "sfastgn.kernels.layer_norm",
    "upsample_conv2d": "sfastgn.kernels.upsample_conv",
    "upsample_nearest_2x": "sfastgn.kernels.upsample",
    "wide_attention": "sfastgn.kernels.wide_attention",
    "GroupNorm": "sfastgn.modules",
    "InstanceNorm": "sfastgn.modules",
    "LayerNorm": "sfastgn.modules",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sfastgn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
