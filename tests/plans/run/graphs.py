"""Graphs written by hand, as a trace and the passes would leave them."""

import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.traced import Traced


def described(n, shape, dtype=torch.float32, device="cpu"):
    n.meta = {"shape": tuple(shape), "dtype": dtype, "device": torch.device(device)}
    return n


class Drawn:
    """A graph in the making. ``add`` runs nothing: shapes are given, or those of the first argument."""

    def __init__(self, *inputs, parameters=(), others=(), dtype=torch.float32, device="cpu"):
        self.graph = fx.Graph()
        self.root = fx.GraphModule({}, fx.Graph())
        self.where, self.others = list(parameters), list(others)
        self.dtype, self.device = dtype, device
        tensors = [getattr(m, kind)[name] for m, kind, name in parameters] + self.others
        self.parameters = [
            described(self.graph.placeholder(f"p{i}"), t.shape, t.dtype, t.device)
            for i, t in enumerate(tensors)
        ]
        self.inputs = [
            described(self.graph.placeholder(f"x{i}"), shape, dtype, device) for i, shape in enumerate(inputs)
        ]

    def add(self, target, *args, shape=None, dtype=None, items=None, **kwargs):
        """A node. ``items``: the shapes of a tuple of results, whose nodes are returned."""
        n = self.graph.call_function(target, args, kwargs)
        if items is not None:
            own = [self.graph.call_function(operator.getitem, (n, i)) for i in range(len(items))]
            return [
                described(i, s, dtype or self.dtype, self.device) for i, s in zip(own, items, strict=True)
            ]
        like = next((a for a in args if isinstance(a, fx.Node)), None)
        shape = like.meta["shape"] if shape is None else shape
        return described(n, shape, dtype or self.dtype, self.device)

    def constant(self, tensor):
        name = f"c{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor)
        return described(self.graph.get_attr(name), tensor.shape, tensor.dtype, tensor.device)

    def traced(self, *results, args=None, kwargs=None, out=None):
        self.graph.output(list(results))
        args = tuple([0] * len(self.inputs)) if args is None else args
        spec = pytree.tree_structure((args, kwargs or {}))
        out_spec = pytree.tree_structure(0 if len(results) == 1 else tuple(results)) if out is None else out
        return Traced(self.root, self.where, self.others, spec, out_spec)

    def plan(self, *results, **call):
        return Plan(self.traced(*results, **call), self.graph)
