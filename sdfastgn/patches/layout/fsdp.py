"""Finds the modules that FSDP shards: their weights must keep their layout.

At each call FSDP copies the weights of these modules into memory that it manages, with its own strides.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed
from torch import nn


def modules_in_fsdp(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules that FSDP shards, and all modules inside of them.

    FSDP shards a module by ``fully_shard`` or ``FullyShardedDataParallel``.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = FSDPModule, FullyShardedDataParallel
    return {m for outer in modules if isinstance(outer, kinds) for m in outer.modules()}
