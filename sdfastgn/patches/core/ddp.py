"""Models in DistributedDataParallel: their weights must keep the layout that they had when wrapped.

DDP's buckets hold gradients as views with the weights' strides of that time. With other strides (PyTorch
2.13) the averaged values end up in other places of the gradient, and DDP only warns about performance.
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
    gc.collect()  # a wrapper that was dropped may wait in a cycle
    return _is_in_any(weights)


def _is_in_any(weights: set[int]) -> bool:
    # A wrapped model knows nothing of its wrapper, so the wrappers are looked for. type(), because
    # isinstance asks proxies for a class.
    kind = nn.parallel.DistributedDataParallel
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), kind)]
    return any(id(p) in weights for wrapper in wrappers for p in wrapper.parameters())
