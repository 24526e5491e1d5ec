"""Rules for tensors in which ``expand`` and other views repeat rows along the last axis.

A linear layer then computes each row once, and a norm of a sum reads it once. An example is attention to a
single key, which gives all queries of a sample the same row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.moves import moved
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import VIEWS, in_memory


def repeated_rows(graph: fx.Graph) -> fx.Graph:
    return apply(graph, product_of_each, steps.linear)


def product_of_each(r: Rewriter, n: Node) -> Node | None:
    """Lets a linear layer of repeated rows compute each row once. Its result is repeated instead."""
    x, weight, bias = n.args
    found = _each(r, x)
    if found is None:
        return None
    C = shape(n)[-1]
    rows = r.reshape(found.rows, (*found.once, shape(x)[-1]))
    y = r.new(steps.linear, (rows, weight, bias), (*found.once, C), dtype(n))
    return r.reshape(r.new(steps.expand, (y, (*found.sizes, C)), (*found.sizes, C), dtype(n)), shape(n))


def grouped_rows(r: Rewriter, x: Any) -> tuple[Node, int] | None:
    """Finds the rows of x (..., D) that views repeat in a regular way. None if there are none.

    Returns (rows, period): row i of x is row ``i // period % len(rows)`` of ``rows``.
    """
    found = _each(r, x)
    if found is None:
        return None
    axes = [i for i, size in enumerate(found.sizes) if size > 1]
    kept = [i for i in axes if found.once[i] > 1]
    first, end = (kept[0], kept[-1] + 1) if kept else (0, 0)
    if any(found.once[i] == 1 for i in axes if first <= i < end):
        return None
    rows = r.reshape(found.rows, (math.prod(found.once), shape(x)[-1]))
    return rows, math.prod(found.sizes[end:])


class _Each(NamedTuple):
    """The rows of a tensor, along its last axis, in which views repeat rows.

    Attributes:
        rows: a tensor with each row once. Its first axes have the sizes ``once``. The remaining axes are the
            elements of a row.
        sizes: the sizes of the tensor's axes without the last one. An axis may be split into several axes:
            then it has several sizes.
        once: like ``sizes``, but with 1 for each axis along which rows are repeated.
    """

    rows: Node
    sizes: tuple[int, ...]
    once: tuple[int, ...]


def _each(r: Rewriter, x: Any) -> _Each | None:
    """Finds the rows of x along its last axis, each of them once. None if no views repeat rows of x."""
    if rank(x) < 2 or 0 in shape(x) or not _is_repeated(x):
        return None
    source = moved(r, x)
    if source is None:
        return None
    count = sum(map(len, source.axes[:-1]))
    memory = in_memory(source.view)
    sizes = tuple(memory.shape[:count])
    each = tuple(1 if step == 0 else size for size, step in zip(memory.shape, memory.stride(), strict=True))
    once = each[:count]
    if once == sizes or each[count:] != memory.shape[count:]:  # no rows repeat, or elements within a row do
        return None
    rows = source.view
    for axis, size in enumerate(once):
        rows = r.cut(rows, axis, 0, size)
    return _Each(rows, sizes, once)


def _is_repeated(n: Any) -> bool:
    while has(n, *VIEWS):
        if has(n, steps.expand):
            return True
        n = n.args[0]
    return False
