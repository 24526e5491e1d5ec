"""Rules for queries, keys and values of attention: norms, rotary embeddings and concatenations of tokens.

Transformers with text and image tokens in one attention compute queries and keys as heads (B, S, H, D). They
normalize each row, apply the rotary embedding (the *rotation*), and concatenate the heads of both kinds of
tokens. The concatenation may come before the rotation. Values are only concatenated. Some models have all
tokens in one tensor, and write rotated tokens over a part of it.

``steps.rotate`` computes the norm and the rotation in one kernel. ``steps.join_heads`` does this for several
groups of tokens, and writes each group into its place in the concatenated tensor.
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
# The permutation that exchanges tokens and heads: (B, S, H, D) becomes (B, H, S, D), and the reverse.
_SWAP = (0, 2, 1, 3)


class _Part(NamedTuple):
    """The heads x of some tokens, with the norm and rotary embedding that ``steps.rotate`` applies to them.

    With the defaults there is neither a norm nor a rotary embedding.
    """

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
        """Returns this part, but with the norm of the other part ``norm`` before the rotary embedding."""
        return self._replace(weight=norm.weight, eps=norm.eps, bias=norm.bias, layer=norm.layer)


def heads(graph: fx.Graph) -> fx.Graph:
    """Replaces norms, rotary embeddings and concatenations of attention heads by fewer kernels.

    The pass goes from the first node to the last, because rules for later nodes look for the kernels that
    have replaced earlier nodes.
    """
    return apply(graph, _one_step, *_RULES, steps.layer_norm, *LAST_OPS)


def _one_step(r: Rewriter, n: Node) -> Node | None:
    return _RULES.get(n.target, _normalized)(r, n)


def _normalized(r: Rewriter, n: Node) -> Node | None:
    """Replaces a norm that attention reads by ``steps.rotate``, the kernel for norms and rotary embeddings.

    The kernel reads rows with any strides. So it needs no copy if queries, keys and values are parts of one
    matrix product.
    """
    found = _norm(r, n) if rank(n) == 4 and _is_read_by_attention(n, steps.permute) else None
    return None if found is None else _tokens_first(r, n, found)


def _rotated(r: Rewriter, n: Node) -> Node | None:
    """Joins a rotary embedding with the norm before it in one ``steps.rotate``.

    If the embedding follows a concatenation of heads, it is applied to each part instead.
    """
    own = _Part(*n.args)
    found = _part(r, own.x)
    found = own if found.cos is not None else own._replace(x=found.x).after(found)
    return _tokens_first(r, n, found)


def _tokens_first(r: Rewriter, n: Node, found: _Part) -> Node:
    """Makes a node that computes ``found``, the norm and rotary embedding whose result is ``n``.

    If ``found.x`` is a view (B, H, S, D) of a tensor (B, S, H, D), the node reads the tensor, and a view of
    its result replaces ``n``. Then the heads of a token lie side by side in memory, also in the result of
    attention.
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
    """Returns ``parts``, heads that are concatenated along the tokens, each with a rotary embedding.

    ``found``: the rotary embedding of all tokens. A part gets its own rows of the tables of cos and sin.
    """
    rotated, start = [], 0
    for p in parts:
        where = 1, start, shape(p.x)[1]
        cos, sin = (_cut_table(r, t, *where) for t in (found.cos, found.sin))
        rotated.append(p._replace(cos=cos, sin=sin, halves=found.halves))
        start += shape(p.x)[1]
    return rotated


def _joined(r: Rewriter, n: Node) -> Node | None:
    """Replaces a cat of heads along the tokens by one kernel, ``steps.join_heads``.

    The kernel also computes norms and rotary embeddings of the parts. The cat is replaced only if a part has
    one of these, or if attention reads the cat.
    """
    parts, dim = n.args
    found = _parts(r, n, parts, dim)
    if found is None:
        return None
    if not any(map(_is_computed, found)) and not _is_read_by_attention(n, steps.permute, steps.rotate):
        return None
    return _join(r, found, n, dim == 2)


def _overwritten(r: Rewriter, n: Node) -> Node | None:
    """Replaces a write of some tokens into x, the heads of all tokens, by one kernel: ``steps.join_heads``.

    The kernel makes a new tensor of the written tokens and the other tokens of x. It also computes the norm
    and rotary embedding of the written tokens; if they have neither, nothing is replaced. Nothing is replaced
    either if x is in newly allocated memory: then the tokens can be written into x in place.
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
    """Returns a ``_Part`` (B, S, H, D) for each of ``parts``, which the node ``n`` joins.

    None if ``n`` does not join attention heads along the tokens, or if they do not fit the kernels.
    """
    if rank(n) != 4 or dim not in (1, 2) or 0 in shape(n) or not has_kernels(n) or not fits(shape(n)[-1]):
        return None
    return [_part(r, r.permute(p, _SWAP) if dim == 2 else p) for p in parts]


def _is_computed(p: _Part) -> bool:
    return p.has_norm or p.cos is not None


def _join(r: Rewriter, parts: list[_Part], n: Node, is_swapped: bool) -> Node:
    """Makes a call of ``steps.join_heads`` for ``parts``, heads (B, S, H, D), in place of the node ``n``.

    ``is_swapped``: True if ``n`` is (B, H, S, D). The result of the call is then permuted.
    """
    B, S, H, D = (shape(n)[i] for i in _SWAP) if is_swapped else shape(n)
    y = r.new(steps.join_heads, (tuple(map(tuple, parts)),), (B, S, H, D), dtype(n))
    return r.permute(y, _SWAP) if is_swapped else y


def _is_read_by_attention(n: Node, *through: Any) -> bool:
    """True if attention reads ``n``, directly or after calls of the functions ``through``."""
    return any(
        has(u, steps.attention) or (has(u, *through) and _is_read_by_attention(u, *through)) for u in n.users
    )


def _part(r: Rewriter, n: Node) -> _Part:
    """Returns a ``_Part`` that describes the attention heads ``n``.

    If ``n`` is a view of a rotary embedding or norm, the part has the same view of its input, and applies the
    embedding or norm to this view. Otherwise the part has ``n``, without embedding and norm.
    """
    source, views = _rows(n)
    if has(source, steps.rotate) and not any(has(v, steps.reshape) for v in views):
        found = _Part(*source.args)
        tables = [None if t is None else _same_views(r, views, t, is_table=True) for t in found[1:3]]
        return found._replace(x=_same_views(r, views, found.x), cos=tables[0], sin=tables[1])
    norm = _norm(r, source)
    return _Part(n) if norm is None else norm._replace(x=_same_views(r, views, norm.x))


def _norm(r: Rewriter, n: Node) -> _Part | None:
    """Returns the norm over the last axis whose result is the node ``n``. None if ``n`` is no such norm."""
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
    """Returns the value from which views make the node ``n``, and these views in order.

    It goes back only over views that keep each row along the last axis.
    """
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
    """Applies to x the reshapes, permutations and cuts of the nodes ``views``.

    ``is_table``: True if x is a table of cos or sin. Its axes of one element are broadcast, so they are not
    cut.
    """
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


# For each function that nodes call, the rule that replaces such nodes. ``_normalized`` is for all others.
_RULES = {steps.rotate: _rotated, steps.cat: _joined, aten.slice_scatter.default: _overwritten}
