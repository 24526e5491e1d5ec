"""Traces small functions, rewrites them, and compares what they compute with eager PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run.aliases import VIEWS
from sdfastgn.plans.trace.tracer import trace
from tests.plans.programs import same_random_numbers

# Largest relative error that rounding explains, by the dtype of a result. Kernels add up in another order.
TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}


class Rewritten:
    """``call`` as rewritten code, for tensors like ``inputs``.

    Attributes:
        graph: the rewritten graph.
        calls: its nodes that compute something, in order: neither views nor items of tuples.
        steps: what these call: "conv" for a step, "aten.relu" for an op of PyTorch.
    """

    def __init__(self, call: Callable[..., Any], *inputs: Any) -> None:
        model = call if isinstance(call, nn.Module) else nn.Module()
        with torch.no_grad():
            self.traced = trace(model, call, *inputs)
        self.graph = rewrite(self.traced.graph.graph)
        self.graph.lint()
        self.module = fx.GraphModule(self.traced.graph, self.graph)
        free = (operator.getitem, *VIEWS)
        self.calls = [n for n in self.graph.nodes if n.op == "call_function" and n.target not in free]
        self.steps = list(map(name_of, self.calls))

    def __call__(self, *inputs: Any) -> Any:
        parameters = [getattr(module, kind)[name] for module, kind, name in self.traced.parameters]
        tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        with torch.no_grad():
            out = self.module(*parameters, *self.traced.others, *tensors)
        return pytree.tree_unflatten(out, self.traced.out_spec)

    def all(self, step: Any) -> list[fx.Node]:
        """The nodes that call ``step``."""
        return [n for n in self.graph.nodes if has(n, step)]

    def only(self, step: Any) -> fx.Node:
        """The node that calls ``step``, which exactly one does."""
        (found,) = self.all(step)
        return found


def name_of(n: fx.Node) -> str:
    target: Any = n.target
    packet = getattr(target, "overloadpacket", None)
    return target.__name__ if packet is None else f"aten.{packet.__name__}"


def steps_of(call: Callable[..., Any], *inputs: Any, **options: Any) -> list[str]:
    """The steps of the rewritten ``call``, which computes what eager does: see ``checked``."""
    return checked(call, *inputs, **options).steps


def draw_exact(shape: Sequence[int], bits: int = 3) -> Tensor:
    """Random odd multiples of 2^-bits, which are never 0.

    Every CPU computes sums of products of such numbers without rounding, in whatever order it adds them.
    """
    return (2 * (torch.randn(shape) * 2 ** (bits - 1)).floor() + 1) / 2**bits


def checked(
    call: Callable[..., Any],
    *inputs: Any,
    tolerance: float | None = None,
    draw: Callable[[Sequence[int]], Tensor] = torch.randn,
) -> Rewritten:
    """The rewritten ``call``. Two calls with other inputs compute what eager does.

    Results are compared, and all arguments after the call.

    Args:
        call, inputs: the function, and its arguments.
        tolerance: the largest relative error. None: ``TOLERANCES`` has it.
        draw: function shape -> the values of a floating-point input.
    """
    plan = Rewritten(call, *inputs)
    earlier: list[tuple[list[Any], list[Any]]] = []
    for _ in range(2):
        ours = others_like(inputs, draw)
        theirs = pytree.tree_map_only(Tensor, Tensor.clone, ours)
        with torch.no_grad():
            found, wanted = same_random_numbers(plan, ours), same_random_numbers(call, theirs)
        earlier.append((pytree.tree_leaves((found, ours)), pytree.tree_leaves((wanted, theirs))))
        for pair in earlier:  # also results of the call before: it owns them
            assert_close(*pair, tolerance)
    return plan


def others_like(inputs: Any, draw: Callable[[Sequence[int]], Tensor] = torch.randn) -> Any:
    """Tensors of other values, in the shapes, strides and dtypes of ``inputs``."""

    def other(x: Tensor) -> Tensor:
        drawn = draw(x.shape) if x.is_floating_point() else torch.randint(0, 3, x.shape)
        return torch.empty_like(x).copy_(drawn)

    return pytree.tree_map_only(Tensor, other, inputs)


def assert_close(found: list[Any], wanted: list[Any], tolerance: float | None) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = torch.complex128 if b.is_complex() else torch.float64
        error = torch.linalg.vector_norm(a.to(wide) - b.to(wide))
        largest = TOLERANCES.get(b.dtype, 1e-5) if tolerance is None else tolerance
        assert error <= largest * torch.linalg.vector_norm(b.to(wide)), float(error)
