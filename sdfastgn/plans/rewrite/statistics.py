"""Statistics for GroupNorms from the step that writes their input."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.plans.rewrite.nodes import Rewriter, has, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

__all__ = ["statistics", "wants_statistics"]

# Step that can compute statistics of its result -> index of its argument ``emits``.
_EMITS = {steps.add: 4, steps.add_bias_: 2, steps.cat_two: 2, steps.upsample_conv: 3}


def statistics(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, channels_of_two, steps.cat)
    return apply(graph, known_statistics, steps.group_norm, steps.frames)


def wants_statistics(x: Node) -> bool:
    """True if a GroupNorm of x is faster if it gets the statistics of x."""
    return any(_takes_statistics(u, x) or (_is_alike(u) and wants_statistics(u)) for u in x.users)


def _is_alike(view: Any) -> bool:
    """True if ``view`` has the same channels and positions as what it reads, such as an image as a video."""
    return has(view, steps.reshape) and rank(view) > 2 and shape(view)[:2] == shape(view.args[0])[:2]


def _takes_statistics(n: Any, x: Node) -> bool:
    if not has(n, steps.group_norm, steps.frames) or n.args[0] is not x:
        return False
    if has(n, steps.group_norm):
        known, framewise = n.args[7:9]
    elif isinstance(n.args[8], steps.Group):
        known, framewise = n.args[8].statistics, n.args[8].framewise
    else:
        return False
    return known is None and not framewise and statistics_pay(shape(x)[1], math.prod(shape(x)[2:]))


def channels_of_two(r: Rewriter, n: Any) -> Node | None:
    """The channels of two tensors side by side, for a GroupNorm: ``cat_two``, which computes statistics."""
    parts, dim = n.args
    if dim != 1 or len(parts) != 2 or not wants_statistics(n):
        return None
    return r.item(r.new(steps.cat_two, (*parts, False)), 0, n)


def known_statistics(r: Rewriter, n: Any) -> Node | None:
    """A GroupNorm of what a step has just written: this step also computes the statistics."""
    x = n.args[0]
    if not _takes_statistics(n, x):
        return None
    while _is_alike(x):
        x = x.args[0]
    if not has(x, operator.getitem) or x.args[1] != 0 or not has(x.args[0], *_EMITS):
        return None
    writer = x.args[0]
    writer.update_arg(_EMITS[writer.target], True)
    known = next((u for u in writer.users if u.args[1] == 1), None) or r.new(operator.getitem, (writer, 1))
    if has(n, steps.group_norm):
        return r.like(n.target, (*n.args[:7], known, *n.args[8:]), n)
    norm = n.args[8]._replace(statistics=known)
    return r.like(n.target, (*n.args[:8], norm, *n.args[9:]), n)
