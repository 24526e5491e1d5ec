"""Joins linear layers with the same input, such as those of queries, keys and values.

They become one call of ``steps.linears``. If the weights lie side by side in memory, it computes one matrix
product. Otherwise it computes one for each layer.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, rank, shape
from sdfastgn.plans.run import steps

# Linear layers whose result has more elements than this are not joined with others. They fill a GPU by
# themselves: on an H200, three products with 4608 rows and 3072 columns took 101 us each, and one product for
# all three took 336 us.
MAX_ELEMENTS = 1 << 23


def packs(graph: fx.Graph) -> fx.Graph:
    """Replaces linear layers with the same input by one call of ``steps.linears``."""
    groups: dict[Any, list[Node]] = {}
    for n in graph.nodes:
        if has(n, steps.linear) and _may_be_packed(n):
            x, _, bias = n.args
            groups.setdefault((x, bias is None, dtype(n)), []).append(n)
    r = Rewriter(graph)
    for (_, has_no_bias, _), products in groups.items():
        # The key of ``groups`` may have a node that is gone: if x was a layer of an earlier group, a new node
        # has replaced it. So x is taken from a layer of this group.
        x = products[0].args[0]
        weights = tuple(n.args[1] for n in products)
        # Only two or more layers with different weights are joined: one weight cannot lie in memory beside
        # itself.
        if len(set(weights)) < max(2, len(weights)):
            continue
        r.at = products[0]
        biases = () if has_no_bias else tuple(n.args[2] for n in products)
        all_products = r.new(steps.linears, (x, weights, biases))
        items = [r.item(all_products, i, n) for i, n in enumerate(products)]
        for n, item in zip(products, items, strict=True):
            r.replace(n, item)
    return graph


def _may_be_packed(n: Node) -> bool:
    """True if ``n``, a linear layer, may be part of a product of several layers.

    Its result must have at most ``MAX_ELEMENTS`` elements and at least three axes, and its weight and bias
    must be parameters of the model.
    """
    parameters = [t for t in n.args[1:] if isinstance(t, Node)]
    is_small = math.prod(shape(n)) <= MAX_ELEMENTS
    return rank(n) > 2 and is_small and all(t.op == "placeholder" for t in parameters)
