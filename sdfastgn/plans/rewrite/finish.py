"""Memory at last: which steps may write in place, and which results need memory of their own."""

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
# What computes a new tensor that nobody else has.
_NEW = (*_IN_PLACE, *_IN_PLACE.values(), *UNFILLED, steps.copy, aten.full.default)


def finish(graph: fx.Graph) -> fx.Graph:
    """Lets writes write in place, and copies results that would share memory with other tensors."""
    r = Rewriter(graph)
    for n in graph.nodes:
        if n.target in _IN_PLACE:
            _write_in_place(r, n)
    out = next(n for n in reversed(graph.nodes) if n.op == "output")
    writes = [n for n in graph.nodes if n.target is aten.copy_.default]
    for n in writes:
        out.prepend(n)  # after all that reads arguments
    r.at = writes[0] if writes else out  # results are copied before arguments are written
    _copy_results(r, out)
    _copy_sources(r, writes)
    return graph


def _write_in_place(r: Rewriter, n: Node) -> None:
    """A write into a part of a new tensor that nobody else reads overwrites the tensor."""
    x: Any = n.args[0]
    if has(x, aten.full.default) and not is_only(x):  # each write gets its own filled tensor
        r.at = n
        x = r.like(x.target, x.args, x, **x.kwargs)
        n.update_arg(0, x)
    if has(x, *_NEW) and is_only(x):
        n.target = _IN_PLACE[n.target]


def _copy_results(r: Rewriter, out: Node) -> None:
    """A result is copied if it is an argument, a parameter or a constant, or lies in another result."""
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
    """A value that is written into an argument is copied first if it lies in an argument that is written."""
    written = {n.args[0] for n in writes}
    for n in writes:
        source: Any = n.args[1]
        if base(source) in written:
            n.update_arg(1, r.like(steps.copy, (source,), source))
