"""Turns the graph of a call with a large batch into the graph of a slice of the batch, to save memory.

Calls then run this smaller graph once for each slice. This is right only if the samples of the batch do not
depend on each other. So ``sliced`` follows the axis of the samples through the graph, from the tensors of
the call to its results. Each op on the way must treat samples separately. If an op may mix samples, or if the
tables in this file do not have the op, the call runs as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, has, rank, shape
from sdfastgn.plans.rewrite.spelling import canonicalize
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.schemas import arguments, writes
from sdfastgn.plans.run.slices import Slices
from sdfastgn.plans.run.traffic import memory, peak, steps_of
from sdfastgn.plans.trace.refusals import is_random
from sdfastgn.plans.trace.traced import Traced

aten = torch.ops.aten
# Bytes (1.75 GiB). If the intermediate values of a call take more than this at once, the call runs in slices.
# If possible, a slice takes at most so much. A decoder of Stable Diffusion takes 1.5 GiB for one image of
# 1024 x 1024 pixels in fp16, and such an image keeps a GPU busy: an H200 takes as long for it as for four
# images of 512 x 512 pixels one after another.
MOST_BYTES = 7 << 28
# A call runs in slices only if its parameters take at most this share of the bytes that a slice reads and
# writes, because each slice reads all parameters again.
_MOST_PARAMETERS = 0.02
# A call runs in slices only if its results take at most this share of the memory that its values take at
# once. Slices do not save the memory of results. For example, a decoder of videos returns the last frames of
# each convolution for its next call.
_MOST_RESULTS = 0.25


class _Mixed(Exception):  # noqa: N818  # caught in this file: the call runs as a whole
    """Raised if an op may mix the samples of a batch."""


def sliced(traced: Traced) -> Traced:
    """Returns the trace of one slice of the samples, if the call takes much memory and slices save memory.

    Else it returns ``traced``, the trace of the whole call.
    """
    graph = traced.graph.graph
    held = len(traced.parameters) + len(traced.others)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = placeholders[held:]
    samples = _samples(inputs)
    if samples < 2 or peak(graph) <= MOST_BYTES:
        return traced
    graph = canonicalize(graph)
    try:
        axes = _axes_of_samples(graph, inputs, samples)
    except _Mixed:
        return traced
    (results,) = graph.output_node().args
    count = _count(graph, placeholders[:held], results, samples)
    if count < 2:
        return traced
    divided = [tuple(axes.get(n) for n in nodes) for nodes in (inputs, results)]
    _divide(graph, axes, count)
    return traced._replace(slices=Slices(count, *divided))


def _samples(inputs: Sequence[Node]) -> int:
    """The number of samples in a call: the size of the first axis of its largest argument."""
    largest = max(inputs, key=lambda n: math.prod(shape(n)), default=None)
    return shape(largest)[0] if largest is not None and rank(largest) > 1 else 1


def _count(graph: fx.Graph, held: Sequence[Node], results: Sequence[Any], samples: int) -> int:
    """Returns how many slices are needed to stay below ``MOST_BYTES``; 1 if slices would not pay.

    They would not pay if results take most of the memory, or if reading the parameters again costs too much
    time.
    """
    most, parameters = peak(graph), sum(map(memory, held))
    if sum(memory(n) for n in {*results} if isinstance(n, Node)) > _MOST_RESULTS * most:
        return 1
    moved = sum(step.read + step.written for step in steps_of(graph)) - parameters
    divisors = (count for count in range(2, samples + 1) if samples % count == 0)
    counts = [count for count in divisors if parameters * count <= _MOST_PARAMETERS * moved]
    fitting = (count for count in counts if most <= MOST_BYTES * count)
    return next(fitting, max(counts, default=1))


def _divide(graph: fx.Graph, axes: dict[Node, int | None], count: int) -> None:
    """Changes the shapes in ``graph`` so that it computes one of ``count`` slices of the samples."""
    r = Rewriter(graph)
    for n in list(graph.nodes):
        axis = axes.get(n)
        if axis is None:
            continue
        size = shape(n)[axis] // count
        n.meta = {**n.meta, "shape": (*shape(n)[:axis], size, *shape(n)[axis + 1 :])}
        r.at, new = n, n
        if has(n, steps.reshape):
            new = r.reshape(n.args[0], shape(n))
        elif has(n, steps.permute):
            new = r.permute(*n.args)
        elif has(n, steps.expand):
            x = n.args[0]
            new = x if shape(x) == shape(n) else r.like(steps.expand, (x, shape(n)), n)
        elif has(n, *_FILLED):
            n.args = (shape(n), *n.args[1:])
        if new is not n:
            r.replace(n, new)


# ---- the axis of the samples
#
# Along its axis of the samples, a value has k elements of the first sample, then k elements of the second
# sample, and so on. The axis is None for a value that does not depend on the samples of the call.


def _axes_of_samples(graph: fx.Graph, inputs: Sequence[Node], samples: int) -> dict[Node, int | None]:
    """Returns for each node the axis along which its value has the samples of the batch, or None.

    None stands for values that do not depend on samples. Raises _Mixed if an op may mix samples.
    """
    axes: dict[Node, int | None] = {}
    for n in graph.nodes:
        if n.op == "placeholder":
            axes[n] = 0 if n in inputs and shape(n)[:1] == (samples,) else None
        elif n.op == "call_function":
            if writes(n.target) or is_random(n.target):
                raise _Mixed
            axes[n] = _axis(n, axes, samples)
    return axes


def _axis(n: Node, axes: dict[Node, int | None], samples: int) -> int | None:
    axis = next((axes[a] for a in n.all_input_nodes if axes.get(a) is not None), None)
    if axis is None:
        return 0 if _is_equal_along_samples(n, samples) else None
    if not n.meta:  # the op returns a tuple, for which this file has no rules
        raise _Mixed
    x: Any = n.args[0]
    if has(n, steps.reshape):
        return _axis_after_reshape(shape(x), axis, shape(n), samples)
    if has(n, steps.permute):
        order: Any = n.args[1]
        return order.index(axis)
    if n.target in _SEPARATE or _is_pointwise(n.target):
        return _aligned(n, n.all_input_nodes, axes)
    mixed = _MIXED.get(n.target)
    if mixed is None:
        raise _Mixed
    first = n.args[0]
    parts: Any = first if isinstance(first, (list, tuple)) else [first]
    if n.target in _OF_FIRST:
        if any(axes.get(a) is not None for a in n.all_input_nodes if a is not first):
            raise _Mixed
        axis = axes[parts[0]]
    else:
        axis = _aligned(parts[0], n.all_input_nodes, axes)
    along = {a % rank(parts[0]) for a in mixed(n)}
    if axis is None or axis in along:
        raise _Mixed
    return axis if rank(n) == rank(parts[0]) else axis - sum(a < axis for a in along)


def _is_equal_along_samples(n: Node, samples: int) -> bool:
    """True if ``n`` does not depend on samples, but has equal rows for all of them along its first axis."""
    if not n.meta or shape(n)[:1] != (samples,):
        return False
    if has(n, steps.expand):
        x: Any = n.args[0]
        return rank(x) < rank(n) or shape(x)[0] == 1
    return has(n, *_FILLED)


def _axis_after_reshape(before: Sequence[int], axis: int, after: Sequence[int], samples: int) -> int:
    """Returns the axis of the samples after a reshape. Raises _Mixed if no axis can be divided into samples.

    ``before``, ``after``: the shapes. ``axis``: the axis before the reshape.
    """
    outer = math.prod(before[:axis])
    for i, size in enumerate(after):
        if size % samples == 0 and math.prod(after[:i]) == outer:
            return i
    raise _Mixed


def _aligned(n: Node, operands: Iterable[Node], axes: dict[Node, int | None]) -> int:
    """Returns the axis of the samples in the node ``n``, to whose shape ``operands`` are broadcast.

    Raises _Mixed if different operands have the samples on different axes.
    """
    places = {a: rank(n) - rank(a) for a in operands}
    (axis, *others) = {axes[a] + before for a, before in places.items() if axes.get(a) is not None}  # type: ignore[operator]
    for a, before in places.items():
        size = shape(a)[axis - before] if axis >= before else 1
        if others or size != (1 if axes.get(a) is None else shape(n)[axis]):
            raise _Mixed
    return axis


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _listed(place: int) -> Callable[[Node], Iterable[int]]:
    """Makes a function that returns the axes along which a node's op works, such as those of a sum.

    The function reads the axes from the node's argument at index ``place``. If the argument names no axes, it
    returns all of them.
    """

    def axes(n: Node) -> Iterable[int]:
        found: Any = arguments(n)[place]
        if isinstance(found, int):
            return [found]
        return found or range(rank(n.args[0]))

    return axes


def _after_samples(n: Node) -> Iterable[int]:
    return range(1, rank(n))


def _last(count: int) -> Callable[[Node], Iterable[int]]:
    return lambda n: range(-count, 0)


_FILLED = (aten.full.default, aten.empty.memory_format)
# In these functions each element of the result depends on one element of each operand. So they treat
# samples separately, as all ops do that PyTorch tags as pointwise.
_SEPARATE = (steps.cast, steps.copy, steps.expand, aten.contiguous.default, aten.empty_like.default)
# For each function that nodes call: a function that returns those axes of its first operand along which the
# op mixes or chooses elements. None of them may be the axis of the samples.
_MIXED: dict[Any, Callable[[Node], Iterable[int]]] = {
    steps.attention: _last(2),
    steps.cat: _listed(1),
    steps.conv: _after_samples,
    steps.cut: _listed(1),
    steps.group_norm: _after_samples,
    steps.layer_norm: _last(1),
    steps.linear: _last(1),
    steps.mean_windows: _listed(1),
    steps.pad: _after_samples,
    steps.upsample: _after_samples,
    aten._upsample_nearest_exact2d.default: _after_samples,
    aten._upsample_nearest_exact3d.default: _after_samples,
    aten._softmax.default: _listed(1),
    aten.bmm.default: _last(2),
    aten.flip.default: _listed(1),
    aten.linalg_vector_norm.default: _listed(2),
    aten.mean.dim: _listed(1),
    aten.rms_norm.default: lambda n: range(-len(n.args[1]), 0),
    aten.slice.Tensor: _listed(1),
    aten.slice_scatter.default: _listed(2),
    aten.sum.dim_IntList: _listed(1),
    aten.upsample_nearest2d.default: _after_samples,
    aten.upsample_nearest3d.default: _after_samples,
}
# Of these functions only the first operand may have the samples of a batch. The other operands are weights.
_OF_FIRST = (steps.conv, steps.group_norm, steps.layer_norm, steps.linear, aten.rms_norm.default)
