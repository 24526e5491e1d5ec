"""Rules for work that a model does piece by piece to save memory. A plan does it in one piece.

SeedVR2's autoencoder cuts the input of a large convolution into strips of rows. In front of each strip but
the first it puts the last rows of the strip before, so that the windows of the convolution find their
neighbors. Then it joins the results. In the same way it computes a GroupNorm for a quarter of the channels at
a time. All these cuts and joins are copies, and were 46 % of the bytes that the decoder moved.

A plan needs no more memory for one piece than for strips: the peak of a call fell from 3.00 to 2.45 GB, for a
video of 17 x 480 x 832.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, index_of_pad, is_only, rank, shape
from sdfastgn.plans.run import steps


class _Made(NamedTuple):
    """The result of an op, a cat or pad, for which there is no node yet.

    Attributes:
        target: the op.
        sources: the tensors that the op reads. Each one is a node or a ``_Made``.
        options: the other arguments of the op.
    """

    target: Any
    sources: tuple[Any, ...]
    options: tuple[Any, ...]


class _Strip(NamedTuple):
    """Consecutive rows of a tensor, with zeros around them.

    A row is all that has the same index along one axis: the axis along which the model cuts strips.

    Attributes:
        source: the tensor, a node or a ``_Made``.
        start, length: index of the first row in ``source``, and number of rows.
        pads: numbers of zeros along the other axes, in the format of ``steps.pad``. Empty if there are none.
        before, after: numbers of rows of zeros before and after the strip.
    """

    source: Any
    start: int
    length: int
    pads: tuple[int, ...] = ()
    before: int = 0
    after: int = 0


def convolution_of_strips(r: Rewriter, n: Node, parts: Sequence[Any], dim: int) -> Node | None:
    """Replaces a cat of convolutions of neighboring strips by one convolution of all rows.

    ``parts``: the nodes that the cat ``n`` joins along axis ``dim``. Returns None if ``n`` is no such cat.
    """
    first = parts[0]
    alike = all(has(p, steps.conv) and is_only(p) and p.args[1:] == first.args[1:] for p in parts)
    if dim < 2 or not alike:
        return None
    _, weight, _, stride, _, dilation, *_ = first.args
    axis = dim - 2
    strips = [_padded_strip(p.args[0], dim) for p in parts]
    top, bottom, next_row = strips[0], strips[-1], strips[0].start - strips[0].before
    for p, strip in zip(parts, strips, strict=True):
        has_inner_zeros = (strip.before and strip is not top) or (strip.after and strip is not bottom)
        is_next = strip.start - strip.before == next_row and strip.source == top.source
        if has_inner_zeros or not is_next or strip.pads != top.pads:
            return None
        next_row += shape(p)[dim] * stride[axis]
    length = bottom.start + bottom.length - top.start
    window = (shape(weight)[dim] - 1) * dilation[axis] + 1
    if (top.before + length + bottom.after - window) // stride[axis] + 1 != shape(n)[dim]:
        return None  # the convolutions have padding along the axis, or are transposed
    rows = r.cut(_node(r, top.source), dim, top.start, length)
    pads = list(top.pads or [0] * 2 * (rank(n) - 2))
    at = index_of_pad(rows, dim)
    pads[at : at + 2] = top.before, bottom.after
    if any(pads):
        rows = _node(r, _Made(steps.pad, (rows,), (tuple(pads), "constant", 0.0)))
    return r.like(steps.conv, (rows, *first.args[1:]), n)


def norm_of_channels(r: Rewriter, n: Node, parts: Sequence[Any], dim: int) -> Node | None:
    """Replaces a cat of GroupNorms of some channels each by one GroupNorm of all channels.

    ``parts``: the nodes that the cat ``n`` joins along axis ``dim``. Returns None if ``n`` is no such cat.
    """
    if dim != 1 or not all(has(p, steps.group_norm) for p in parts):
        return None
    options = parts[0].args[4:]
    if any(p.args[4:] != options for p in parts):
        return None
    if len({shape(p)[1] / p.args[1] for p in parts}) > 1:  # the norms have groups of different sizes
        return None
    whole = [_whole(r, [p.args[i] for p in parts], axis) for i, axis in ((0, 1), (2, 0), (3, 0))]
    if any(each is None for each in whole):
        return None
    x, weight, bias = whole
    groups = sum(p.args[1] for p in parts)
    return r.like(steps.group_norm, (x, groups, weight, bias, *options), n)


def _whole(r: Rewriter, parts: Sequence[Any], dim: int) -> Node | None:
    """Returns a node for the cat of ``parts`` if they are consecutive rows of one tensor; else None."""
    if not all(isinstance(p, Node) for p in parts):
        return None
    found = _joined([_strip(p, dim) for p in parts])
    return None if found is None else r.cut(_node(r, found.source), dim, found.start, found.length)


def _padded_strip(x: Any, dim: int) -> _Strip:
    """Returns x as a strip along axis ``dim``.

    If x is a tensor padded with zeros, the strip has the tensor's rows, and says how many zeros are around.
    """
    if not has(x, steps.pad) or x.args[2:] != ("constant", 0):
        return _strip(x, dim)
    inner, pads, at = _strip(x.args[0], dim), list(x.args[1]), index_of_pad(x, dim)
    before, after = pads[at : at + 2]
    pads[at : at + 2] = 0, 0
    return inner._replace(pads=tuple(pads) if any(pads) else (), before=before, after=after)


def _strip(x: Any, dim: int) -> _Strip:
    """Returns x as a strip of the tensor from which x was cut along axis ``dim``.

    x may also be a cat of neighboring cuts of one tensor. If x was not cut, the strip has all rows of x.
    """
    cut = _cut(x, dim)
    if cut is not None:
        source, start, length = cut
        whole = _strip(source, dim)
        return _Strip(whole.source, whole.start + start, length)
    if has(x, steps.cat):
        strips = [_strip(p, dim) for p in x.args[0]]
        found = _joined(strips) if x.args[1] == dim else _side_by_side(strips, x, dim)
        if found is not None:
            return found
    if has(x, steps.pad) and not any(x.args[1][index_of_pad(x, dim) :][:2]):
        inner = _strip(x.args[0], dim)
        return inner._replace(source=_Made(steps.pad, (inner.source,), x.args[1:]))
    return _Strip(x, 0, shape(x)[dim])


def _cut(x: Any, dim: int) -> tuple[Any, int, int] | None:
    """Returns (tensor, start, length) if x is cut from a tensor along axis ``dim``; else None.

    A model may move the axis to the front for the cut, and back afterwards.
    """
    if has(x, steps.cut) and x.args[1] == dim:
        source, _, start, length = x.args
        return source, start, length
    if (
        not has(x, steps.permute)
        or not has(x.args[0], steps.cut)
        or not has(x.args[0].args[0], steps.permute)
    ):
        return None
    moved, at, start, length = x.args[0].args
    source, order = moved.args
    is_back = [order[i] for i in x.args[1]] == list(range(rank(x)))
    return (source, start, length) if is_back and order[at] == dim else None


def _joined(strips: Sequence[_Strip]) -> _Strip | None:
    """Joins ``strips`` to one strip. Returns None if they are not consecutive rows of one tensor."""
    end = strips[0].start
    for strip in strips:
        if strip.source != strips[0].source or strip.start != end:
            return None
        end += strip.length
    return strips[0]._replace(length=end - strips[0].start)


def _side_by_side(strips: Sequence[_Strip], x: Any, dim: int) -> _Strip | None:
    """Returns x, a cat of ``strips`` along another axis than ``dim``, as one strip.

    The strip is cut from a cat of the whole tensors from which ``strips`` were cut. Returns None if the
    strips are not the same rows of each tensor, or if the tensors have different numbers of rows.
    """
    if len({(s.start, s.length, _rows(s.source, dim)) for s in strips}) > 1:
        return None
    return strips[0]._replace(source=_Made(steps.cat, tuple(s.source for s in strips), (x.args[1],)))


def _rows(source: Any, dim: int) -> int:
    """Returns the size of ``source`` along ``dim``. A ``_Made`` has the same size there as its sources."""
    while isinstance(source, _Made):
        source = source.sources[0]
    return shape(source)[dim]


def _node(r: Rewriter, source: Any) -> Node:
    """Returns ``source`` if it is a node. If it is a ``_Made``, makes a node that computes it."""
    if isinstance(source, Node):
        return source
    nodes = [_node(r, each) for each in source.sources]
    to = list(shape(nodes[0]))
    if source.target is steps.cat:
        (axis,) = source.options
        to[axis] = sum(shape(node)[axis] for node in nodes)
        return r.new(steps.cat, (tuple(nodes), axis), to, dtype(nodes[0]))
    pads = source.options[0]
    to = [size + (sum(pads[index_of_pad(nodes[0], i) :][:2]) if i > 1 else 0) for i, size in enumerate(to)]
    return r.new(steps.pad, (nodes[0], *source.options), to, dtype(nodes[0]))
