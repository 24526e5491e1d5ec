"""All fusions that ``optimize`` uses, in the order in which they are applied. They are undone in reverse.

``patcher.py`` takes every fusion from here, and has no code for particular models. The fusions for ComfyUI
are in ``comfyui/inject.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.swap.fusion import Fusion

# The fusions for modules of PyTorch. Each entry has the name of a Python module in ``sdfastgn.patches``, and
# then names of variables in that module. The value of each variable is a fusion or a tuple of fusions.
_FUSIONS = (
    ("layers.group_norm", "FUSION"),
    ("layers.group_norm_subclass", "FUSION"),
    ("fusions.sequential", "FUSION"),
)
_ASKED = (("fusions.sequential", "FOLD_BATCH_NORM"),)
_OF_DIFFUSERS = (
    ("fusions.resnet_block", "FUSION"),
    ("fusions.resnet_block_cond_norm", "FUSION"),
    ("fusions.temporal_resnet_block", "FUSION", "SPATIO_TEMPORAL"),
    ("fusions.transformer_2d", "FUSION"),
    ("fusions.transformer_block", "FUSION"),
    ("fusions.temporal_transformer", "FUSION", "MOTION"),
    ("fusions.spatio_temporal_transformer", "FUSION"),
    ("fusions.attention", "FUSION"),
    ("fusions.up_block", "FUSION", "CROSS_ATTENTION"),
    ("fusions.video_up_block", "FUSIONS"),
    ("fusions.upsample_2d", "FUSION"),
    ("fusions.ada_group_norm", "FUSION"),
    ("fusions.geglu", "FUSION"),
    ("fusions.conv_norm_out", "FUSION"),
    ("fusions.decoder_slices", "FUSION"),
    ("fusions.tiled_decode", "FUSION"),
    ("fusions.autoencoder_tiny", "BLOCK", "ENCODER", "DECODER"),
)
_OF_PIPELINES = (
    ("pipeline.scheduler", "FUSION"),
    ("pipeline.image_processor", "FUSION"),
    ("pipeline.device", "FUSION"),
)

# The Python modules in ``sdfastgn.patches`` that could not be imported: a dict from the module's name to the
# error's message. The installed diffusers lacks a class that such a module's fusions replace, or has moved
# this class. ``FUSIONS`` and the other tuples below do not have the fusions of such a module.
MISSING: dict[str, str] = {}


def _fusions(*entries: tuple[str, ...]) -> tuple[Any, ...]:
    found: list[Any] = []
    for file, *names in entries:
        try:
            module = importlib.import_module(f"sdfastgn.patches.{file}")
        except (ImportError, AttributeError) as error:
            MISSING[file] = str(error)
        else:
            for value in (getattr(module, name) for name in names):
                found += value if isinstance(value, tuple) else (value,)
    return tuple(found)


_has_diffusers = importlib.util.find_spec("diffusers") is not None
FUSIONS: tuple[Fusion, ...] = _fusions(*_FUSIONS, *(_OF_DIFFUSERS if _has_diffusers else ()))
# A dict from names to fusions, for the fusions for ``nn.Module``s that are applied only if the user asks for
# them.
ASKED_FUSIONS: dict[str, Fusion] = {fusion.name: fusion for fusion in _fusions(*_ASKED)}
# The fusions for objects of a pipeline that are not ``nn.Module``s, such as schedulers.
OBJECT_FUSIONS: tuple[ObjectFusion, ...] = _fusions(*(_OF_PIPELINES if _has_diffusers else ()))

if MISSING:
    left_out = "; ".join(f"{file} ({reason})" for file, reason in MISSING.items())
    warnings.warn(
        f"sdfastgn: this diffusers lacks what some fusions replace, and they are left out: {left_out}",
        stacklevel=2,
    )
