"""Numbers that a call writes into parts of a new tensor, such as a mask that a loop fills row by row.

These writes wait until somebody reads the tensor. Then a few of them become nodes. Many of them become one
constant, which is filled on the CPU: a mask of 7800 rows would be 58,000 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sdfastgn.plans.trace.refusals import refuse
from sdfastgn.plans.trace.tensors import Step, TracedTensor

aten = torch.ops.aten
# Ops that write one number into all elements of a tensor, if what they write is one.
FILLS = {aten.fill_.Tensor, aten.fill_.Scalar, aten.copy_.default, aten.zero_.default}
_NEW = (aten.full.default, aten.zeros.default, aten.ones.default)
# More writes than this become a constant.
MOST_NODES = 64
# Bytes (1 GB) of the largest constant.
_MOST_MEMORY = 1 << 30


class Fill(NamedTuple):
    """The write of ``number`` into the view of a tensor by the steps of ``path``."""

    path: tuple[Step, ...]
    number: Any


def is_new(base: TracedTensor) -> bool:
    """True if the call has just made ``base`` from numbers."""
    return base.node.target in _NEW and base.memory is None


def filled(made: fx.Node, fills: Sequence[Fill]) -> Tensor:
    """The values on the CPU of the tensor of the node ``made``, after ``fills``."""
    if math.prod(made.meta["shape"]) * made.meta["dtype"].itemsize > _MOST_MEMORY:
        refuse("the call fills more than 1 GB in many parts")
    options = {k: v for k, v in made.kwargs.items() if k != "pin_memory"}
    target: Any = made.target
    y = target(*made.args, **{**options, "device": torch.device("cpu")})
    for path, number in fills:
        part = y
        for step in path:
            part = step.op(part, *step.args, **step.kwargs)
        part.fill_(number)
    return y
