"""Biases of convolutions as steps of their own, so that the step after a convolution can add them.

The rules of ``convolutions`` write ``bias_of``. The rules of ``sums`` give it to norms and residual sums.
``biases`` is the pass after them: no ``bias_of`` is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, has, is_only, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

__all__ = ["bias_of", "biases"]

aten = torch.ops.aten
# Steps whose result is new memory, which nothing else knows.
_NEW = (steps.conv, steps.conv_windows, steps.conv_last_slice)


def bias_of(h: Tensor, bias: Tensor) -> Tensor:
    """h + bias, where axis 1 of h has the channels. No plan runs it."""
    return h + bias.view(-1, *[1] * (h.dim() - 2))


def biases(graph: fx.Graph) -> fx.Graph:
    return apply(graph, _added, bias_of)


def _added(r: Rewriter, n: Any) -> Node:
    """A bias that no other step has taken: it is written over the result of the convolution."""
    h, bias = n.args
    if _is_its_own(h) and 0 not in shape(n):
        return r.item(r.new(steps.add_bias_, (h, bias, False)), 0, n)
    column = r.reshape(bias, (shape(n)[1], *[1] * (rank(n) - 2)))
    return r.like(aten.add.Tensor, (h, column), n)


def _is_its_own(h: Any) -> bool:
    """True if one node reads h, and no other value lies in the memory of h."""
    while has(h, steps.reshape, steps.permute) and is_only(h):
        h = h.args[0]
    return has(h, *_NEW) and is_only(h)
