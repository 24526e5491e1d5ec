"""diffusers' ``GEGLU``, the first part of ``FeedForward``: bias, GELU and product in one kernel.

diffusers' linear layer writes a tensor (..., 2D). GELU reads and writes half of this tensor, and the
elementwise product reads both halves and writes (..., D). Here the matrix product adds no bias, and one
kernel reads its result, does all the rest and writes (..., D). The other parts of ``FeedForward`` (dropout,
the second linear layer, chunks of tokens) stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.activations import GEGLU
from diffusers.utils import is_torch_npu_available
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.tokens import linear_geglu
from sdfastgn.patches.swap.fusion import ClassSwap, layer_of
from sdfastgn.patches.swap.tested_sources import tested


class FusedGEGLU(GEGLU):
    """``GEGLU``: a matrix product, then one kernel for the bias, GELU and the product of both halves.

    hidden_states (..., dim_in) -> (..., dim_out).
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # With extra arguments diffusers' forward runs, because it warns that these arguments are deprecated.
        # diffusers' forward also runs under a compiler, which itself fuses the bias, GELU and product.
        if args or kwargs or torch.compiler.is_compiling() or not dispatch.has_kernels(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        return linear_geglu(layer_of(self, "proj"), hidden_states)


def _check(_: GEGLU) -> str | None:
    return "torch_npu has a GEGLU of its own" if is_torch_npu_available() else None


FUSION = ClassSwap(
    "geglu",
    GEGLU,
    FusedGEGLU,
    sources=(tested(GEGLU, "__init__", "forward", "gelu"),),
    check=_check,
)
