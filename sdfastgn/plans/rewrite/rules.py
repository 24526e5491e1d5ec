"""How a rule is applied to a graph.

A rule is a function of a ``Rewriter`` and a node. It returns the node that runs instead, or None if the node
is not what the rule looks for. To add a rule, write such a function with one sentence that says what upstream
wrote and what runs instead, and name it in the pass of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, cleaned, has, is_unread, ordered

Rule = Callable[[Rewriter, Node], Node | None]


def apply(graph: fx.Graph, rule: Rule, *targets: Any) -> fx.Graph:
    """Asks ``rule`` about each node that calls one of ``targets``, from the first to the last.

    New nodes are made before the node. The rule is not asked about them. If nothing has changed, the graph is
    as it was. Otherwise nodes that nobody reads are removed, and each node stands after those that it reads.
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
    """Yields each node that calls one of ``targets``, from the last to the first.

    ``r`` makes nodes before the node. Nodes that nobody reads are erased on the way, such as parts of a
    pattern that a rule has replaced.
    """
    for n in list(reversed(r.graph.nodes)):
        if is_unread(n):
            r.graph.erase_node(n)
        elif has(n, *targets):
            r.at = n
            yield n
