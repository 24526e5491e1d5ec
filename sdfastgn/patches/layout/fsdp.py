"""Finds the modules that FSDP shards: their weights must keep their layout.

At each call FSDP copies the weights of these modules into memory that it manages, with its own strides.
"""

from __future__ import annotations

import torch.distributed
from torch import nn

__all__ = ["modules_in_fsdp"]


def modules_in_fsdp(root: nn.Module) -> set[nn.Module]:
    """All modules in ``root`` that FSDP shards, by ``fully_shard`` or by ``FullyShardedDataParallel``."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = FSDPModule, FullyShardedDataParallel
    return {m for outer in root.modules() if isinstance(outer, kinds) for m in outer.modules()}
