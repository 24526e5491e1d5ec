"""Remembers the state of a model, and restores it after a benchmark has changed it, as by torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Attributes of a module that are dicts. The benchmark's variants (ways to run a model) change these dicts in
# place, so a snapshot also copies the entries of the dicts.
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def modules_of(target: Any) -> dict[str, nn.Module]:
    """Return {name of a component: module} for a diffusers pipeline, and ``{"": module}`` for a module."""
    if isinstance(target, nn.Module):
        return {"": target}
    return {name: part for name, part in target.components.items() if isinstance(part, nn.Module)}


class Snapshot:
    """Remembers the classes, attributes, hooks and tensor strides of a model or pipeline.

    A snapshot copies no tensor. So it cannot restore the values of weights, and no variant of the benchmark
    may change them. It can restore the memory format of weights.
    """

    def __init__(self, target: object) -> None:
        modules = [module for root in modules_of(target).values() for module in root.modules()]
        owners: list[Any] = list({id(module): module for module in modules}.values())
        if not isinstance(target, nn.Module):
            processor = getattr(target, "image_processor", None)
            owners += [target] if processor is None else [target, processor]
        self._saved = []
        for owner in owners:
            registries = {name: dict(vars(owner)[name]) for name in _REGISTRIES if name in vars(owner)}
            self._saved.append((owner, type(owner), dict(vars(owner)), registries))
        tensors = [each for m in modules for each in (*m.parameters(False), *m.buffers(False))]
        self._strides = [(tensor, tensor.stride()) for tensor in tensors]

    def restore(self) -> None:
        """Restore what the snapshot remembers. Does nothing to an unchanged model."""
        for owner, kind, attributes, registries in self._saved:
            if type(owner) is not kind:
                owner.__class__ = kind
            vars(owner).clear()
            vars(owner).update(attributes)
            for name, entries in registries.items():
                vars(owner)[name].clear()
                vars(owner)[name].update(entries)
        with torch.no_grad():
            for tensor, stride in self._strides:
                if tensor.stride() != stride:
                    tensor.data = torch.empty_strided(
                        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
                    ).copy_(tensor.data)
