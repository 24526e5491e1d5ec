"""Steps of transformers: sums before layer norms, gated activations, and what products take in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.act_linear.config import has_few_rows
from sdfastgn.plans.rewrite.ada_norms import in_dtype, uncast
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    cleaned,
    dtype,
    has,
    has_kernels,
    is_only,
    operands,
    ordered,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.norms import activation, is_outside
from sdfastgn.plans.rewrite.repeated_rows import grouped_rows
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.rewrite.views import applied
from sdfastgn.plans.run import steps

aten = torch.ops.aten
# Dtypes of products that compute an activation.
HALVES = (torch.float16, torch.bfloat16)
# Dtypes of sums of products. A part of a sum may be much larger than the sum, and has no place in fp16.
_ADDED = (torch.bfloat16, torch.float32)
# Bytes. Matrix products on tensor cores need rows at multiples of it.
_ALIGNMENT = 16


def tokens(graph: fx.Graph) -> fx.Graph:
    """Sums go into the layer norms and products beside them. Gates, few rows and cats get their steps."""
    graph = apply(_add_before_norms(graph), _gated, aten.mul.Tensor)
    graph = apply(graph, _few_rows, steps.linear)
    graph = apply(graph, _activated_product, aten.gelu.default)
    graph = apply(graph, _product_of_cat, steps.linear)
    return apply(graph, _one_more_row, aten.add.Tensor)


# ---- sums


def _add_before_norms(graph: fx.Graph) -> fx.Graph:
    """layer_norm(a + b) -> ``add_layer_norm``. A product that is then added to a + b is added in place."""
    r = Rewriter(graph)
    later: Any = _sums_in_place(graph)
    in_place = {total for total, _ in later.values()}
    for n in graph.nodes:
        total: Any = n.args[0] if has(n, steps.layer_norm) else None
        if not _is_sum(total) or total in in_place or not all(map(is_outside, n.args[1:3])):
            continue
        after, product = later.get(total, (None, None))
        r.at = total
        bias = product.args[2] if product is not None else None
        both = _norm_of_sum(r, total, n.args[1:], bias)
        y, new_total = r.item(both, 0, n), r.item(both, 1, total)
        r.replace(n, y)
        r.replace(total, new_total)
        if after is not None:
            r.at = after
            r.replace(after, r.like(steps.add_linear_, (new_total, *product.args[:2]), after))
    return ordered(cleaned(graph))


def _norm_of_sum(r: Rewriter, total: Node, norm: Sequence[Any], bias: Node | None) -> Node:
    """The step for (layer_norm(total), total + bias). It reads rows that are repeated in the sum once."""
    for x, added in operands(total):
        found = grouped_rows(r, added)
        if found is not None:
            both = x.args if _is_sum(x) and is_only(x) else (x, None)
            return r.new(steps.grouped_layer_norm, (*both, *found, *norm, bias))
    return r.new(steps.add_layer_norm, (*total.args, *norm, bias))


def _sums_in_place(graph: fx.Graph) -> dict[Node, tuple[Node, Any]]:
    """a + b -> (total, product): total = (a + b) + product may be written over a + b.

    Only a layer norm reads a + b besides, and nobody else reads the product. ``add_layer_norm`` then makes
    a + b as a new tensor, and adds the product's bias to it. So every other sum of a chain can be written in
    place. The last one is, because no norm follows it that could add.
    """
    found: dict[Node, tuple[Node, Any]] = {}
    for total in reversed(graph.nodes):
        for product, before in operands(total) if _is_sum(total) and total not in found else ():
            if not has(product, steps.linear) or not is_only(product):
                continue
            if _is_sum(before) and _is_read_by_norm_and(total, before):
                found[before] = total, product
                break
    return found


def _is_read_by_norm_and(total: Node, before: Node) -> bool:
    """True if one layer norm, of rows of ``before``, and ``total`` read ``before``, and no other node."""
    norm: Any = next((u for u in before.users if u is not total), None)
    return has(norm, steps.layer_norm) and norm.args[0] is before and set(before.users) == {total, norm}


def _is_sum(n: Any) -> bool:
    """True if ``n`` is the sum of two different tensors of one shape and dtype."""
    if not has(n, aten.add.Tensor) or not has_kernels(n):
        return False
    are_alike = [shape(t) == shape(n) and dtype(t) == dtype(n) for t, _ in operands(n)]
    return bool(are_alike) and all(are_alike) and n.args[0] is not n.args[1]


# ---- gates and few rows


def _gated(r: Rewriter, n: Node) -> Node | None:
    """value * activation(gate), of one shape and dtype -> ``gated``, which does not round the activation."""
    for value, factor in operands(n):
        activated, views = _before_views(factor, n)
        name = activation(activated)
        gate = in_dtype(activated.args[0], n) if name is not None and is_only(activated) else None
        if gate is None or not shape(value) == shape(factor) == shape(n) or dtype(value) != dtype(n):
            continue
        if has_kernels(n) and shape(n):
            return r.like(steps.gated, (value, applied(r, views, gate), name), n)
    return None


def _before_views(n: Node, root: Node) -> tuple[Any, list[Node]]:
    """(value, views): n is the value after these views, and after casts that ``uncast`` takes away.

    Nobody but n reads the results of the views and casts between.
    """
    views: list[Node] = []
    while is_only(n) and activation(n) is None:
        if has(n, steps.reshape, steps.permute):
            views.insert(0, n)
        elif uncast(n, root) is n:
            break
        n = n.args[0]
    return n, views


def _few_rows(r: Rewriter, n: Node) -> Node | None:
    """linear(activation(x)) of few rows -> ``act_linear``."""
    if rank(n) != 2 or not has_few_rows(shape(n)[0]):
        return None
    activated: Any = n.args[0]
    name = activation(activated)
    return r.like(steps.act_linear, (activated.args[0], *n.args[1:], name, None), n) if name else None


def _activated_product(r: Rewriter, n: Node) -> Node | None:
    """GELU, in its tanh form, of a linear layer with a bias in 16 bits -> ``linear_gelu``."""
    product = n.args[0]
    if activation(n) != "gelu_tanh" or not has(product, steps.linear) or not is_only(product):
        return None
    _, weight, bias = product.args
    are_alike = bias is not None and dtype(weight) == dtype(bias) == dtype(n)
    has_many_rows = math.prod(shape(n)[:-1]) > 0 and not has_few_rows(math.prod(shape(n)[:-1]))
    if not are_alike or dtype(n) not in HALVES or not has_many_rows or rank(weight) != 2:
        return None
    return r.like(steps.linear_gelu, product.args, n)


def _product_of_cat(r: Rewriter, n: Node) -> Node | None:
    """linear(cat(parts)) of many rows -> the sum of the products of the parts, in one tensor.

    The result is rounded after each product. So the smallest part, which adds least, is the first.
    """
    cat, weight, bias = n.args
    if not has(cat, steps.cat) or not is_only(cat) or cat.args[1] != rank(cat) - 1 or dtype(n) not in _ADDED:
        return None
    N, K = shape(weight)
    ends = list(itertools.accumulate((shape(p)[-1] for p in cat.args[0]), initial=0))
    parts = sorted(zip(cat.args[0], ends, strict=False), key=lambda part: shape(part[0])[-1])
    has_many_rows = math.prod(shape(n)[:-1]) > 0 and not has_few_rows(math.prod(shape(n)[:-1]))
    are_aligned = all(end * dtype(weight).itemsize % _ALIGNMENT == 0 for end in ends)
    # A cat reads and writes K elements of a row, and each further product N.
    if not has_many_rows or not are_aligned or (len(parts) - 1) * N >= K:
        return None
    total = None
    for part, start in parts:
        own = r.cut(weight, 1, start, shape(part)[-1])
        if total is None:
            total = r.like(steps.linear, (part, own, bias), n)
        else:
            total = r.like(steps.add_linear_, (total, part, own), n)
    return total


def _one_more_row(r: Rewriter, n: Node) -> Node | None:
    """``act_linear`` plus a row, such as the bias of a convolution -> its second bias."""
    for y, row in operands(n):
        takes_row = has(y, steps.act_linear) and is_only(y) and y.args[4] is None and dtype(y) == dtype(n)
        if takes_row and shape(row) == shape(n)[1:] and dtype(row).is_floating_point and shape(y) == shape(n):
            return r.like(steps.act_linear, (*y.args[:4], row), n)
    return None
