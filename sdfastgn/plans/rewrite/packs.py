"""Products of one tensor with several weights, such as queries, keys and values, become one step."""

from __future__ import annotations

import math
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, rank, shape
from sdfastgn.plans.run import steps

# Maximum number of elements of a product. Larger ones fill a GPU by themselves: on an H200, three products
# with 4608 rows and 3072 columns took 3 x 101 us, and the packed one 336 us.
MAX_ELEMENTS = 1 << 23


def packs(graph: fx.Graph) -> fx.Graph:
    """linear(x, w1), linear(x, w2), ... -> ``linears``: one product if the weights lie side by side."""
    groups: dict[Any, list[Node]] = {}
    for n in graph.nodes:
        if has(n, steps.linear) and _may_be_packed(n):
            x, _, bias = n.args
            groups.setdefault((x, bias is None, dtype(n)), []).append(n)
    r = Rewriter(graph)
    for (_, has_no_bias, _), products in groups.items():
        x = products[0].args[0]  # not the key's x, which an earlier group may have replaced
        weights = tuple(n.args[1] for n in products)
        if len(set(weights)) < max(2, len(weights)):  # one weight cannot lie beside itself
            continue
        r.at = products[0]
        biases = () if has_no_bias else tuple(n.args[2] for n in products)
        all_products = r.new(steps.linears, (x, weights, biases))
        items = [r.item(all_products, i, n) for i, n in enumerate(products)]
        for n, item in zip(products, items, strict=True):
            r.replace(n, item)
    return graph


def _may_be_packed(n: Node) -> bool:
    """True if the product is small, has several tokens, and its weight and bias are parameters."""
    parameters = [t for t in n.args[1:] if isinstance(t, Node)]
    is_small = math.prod(shape(n)) <= MAX_ELEMENTS
    return rank(n) > 2 and is_small and all(t.op == "placeholder" for t in parameters)
