"""Finds models in DistributedDataParallel: their weights must keep the layout that they had when wrapped.

DDP keeps gradients in buckets, as views with the strides that the weights had when they were wrapped. If
the strides change later, the averaged values end up in other places of the gradient (seen with PyTorch
2.13). DDP only warns about performance.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.distributed
from torch import nn

__all__ = ["is_in_ddp"]


def is_in_ddp(roots: Iterable[nn.Module]) -> bool:
    """True if a living DistributedDataParallel averages gradients of any of the ``roots``."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    weights = {id(p) for root in roots for p in root.parameters()}
    if not _is_in_any(weights):
        return False
    gc.collect()  # a dropped wrapper may still be alive in a reference cycle
    return _is_in_any(weights)


def _is_in_any(weights: set[int]) -> bool:
    # A model has no reference to its wrapper, so all objects are searched. ``issubclass(type(o), ...)``
    # instead of isinstance, which runs the code of proxy objects.
    kind = nn.parallel.DistributedDataParallel
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), kind)]
    return any(id(p) in weights for wrapper in wrappers for p in wrapper.parameters())
