"""Runs traced graphs node by node, and compares them with the calls that were traced."""

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sdfastgn.plans.trace.tracer import trace

aten = torch.ops.aten


class Net(nn.Module):
    """A module whose forward is the function ``call(net, ...)``."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4))
        self.count = 0
        self.items = [1]

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def run(traced, *args, **kwargs):
    """The result of the graph for these arguments. Checks the metadata of each node against its value."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    parameters = [getattr(module, kind)[name] for module, kind, name in traced.parameters]
    given = iter([*parameters, *traced.others, *tensors])
    values = {}
    for n in traced.graph.graph.nodes:
        if n.op == "placeholder":
            values[n] = next(given)
        elif n.op == "get_attr":
            values[n] = getattr(traced.graph, n.target)
        elif n.op == "call_function":
            a, k = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
            # Where values lie is no part of a graph, so a view may need a copy.
            values[n] = (aten.reshape.default if n.target is aten.view.default else n.target)(*a, **k)
        if isinstance(values.get(n), Tensor):
            value = values[n]
            assert n.meta == {"shape": tuple(value.shape), "dtype": value.dtype, "device": value.device}, n
        elif n.op == "call_function":
            assert n.meta == {}
    (results,) = (n.args[0] for n in traced.graph.graph.nodes if n.op == "output")
    assert isinstance(results, (list, tuple))
    return pytree.tree_unflatten(list(fx.node.map_arg(results, values.__getitem__)), traced.out_spec)


def targets(traced):
    return [n.target for n in traced.graph.graph.nodes if n.op == "call_function"]


@torch.no_grad()
def check(call, *shapes, module=None):
    """Traces a call, and compares the graph with it for other inputs: results, and what the call writes."""
    net = module or Net(call)
    traced = trace(
        net, net if module is None else call, *(torch.randn(shape) for shape in shapes or [(4, 4)])
    )
    for target in targets(traced):
        assert target is aten.copy_.default or callable(target)
        assert not (hasattr(target, "_schema") and target._schema.is_mutable) or target is aten.copy_.default
    for _ in range(2):
        inputs = [torch.randn(shape) for shape in shapes or [(4, 4)]]
        before = {name: t.clone() for name, t in net.state_dict().items()}
        own = [x.clone() for x in inputs]
        expected = [t.clone() for t in leaves((net if module is None else call)(*own))]
        after = {name: t.clone() for name, t in net.state_dict().items()}
        for name, t in net.state_dict().items():
            t.copy_(before[name])
        found = leaves(run(traced, *inputs))
        assert len(found) == len(expected)
        for a, b in zip([*found, *inputs], [*expected, *own], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for name, t in net.state_dict().items():
            assert torch.equal(t, after[name]), name
    return traced


def leaves(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
