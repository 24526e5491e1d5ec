"""diffusers' ``DiffusionPipeline``: on which device it works, found in a fraction of the time.

``_execution_device``, which every image begins with, looks for offload hooks with ``modules()``, whose generators go through as many
levels as the tree has, and does so six times, before the GPU has anything to do: 1 to 2 ms on an H200's host. Here the tree is walked once,
and where there are no hooks and one device, that is the answer; anything else is upstream's to decide.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from sdfastgn.patches.pipeline.part import PipelinePart

__all__ = ["PART"]

_READ = ("_execution_device", "device")


def _says_first_parameters(cls: type) -> bool:
    """True if ``device`` of a model is diffusers' or transformers' property: that of its first parameter."""
    getter = getattr(getattr(cls, "device", None), "fget", None)
    module = getattr(getter, "__globals__", {}).get("__name__")
    return module in ("diffusers.models.modeling_utils", "transformers.modeling_utils")


def _is_stock(part: Any) -> bool:
    cls = type(part)
    return issubclass(cls, DiffusionPipeline) and all(
        getattr(cls, n) is getattr(DiffusionPipeline, n) for n in _READ
    )


def _device_without_hooks(pipe: Any) -> torch.device | None:
    """The device of all the pipeline's modules; None if there are hooks, several devices, or modules that say it in their own way."""
    roots = {part for part in list(vars(pipe).values()) if isinstance(part, nn.Module)}
    devices: set[torch.device] = set()
    for root in roots:
        first = next(root.parameters(), None)
        if first is None or not _says_first_parameters(type(root)):
            return None
        devices.add(first.device)
    if len(devices) != 1:
        return None
    seen: set[nn.Module | None] = {None}
    level: set[nn.Module | None] = {*roots}
    while level:  # level by level, so that most of it is done in C
        seen |= level
        attributes = list(map(vars, level))
        if any("_hf_hook" in names or "_diffusers_hook" in names for names in attributes):
            return None
        level = set(chain.from_iterable(names["_modules"].values() for names in attributes)) - seen
    return devices.pop()


def _overrides(stock: Any) -> dict[str, Any]:
    def _execution_device(self: Any) -> Any:
        device = _device_without_hooks(self)
        return stock._execution_device.__get__(self) if device is None else device

    return {"_execution_device": property(_execution_device, doc=stock._execution_device.__doc__)}


PART = PipelinePart(
    "execution_device",
    is_stock=_is_stock,
    overrides=_overrides,
    upstream=lambda _: (DiffusionPipeline, _READ),
)
