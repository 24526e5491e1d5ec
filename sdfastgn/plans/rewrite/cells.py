"""Replaces convolutions whose windows neither overlap nor leave gaps, such as wavelets, by matrix products.

A *cell* is one such window: it has as many positions as the kernel. The rules know two patterns, both of
convolutions with one filter for each channel. In the first, several convolutions of the same input are
concatenated along the channels: they compute several weighted sums of each cell. In the second, the results
of several transposed convolutions are added: they compute cells from such sums.

Both are matrix products of the elements of cells with one matrix, whatever the filters are. Most entries of
the matrix are zeros. If an element is inf or nan, its products with these zeros are nan. So the whole cell is
then nan, which it would not be in a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import Node

from sdfastgn.plans.rewrite.cats import unpadded
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    dtype,
    has,
    has_kernels,
    is_only,
    number,
    operands,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

aten = torch.ops.aten
# Convolutions become a matrix product only if the matrix has at most this number of rows and of columns. With
# a larger matrix, a GPU would take longer to compute the product than to read and write the tensors.
MOST = 512


def gathered(x: Tensor, filters: Tensor, scale: float) -> Tensor:
    """Stands for a convolution whose windows do not overlap. Later rules replace it, so it never runs.

    ``filters``: (r, C, *cell), where ``*cell`` is the size of the kernel. Each window (cell) of channel c of
    x becomes one element of channel i * C + c, for each i below r: the sum of the cell's elements, each times
    its number in ``scale * filters[i, c]``.
    """
    raise NotImplementedError


def scattered(x: Tensor, filters: Tensor, scale: float) -> Tensor:
    """Stands for a transposed convolution whose windows do not overlap. Later rules replace it.

    ``filters``: (r, C, *cell), where ``*cell`` is the size of the kernel. x has r * C channels, and the
    result has C. Each position of x becomes a cell of the result. Channel c of this cell is the sum over i of
    the element in channel i * C + c of x, times ``scale * filters[i, c]``.
    """
    raise NotImplementedError


def cells(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, side_by_side, steps.cat)
    graph = apply(graph, added_up, aten.add.Tensor)
    graph = apply(graph, scaled, aten.mul.Tensor, aten.div.Tensor)
    graph = apply(graph, without_unread_pad, gathered)
    graph = apply(graph, cells_of_cells, gathered, scattered)
    return apply(graph, as_product, gathered, scattered)


# ---- convolutions


class Chain(NamedTuple):
    """Convolutions one after another. The first reads channels ``start`` to ``start + C`` of ``x``.

    ``filters`` has one weight (C, 1, *kernel) for each convolution.
    """

    x: Node
    start: int
    filters: tuple[Node, ...]


def side_by_side(r: Rewriter, n: Any) -> Node | None:
    """Replaces convolutions of one input, and the cat of their channels, by one node: ``gathered``.

    The windows of each convolution must not overlap.
    """
    parts, dim = n.args
    if dim != 1 or not _is_usual(n):
        return None
    chains, inside = [], {n}
    for part in parts:
        filters: list[Node] = []
        v = part
        while _is_of_cells(v, transposed=False):
            inside.add(v)
            filters, v = [v.args[1], *filters], v.args[0]
        chains.append(Chain(v, 0, tuple(filters)))
    is_read = any(u not in inside for v in inside - {n} for u in v.users)
    if is_read or any(c.x is not chains[0].x for c in chains):
        return None
    filters_ = _joined(r, chains, first_is_inner=True)
    return None if filters_ is None else r.like(gathered, (chains[0].x, filters_, 1.0), n)


def added_up(r: Rewriter, n: Any) -> Node | None:
    """Replaces transposed convolutions, and the sum of their results, by one node: ``scattered``.

    The windows of each convolution must not overlap. The convolutions must read different channels of the
    same value, and together all of its channels.
    """
    chains = sorted(_terms(n) or (), key=lambda c: c.start) if _is_usual(n) else []
    starts = [c.start for c in chains]
    if not chains or starts != list(range(0, shape(chains[0].x)[1], shape(n)[1])):
        return None
    if any(c.x is not chains[0].x for c in chains):
        return None
    filters = _joined(r, chains, first_is_inner=False)
    return None if filters is None else r.like(scattered, (chains[0].x, filters, 1.0), n)


def _terms(n: Any) -> list[Chain] | None:
    """Lists the transposed convolutions whose sum is the node ``n``. None if ``n`` is no such sum."""
    if has(n, aten.add.Tensor):
        a, b = next(operands(n), (None, None))
        if a is None or a is b or shape(a) != shape(b) or dtype(a) != dtype(b):
            return None
        both = [_terms(t) if is_only(t) else None for t in (a, b)]
        return None if None in both else [*both[0], *both[1]]  # type: ignore[misc]
    if not _is_of_cells(n, transposed=True):
        return None
    x, weight = n.args[:2]
    if has(x, steps.cut) and x.args[1] == 1:
        return [Chain(x.args[0], x.args[2], (weight,))]
    before = _terms(x) if is_only(x) else None
    return None if before is None else [c._replace(filters=(*c.filters, weight)) for c in before]


def _is_of_cells(n: Any, *, transposed: bool) -> bool:
    """True if the node ``n`` is a convolution whose windows do not overlap.

    It must have no bias, and one filter for each channel.
    """
    if not has(n, steps.conv):
        return False
    x, weight, bias, stride, padding, dilation, is_transposed, more, groups = n.args
    C, one, *kernel = shape(weight)
    is_alone = one == 1 and groups == C == shape(x)[1] and bias is None and is_transposed is transposed
    return is_alone and list(stride) == kernel and set(dilation) == {1} and not any((*padding, *more))


def _is_usual(n: Any) -> bool:
    return rank(n) in (4, 5) and has_kernels(n) and 0 not in shape(n)


# ---- the filters of convolutions


def _joined(r: Rewriter, chains: Sequence[Chain], *, first_is_inner: bool) -> Node | None:
    """Combines the filters of successive convolutions: (chains, C, *cell), in fp32.

    Each of ``chains`` is a series of convolutions, which gets one combined filter for each channel. Returns
    None for a single chain, for kernels of different sizes, or if the matrix that replaces the convolutions
    would be too large.

    ``first_is_inner``: True if each element of the next convolution's kernel stands for a whole kernel of the
    first one. False if it is the other way round, as in transposed convolutions.
    """
    kernels = [[shape(w)[2:] for w in c.filters] for c in chains]
    C = shape(chains[0].filters[0])[0] if chains[0].filters else 0
    is_alike = C and len(chains) > 1 and all(k == kernels[0] for k in kernels)
    cell = [math.prod(sizes) for sizes in zip(*kernels[0], strict=True)]
    if not is_alike or max(len(chains), math.prod(cell)) * C > MOST:
        return None
    found: Any = None
    for weights in zip(*(c.filters for c in chains), strict=True):
        kernel = shape(weights[0])[2:]
        P = math.prod(kernel)
        rows = tuple(r.reshape(w, (C, P)) for w in weights)
        flat = r.new(steps.cat, (rows, 0), (len(rows) * C, P), dtype(weights[0]))
        every = r.reshape(flat, (len(chains), C, *kernel))
        if found is None:
            found = r.cast(every, torch.float32)
        elif first_is_inner:
            found = _nested(r, every, found)
        else:
            found = _nested(r, found, every)
    return found


def _nested(r: Rewriter, outer: Node, inner: Node) -> Node:
    """Combines the filters of two convolutions: each element of ``outer`` becomes element * ``inner``."""
    channels = shape(outer)[0] * shape(outer)[1]
    b, C, *small = shape(inner)
    outer = r.reshape(outer, (channels // (b * C), b * C, *shape(outer)[2:]))
    cell = [o * i for o, i in zip(shape(outer)[2:], small, strict=True)]
    return r.new(steps.nested_filters, (outer, inner), (channels // C, C, *cell), torch.float32)


# ---- rules for ``gathered`` and ``scattered``, nodes that stand for convolutions


def scaled(r: Rewriter, n: Any) -> Node | None:
    """Replaces conv(x) * factor or conv(x) / divisor by one node, which scales the convolution's filters."""
    of, factor = n.args[0], number(n)
    if not has(of, gathered, scattered) or not is_only(of) or not factor or dtype(of) != dtype(n):
        return None
    x, filters, scale = of.args
    scale = scale * factor if has(n, aten.mul.Tensor) else scale / factor
    return r.like(of.target, (x, filters, scale), n)


