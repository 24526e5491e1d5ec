"""Rewrites a small function, and compares the result with the function itself."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from sdfastgn.plans.rewrite.biases import biases
from sdfastgn.plans.rewrite.convolutions import convolutions
from sdfastgn.plans.rewrite.modulations import modulations
from sdfastgn.plans.rewrite.norms import activations, norms
from sdfastgn.plans.rewrite.spelling import canonicalize
from sdfastgn.plans.rewrite.statistics import statistics
from sdfastgn.plans.rewrite.sums import shifts, sums
from sdfastgn.plans.rewrite.views import sink_views
from sdfastgn.plans.run.aliases import VIEWS
from sdfastgn.plans.trace.tracer import trace

PASSES = (
    canonicalize,
    norms,
    sink_views,
    activations,
    modulations,
    convolutions,
    sums,
    shifts,
    biases,
    statistics,
)


def rewritten(function: Callable, *inputs: Tensor) -> tuple[fx.Graph, Callable]:
    """The rewritten graph of ``function``, and a function that runs it."""
    traced = trace(nn.Module(), function, *inputs)
    graph = traced.graph.graph
    for each in PASSES:
        graph = each(graph)
        graph.lint()
    graph.set_codegen(fx.graph.CodeGen())
    module = fx.GraphModule(traced.graph, graph)
    others = traced.others
    return graph, lambda *args: module(*others, *args)


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, in order."""
    free = (operator.getitem, *VIEWS)
    return [n for n in graph.nodes if n.op == "call_function" and n.target not in free]


def names(graph: fx.Graph) -> list[str]:
    """What the nodes of ``calls`` call: "conv" for a step, "aten.relu" for an op of PyTorch."""
    found = (n.target for n in calls(graph))
    return [
        f"aten.{t.overloadpacket.__name__}" if hasattr(t, "overloadpacket") else t.__name__ for t in found
    ]


def check(function: Callable, *inputs: Tensor, tolerance: float = 1e-5) -> fx.Graph:
    """Rewrites ``function``, compares it with itself for other inputs, and returns the graph.

    It runs three times, and results of earlier calls must stay as they are.
    """
    with torch.no_grad():
        graph, run = rewritten(function, *inputs)
        held = []
        for _ in range(3):
            args = [torch.randn_like(x) for x in inputs]
            before = [x.clone() for x in args]
            wanted = as_list(function(*[x.clone() for x in args]))
            got = run(*args)
            held.append((got, [y.clone() for y in got], wanted))
            assert all(map(torch.equal, args, before)), "an input was written"
        for got, first, wanted in held:
            assert len(got) == len(wanted)
            for y, same, exact in zip(got, first, wanted, strict=True):
                assert torch.equal(y, same), "a later call wrote over a result"
                assert (y.shape, y.dtype) == (exact.shape, exact.dtype)
                if not y.numel():
                    continue
                error = (y.double() - exact.double()).abs().max() / exact.double().abs().max().clamp_min(
                    1e-30
                )
                assert error <= tolerance, f"{names(graph)} is {error:.1e} off"
    return graph


def as_list(y: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)
