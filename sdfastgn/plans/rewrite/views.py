"""Moves reshapes and permutations behind norms and activations.

The kernels of norms need images or videos with the channels on axis 1. Models often reshape or permute these
before a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import TO_FRAMES, Rewriter, dtype, has, is_only, rank, shape
from sdfastgn.plans.rewrite.norms import ACTIVATIONS
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps


def merged_views(graph: fx.Graph) -> fx.Graph:
    """Replaces several reshapes in a row, or several permutations in a row, by one."""
    return apply(graph, _merged, steps.reshape, steps.permute)


def sink_views(graph: fx.Graph) -> fx.Graph:
    """Replaces norm(views(x)) by views(norm(x)), and does the same for activations and average pooling."""
    graph = apply(merged_views(graph), _before_views, steps.channel_norm, steps.group_norm, *ACTIVATIONS)
    graph = apply(graph, _windows_before_views, steps.mean_windows)
    graph = apply(graph, _cat_before_views, steps.cat)
    return merged_views(graph)


def _merged(r: Rewriter, n: Node) -> Node | None:
    """Joins a view with the view before it, if one view can do both."""
    return applied(r, [n], n.args[0]) if has(n.args[0], steps.reshape, steps.permute) else None


def _before_views(r: Rewriter, n: Node) -> Node | None:
    """Moves views before a norm or an activation behind it."""
    x, views = _channel_views(n.args[0])
    if not views:
        return None
    args = [x, *n.args[1:]]
    if has(n, steps.group_norm) and not _keeps_samples(views):
        if not _is_frames_as_images(x, views):
            return None
        args[8] = True  # ``framewise``: like the images before, each frame is normalized by itself
    return applied(r, views, r.like(n.target, args, x, **n.kwargs))


def _windows_before_views(r: Rewriter, n: Node) -> Node | None:
    """Moves views of an image or video that come before average pooling (``mean_windows``) behind it."""
    along = _along(r, n, n.args[1])
    return along.whole(r, along.x) if along.views and rank(along.x) in (4, 5) else None


def _cat_before_views(r: Rewriter, n: Any) -> Node | None:
    """Moves equal views of all parts of a cat behind the cat.

    The parts must be images or videos, and at least one of them must be the result of average pooling along
    the axis of the cat (``steps.mean_windows``).
    """
    parts = [_along(r, p, n.args[1]) for p in n.args[0]]
    first = parts[0]
    if not any(has(p.x, steps.mean_windows) for p in parts) or not first.views or rank(first.x) not in (4, 5):
        return None
    if any((p.axis, p.kept, p.views) != (first.axis, first.kept, first.views) for p in parts):
        return None
    length = sum(shape(p.x)[first.axis] for p in parts)
    to = (*shape(first.x)[: first.axis], length, *shape(first.x)[first.axis + 1 :])
    return first.whole(r, r.new(steps.cat, (tuple(p.x for p in parts), first.axis), to, dtype(n)))


class _Along(NamedTuple):
    """A value as views of another value x. One axis of the value is followed through the views to x.

    Attributes:
        x: the value before the views.
        axis: the axis of x that the views turn into the followed axis.
        views: ("permute", order of axes) or ("reshape", shape) for each view, in order. In a shape, -1 stands
            for the size of the followed axis.
    """

    x: Node
    axis: int
    views: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes of all axes of x except ``axis``."""
        return (*shape(self.x)[: self.axis], *shape(self.x)[self.axis + 1 :])

    def whole(self, r: Rewriter, x: Node) -> Node:
        """Applies ``views`` to another ``x``, which may have another size along ``axis``."""
        size = shape(x)[self.axis]
        for kind, of in self.views:
            is_shape = kind == "reshape"
            x = r.reshape(x, [size if s < 0 else s for s in of]) if is_shape else r.permute(x, of)
        return x


