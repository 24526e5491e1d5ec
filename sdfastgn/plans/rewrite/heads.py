"""Queries, keys and values of attention over two kinds of tokens, such as text and image.

Models compute for heads (B, S, H, D): the norm of each row, its rotation, and a concatenation with the
heads of other tokens. The concatenation may come before the rotation. Values are only concatenated. Some
models have all tokens in one tensor, and write rotated tokens over a part of it.

``steps.rotate`` takes the norm, and ``steps.join_heads`` writes each part into its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.rotate.op import fits
from sdfastgn.plans.rewrite.ada_norms import in_dtype, uncast
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, has_kernels, rank, shape
from sdfastgn.plans.rewrite.norms import LAST_OPS, norm_over
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.rewrite.spelling import UNFILLED
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.schemas import arguments

aten = torch.ops.aten
# Exchanges tokens and heads.
_SWAP = (0, 2, 1, 3)


class _Part(NamedTuple):
    """The arguments of ``steps.rotate``. With the defaults the result is x."""

    x: Node
    cos: Node | None = None
    sin: Node | None = None
    weight: Node | None = None
    eps: float = 0.0
    halves: bool = False
    bias: Node | None = None
    layer: bool = False

    @property
    def has_norm(self) -> bool:
        return self.weight is not None or self.layer

    def after(self, norm: _Part) -> _Part:
        """This rotation, of the result of ``norm``."""
        return self._replace(weight=norm.weight, eps=norm.eps, bias=norm.bias, layer=norm.layer)


def heads(graph: fx.Graph) -> fx.Graph:
    """Goes forward, so that a rule finds what it has made of the nodes before."""
    return apply(graph, _one_step, *_RULES, steps.layer_norm, *LAST_OPS)


def _one_step(r: Rewriter, n: Node) -> Node | None:
    return _RULES.get(n.target, _normalized)(r, n)


def _normalized(r: Rewriter, n: Node) -> Node | None:
    """A norm that attention reads -> a step that takes the rows from a larger product without a copy."""
    found = _norm(r, n) if rank(n) == 4 and _is_read_by_attention(n, steps.permute) else None
    return None if found is None else _tokens_first(r, n, found)


def _rotated(r: Rewriter, n: Node) -> Node | None:
    """A norm and the rotary embedding after it -> one step, or one for each part of joined heads."""
    own = _Part(*n.args)
    found = _part(r, own.x)
    found = own if found.cos is not None else own._replace(x=found.x).after(found)
    return _tokens_first(r, n, found)


def _tokens_first(r: Rewriter, n: Node, found: _Part) -> Node:
    """A node that computes ``found``, the norm and rotation whose result is n.

    If x is a view (B, H, S, D) of a tensor (B, S, H, D), it is computed in the order of the tensor. Then the
    heads of a token lie side by side, also in the result of attention.
    """
    is_swapped = has(found.x, steps.permute) and found.x.args[1] == _SWAP
    if is_swapped:
        x, cos, sin = (None if t is None else r.permute(t, _SWAP) for t in found[:3])
        found = found._replace(x=x, cos=cos, sin=sin)
    joined: Any = found.x
    parts = [_Part(*p) for p in joined.args[0]] if has(joined, steps.join_heads) else []
    if parts and not found.has_norm and all(p.cos is None for p in parts):
        y = _join(r, _each_rotated(r, parts, found), n, is_swapped)
    else:
        y = r.new(steps.rotate, found, shape(found.x), dtype(n))
        y = r.permute(y, _SWAP) if is_swapped else y
    return y


def _each_rotated(r: Rewriter, parts: list[_Part], found: _Part) -> list[_Part]:
    """The parts, each rotated as in ``found``, with its rows of the tables."""
    rotated, start = [], 0
    for p in parts:
        where = 1, start, shape(p.x)[1]
        cos, sin = (_cut_table(r, t, *where) for t in (found.cos, found.sin))
        rotated.append(p._replace(cos=cos, sin=sin, halves=found.halves))
        start += shape(p.x)[1]
    return rotated


def _joined(r: Rewriter, n: Node) -> Node | None:
    """A cat of heads along the tokens -> ``join_heads``, if a part is computed, or attention reads it."""
    parts, dim = n.args
    found = _parts(r, n, parts, dim)
    if found is None:
        return None
    if not any(map(_is_computed, found)) and not _is_read_by_attention(n, steps.permute, steps.rotate):
        return None
    return _join(r, found, n, dim == 2)


def _overwritten(r: Rewriter, n: Node) -> Node | None:
    """Rotated tokens overwrite some tokens of heads x -> ``join_heads`` of them and of the rest of x.

    Nothing is joined if x is new memory: the tokens are then written into it in place.
    """
    x, part, dim, start, _, step = arguments(n)
    if has(x, *UNFILLED, aten.full.default, aten.slice_scatter.default) or step != 1 or start < 0:
        return None
    end = start + shape(part)[dim]
    around = r.cut(x, dim, 0, start), part, r.cut(x, dim, end, shape(x)[dim] - end)
    found = _parts(r, n, [p for p in around if shape(p)[dim]], dim)
    if found is None or not _is_computed(found[start > 0]):
        return None
    return _join(r, found, n, dim == 2)


def _parts(r: Rewriter, n: Node, parts: Iterable[Node], dim: int) -> list[_Part] | None:
    """A ``_Part`` for each of ``parts``, as (B, S, H, D). None if ``n`` does not join heads along tokens."""
    if rank(n) != 4 or dim not in (1, 2) or 0 in shape(n) or not has_kernels(n) or not fits(shape(n)[-1]):
        return None
    return [_part(r, r.permute(p, _SWAP) if dim == 2 else p) for p in parts]


def _is_computed(p: _Part) -> bool:
    return p.has_norm or p.cos is not None


def _join(r: Rewriter, parts: list[_Part], n: Node, is_swapped: bool) -> Node:
    """The parts (B, S, H, D) side by side, as the value ``n``, which may be (B, H, S, D)."""
    B, S, H, D = (shape(n)[i] for i in _SWAP) if is_swapped else shape(n)
    y = r.new(steps.join_heads, (tuple(map(tuple, parts)),), (B, S, H, D), dtype(n))
    return r.permute(y, _SWAP) if is_swapped else y


def _is_read_by_attention(n: Node, *through: Any) -> bool:
    """True if attention reads ``n``, or what steps of the kinds ``through`` make of it."""
    return any(
        has(u, steps.attention) or (has(u, *through) and _is_read_by_attention(u, *through)) for u in n.users
    )


def _part(r: Rewriter, n: Node) -> _Part:
    """What ``steps.rotate`` has to compute for the value ``n``: a view of a rotation or norm, or n itself."""
    source, views = _rows(n)
    if has(source, steps.rotate) and not any(has(v, steps.reshape) for v in views):
        found = _Part(*source.args)
        tables = [None if t is None else _same_views(r, views, t, is_table=True) for t in found[1:3]]
        return found._replace(x=_same_views(r, views, found.x), cos=tables[0], sin=tables[1])
    norm = _norm(r, source)
    return _Part(n) if norm is None else norm._replace(x=_same_views(r, views, norm.x))


def _norm(r: Rewriter, n: Node) -> _Part | None:
    """The norm of rows whose result is n. None if n is no such norm."""
    D = shape(n)[-1] if rank(n) else 0
    if not has_kernels(n) or 0 in shape(n) or not fits(D):
        return None
    layer = uncast(n, n)
    if has(layer, steps.layer_norm):
        x, weight, bias, eps = layer.args
        source = in_dtype(x, n)
        return None if source is None else _Part(source, None, None, weight, eps, bias=bias, layer=True)
    found = norm_over(n, rank(n) - 1)
    if found is None or found.weight is None:
        return None
    if found.eps or found.scale != math.sqrt(D):
        return None
    weight, bias = (None if t is None else r.reshape(t, (D,)) for t in (found.weight, found.bias))
    return _Part(found.x, weight=weight, eps=found.added / D, bias=bias)


def _rows(n: Any) -> tuple[Any, list[Node]]:
    """The value whose rows along the last axis are the rows of n, and the views from it to n, in order."""
    views: list[Node] = []
    while has(n, steps.permute, steps.cut, steps.reshape):
        below, last = n.args[0], rank(n) - 1
        while has(n, steps.reshape) and has(below, steps.reshape):
            below = below.args[0]
        if has(n, steps.permute):
            keeps_rows = n.args[1][-1] == last
        else:
            keeps_rows = n.args[1] != last if has(n, steps.cut) else shape(n)[-1:] == shape(below)[-1:]
        if not keeps_rows:
            break
        if not has(n, steps.reshape) or shape(n) != shape(below):
            views.insert(0, n)
        n = below
    return n, views


def _same_views(r: Rewriter, views: list[Node], x: Node, is_table: bool = False) -> Node:
    """x after the same ``views`` as another value. A table may have one element along an axis."""
    for v in views:
        if has(v, steps.permute):
            x = r.permute(x, v.args[1])
        elif has(v, steps.reshape):
            x = r.reshape(x, shape(v))
        else:
            x = _cut_table(r, x, *v.args[1:]) if is_table else r.cut(x, *v.args[1:])
    return x


def _cut_table(r: Rewriter, t: Node | None, dim: int, start: int, length: int) -> Node | None:
    return t if t is None or shape(t)[dim] == 1 else r.cut(t, dim, start, length)


# Op -> the rule for it.
_RULES = {steps.rotate: _rotated, steps.cat: _joined, aten.slice_scatter.default: _overwritten}
