"""Statistics for GroupNorms from the step that writes their input."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.plans.rewrite.nodes import Rewriter, has, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

__all__ = ["statistics", "takes_statistics"]

# Step that can compute statistics of what it writes -> index of its argument ``emits``.
_EMITS = {steps.add: 4, steps.add_bias_: 2, steps.cat_two: 2, steps.upsample_conv: 3}


def statistics(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, channels_of_two, steps.cat)
    return apply(graph, known_statistics, steps.group_norm, steps.frames)


def takes_statistics(n: Node, x: Node) -> bool:
    """True if ``n`` is a GroupNorm of x that is faster if it gets the statistics of x."""
    if not has(n, steps.group_norm, steps.frames) or n.args[0] is not x:
        return False
    norm: Any = (
        steps.Group(*n.args[1:6], n.args[7], None, n.args[8]) if has(n, steps.group_norm) else n.args[8]
    )
    is_open = isinstance(norm, steps.Group) and norm.statistics is None and not norm.framewise
    return is_open and statistics_pay(shape(x)[1], math.prod(shape(x)[2:]))


def channels_of_two(r: Rewriter, n: Node) -> Node | None:
    """The channels of two tensors side by side, for a GroupNorm: ``cat_two``, which computes statistics."""
    parts, dim = n.args
    if dim != 1 or len(parts) != 2 or not any(takes_statistics(u, n) for u in n.users):
        return None
    return r.item(r.new(steps.cat_two, (*parts, False)), 0, n)


def known_statistics(r: Rewriter, n: Node) -> Node | None:
    """A GroupNorm of what a step has just written: this step also computes the statistics."""
    x = n.args[0]
    writer = x.args[0] if has(x, operator.getitem) and x.args[1] == 0 else None
    if not has(writer, *_EMITS) or not takes_statistics(n, x):
        return None
    writer.update_arg(_EMITS[writer.target], True)
    known = next((u for u in writer.users if u.args[1] == 1), None) or r.new(operator.getitem, (writer, 1))
    if has(n, steps.group_norm):
        return r.like(n.target, (*n.args[:7], known, *n.args[8:]), n)
    norm = n.args[8]._replace(statistics=known)
    return r.like(n.target, (*n.args[:8], norm, *n.args[9:]), n)
