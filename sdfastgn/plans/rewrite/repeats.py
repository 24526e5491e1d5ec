"""Replaces repetitions of elements before a convolution, as by ``repeat_interleave``, by ``steps.upsample``.

PyTorch computes such a repetition by ``expand``, and a reshape that copies.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps


def repeats(graph: fx.Graph) -> fx.Graph:
    return apply(graph, upsampled, steps.reshape, steps.cut)


def upsampled(r: Rewriter, n: Any) -> Node | None:
    """Replaces repeated elements by ``steps.upsample``, if a convolution or a pad reads them.

    Convolutions and pads need the repeated elements in memory. Other ops may read the views instead, so for
    them nothing is replaced. Repetitions along time are replaced only if the model cuts off the copies of the
    first frame.
    """
    is_copied = any(has(u, steps.conv, steps.pad) for u in n.users)
    if not is_copied or rank(n) not in (4, 5) or 0 in shape(n) or not dtype(n).is_floating_point:
        return None
    whole = n.args[0] if has(n, steps.cut) else n
    x, times = _source(r, whole)
    of_time = times[0] if rank(n) == 5 else 1
    cut = (2, of_time - 1, shape(whole)[2] - of_time + 1)
    if x is whole or (n is not whole and n.args[1:] != cut) or (n is whole and of_time > 1):
        return None
    return r.like(steps.upsample, (x, times, of_time > 1), n)


def _source(r: Rewriter, n: Any) -> tuple[Any, tuple[int, ...]]:
    """Finds the value whose elements ``n`` repeats, and how often it repeats them along each spatial axis.

    If ``n`` repeats none, the value is ``n`` itself.
    """
    times = [1] * (rank(n) - 2)
    while has(n, steps.reshape) and has(n.args[0], steps.expand):
        wide: Any = n.args[0]
        axis = next((a for a, (s, t) in enumerate(zip(shape(n), shape(wide), strict=False)) if s != t), 0)
        whole, one, many = shape(n), shape(wide.args[0]), shape(wide)
        if axis < 2 or rank(wide) != rank(n) + 1 or len(one) != len(many):
            break
        count = many[axis + 1]
        same = (*many[:axis], many[axis] * count, *many[axis + 2 :])
        if whole != same or one != (*many[: axis + 1], 1, *many[axis + 2 :]) or count & (count - 1):
            break
        times[axis - 2] *= count
        n = r.reshape(wide.args[0], (*many[: axis + 1], *many[axis + 2 :]))
    return n, tuple(times)
