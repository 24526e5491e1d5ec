"""Reads from the schema of a PyTorch op which arguments it has, and whether it writes or returns a view."""

from __future__ import annotations

import functools
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from sdfastgn.kernels.common.private import schema_of


def arguments(n: Node) -> list[Any]:
    """Returns all arguments of the op that node ``n`` calls, in the order of the op's schema.

    Arguments that the node does not have get their default values. If ``n`` calls another function than an op
    of PyTorch, its positional arguments are returned as they are.
    """
    found = list(n.args)
    if not isinstance(n.target, OpOverload):
        return found
    for name, default in _declared(n.target)[len(found) :]:
        found.append(n.kwargs.get(name, default))
    return found


@functools.cache
def _declared(op: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in schema_of(op).arguments)


@functools.cache
def writes(op: Any) -> bool:
    """True if ``op`` is an op of PyTorch that writes into an argument."""
    return isinstance(op, OpOverload) and schema_of(op).is_mutable


@functools.cache
def is_view(op: Any) -> bool:
    """True if ``op`` is an op of PyTorch that writes nothing, and returns a view of an argument."""
    if not isinstance(op, OpOverload) or writes(op):
        return False
    return any(result.alias_info is not None for result in schema_of(op).returns)
