"""Finds the device on which a ``DiffusionPipeline`` of diffusers works, faster than diffusers does.

A pipeline reads its property ``_execution_device`` at the start of each image. diffusers' property searches
all ``modules()`` of each model for offload hooks. The nested Python generators of ``modules()`` are slow: in
an SDXL pipeline they take half of the CPU time that is spent outside of the models. Here built-in functions
search all modules of one depth at once. If no module has an offload hook and the first parameters of all
models are on one device, this device is the result. Otherwise diffusers' code runs. It also runs if a model
has no parameters, or if its class defines ``device`` in another way.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from sdfastgn.patches.pipeline.object_fusion import ObjectFusion
from sdfastgn.patches.swap.tested_sources import tested

# Python modules that define base classes of models. There the property ``device`` returns the device of the
# model's first parameter.
_FIRST_PARAMETER = ("diffusers.models.modeling_utils", "transformers.modeling_utils")


def _says_first_parameter(cls: type) -> bool:
    getter = getattr(getattr(cls, "device", None), "fget", None)
    return getattr(getter, "__globals__", {}).get("__name__") in _FIRST_PARAMETER


def _device_without_hooks(pipe: Any) -> torch.device | None:
    """The device of all models of ``pipe``.

    None if diffusers' own code must find the device: because the models are on several devices, a module has
    an offload hook or is of TorchScript, a model has no parameters, or a model's class defines ``device`` in
    another way.
    """
    roots = {part for part in vars(pipe).values() if isinstance(part, nn.Module)}
    devices = set()
    for root in roots:
        first = next(root.parameters(), None)
        if first is None or not _says_first_parameter(type(root)):
            return None
        devices.add(first.device)
    if len(devices) != 1:
        return None
    seen: set[nn.Module | None] = {None}
    level: set[nn.Module | None] = {*roots}
    while level:
        seen |= level
        attributes = list(map(vars, level))
        if any("_hf_hook" in names or "_diffusers_hook" in names for names in attributes):
            return None  # accelerate or diffusers offloads this module, so its hook knows the device
        if any("_modules" not in names for names in attributes):
            return None  # a TorchScript module has no ``_modules``
        level = set(chain.from_iterable(names["_modules"].values() for names in attributes)) - seen
    return devices.pop()


def _overrides(stock: Any) -> dict[str, Any]:
    def _execution_device(self: Any) -> Any:
        device = _device_without_hooks(self)
        return stock._execution_device.__get__(self) if device is None else device

    return {"_execution_device": property(_execution_device, doc=stock._execution_device.__doc__)}


FUSION = ObjectFusion(
    "execution_device",
    module=__name__,
    sources=(tested(DiffusionPipeline, "_execution_device", "device"),),
    overrides=_overrides,
    heirs=True,
)