def without_unread_pad(r: Rewriter, n: Any) -> Node | None:
    """Removes a pad before a convolution whose windows do not overlap, if no window reads the pad."""
    padded, filters, scale = n.args
    x = unpadded(padded, [m * k for m, k in zip(shape(n)[2:], shape(filters)[2:], strict=True)])
    return None if x is padded else r.like(gathered, (x, filters, scale), n)


def cells_of_cells(r: Rewriter, n: Any) -> Node | None:
    """Replaces two successive convolutions whose windows do not overlap by one such convolution.

    It does the same for two transposed convolutions.
    """
    before, filters, scale = n.args
    if not has(before, n.target) or not is_only(before):
        return None
    x, first, first_scale = before.args
    outer, inner = (filters, first) if has(n, gathered) else (first, filters)
    sizes = [shape(outer)[0] * shape(inner)[0], math.prod((*shape(outer)[2:], *shape(inner)[2:]))]
    if max(sizes) * min(shape(outer)[1], shape(inner)[1]) > MOST:
        return None
    return r.like(n.target, (x, _nested(r, outer, inner), scale * first_scale), n)


def as_product(r: Rewriter, n: Any) -> Node:
    """Replaces a convolution whose windows do not overlap by views, a matrix product, and views of it."""
    x, filters, scale = n.args
    count, C, *cell = shape(filters)
    d, P = len(cell), math.prod(cell)
    is_scattered = has(n, scattered)
    N, many, *few = shape(x) if is_scattered else shape(n)  # few: the number of windows along each axis
    size = (P * C, count * C) if is_scattered else (count * C, P * C)
    matrix = r.new(steps.matrix_of_cells, (filters, scale, dtype(n), is_scattered), size, dtype(n))
    if is_scattered:
        x = r.permute(x, (0, *range(2, d + 2), 1))
        y = r.new(steps.linear, (x, matrix, None), (N, *few, P * C), dtype(n))
        y = r.reshape(y, (N, *few, *cell, C))
        places = [axis for i in range(1, d + 1) for axis in (i, d + i)]
        return r.reshape(r.permute(y, (0, 2 * d + 1, *places)), shape(n))
    for axis, (m, k) in enumerate(zip(few, cell, strict=True), 2):
        x = r.cut(x, axis, 0, m * k)
    split = [size for pair in zip(few, cell, strict=True) for size in pair]
    x = r.permute(r.reshape(x, (N, C, *split)), (0, *range(2, 2 * d + 2, 2), *range(3, 2 * d + 2, 2), 1))
    y = r.new(steps.linear, (r.reshape(x, (N, *few, P * C)), matrix, None), (N, *few, many), dtype(n))
    return r.permute(y, (0, d + 1, *range(1, d + 1)))
