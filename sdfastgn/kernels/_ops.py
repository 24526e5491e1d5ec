"""The namespace of the ops in ``torch.ops``.

``scripts/build_hub_kernels.py`` gives each build for the Kernel Hub a namespace of its own, because one
process may load several. The hub's tools know these names.
"""

from __future__ import annotations

import torch

_NAMESPACE = "sdfastgn"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """``op_name`` as ``torch.library`` takes it, with the namespace before it."""
    return f"{_NAMESPACE}::{op_name}"
