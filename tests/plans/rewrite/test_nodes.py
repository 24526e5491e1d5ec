"""What passes do with nodes of a graph."""

import operator

import pytest
import torch
from torch import fx

from sdfastgn.plans.rewrite.nodes import ordered


def graph_of_sums():
    """Returns a graph of a = x + x, b = a + x, c = b + a, and its nodes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(operator.add, (x, x))
    b = graph.call_function(operator.add, (a, x))
    c = graph.call_function(operator.add, (b, a))
    graph.output([c])
    return graph, [x, a, b, c]


def test_nodes_stand_after_those_that_they_read():
    graph, (x, a, b, c) = graph_of_sums()
    with graph.inserting_after(c):
        late = graph.call_function(operator.mul, (x, 2))
    a.update_arg(0, late)
    assert [n for n in ordered(graph).nodes if n.op == "call_function"] == [late, a, b, c]
    graph.lint()
    assert fx.GraphModule(torch.nn.Module(), graph)(1) == [7]


def test_a_cycle_is_an_error():
    graph, (_, a, b, _) = graph_of_sums()
    a.update_arg(1, b)
    with pytest.raises(RuntimeError, match=r"these nodes read each other: (add, add_1|add_1, add)$"):
        ordered(graph)
    graph, (_, _, b, _) = graph_of_sums()
    b.update_arg(1, b)
    with pytest.raises(RuntimeError, match=r"these nodes read each other: add_1$"):
        ordered(graph)
