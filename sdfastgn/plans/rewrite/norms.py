"""Rules for norms: models write the same norm in several ways, and each of them becomes one kernel.

The first pass, ``norms``, finds norms over the channels, such as RMS norms, and replaces them by
``steps.channel_norm``. The second one, ``after_norms``, lets norms also compute scales, shifts, activations
and casts that follow them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    cleaned,
    dtype,
    has,
    has_kernels,
    is_exact,
    is_only,
    number,
    operands,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import VIEWS
from sdfastgn.plans.run.schemas import arguments

aten = torch.ops.aten
# For each op that is an activation, the name by which kernels know it. For GELU in its tanh form, the
# function ``activation`` returns another name.
ACTIVATIONS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.mish.default: "mish",
    aten.gelu.default: "gelu",
}


def activation(n: Any) -> str | None:
    """Returns the name by which kernels know the activation ``n``. None if ``n`` is no activation."""
    if not has(n, *ACTIVATIONS):
        return None
    return "gelu_tanh" if n.kwargs.get("approximate") == "tanh" else ACTIVATIONS[n.target]


def widened(n: Any) -> Any:
    """Returns the value from which the node ``n`` was cast without rounding, or else ``n`` itself."""
    while has(n, steps.cast) and is_exact(n):
        n = n.args[0]
    return n


# ---- norms of channels


class Norm(NamedTuple):
    """The norm ``x / max(sqrt(sum of squares + added), eps) * scale * weight + bias`` over one axis."""

    x: Any
    eps: float = 0.0
    added: float = 0.0
    scale: float = 1.0
    weight: Any = None
    bias: Any = None


def norms(graph: fx.Graph) -> fx.Graph:
    """Replaces norms over the channels of images, videos or attention heads by one kernel each."""
    r = Rewriter(graph)
    # The loop goes from the last node to the first: the product with the weight and the sum with the bias
    # follow the norm, so they are found before the norm itself is replaced.
    for n in reversed(graph.nodes):
        if not has(n, *LAST_OPS) or not n.users or rank(n) not in (4, 5):
            continue
        r.at = n
        if has_kernels(n):
            pairs = ((axis, norm_over(n, axis)) for axis in (1, rank(n) - 1))
            axis, found = next((pair for pair in pairs if pair[1] is not None), (0, None))
            if found is not None:
                r.replace(n, _channel_norm(r, n, found, axis))
    return cleaned(graph)


# In a graph, the last node of a norm calls one of these functions.
LAST_OPS = (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, steps.cast, aten.rms_norm.default)


def norm_over(n: Node, axis: int) -> Norm | None:
    """Returns the norm over ``axis`` whose result is the node ``n``. None if ``n`` is no such norm."""
    inner, affine = _affine(n, axis)
    found = next(filter(None, (spelling(inner, axis) for spelling in _NORMS)), None)
    if found is None or (found.weight is not None and affine.weight is not None):
        return None
    x = next((v for v in (widened(found.x), found.x) if dtype(v) == dtype(n)), None)
    if x is None:
        return None
    weight = affine.weight if found.weight is None else found.weight
    return Norm(x, found.eps, found.added, found.scale * affine.scale, weight, affine.bias)


def _affine(n: Any, axis: int) -> tuple[Any, Norm]:
    """Goes back from the node ``n`` over the weight, bias, scale and casts that follow a norm.

    Returns (the value before these, a ``Norm`` with the weight, bias and scale). The search does not check
    whether that value is a norm.
    """
    weight = bias = None
    scale = 1.0
    root = dtype(n)
    while True:
        is_cast = has(n, steps.cast) and dtype(n.args[0]).is_floating_point
        if is_cast and torch.promote_types(dtype(n), root) == dtype(n):
            n = n.args[0]  # the cast rounds to no fewer bits than the final result has, so it can be left out
        elif has(n, aten.mul.Tensor) and number(n) is not None:
            n, scale = n.args[0], scale * number(n)  # type: ignore[operator]
        elif has(n, aten.div.Tensor) and number(n):
            n, scale = n.args[0], scale / number(n)  # type: ignore[operator]
        elif (
            has(n, aten.add.Tensor) and weight is bias is None and scale == 1 and (of := _parameter(n, axis))
        ):
            n, bias = of
        elif has(n, aten.mul.Tensor) and weight is None and (of := _parameter(n, axis)):
            n, weight = of
        else:
            return n, Norm(None, scale=scale, weight=weight, bias=bias)


def _parameter(n: Node, axis: int) -> tuple[Node, Node] | None:
    """Returns (x, t) if ``n`` adds or multiplies x and a parameter t with one number for each channel.

    Else None. t may also be a view or cast of a parameter.
    """
    for x, t in operands(n):
        aligned = (1,) * (rank(n) - rank(t)) + shape(t)
        is_small = math.prod(aligned) == shape(n)[axis] == aligned[axis]
        if is_outside(t) and is_small and shape(x) == shape(n) and dtype(t).is_floating_point:
            return x, t
    return None


def is_column(t: Node, x: Node) -> bool:
    """True if ``t`` has one number for each channel of x, or for each channel of each sample."""
    N, C, *axes = shape(x)
    return shape(t) in ((N, C, *[1] * len(axes)), (1, C, *[1] * len(axes))) and has_kernels(t)


def is_one_plus(t: Any) -> bool:
    return has(t, aten.add.Tensor) and number(t) == 1 and dtype(t) == dtype(t.args[0])


def is_outside(t: Any) -> bool:
    """True if ``t`` is None, or an input of the graph such as a parameter, or a view or cast of one."""
    while has(t, *VIEWS, steps.cast):
        t = t.args[0]
    return t is None or t.op != "call_function"


def _normalized(n: Any, axis: int) -> Norm | None:
    """Returns the norm if ``n`` is x / max(|x|, eps), as ``F.normalize`` computes it. Else None."""
    if not has(n, aten.div.Tensor) or not isinstance(n.args[1], Node) or n.kwargs:
        return None
    x, divisor = n.args
    divisor = divisor.args[0] if has(divisor, steps.expand) else divisor
    if not has(divisor, aten.clamp_min.default) or not has(divisor.args[0], aten.linalg_vector_norm.default):
        return None
    of, order, axes, keeps, _ = arguments(divisor.args[0])
    is_norm = of is x and order == 2 and _is_axis(axes, axis, x) and keeps
    return Norm(x, eps=float(divisor.args[1])) if is_norm else None


def _root_mean_square(n: Any, axis: int) -> Norm | None:
    found = mean_square_norm(n, axis)
    return None if found is None else _of_mean(*found, axis)


def mean_square_norm(n: Any, axis: int) -> tuple[Node, float] | None:
    """Returns (x, eps) if n is the RMS norm x / sqrt(mean(x^2) + eps) over ``axis``. Else None.

    It may also be written as x * rsqrt(mean(x^2) + eps).
    """
    pairs = list(operands(n)) if has(n, aten.mul.Tensor, aten.div.Tensor) else []
    pairs, root = (pairs[:1], aten.sqrt) if has(n, aten.div.Tensor) else (pairs, aten.rsqrt)
    for x, q in pairs:
        plus: Any = q.args[0] if has(q, root.default) else None
        mean: Any = plus.args[0] if has(plus, aten.add.Tensor) and number(plus) is not None else None
        if not has(mean, aten.mean.dim):
            continue
        square, axes, keeps, _ = arguments(mean)
        is_square = has(square, aten.mul.Tensor) and square.args[0] is square.args[1]
        if is_square and widened(square.args[0]) is widened(x) and _is_axis(axes, axis, square) and keeps:
            return x, float(number(plus))  # type: ignore[arg-type]
    return None


def _whole(n: Any, axis: int) -> Norm | None:
    """Returns the norm if ``n`` is ``aten.rms_norm`` over ``axis``, which must be the last one. Else None."""
    if not has(n, aten.rms_norm.default) or axis != rank(n) - 1:
        return None
    x, axes, weight, eps = arguments(n)
    if eps is None and dtype(x) != torch.float32:
        return None  # the norm stays: in 16 bits PyTorch's default for eps differs between releases
    eps = torch.finfo(dtype(x)).eps if eps is None else eps
    return _of_mean(x, eps, axis)._replace(weight=weight) if len(axes) == 1 else None


_NORMS: tuple[Callable[[Any, int], Norm | None], ...] = (_normalized, _root_mean_square, _whole)


def _of_mean(x: Node, eps: float, axis: int) -> Norm:
    """Expresses an RMS norm over C channels as x * sqrt(C) / sqrt(sum of squares + C * eps)."""
    C = shape(x)[axis]
    return Norm(x, added=C * eps, scale=math.sqrt(C))


def _is_axis(axes: Any, axis: int, x: Node) -> bool:
    return axes is not None and [a % rank(x) for a in axes] == [axis]


def _channel_norm(r: Rewriter, n: Node, norm: Norm, axis: int) -> Node:
    """Makes a node for a norm over the channels: ``steps.channel_norm``, which needs them on axis 1.

    For a norm of the last axis, input and result are permuted.
    """
    C, last = shape(n)[axis], rank(n) - 1
    weight, bias = (None if t is None else r.reshape(t, (C,)) for t in (norm.weight, norm.bias))
    more = weight, bias, norm.scale, norm.eps, "identity", norm.added
    if axis == 1:
        return r.like(steps.channel_norm, (norm.x, *more), n)
    x, dims = norm.x, range(rank(n))
    if has(x, steps.permute) and x.args[1][-1] == last:
        x, dims = x.args
    first = r.permute(x, (0, last, *range(1, last)))
    y = r.like(steps.channel_norm, (first, *more), first)
    return r.permute(r.permute(y, (0, *range(2, last + 1), 1)), dims)


# ---- what follows a norm


def after_norms(graph: fx.Graph) -> fx.Graph:
    """Lets norms also compute the scales, shifts, activations and casts that follow them."""
    return apply(graph, _into_norm, aten.mul.Tensor, aten.add.Tensor, *ACTIVATIONS, steps.cast)


def _into_norm(r: Rewriter, n: Node) -> Node | None:
    return _with_modulation(r, n) or _with_activation(r, n) or _in_one_dtype(r, n)


def _with_modulation(r: Rewriter, n: Any) -> Node | None:
    """Lets a GroupNorm also compute a product with 1 + scale, or a sum with a shift, after it.

    Scale and shift have one number for each channel, or for each channel of each sample.
    """
    is_scale = has(n, aten.mul.Tensor)
    for norm, t in operands(n) if is_scale or has(n, aten.add.Tensor) else ():
        if not has(norm, steps.group_norm) or not is_only(norm) or norm.args[5] != "identity" or norm.args[8]:
            continue
        scale, shift = norm.args[9:] or (None, None)
        is_free = shift is None and (scale is None or not is_scale)
        added = _added_to_one(t) if is_scale else t
        if is_free and added is not None and is_column(t, norm) and dtype(norm) == dtype(n):
            column = r.reshape(added, shape(t)[:2])
            ada = (column, None) if is_scale else (scale, column)
            return r.like(steps.group_norm, (*norm.args[:9], *ada), n)
    return None


def _added_to_one(t: Any) -> Node | None:
    """Returns s if ``t`` is 1 + s, or a reshape of 1 + s. Else None."""
    t = t.args[0] if has(t, steps.reshape) else t
    return t.args[0] if is_one_plus(t) else None


def _with_activation(r: Rewriter, n: Node) -> Node | None:
    """Lets a norm also compute the activation after it, if no other node reads the norm."""
    name = activation(n)
    norm: Any = n.args[0] if name is not None else None
    if not has(norm, steps.group_norm, steps.channel_norm) or not is_only(norm) or norm.args[5] != "identity":
        return None
    return r.like(norm.target, (*norm.args[:5], name, *norm.args[6:]), n)


def _in_one_dtype(r: Rewriter, n: Node) -> Node | None:
    """Removes the casts around a norm that models compute in fp32 for 16-bit tensors.

    The kernel of the norm reads and writes 16 bits, and computes in fp32.
    """
    norm: Any = n.args[0] if has(n, steps.cast) else None
    if not has(norm, steps.group_norm, steps.layer_norm) or not is_only(norm):
        return None
    x = norm.args[0]
    source = x.args[0] if has(x, steps.cast) and is_exact(x) else None
    if source is None or dtype(norm) != torch.float32 or dtype(source) != dtype(n):
        return None
    return r.like(norm.target, (source, *map(widened, norm.args[1:])), n)
