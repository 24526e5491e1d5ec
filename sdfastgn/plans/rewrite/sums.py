"""Rules for sums of images and videos, such as residual sums.

One kernel computes a sum together with the bias of a convolution, a division and an activation. A bias or an
embedding that is added before a norm is added by the kernel of the norm.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.biases import bias_of
from sdfastgn.plans.rewrite.blends import blended
from sdfastgn.plans.rewrite.moves import is_copied, sum_of_views
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    dtype,
    has,
    has_kernels,
    is_only,
    number,
    operands,
    rank,
    shape,
    user,
)
from sdfastgn.plans.rewrite.norms import ACTIVATIONS, activation, is_column
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.rewrite.statistics import wants_statistics
from sdfastgn.plans.rewrite.views import applied, axis_after, merged_views
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import base

aten = torch.ops.aten
# For each function in ``steps`` that computes a norm: the index of its argument ``shift``, which it adds to
# its input.
_SHIFT = {steps.group_norm: 6, steps.channel_norm: 7, steps.frames: 7}
# For each function in ``steps`` that computes a sum: the index of its argument ``activation``.
_ACTIVATION = {steps.add: 5, steps.add_bias_: 3}


def sums(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, behind_views, bias_of)
    graph = apply(graph, divided_sum, aten.div.Tensor)
    graph = merged_views(apply(graph, blended, aten.add.Tensor))
    return apply(graph, residual_sum, aten.add.Tensor)


def shifts(graph: fx.Graph) -> fx.Graph:
    return apply(graph, shifted_norm, *_SHIFT)


def activated_sums(graph: fx.Graph) -> fx.Graph:
    """Lets sums also compute the activations after them.

    This pass runs after the pass ``biases``, because ``biases`` makes further sums.
    """
    return apply(graph, activated_sum, *ACTIVATIONS)


def behind_views(r: Rewriter, n: Any) -> None:
    """Moves the addition of a bias behind views of the sum, if these keep the axis of the channels."""
    views, last = [], 0
    v, axis = n, 1  # ``axis``: the axis of the channels in the value v
    while is_only(v) and has(user(v), steps.reshape, steps.permute):
        v = user(v)
        found = axis_after(v, axis)
        if found is None:
            break
        axis = found
        views.append(v)
        if axis == 1 and rank(v) in (4, 5):
            last = len(views)
    if last:
        h, bias = n.args
        r.at = end = views[last - 1]
        end.replace_all_uses_with(r.like(bias_of, (applied(r, views[:last], h), bias), end))


def divided_sum(r: Rewriter, n: Any) -> Node | None:
    """Replaces (a + b) / number, with or without a convolution's bias in the sum, by ``steps.add``."""
    total, divisor = n.args[0], number(n)
    if not has(total, aten.add.Tensor) or not is_only(total) or not divisor or dtype(n) != dtype(total):
        return None
    return _added(r, total, n, float(divisor)) if _is_residual(total) else None


def residual_sum(r: Rewriter, n: Any) -> Node | None:
    """Replaces a + b, with or without the bias of a convolution in the sum, by one kernel, ``steps.add``.

    A sum without a bias is replaced only if an activation follows, or a GroupNorm that gets faster because
    the kernel also computes the sums for its mean and variance.
    """
    if not _is_residual(n):
        return None
    has_bias = any(has(t, bias_of) and is_only(t) for t in n.args)
    if has_bias or (is_only(n) and activation(user(n)) is not None):
        return _added(r, n, n, 1.0)
    if not wants_statistics(n):
        return None
    # If an operand is a reshape that must copy, it is better to read the operand without the copy than to
    # compute statistics for a GroupNorm. But if the copy also adds a bias, it is needed anyway.
    is_moved = any(is_copied(t) and not has(base(t), bias_of) for t in n.args)
    return (sum_of_views(r, n) if is_moved else None) or _added(r, n, n, 1.0)


def _is_residual(n: Any) -> bool:
    """True if ``n`` is a sum of two different images or videos of one shape, in a dtype of our kernels."""
    a, b = next(operands(n), (None, None))
    if a is None or b is None or a is b or rank(n) < 4 or 0 in shape(n):
        return False
    is_alike = shape(a) == shape(b) == shape(n) and dtype(a) == dtype(b) == dtype(n)
    return is_alike and has_kernels(n)


def _added(r: Rewriter, total: Any, end: Node, divisor: float) -> Node:
    biases: list[Any] = [t.args[1] for t in total.args if has(t, bias_of) and is_only(t)]
    a, b = (t.args[0] if has(t, bias_of) and is_only(t) else t for t in total.args)
    bias = biases[0] if biases else None
    if len(biases) == 2:
        bias = r.like(aten.add.Tensor, biases, biases[0])
    return r.item(r.new(steps.add, (a, b, bias, divisor, False)), 0, end)


def activated_sum(r: Rewriter, n: Any) -> Node | None:
    """Replaces activation(sum) by one step if no other node reads the sum, also of convolution and bias."""
    x = n.args[0]
    if not has(x, operator.getitem) or x.args[1] != 0 or not is_only(x):
        return None
    total = x.args[0]
    i = _ACTIVATION.get(total.target)
    if i is None or len(total.args) > i:
        return None
    return r.item(r.new(total.target, (*total.args[:i], activation(n))), 0, n)


def shifted_norm(r: Rewriter, n: Any) -> Node | None:
    """Moves the addition of a bias, or of an embedding of one number per channel, from before a norm into it.

    The norm takes the bias or embedding as its argument ``shift``.
    """
    x, i = n.args[0], _SHIFT[n.target]
    args = [*n.args, *[None] * (i + 1 - len(n.args))]
    if not is_only(x) or args[i] is not None:
        return None
    takes_samples = has(n, steps.group_norm) and not n.args[8]
    found = x.args if has(x, bias_of) else _embedded(r, x) if takes_samples else None
    if found is None:
        return None
    args[0], args[i] = found
    return r.like(n.target, args, n)


def _embedded(r: Rewriter, x: Any) -> tuple[Any, Node] | None:
    """Returns (h, shift) if x is h plus a tensor with one number a channel. Else None.

    If a bias is added too, the shift is the tensor plus the bias, and h is the value without both.
    """
    for h, t in operands(x) if has(x, aten.add.Tensor) else ():
        if not is_column(t, x) or shape(h) != shape(x) or dtype(t) != dtype(h):
            continue
        shift = r.reshape(t, shape(t)[:2])
        if has(h, bias_of) and is_only(h):
            return h.args[0], r.like(aten.add.Tensor, (shift, h.args[1]), shift)
        return h, shift
    return None
