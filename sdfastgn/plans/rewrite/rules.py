"""Applies a rule to a graph.

A rule is a function that gets a ``Rewriter``, which makes nodes, and one node of the graph. It returns the
node that replaces this node, or None if the node is not what the rule looks for. To add a rule, write such a
function, and pass it to ``apply`` in the file's pass, which is the function that applies all rules of the
file to a graph. The docstring of a rule says what the model's code does, and what runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, cleaned, has, is_unread, ordered

Rule = Callable[[Rewriter, Node], Node | None]


def apply(graph: fx.Graph, rule: Rule, *targets: Any) -> fx.Graph:
    """Calls ``rule`` for each node that calls one of ``targets``, from the first node to the last.

    Where the rule returns a node, that node replaces the old one. The rule is not called for nodes that it
    makes. Afterwards nodes that no other node reads are removed, and nodes are ordered so that each stands
    after those that it reads.
    """
    r = Rewriter(graph)
    asked = (n for target in targets for n in graph.find_nodes(op="call_function", target=target, sort=False))
    for n in sorted(asked):
        if n.users:
            r.at = n
            new = rule(r, n)
            if new is not None:
                r.replace(n, new)
    return ordered(cleaned(graph)) if r.has_changed else graph


def from_the_last(r: Rewriter, *targets: Any) -> Iterator[Node]:
    """Yields each node that calls one of ``targets``, from the last node to the first.

    While the caller handles a node, the Rewriter ``r`` makes new nodes in front of it. Nodes that no other
    node reads are erased on the way. So parts of a pattern that was replaced are not yielded.
    """
    for n in list(reversed(r.graph.nodes)):
        if is_unread(n):
            r.graph.erase_node(n)
        elif has(n, *targets):
            r.at = n
            yield n
