"""sdfastgn: one line that makes Stable Diffusion in diffusers faster, with an exact undo.

``sdfastgn.optimize(pipe)`` makes a pipeline channels-last and fuses its GroupNorm and activation
calls into Triton kernels. ``sdfastgn.restore(pipe)`` makes the pipeline exactly what it was before.
``import sdfastgn`` imports neither diffusers nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "import X as X" in this file tells type checkers that X is public.
    from sdfastgn.api import optimize as optimize
    from sdfastgn.api import optimized as optimized
    from sdfastgn.api import report as report
    from sdfastgn.api import restore as restore
    from sdfastgn.kernels.batch_norm.op import batch_norm as batch_norm
    from sdfastgn.kernels.group_norm.instance_norm import instance_norm as instance_norm
    from sdfastgn.kernels.group_norm.op import group_norm as group_norm
    from sdfastgn.kernels.layer_norm.op import add_layer_norm as add_layer_norm
    from sdfastgn.kernels.layer_norm.op import layer_norm as layer_norm
    from sdfastgn.kernels.statistics.op import add_with_statistics as add_with_statistics
    from sdfastgn.kernels.statistics.op import cat_with_statistics as cat_with_statistics
    from sdfastgn.kernels.statistics.op import channel_statistics as channel_statistics
    from sdfastgn.modules import BatchNorm as BatchNorm
    from sdfastgn.modules import GroupNorm as GroupNorm
    from sdfastgn.modules import InstanceNorm as InstanceNorm
    from sdfastgn.modules import LayerNorm as LayerNorm

__version__ = "0.1.0"

# The Python module that defines each public name. It is imported when the name is first used (PEP 562).
_HOMES = {
    "BatchNorm": "sdfastgn.modules",
    "GroupNorm": "sdfastgn.modules",
    "InstanceNorm": "sdfastgn.modules",
    "LayerNorm": "sdfastgn.modules",
    "add_layer_norm": "sdfastgn.kernels.layer_norm.op",
    "add_with_statistics": "sdfastgn.kernels.statistics.op",
    "batch_norm": "sdfastgn.kernels.batch_norm.op",
    "cat_with_statistics": "sdfastgn.kernels.statistics.op",
    "channel_statistics": "sdfastgn.kernels.statistics.op",
    "group_norm": "sdfastgn.kernels.group_norm.op",
    "instance_norm": "sdfastgn.kernels.group_norm.instance_norm",
    "layer_norm": "sdfastgn.kernels.layer_norm.op",
    "optimize": "sdfastgn.api",
    "optimized": "sdfastgn.api",
    "report": "sdfastgn.api",
    "restore": "sdfastgn.api",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sdfastgn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
