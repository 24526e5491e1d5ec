"""Traces writes of numbers into parts of a new tensor, such as a mask that a loop fills row by row.

These writes are collected until the traced code reads the tensor. If there are few, each becomes a node of
the graph. If there are many, a constant is filled on the CPU instead, because a mask of 7800 rows would
become 58,000 nodes. If most rows are equal, as in a mask that hides frames of a video, the constant has each
different row once: a whole mask of 48,000 rows would take 5 GB.
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
# In-place ops that fill a tensor with one number, if the value that they write is a number.
FILLS = {aten.fill_.Tensor, aten.fill_.Scalar, aten.copy_.default, aten.zero_.default}
_NEW = (aten.full.default, aten.zeros.default, aten.ones.default)
# If more writes than this were collected for a tensor, the tensor becomes a constant instead of nodes.
MOST_NODES = 64
# Bytes (1 GB). If a constant would be larger, the call is not traced.
_MOST_MEMORY = 1 << 30


class Fill(NamedTuple):
    """A write of ``number`` into a view of a tensor. ``path``: the ops that make the view from the tensor."""

    path: tuple[Step, ...]
    number: Any


def is_new(base: TracedTensor) -> bool:
    """True if the call has made ``base`` by ``full``, ``zeros`` or ``ones``, and no node writes into it."""
    return base.node.target in _NEW and base.memory is None


def filled(made: fx.Node, fills: Sequence[Fill]) -> tuple[Tensor, Tensor | None]:
    """Computes on the CPU the values that the tensor of node ``made`` has after the writes ``fills``.

    Returns (rows, which). Row i of the tensor is ``rows[which[i]]``. If ``which`` is None, ``rows`` is the
    whole tensor.
    """
    shape, which = made.meta["shape"], None
    found = _different_rows(shape, fills)
    if found is not None:
        fills, which = found
        shape = (max(which) + 1, *shape[1:])
    if math.prod(shape) * made.meta["dtype"].itemsize > _MOST_MEMORY:
        refuse("the call fills more than 1 GB in many parts")
    options = {k: v for k, v in made.kwargs.items() if k != "pin_memory"}
    target: Any = made.target
    rows = target(shape, *made.args[1:], **{**options, "device": torch.device("cpu")})
    for path, number in fills:
        part = rows
        for step in path:
            part = step.op(part, *step.args, **step.kwargs)
        part.fill_(number)
    return rows, None if which is None else torch.tensor(which, device="cpu")


def _different_rows(shape: Sequence[int], fills: Sequence[Fill]) -> tuple[list[Fill], list[int]] | None:
    """Finds rows of a tensor that get the same writes. Keeps only one of the rows that become equal.

    Returns the writes into the kept rows, and for each row of the tensor the index of the equal kept row.
    None if more than half of the rows would be kept, or if one write goes into several rows.
    """
    of_row: dict[int, list[Fill]] = {}
    for fill in fills:
        first = fill.path[0] if fill.path else None
        if first is None or first.op is not aten.select.int or first.args[0] != 0:
            return None
        of_row.setdefault(first.args[1] % shape[0], []).append(fill)
    found: dict[str, int] = {}
    different, which = [], []
    for row in range(shape[0]):
        own = of_row.get(row, [])
        # The writes into two rows are compared as texts, because the values -0.0 and 0.0, or True and 1,
        # count as equal.
        text = repr([([step[:3] for step in path[1:]], number) for path, number in own])
        if text not in found:
            at = found[text] = len(found)
            different += [Fill((path[0]._replace(args=(0, at)), *path[1:]), number) for path, number in own]
        which.append(found[text])
    return (different, which) if 2 * len(found) <= shape[0] else None
