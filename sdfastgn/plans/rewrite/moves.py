"""Removes copies that only move elements between channels and positions, before a sum, mean or bias.

Pixel shuffles, and the code that cuts an image into patches, are views followed by a reshape that must copy.
A sum or mean can read the views before that reshape instead. It then needs no copy, and it writes its result
channels-last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.biases import bias_of
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, is_only, operands, rank, shape, user
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.rewrite.views import applied
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import VIEWS, copies, in_memory
from sdfastgn.plans.run.schemas import arguments

aten = torch.ops.aten
Sizes = tuple[int, ...]


class Moved(NamedTuple):
    """A value that a reshape makes from ``view`` by joining neighboring axes. ``view`` needs no copy.

    ``axes``: for each axis of the value, the sizes of the axes of ``view`` that are joined in it.
    """

    view: Node
    axes: tuple[Sizes, ...]


def moves(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, mean_of_views, aten.mean.dim)
    graph = apply(graph, sum_of_views, aten.add.Tensor)
    return apply(graph, bias_before_views, bias_of)


# ---- rules


def mean_of_views(r: Rewriter, n: Any) -> Node | None:
    """Lets a mean read the view before a reshape that copies. The result is written channels-last."""
    x, axes, _, to = arguments(n)
    if not axes or to is not None or 0 in shape(x):
        return None
    axes = {a % rank(x) for a in axes}
    if all(shape(x)[a] == 1 for a in axes):
        return r.reshape(x, shape(n))
    kept = [a for a in range(rank(x)) if a not in axes]
    source = moved(r, x) if len(kept) in (4, 5) else None
    if source is None:
        return None
    order = [kept[0], *kept[2:], kept[1], *sorted(axes)]
    places, memory = _places(source.axes), in_memory(source.view)
    innermost = min(
        _flat(places[a] for a in kept),
        key=lambda p: (memory.shape[p] == 1, memory.stride(p)),
        default=None,  # if the result has one element, there is no innermost axis
    )
    if innermost not in places[kept[1]]:
        return None  # in memory, the channels are not the innermost axis
    view = r.permute(source.view, _flat(places[a] for a in order))
    sizes = _flat(source.axes[a] for a in order[: len(kept)])
    over = list(range(len(sizes), rank(view)))
    y = r.new(aten.mean.dim, (view, over), sizes, dtype(n))
    last = r.reshape(y, [shape(x)[a] for a in order[: len(kept)]])
    return r.reshape(r.permute(last, (0, len(kept) - 1, *range(1, len(kept) - 1))), shape(n))


def sum_of_views(r: Rewriter, n: Any) -> Node | None:
    """Replaces a sum of operands that a reshape has copied by ``steps.add_views``.

    ``steps.add_views`` reads the views before the reshape, so the reshape need not copy.
    """
    a, b = next(operands(n), (None, None))
    if a is None or b is None or rank(n) not in (4, 5) or 0 in shape(n):
        return None
    is_alike = shape(a) == shape(b) == shape(n) and dtype(a) == dtype(b) == dtype(n)
    return _sum(r, a, b) if is_alike and (is_copied(a) or is_copied(b)) else None


def bias_before_views(r: Rewriter, n: Any) -> None:
    """Lets a reshape that must copy also add the bias that the node ``n`` adds before it.

    Only views may be between ``n`` and the reshape.
    """
    views: list[Node] = []
    end: Any = n
    while is_only(end) and has(user(end), steps.reshape, steps.permute):
        end = user(end)
        views.append(end)
        if copies(end):
            break
    if end is n or rank(end) not in (4, 5) or 0 in shape(n) or not copies(end):
        return
    h, bias = n.args
    r.at = end
    column = r.reshape(bias, (shape(n)[1], *[1] * (rank(n) - 2)))
    every = r.like(steps.expand, (column, shape(h)), n)
    total = _sum(r, applied(r, views, h), applied(r, views, every))
    if total is not None:
        end.replace_all_uses_with(total)


def _sum(r: Rewriter, a: Any, b: Any) -> Node | None:
    """Makes a node that computes a + b by ``steps.add_views``. a and b have equal shapes.

    Returns None if the views of a and b cannot be split into the same axes.
    """
    first, second = moved(r, a), moved(r, b)
    if first is None or second is None:
        if has(a, steps.cut) and has(b, steps.cut) and a.args[1:] == b.args[1:]:
            whole = _sum(r, a.args[0], b.args[0]) if shape(a.args[0]) == shape(b.args[0]) else None
            return None if whole is None else r.cut(whole, *a.args[1:])
        return None
    axes = [_common(*sizes) for sizes in zip(first.axes, second.axes, strict=True)]
    if None in axes:
        return None
    sizes = _flat(axes)  # type: ignore[arg-type]
    return r.like(steps.add_views, (r.reshape(first.view, sizes), r.reshape(second.view, sizes), shape(a)), a)


# ---- values as views of other values


def moved(r: Rewriter, n: Any) -> Moved | None:
    """Finds the value of which the node ``n`` is a view or a reshaped copy, as a ``Moved``.

    None if a reshape between the two does more than split or join axes.
    """
    if has(n, *VIEWS) and (source := moved(r, n.args[0])) is not None:
        if has(n, steps.reshape):
            return _reshaped(r, source, shape(n))
        if has(n, steps.permute):
            places = _places(source.axes)
            view = r.permute(source.view, _flat(places[d] for d in n.args[1]))
            return Moved(view, tuple(source.axes[d] for d in n.args[1]))
        if has(n, steps.expand):
            return _expanded(r, source, shape(n))
        return _part(r, source, *n.args[1:])
    return None if has(n, *VIEWS) else Moved(n, tuple((size,) for size in shape(n)))


def _reshaped(r: Rewriter, source: Moved, to: Sizes) -> Moved | None:
    sizes = _common(_flat(source.axes), to)
    if sizes is None:
        return None
    left = iter(sizes)
    axes = []
    for size in to:
        joined: list[int] = []
        while math.prod(joined) < size:
            joined.append(next(left))
        axes.append(tuple(joined))
    return Moved(r.reshape(source.view, sizes), tuple(axes))


def _expanded(r: Rewriter, source: Moved, to: Sizes) -> Moved:
    before = [(), *[()] * (len(to) - len(source.axes) - 1)] if len(to) > len(source.axes) else []
    old = [*before, *source.axes]
    is_wider = [math.prod(axes) != size for axes, size in zip(old, to, strict=True)]
    single = [(1,) if wider else axes for wider, axes in zip(is_wider, old, strict=True)]
    axes = [(size,) if wider else same for wider, same, size in zip(is_wider, old, to, strict=True)]
    view = r.reshape(source.view, _flat(single))
    return Moved(r.new(steps.expand, (view, _flat(axes)), _flat(axes), dtype(view)), tuple(axes))


def _part(r: Rewriter, source: Moved, dim: int, start: int, length: int) -> Moved | None:
    """Cuts ``length`` elements of axis ``dim`` out of ``source``, beginning with element ``start``.

    Axis ``dim`` joins axes of ``source.view``. None if cuts of these axes cannot give exactly these elements.
    """
    place, axes = len(_flat(source.axes[:dim])), list(source.axes[dim])
    view = source.view
    for i, size in enumerate(axes):
        inner = math.prod(axes[i + 1 :])
        if start % inner == length % inner == 0:
            axes[i] = length // inner
            view = r.cut(view, place + i, start // inner, length // inner)
            return Moved(view, (*source.axes[:dim], tuple(axes), *source.axes[dim + 1 :]))
        if start % inner + length > inner:
            return None
        axes[i] = 1
        view = r.cut(view, place + i, start // inner, 1) if size > 1 else view
        start %= inner
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> Sizes | None:
    """Finds sizes into which axes of the sizes a, and axes of the sizes b, can both be split. Else None.

    For instance, (6, 4) and (2, 12) can both be split into (2, 3, 4).
    """
    left, right = ([size for size in reversed(sizes) if size != 1] for sizes in (a, b))
    found = []
    while left and right:
        size = min(left[-1], right[-1])
        for sizes in (left, right):
            if sizes[-1] % size:
                return None
            sizes[-1] //= size
            if sizes[-1] == 1:
                sizes.pop()
        found.append(size)
    return tuple(found)


def _places(axes: Sequence[Sizes]) -> list[Sizes]:
    """For each axis of a value, the indices of the axes of its view that are joined in it."""
    ends = list(itertools.accumulate(map(len, axes), initial=0))
    return [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]


def _flat(groups: Iterable[Sizes]) -> Sizes:
    return tuple(itertools.chain.from_iterable(groups))


def is_copied(n: Any) -> bool:
    """True if ``n`` is a reshape that copies, or a cut of one, and only one node reads each of them."""
    while has(n, steps.cut) and is_only(n):
        n = n.args[0]
    return is_only(n) and copies(n)
