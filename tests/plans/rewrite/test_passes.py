"""What no plan can repeat is refused, with the reason."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sdfastgn.plans.rewrite import passes
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.trace.traced import Untraceable
from sdfastgn.plans.trace.tracer import trace
from tests.plans.rewrite.rewriting import steps_of

aten = torch.ops.aten
x = torch.randn(1, 2, 3, 4)


def graph_of(op, *args, reads=True, **kwargs):
    """A graph that calls ``op`` with one argument, and ``args``."""
    graph = fx.Graph()
    meta = {"shape": (1, 2, 3, 4), "dtype": torch.float32, "device": torch.device("cpu")}
    given = graph.placeholder("x")
    called = graph.call_function(op, (given, *args), kwargs)
    given.meta, called.meta = meta, dict(meta)
    graph.output([called if reads else given])
    return graph


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.bernoulli.default, ()), (aten.rand_like.default, ()), (aten.native_dropout.default, (0.5, True))],
)
def test_random_numbers_are_refused(op, args):
    with pytest.raises(Untraceable, match=r"random numbers \(aten"):
        rewrite(graph_of(op, *args))
    rewrite(graph_of(op, *args, reads=False))  # nobody reads them


def test_random_numbers_keep_their_order(monkeypatch):
    def call(x):
        a, b = torch.rand(4), torch.rand(4)
        return x * b + a

    def turned(graph):
        a, b = (n for n in graph.nodes if n.target is aten.rand.default)
        b.append(a)
        return graph

    x = torch.ones(4)
    assert steps_of(call, x) == ["aten.rand", "aten.rand", "aten.mul", "aten.add"]
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, turned))
    with pytest.raises(Untraceable, match="in another order"):
        rewrite(trace(nn.Module(), call, x).graph.graph)


def test_attention_is_random_with_dropout_only():
    assert steps_of(lambda x: F.scaled_dot_product_attention(x, x, x), x) == ["attention"]
    graph = fx.Graph()
    q = graph.placeholder("q")
    q.meta = {"shape": (1, 2, 3, 4), "dtype": torch.float32, "device": torch.device("cpu")}
    attention = graph.call_function(aten.scaled_dot_product_attention.default, (q, q, q, None, 0.5))
    attention.meta = dict(q.meta)
    graph.output([attention])
    with pytest.raises(Untraceable, match="random numbers"):
        rewrite(graph)


def test_strides_are_refused():
    with pytest.raises(Untraceable, match="depends on strides"):
        rewrite(graph_of(aten.as_strided.default, (2, 2), (1, 1)))


def test_writes_into_values_are_refused():
    with pytest.raises(Untraceable, match=r"writes with aten\.add_"):
        rewrite(graph_of(aten.add_.Tensor, 1))
    graph = graph_of(aten.mul.Tensor, 2)
    value = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(value):
        graph.call_function(aten.copy_.default, (value, next(iter(graph.nodes))))
    with pytest.raises(Untraceable, match=r"writes with aten\.copy_"):
        rewrite(graph)


def test_nodes_that_nobody_reads_go():
    assert steps_of(lambda x: (x.exp(), x.sin() + 1)[0], x) == ["aten.exp"]


def test_tuples_stay():
    found = steps_of(lambda x: operator.add(*torch.var_mean(x, 1)), x)
    assert found == ["aten.var_mean", "aten.add"]
