"""Rules for transformers: sums before layer norms, gated activations, and linear layers.

Linear layers compute sums and activations after them, or read concatenated inputs without the concatenation.
"""

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
# In these dtypes a linear layer can also compute the GELU after it.
HALVES = (torch.float16, torch.bfloat16)
# In these dtypes a linear layer of concatenated inputs may become a sum of linear layers. In fp16 it may not,
# because a term of the sum can be beyond fp16's range although the sum is not.
_ADDED = (torch.bfloat16, torch.float32)
# Bytes. Matrix products on tensor cores need rows that begin at multiples of this number.
_ALIGNMENT = 16


def tokens(graph: fx.Graph) -> fx.Graph:
    """Joins sums, layer norms, linear layers, gated activations and concatenations to fewer kernels."""
    graph = apply(_add_before_norms(graph), _gated, aten.mul.Tensor)
    graph = apply(graph, _few_rows, steps.linear)
    graph = apply(graph, _activated_product, aten.gelu.default)
    graph = apply(graph, _product_of_cat, steps.linear)
    return apply(graph, _one_more_row, aten.add.Tensor)


# ---- sums


def _add_before_norms(graph: fx.Graph) -> fx.Graph:
    """Replaces layer_norm(a + b) by ``steps.add_layer_norm``, which returns the sum and its norm.

    If the result of a linear layer is added to a + b later, the layer adds it in place.
    """
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
    """Makes a node that computes layer_norm(total) and total + bias in one kernel. ``total`` is a sum.

    If rows of a summand are repeated by views, the kernel reads each of these rows once. ``bias``: the bias
    of the linear layer whose result is added to the sum later; None if there is no such layer.
    """
    for x, added in operands(total):
        found = grouped_rows(r, added)
        if found is not None:
            both = x.args if _is_sum(x) and is_only(x) else (x, None)
            return r.new(steps.grouped_layer_norm, (*both, *found, *norm, bias))
    return r.new(steps.add_layer_norm, (*total.args, *norm, bias))


def _sums_in_place(graph: fx.Graph) -> dict[Node, tuple[Node, Any]]:
    """Finds the sums that a linear layer can add in place.

    Returns a dict from nodes a + b to pairs (total, product). total is the node (a + b) + product, which may
    be written over a + b. product is a linear layer that only total reads. Besides total, only a layer norm
    reads a + b.

    ``add_layer_norm`` writes a + b to a new tensor, and already adds the bias of the linear layer to it. In a
    chain of sums, ``add_layer_norm`` and linear layers compute the sums in turns. A linear layer computes the
    last sum, because no norm follows it.
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
    """True if exactly two nodes read ``before``: ``total``, and a layer norm of it."""
    norm: Any = next((u for u in before.users if u is not total), None)
    return has(norm, steps.layer_norm) and norm.args[0] is before and set(before.users) == {total, norm}


def _is_sum(n: Any) -> bool:
    """True if ``n`` is the sum of two different tensors of one shape and dtype."""
    if not has(n, aten.add.Tensor) or not has_kernels(n):
        return False
    are_alike = [shape(t) == shape(n) and dtype(t) == dtype(n) for t, _ in operands(n)]
    return bool(are_alike) and all(are_alike) and n.args[0] is not n.args[1]


# ---- gated activations, and linear layers


def _gated(r: Rewriter, n: Node) -> Node | None:
    """Replaces value * activation(gate) by one kernel, which does not round the activation."""
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
    """Goes back from the node ``n`` over views and casts to an activation.

    Returns the activation, and the views in order. Only casts to dtypes at least as wide as that of the node
    ``root`` are passed over, and only values with one reader. If the search has to stop earlier, the node
    where it stops is returned instead of an activation.
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
    """Replaces linear(activation(x)) of few rows, such as a timestep's embedding, by one kernel."""
    if rank(n) != 2 or not has_few_rows(shape(n)[0]):
        return None
    activated: Any = n.args[0]
    name = activation(activated)
    return r.like(steps.act_linear, (activated.args[0], *n.args[1:], name, None), n) if name else None


def _activated_product(r: Rewriter, n: Node) -> Node | None:
    """Replaces a 16-bit linear layer with a bias, and the GELU in tanh form after it, by ``linear_gelu``."""
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
    """Replaces linear(cat(parts)) of many rows by a sum of linear layers, one for each part, without the cat.

    Each layer adds its product to the same tensor, which is rounded each time. The part with the fewest
    columns comes first, because its product is likely the smallest, and so is its rounding error.
    """
    cat, weight, bias = n.args
    if not has(cat, steps.cat) or not is_only(cat) or cat.args[1] != rank(cat) - 1 or dtype(n) not in _ADDED:
        return None
    N, K = shape(weight)
    ends = list(itertools.accumulate((shape(p)[-1] for p in cat.args[0]), initial=0))
    parts = sorted(zip(cat.args[0], ends, strict=False), key=lambda part: shape(part[0])[-1])
    has_many_rows = math.prod(shape(n)[:-1]) > 0 and not has_few_rows(math.prod(shape(n)[:-1]))
    are_aligned = all(end * dtype(weight).itemsize % _ALIGNMENT == 0 for end in ends)
    # The rule saves the cat, which reads and writes K elements per row. But each linear layer after the first
    # reads and writes the N elements of the result once more.
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
    """Replaces linear(activation(x)) + row by one kernel, which adds the row as a second bias.

    For example, a time embedding is added to the result of a convolution. Then the bias of the convolution is
    added to the time embedding first: it is the row.
    """
    for y, row in operands(n):
        takes_row = has(y, steps.act_linear) and is_only(y) and y.args[4] is None and dtype(y) == dtype(n)
        if takes_row and shape(row) == shape(n)[1:] and dtype(row).is_floating_point and shape(y) == shape(n):
            return r.like(steps.act_linear, (*y.args[:4], row), n)
    return None
