"""Finds models that are wrapped in DistributedDataParallel (DDP): their weights must keep their layout.

DDP keeps gradients in buckets, as views with the strides that the weights had when the model was wrapped. If
the strides of a weight change later, the averaged gradient has its values at wrong places (seen with PyTorch
2.13). DDP raises no error then: it only warns that different strides may be slow.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.distributed
from torch import nn


def is_in_ddp(roots: Iterable[nn.Module]) -> bool:
    """True if a DistributedDataParallel that still exists contains a parameter of one of the ``roots``."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    weights = {id(p) for root in roots for p in root.parameters()}
    if not _is_in_any(weights):
        return False
    # The garbage collection frees DDP wrappers that nobody uses any more, but that a reference cycle keeps
    # alive.
    gc.collect()
    return _is_in_any(weights)


def _is_in_any(weights: set[int]) -> bool:
    # A model has no reference to its wrapper, so all objects of the process are searched.
    # ``isinstance`` would run code of proxy objects, so ``issubclass`` is used.
    kind = nn.parallel.DistributedDataParallel
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), kind)]
    return any(id(p) in weights for wrapper in wrappers for p in wrapper.parameters())
