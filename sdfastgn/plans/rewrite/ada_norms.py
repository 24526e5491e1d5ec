"""Replaces adaptive norms of tokens by one kernel, together with the residual sum before the norm.

The kernel is called by ``steps.ada_norm``. It also computes gated sums and RMS norms without a modulation.
Tokens are (B, S, D). The rules look for this pattern, of which any part may be missing:

    total = x + gate * rms_norm(branch)
    y = norm(total) * gain * factor + offset

``branch`` is what the residual sum adds to x, such as the result of attention. If it is a linear layer, and
PyTorch would add the layer's bias in a second pass over the result, the kernel adds this bias. ``gain`` is
the weight of the norm, if the model multiplies it separately.

Factor and offset are the *modulation*. Gate, factor and offset are (B, S, D), or have one element along B or
S. The kernel computes in fp32 and rounds each result once. So casts inside of the pattern are dropped, unless
a cast rounds to fewer bits than the result has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.common.dispatch import KERNEL_DTYPES
from sdfastgn.kernels.layer_norm.config import fits_registers
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    cleaned,
    dtype,
    has,
    has_kernels,
    is_only,
    operands,
    ordered,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.norms import ACTIVATIONS, is_one_plus, mean_square_norm, widened
from sdfastgn.plans.rewrite.rules import from_the_last
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import adds_bias_apart
from sdfastgn.plans.run.schemas import arguments

aten = torch.ops.aten
_LAST_OPS = (
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.rms_norm.default,
    steps.cast,
    steps.layer_norm,
)


class _Norm(NamedTuple):
    """A LayerNorm or RMS norm of the last axis of x: ``kind`` is "layer" or "rms"."""

    x: Node
    kind: str
    weight: Node | None
    bias: Node | None
    eps: float


class _Sum(NamedTuple):
    """A residual sum: x + gate * norm(branch). ``gate`` and ``norm`` are None if the sum is without them."""

    x: Node
    branch: Node
    gate: Node | None
    norm: _Norm | None


class _Modulated(NamedTuple):
    norm: _Norm
    factor: Node | None
    offset: Node | None


def ada_norms(graph: fx.Graph) -> fx.Graph:
    """Replaces adaptive norms of tokens, and sums with a gate, by one kernel: ``steps.ada_norm``.

    The pass goes from the last node of the graph to the first, so that the largest pattern is found first.
    """
    r = Rewriter(graph)
    places = {n: i for i, n in enumerate(graph.nodes)}
    for n in from_the_last(r, *_LAST_OPS):
        if _is_tokens(n):
            _norm_of_tokens(r, n, places) or _gated_sum(r, n)
    if not r.has_changed:
        return graph
    for n in cleaned(graph).nodes:
        if has(n, steps.ada_norm):
            n.args = (*n.args[:-1], any(item.args[1] == 0 for item in n.users))
    return ordered(graph)


def _is_tokens(n: Node) -> bool:
    return rank(n) == 3 and 0 not in shape(n) and has_kernels(n) and fits_registers(shape(n)[-1])


def _norm_of_tokens(r: Rewriter, n: Node, places: dict[Node, int]) -> bool:
    """Replaces norm(x + gate * branch) * factor + offset, whose last node is ``n``, by ``steps.ada_norm``.

    Gate, factor, offset and the sum may be missing, and the branch may have an RMS norm. A LayerNorm without
    factor and offset is replaced only after a sum with a gate or with a norm of the branch. Returns True if
    ``n`` was replaced.
    """
    found = _modulated(n)
    if found is None:
        return False
    norm, factor, offset = found
    total = _sum(norm.x)
    is_plain = has(uncast(n, n), steps.layer_norm)
    if is_plain and (total is None or total.gate is total.norm is None):
        return False
    after = [t for t in (norm.weight, norm.bias, factor, offset) if t is not None]
    if total is not None and _depends(after, norm.x, places):
        total = None
    step = _step(r, total, found)
    if total is not None:
        norm.x.replace_all_uses_with(r.item(step, 0, norm.x))
    r.replace(n, r.item(step, 1, n))
    return True


def _gated_sum(r: Rewriter, n: Node) -> bool:
    """Replaces the node ``n`` by ``steps.ada_norm`` if it is x + gate * branch or x + rms_norm(branch).

    Returns True if ``n`` was replaced.
    """
    total = _sum(n)
    if total is None or total.gate is total.norm is None:
        return False
    r.replace(n, r.item(_step(r, total, None), 0, n))
    return True


def _step(r: Rewriter, total: _Sum | None, found: _Modulated | None) -> Node:
    """Makes a node that calls the kernel ``steps.ada_norm`` for a sum, a norm, or both.

    The call's last argument says whether the sum must be written to memory. It is set at the end of the pass,
    when it is known whether other nodes read the sum.
    """
    x: Any = found.norm.x if total is None and found is not None else None
    branch = gate = branch_norm = norm = factor = offset = None
    has_tanh = adds_one = False
    if total is not None:
        x, branch, gate = total[:3]
        branch, bias = _without_bias(r, branch) if total.norm is None else (branch, None)
        if total.norm is not None:
            branch_norm = total.norm[1:]
        elif bias is not None:
            branch_norm = ("none", None, bias, 0.0)
        if has(gate, aten.tanh.default):
            gate, has_tanh = gate.args[0], True  # type: ignore[union-attr]
    if found is not None:
        norm, factor, offset = found.norm[1:], found.factor, found.offset
        if is_one_plus(factor):
            factor, adds_one = factor.args[0], True  # type: ignore[union-attr]
    gate, factor, offset = (_as_rows(r, t) for t in (gate, factor, offset))
    return r.new(
        steps.ada_norm, (x, branch, gate, branch_norm, norm, factor, offset, has_tanh, adds_one, True)
    )


def _without_bias(r: Rewriter, n: Node) -> tuple[Node, Node | None]:
    """Takes the bias out of the linear layer ``n``, if PyTorch would add this bias by a second kernel.

    Returns (the layer without bias, the bias). For other nodes, and if several nodes read ``n``, it returns
    (``n``, None).
    """
    if not adds_bias_apart(n) or not is_only(n):
        return n, None
    x, weight, bias = n.args
    return r.like(steps.linear, (x, weight, None), n), bias


def _as_rows(r: Rewriter, t: Node | None) -> Node | None:
    return None if t is None else r.reshape(t, (1,) * (3 - rank(t)) + shape(t))


# ---- finding norms, modulations and gated sums


def _modulated(n: Node) -> _Modulated | None:
    """Returns norm, factor and offset if the node ``n`` is norm(x) * gain * factor + offset. Else None.

    Gain, factor and offset may be missing. x must have the dtype of ``n``. The gain becomes the weight of the
    norm.
    """
    for a, offset in _operands(n, aten.add.Tensor, n):
        for b, factor in _operands(a, aten.mul.Tensor, n):
            for c, gain in _operands(b, aten.mul.Tensor, n):
                norm = _norm(c, n)
                if norm is None:
                    continue
                is_gain = gain is not None and rank(gain) == 1 and norm.weight is norm.bias is None
                if gain is None or is_gain:
                    return _Modulated(norm._replace(weight=gain) if is_gain else norm, factor, offset)
    return None


def _sum(n: Node) -> _Sum | None:
    """Returns x, branch, gate and norm if the node ``n`` is x + gate * norm(branch). Else None.

    Gate and norm may be missing. x and the branch must have the dtype of ``n``.
    """
    plain = None
    for x, added in _summands(n):
        for b, gate in _operands(added, aten.mul.Tensor, n):
            is_activated = any(has(uncast(t, n), *ACTIVATIONS) for t in (b, gate))
            if gate is not None and is_activated and shape(gate) == shape(n):
                continue  # skipped: ``steps.gated`` replaces value * activation(gate) of equal shapes
            for c, gain in _operands(b, aten.mul.Tensor, n):
                norm = _norm(c, n)
                is_gain = gain is None or (rank(gain) == 1 and norm is not None and norm.weight is None)
                if norm is not None and norm.kind == "rms" and is_gain:
                    weight = norm.weight if gain is None else gain
                    return _Sum(x, norm.x, gate, norm._replace(weight=weight))
            branch = in_dtype(b, n)
            if branch is not None and gate is not None:
                return _Sum(x, branch, gate, None)
            if branch is not None and plain is None and branch is not x:
                plain = _Sum(x, branch, None, None)
    return plain


def _summands(n: Node) -> Iterator[tuple[Node, Node]]:
    total = uncast(n, n)
    for x, added in operands(total) if has(total, aten.add.Tensor) else ():
        source = in_dtype(x, n)
        if source is not None and shape(x) == shape(added) == shape(n):
            yield source, added


def _operands(n: Node, op: Any, root: Node) -> Iterator[tuple[Node, Node | None]]:
    """Yields (n, None), and also (a, b) if ``n`` is ``op(a, b)`` and b can be a factor or offset of a.

    It can if a has the shape of the node ``root``, and b broadcasts to this shape. If ``n`` is a
    cast of ``op(a, b)``, the cast is skipped.
    """
    n = uncast(n, root)
    yield n, None
    for a, b in operands(n) if has(n, op) else ():
        if shape(a) == shape(root) and _modulates(b, root):
            yield a, b


def _modulates(t: Node, root: Node) -> bool:
    """True if ``t`` can be a factor, gate or offset for tokens ``root`` (B, S, D): it broadcasts to them."""
    whole = (1,) * (3 - rank(t)) + shape(t)
    is_aligned = len(whole) == 3 and whole[-1] == shape(root)[-1]
    return (
        dtype(t) in KERNEL_DTYPES
        and is_aligned
        and all(size in (1, full) for size, full in zip(whole, shape(root), strict=True))
    )


def _norm(n: Node, root: Node) -> _Norm | None:
    """Returns the norm whose result is the node ``n``.

    None if ``n`` is no norm, or if the norm's input has another shape or dtype than the node ``root``.
    """
    n = uncast(n, root)
    found = _norm_at(n)
    x = None if found is None else in_dtype(found.x, root)
    return None if found is None or x is None or shape(x) != shape(root) else found._replace(x=x)


def _norm_at(n: Node) -> _Norm | None:
    if has(n, steps.layer_norm):
        x, weight, bias, eps = n.args
        return _Norm(x, "layer", weight, bias, eps)
    if has(n, aten.rms_norm.default):
        x, axes, weight, eps = arguments(n)
        # An RMS norm without an eps is not replaced: in 16 bits PyTorch's default for eps differs between
        # releases.
        return _Norm(x, "rms", weight, None, eps) if len(axes) == 1 and eps is not None else None
    found = mean_square_norm(n, rank(n) - 1)
    return None if found is None else _Norm(found[0], "rms", None, None, found[1])


def in_dtype(n: Node, root: Node) -> Node | None:
    """Returns the node ``n``, or the value from which ``n`` was cast without rounding.

    It returns whichever has the dtype of the node ``root``. None if neither has it.
    """
    return next((v for v in (widened(n), n) if dtype(v) == dtype(root)), None)


def uncast(n: Any, root: Node) -> Any:
    """Returns the value from which ``n`` was cast, or ``n`` itself.

    It goes back only over casts between floats to dtypes at least as wide as that of the node ``root``. These
    round to no fewer bits than ``root`` has.
    """
    while has(n, steps.cast) and dtype(n.args[0]).is_floating_point:
        if torch.promote_types(dtype(n), dtype(root)) != dtype(n):
            break
        n = n.args[0]
    return n


def _depends(sources: list[Node], on: Node, places: dict[Node, int]) -> bool:
    """True if one of the nodes ``sources`` is computed from the node ``on``.

    ``places``: for each node, its index in the graph.
    """
    seen: set[Node] = set()
    todo = list(sources)
    while todo:
        n = todo.pop()
        if n is on:
            return True
        if n not in seen and places.get(n, len(places)) > places[on]:
            seen.add(n)
            todo += n.all_input_nodes
    return False
