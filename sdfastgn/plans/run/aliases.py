"""Where the values of a graph lie in memory: which nodes are views, and which write over an argument."""

from __future__ import annotations

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from sdfastgn.plans.run import schemas, steps

__all__ = ["VIEWS", "base", "is_view", "writes_over"]

# Steps that compute nothing: their results are views wherever strides allow it.
VIEWS = (steps.reshape, steps.permute, steps.expand, steps.cut)


def is_view(n: Node) -> bool:
    """True if ``n`` gives its argument or a part of it: without a copy wherever strides allow it."""
    if n.op != "call_function":
        return False
    return n.target is operator.getitem or n.target in VIEWS or schemas.is_view(n.target)


def writes_over(n: Node) -> bool:
    """True if ``n`` writes over its first argument: an op that writes, or a step whose name ends with "_"."""
    if n.op != "call_function":
        return False
    target: Any = n.target
    return schemas.writes(target) if isinstance(target, OpOverload) else target.__name__.endswith("_")


def base(n: Node) -> Node:
    """The node in whose memory the value of ``n`` lies, or may lie."""
    while is_view(n):
        source: Any = n.args[0]
        if n.target is operator.getitem and not is_view(source):
            break  # an item of the results of a step that computes them
        n = source
    return n