def _along(r: Rewriter, n: Any, axis: int) -> _Along:
    """Finds the value from which views make the node ``n``, and these views. Follows ``axis`` of ``n``.

    If a slice of this axis (``steps.cut``) or average pooling along it comes after views, a new node does the
    same before the views.
    """
    if has(n, steps.cut, steps.mean_windows) and n.args[1] == axis:
        inner = _along(r, n.args[0], axis)
        if not inner.views:
            return _Along(n, axis)
        if has(n, steps.cut):
            return inner._replace(x=r.cut(inner.x, inner.axis, *n.args[2:]))
        to = (*shape(inner.x)[: inner.axis], shape(n)[axis], *shape(inner.x)[inner.axis + 1 :])
        return inner._replace(x=r.new(n.target, (inner.x, inner.axis, n.args[2]), to, dtype(n)))
    before = _axis_before(n, axis) if has(n, steps.reshape, steps.permute) else None
    if before is None:
        return _Along(n, axis)
    inner = _along(r, n.args[0], before)
    if has(n, steps.permute):
        return inner._replace(views=(*inner.views, ("permute", n.args[1])))
    to = (*shape(n)[:axis], -1, *shape(n)[axis + 1 :])
    views = inner.views[:-1] if inner.views and inner.views[-1][0] == "reshape" else inner.views
    return inner._replace(views=(*views, ("reshape", to)))


def applied(r: Rewriter, views: Sequence[Node], x: Node) -> Node:
    """Applies to x the same reshapes and permutations as those of the nodes ``views``."""
    for v in views:
        of: Any = v.args[1]
        x = r.reshape(x, of) if has(v, steps.reshape) else r.permute(x, of)
    return x


def _channel_views(v: Node) -> tuple[Node, list[Node]]:
    """Finds an image or video x from which views make the node ``v``, and these views.

    Axis 1 of ``v`` must be axis 1 of x, and no other nodes may read the views. If there is no such x, it
    returns ``v`` and no views.
    """
    views: list[Node] = []
    best: tuple[Node, list[Node]] = v, []
    n: Any = v
    axis: int | None = 1
    if rank(v) < 2 or shape(v)[1] == 1:  # an axis of one element cannot be followed through reshapes
        return best
    while has(n, steps.reshape, steps.permute) and is_only(n):
        axis = _axis_before(n, axis)  # type: ignore[arg-type]
        if axis is None:
            break
        views, n = [n, *views], n.args[0]
        if axis == 1 and rank(n) in (4, 5):
            best = n, views
    return best


def axis_after(view: Any, axis: int) -> int | None:
    """Returns the axis of ``view`` that has the elements of ``axis`` of its input. None if there is none.

    ``view``: a reshape or permutation.
    """
    if has(view, steps.permute):
        return view.args[1].index(axis)
    return _same_axis(shape(view.args[0]), axis, shape(view))


def _axis_before(view: Any, axis: int) -> int | None:
    """Returns the axis of the input of ``view`` that has the elements of ``axis`` of ``view``, or None."""
    if has(view, steps.permute):
        return view.args[1][axis]
    return _same_axis(shape(view), axis, shape(view.args[0]))


def _same_axis(sizes: Sequence[int], axis: int, others: Sequence[int]) -> int | None:
    """Returns the axis that ``axis`` becomes in a reshape from ``sizes`` to ``others``, or None."""
    same = (sizes[axis], math.prod(sizes[:axis]))
    return next((i for i, size in enumerate(others) if (size, math.prod(others[:i])) == same), None)


def _keeps_samples(views: Sequence[Any]) -> bool:
    """True if all views keep axis 0, so that they have the same samples as the value before them."""
    return all(
        v.args[1][0] == 0 if has(v, steps.permute) else shape(v)[0] == shape(v.args[0])[0] for v in views
    )


def _is_frames_as_images(x: Node, views: Sequence[Node]) -> bool:
    """True if the views turn the video x into a batch of images, its frames in order."""
    if rank(x) != 5:
        return False
    N, C, T, *image = shape(x)
    return [v.args[1] for v in views] == [TO_FRAMES, (N * T, C, *image)]
