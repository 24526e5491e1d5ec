"""Traces small functions, rewrites them, and compares what they compute with eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run.aliases import VIEWS
from sdfastgn.plans.trace.tracer import trace

# Relative error that rounding explains.
TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}


class Rewritten:
    """``call`` as rewritten code, for tensors like ``inputs``. ``steps``: the names of its steps, in order.

    Views and items of tuples are left out of ``steps``, and written arguments are "copy_".
    """

    def __init__(self, call: Callable[..., Any], *inputs: Any) -> None:
        model = call if isinstance(call, nn.Module) else nn.Module()
        with torch.no_grad():
            self.traced = trace(model, call, *inputs)
        self.graph = rewrite(self.traced.graph.graph)
        self.graph.lint()
        self.module = fx.GraphModule(self.traced.graph, self.graph)
        computed = [n for n in self.graph.nodes if n.op == "call_function"]
        self.steps = [name_of(n) for n in computed if n.target not in (*VIEWS, operator.getitem)]

    def __call__(self, *inputs: Any) -> Any:
        parameters = [getattr(module, kind)[name] for module, kind, name in self.traced.parameters]
        tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        with torch.no_grad():
            out = self.module(*parameters, *self.traced.others, *tensors)
        return pytree.tree_unflatten(out, self.traced.out_spec)

    def node(self, name: str) -> fx.Node:
        """The first node that calls the step ``name``."""
        return next(n for n in self.graph.nodes if n.op == "call_function" and name_of(n) == name)


def name_of(n: fx.Node) -> str:
    """The name of a step, or of an op of PyTorch without its overload."""
    target: Any = n.target
    return target.__name__.split(".")[0]


def steps_of(call: Callable[..., Any], *inputs: Any) -> list[str]:
    """The steps of the rewritten ``call``, after two calls with other inputs computed what eager does."""
    return checked(call, *inputs).steps


def checked(call: Callable[..., Any], *inputs: Any) -> Rewritten:
    """The rewritten ``call``, which computes what eager does: results, written arguments, and twice."""
    plan = Rewritten(call, *inputs)
    earlier: list[tuple[list[Any], list[Any]]] = []
    for _ in range(2):
        ours = others_like(inputs)
        theirs = pytree.tree_map_only(Tensor, Tensor.clone, ours)
        with torch.no_grad():
            found, wanted = plan(*ours), call(*theirs)
        earlier.append((pytree.tree_leaves((found, ours)), pytree.tree_leaves((wanted, theirs))))
        for pair in earlier:  # also results of the call before: it owns them
            assert_close(*pair)
    return plan


def others_like(inputs: Any) -> Any:
    """Tensors of other values, in the shapes, strides and dtypes of ``inputs``."""

    def other(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        return (
            y.copy_(torch.randn(x.shape)) if x.is_floating_point() else y.copy_(torch.randint(0, 3, x.shape))
        )

    return pytree.tree_map_only(Tensor, other, inputs)


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = torch.complex128 if b.is_complex() else torch.float64
        error = torch.linalg.vector_norm(a.to(wide) - b.to(wide))
        assert error <= TOLERANCES.get(b.dtype, 1e-5) * torch.linalg.vector_norm(b.to(wide)), float(error)
