"""Replaces rotary embeddings, which models write in four ways, by ``steps.rotate``.

A rotary embedding rotates pairs of elements of each row by angles, whose cos and sin are in tables. x0 and x1
are the first and second elements of all pairs of neighbors in x, and h0 and h1 are the two halves of x. The
ways are:

1. x * cos + stack(-x1, x0) * sin;
2. x * cos + cat(-h1, h0) * sin;
3. the product of complex numbers: of x, and of a table;
4. x0 * cos - x1 * sin, and x0 * sin + x1 * cos, each written into every second element of a new tensor.

``steps.rotate`` computes in fp32 and rounds once, to the dtype of x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.common.dispatch import KERNEL_DTYPES
from sdfastgn.kernels.rotate.op import fits_pairs
from sdfastgn.plans.rewrite.ada_norms import uncast
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    cleaned,
    dtype,
    has,
    has_kernels,
    is_exact,
    operands,
    ordered,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.rules import from_the_last
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.schemas import arguments

aten = torch.ops.aten
_LAST_OPS = (steps.cast, aten.add.Tensor, aten.view_as_real.default, aten.slice_scatter.default)


class _Rotation(NamedTuple):
    """A rotary embedding: the input ``x``, and the tables ``cos`` and ``sin``.

    ``x`` may be a reshape or a wider dtype of the tensor that is rotated. If ``cos`` is a complex table,
    ``sin`` is None. ``halves``: True if the two elements of a pair are half a row apart, and False if they
    are neighbors.
    """

    x: Node
    cos: Node
    sin: Node | None
    halves: bool = False


def rotations(graph: fx.Graph) -> fx.Graph:
    """Replaces rotary embeddings by one kernel, ``steps.rotate``.

    The pass goes from the last node to the first. So it meets a cast of the result before the result itself,
    and replaces both.
    """
    r = Rewriter(graph)
    turns: dict[tuple[Node, Node], Node] = {}
    for n in from_the_last(r, *_LAST_OPS):
        new = _rotated(r, n, turns) if has_kernels(n) else None
        if new is not None:
            r.replace(n, new)
    return ordered(cleaned(graph)) if r.has_changed else graph


def _rotated(r: Rewriter, n: Node, turns: dict[tuple[Node, Node], Node]) -> Node | None:
    top = uncast(n, n)
    whole = top.args[0] if has(top, steps.reshape) else top
    if has(whole, aten.view_as_real.default):
        found, to = _complex(whole), (*shape(whole)[:-2], 2 * shape(whole)[-2])
    elif has(top, aten.add.Tensor):
        found, to = _turned(top), shape(top)
    else:
        found, to = _written(top), shape(top)
    if found is None or len(to) not in (3, 4) or 0 in to or not fits_pairs(to[-1]):
        return None
    x = _base(found.x)
    if dtype(x) != dtype(n):
        return None
    heads = (*to[:-1], 1, to[-1]) if len(to) == 3 else to
    cos, sin = found.cos, found.sin
    if sin is not None and shape(cos)[-1] < to[-1] and shape(cos) == shape(sin) and dtype(cos) == dtype(sin):
        if (cos, sin) not in turns:
            turns[cos, sin] = _in_turns(r, cos, sin)
        cos, sin = turns[cos, sin], None
    tables = [t if t is None else _table(r, t, to) for t in (cos, sin)]
    more = (None, 0.0, True) if found.halves else ()
    y = r.new(steps.rotate, (r.reshape(x, heads), *tables, *more), heads, dtype(n))
    return r.reshape(y, shape(n))


def _base(n: Node) -> Node:
    """Returns the value from which reshapes, and casts that round no number, make the node ``n``."""
    while has(n, steps.reshape) or (has(n, steps.cast) and is_exact(n)):
        n = n.args[0]
    return n


def _in_turns(r: Rewriter, cos: Node, sin: Node) -> Node:
    """Makes a table with cos and sin of each pair side by side, which the kernel can load as vectors."""
    *rows, half = shape(cos)
    size = math.prod(rows) * half
    parts = [r.reshape(t, (size, 1)) for t in (cos, sin)]
    return r.reshape(r.new(steps.cat, (parts, 1), (size, 2), dtype(cos)), (*rows, 2 * half))


def _table(r: Rewriter, t: Node, to: tuple[int, ...]) -> Node:
    """Reshapes ``t``, a table of cos or sin for rows of the shape ``to``, so that it has an axis of heads."""
    whole = (1,) * (len(to) - rank(t)) + shape(t)
    return r.reshape(t, whole if len(to) == 4 else (*whole[:-1], 1, whole[-1]))


def _is_table(t: Node, to: tuple[int, ...], columns: int) -> bool:
    """True if ``t`` can be a table of cos or sin for rows of the shape ``to``.

    It must have ``columns`` columns, and broadcast to the rows.
    """
    whole = (1,) * (len(to) - rank(t)) + shape(t)
    is_aligned = len(whole) == len(to) and all(a in (1, b) for a, b in zip(whole[:-1], to[:-1], strict=True))
    return is_aligned and whole[-1] == columns and dtype(t) in (*KERNEL_DTYPES, torch.complex64)


def _part(n: Node, index: int, D: int, halves: bool) -> Node | None:
    """Returns x, before reshapes and casts, if the node ``n`` has one element of each pair of x. Else None.

    ``index``: 0 for the first element of each pair, 1 for the second. ``D``: the length of a row of x.
    ``halves``: True if the two elements of a pair are half a row apart, and False if they are neighbors.
    """
    part: Any = _base(n)
    if not has(part, steps.cut):
        return None
    whole, axis, *where = part.args
    found = shape(whole)[axis:], tuple(where)
    of_pairs = ((2, D // 2) if halves else (2,)), (index, 1)
    of_rows = (D,), (index * D // 2, D // 2)
    return _base(whole) if found == of_pairs or (halves and found == of_rows) else None


# ---- the ways in which models write a rotary embedding


def _turned(n: Node) -> _Rotation | None:
    """Recognizes a rotary embedding written as x * cos + turned * sin. None for other nodes.

    ``turned`` has the pair (-b, a) in place of each pair (a, b) of x.
    """
    to = shape(n)
    for p, q in operands(n):
        for x, cos in operands(p) if has(p, aten.mul.Tensor) else ():
            for turned, sin in operands(q) if has(q, aten.mul.Tensor) else ():
                are_whole = shape(x) == shape(turned) == shape(p) == shape(q) == to
                are_tables = _is_table(cos, to, to[-1]) and _is_table(sin, to, to[-1])
                for halves in (False, True) if are_whole and are_tables else ():
                    if _is_turned(_base(turned), _base(x), to, halves):
                        return _Rotation(x, cos, sin, halves)
    return None


def _is_turned(n: Any, x: Node, to: tuple[int, ...], halves: bool) -> bool:
    """True if ``n`` has the pair (-b, a) in place of each pair (a, b) of x."""
    D = to[-1]
    joined = to if halves else (*to[:-1], D // 2, 2)
    if not has(n, steps.cat) or shape(n) != joined or n.args[1] != rank(n) - 1 or len(n.args[0]) != 2:
        return False
    first, second = map(_base, n.args[0])
    if not has(first, aten.neg.default):
        return False
    return _part(first.args[0], 1, D, halves) is x and _part(second, 0, D, halves) is x


def _complex(n: Any) -> _Rotation | None:
    """Recognizes a rotary embedding written as view_as_real(view_as_complex(pairs of x) * table).

    None for other nodes.
    """
    product = n.args[0]
    for a, table in operands(product) if has(product, aten.mul.Tensor) else ():
        if not has(a, aten.view_as_complex.default) or dtype(table) != torch.complex64:
            continue
        pairs: Any = a.args[0]
        pairs = pairs.args[0] if has(pairs, aten.contiguous.default) else pairs
        to = (*shape(a)[:-1], 2 * shape(a)[-1])
        if shape(a) == shape(product) and _is_table(table, to, shape(a)[-1]):
            return _Rotation(pairs, table, None)
    return None


def _written(n: Any) -> _Rotation | None:
    """Recognizes a rotary embedding written as x0 * cos - x1 * sin and x0 * sin + x1 * cos. Else None.

    x0 and x1 are the first and second elements of all pairs of neighbors. Each of the two results must be
    written into every second element of a tensor.
    """
    to, found, below = shape(n), {}, n
    for _ in range(2):
        if not has(below, aten.slice_scatter.default):
            return None
        below, part, axis, start, end, step = arguments(below)
        if axis % len(to) != len(to) - 1 or start not in (0, 1) or end < to[-1] or step != 2:
            return None
        found[start] = uncast(part, n)
    if len(found) < 2 or to[-1] % 2:
        return None
    half = (*to[:-1], to[-1] // 2)
    minus, plus = found[0], found[1]
    if not has(minus, aten.sub.Tensor) or not has(plus, aten.add.Tensor) or minus.kwargs or plus.kwargs:
        return None
    products = [*minus.args, *plus.args]
    if not all(has(m, aten.mul.Tensor) and shape(m) == half for m in products):
        return None
    for x0, cos in operands(products[0]):
        for x1, sin in operands(products[1]):
            x = _part(x0, 0, to[-1], False)
            are_tables = _is_table(cos, to, half[-1]) and _is_table(sin, to, half[-1])
            if x is None or _part(x1, 1, to[-1], False) is not x or not are_tables or shape(x0) != half:
                continue
            others = {frozenset((_base(a), _base(b))) for m in products[2:] for a, b in operands(m)}
            if others == {frozenset((_base(x0), _base(sin))), frozenset((_base(x1), _base(cos)))}:
                return _Rotation(x, cos, sin)
    return None
