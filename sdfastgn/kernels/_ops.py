"""The namespace of this package's ops: ``torch.ops.sdfastgn``.

``scripts/build_hub_kernels.py`` gives each build for Hugging Face's Kernel Hub its own namespace, because one
process may load several builds. The Hub's tools expect the names ``ops`` and ``add_op_namespace_prefix``.
"""

from __future__ import annotations

import torch

_NAMESPACE = "sdfastgn"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns an op's name with the namespace: ``"sdfastgn::group_norm"`` for ``"group_norm"``."""
    return f"{_NAMESPACE}::{op_name}"
