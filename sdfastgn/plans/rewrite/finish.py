"""The last pass: it decides which nodes write in place, and which results must be copied.

In all earlier passes a node stands for a value, wherever the value lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, has, is_only
from sdfastgn.plans.rewrite.spelling import UNFILLED
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import base

aten = torch.ops.aten
_IN_PLACE = {
    aten.slice_scatter.default: steps.write_slice_,
    aten.select_scatter.default: steps.write_select_,
}
# Ops of aten, and functions in ``steps``, whose result lies in newly allocated memory, so that it may be
# overwritten.
_NEW = (*_IN_PLACE, *_IN_PLACE.values(), *UNFILLED, steps.copy, aten.full.default)


def finish(graph: fx.Graph) -> fx.Graph:
    """Makes writes into parts of tensors in-place where possible, and copies results that share memory.

    A result of the call must not share memory with arguments, weights, constants or other results.
    """
    r = Rewriter(graph)
    for n in graph.nodes:
        if n.target in _IN_PLACE:
            _write_in_place(r, n)
    out = next(n for n in reversed(graph.nodes) if n.op == "output")
    writes = [n for n in graph.nodes if n.target is aten.copy_.default]
    for n in writes:
        out.prepend(n)  # writes into arguments come last, when all other nodes have read the arguments
    r.at = writes[0] if writes else out  # results are copied before arguments are written
    _copy_results(r, out)
    _copy_sources(r, writes)
    return graph


def _write_in_place(r: Rewriter, n: Node) -> None:
    """Lets the node ``n`` overwrite a part of its input instead of a copy of it, where that is safe.

    It is safe if the input is in newly allocated memory and no other node reads it.
    """
    x: Any = n.args[0]
    # Several nodes may read a tensor that is filled with one number, and write into parts of it. Then ``n``
    # gets a new tensor filled with this number, which it can overwrite.
    if has(x, aten.full.default) and not is_only(x):
        r.at = n
        x = r.like(x.target, x.args, x, **x.kwargs)
        n.update_arg(0, x)
    if has(x, *_NEW) and is_only(x):
        n.target = _IN_PLACE[n.target]


def _copy_results(r: Rewriter, out: Node) -> None:
    """Copies each result that lies in the memory of an argument, parameter, constant or other result."""
    seen: set[Node] = set()
    results: list[Any] = []
    for y in out.args[0]:
        owner = base(y) if isinstance(y, Node) else None
        if owner is not None and (owner in seen or owner.op != "call_function"):
            y = r.like(steps.copy, (y,), y)
        elif owner is not None:
            seen.add(owner)
        results.append(y)
    out.args = (results,)


def _copy_sources(r: Rewriter, writes: Iterable[Node]) -> None:
    """Copies values that the call writes into its arguments, if they lie in arguments that are written too.

    Otherwise an earlier write could change the value before a later write reads it.
    """
    written = {n.args[0] for n in writes}
    for n in writes:
        source: Any = n.args[1]
        if base(source) in written:
            n.update_arg(1, r.like(steps.copy, (source,), source))
