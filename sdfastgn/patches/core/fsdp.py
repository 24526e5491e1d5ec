"""Finds modules that FSDP shards. FSDP gathers their weights at each call, in its own memory and strides."""

from __future__ import annotations

import torch.distributed
from torch import nn

__all__ = ["modules_in_fsdp"]


def modules_in_fsdp(root: nn.Module) -> set[nn.Module]:
    """Modules below ``root`` that are in a ``fully_shard`` or a FullyShardedDataParallel below it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = FSDPModule, FullyShardedDataParallel
    return {m for outer in root.modules() if isinstance(outer, kinds) for m in outer.modules()}
