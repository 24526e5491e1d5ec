"""How a rule is applied to a graph.

A rule is a function of a ``Rewriter`` and a node. It returns the node that runs instead, or None if the node
is not what the rule looks for. To add a rule, write such a function with one sentence that says what upstream
wrote and what runs instead, and name it in the pass of its file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, cleaned, has, ordered

__all__ = ["Rule", "apply"]

Rule = Callable[[Rewriter, Node], Node | None]


def apply(graph: fx.Graph, rule: Rule, *targets: Any) -> fx.Graph:
    """Asks ``rule`` about each node that calls one of ``targets``, from the first to the last.

    New nodes are made before the node. The rule is not asked about them. If nothing has changed, the graph is
    as it was. Otherwise nodes that nobody reads are removed, and each node stands after those that it reads.
    """
    r = Rewriter(graph)
    for n in list(graph.nodes):
        if has(n, *targets) and n.users:
            r.at = n
            new = rule(r, n)
            if new is not None:
                r.replace(n, new)
    return ordered(cleaned(graph)) if r.has_changed else graph
