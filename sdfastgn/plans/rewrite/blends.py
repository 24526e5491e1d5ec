"""A rule for mixes of two images or videos: each is multiplied by a number, and the products are added."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from sdfastgn.plans.rewrite.biases import bias_of
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, has_kernels, is_only, operands, rank, shape
from sdfastgn.plans.run import steps

aten = torch.ops.aten


def blended(r: Rewriter, n: Any) -> Node | None:
    """Replaces kept * x + scale * y by one kernel, ``steps.blend``. x and y are images or videos.

    ``kept`` and ``scale`` have one number for each frame, or for all. If y is itself x + h, the kernel reads
    h instead, and computes (kept + scale) * x + scale * h. If a convolution is mixed, the kernel also adds
    its bias.
    """
    a, b = (_weighted(m) for m in n.args[:2]) if any(operands(n)) else (None, None)
    if a is None or b is None or a[0] is b[0] or not shape(a[0]) == shape(b[0]) == shape(n):
        return None
    if not has_kernels(n) or 0 in shape(n) or {dtype(a[0]), dtype(b[0])} != {dtype(n)}:
        return None
    kept, scale = _of_frames(r, *a), _of_frames(r, *b)
    if dtype(kept) != dtype(scale):
        return None
    for x, y, factors in ((a[0], b[0], (kept, scale)), (b[0], a[0], (scale, kept))):
        h = _added_to(x, y)
        if h is not None:  # kept * x + scale * (x + h) is (kept + scale) * x + scale * h
            total = r.like(aten.add.Tensor, factors, kept)
            return _blend(r, n, h, x, total, factors[1])
    if has(a[0], bias_of):
        return _blend(r, n, a[0], b[0], scale, kept)
    return _blend(r, n, b[0], a[0], kept, scale)


def _weighted(m: Any) -> tuple[Node, Node] | None:
    """Returns (x, factor) if ``m`` is x * factor, and the factor has one number, or one for each frame.

    Returns None otherwise, and also if several nodes read the product ``m``.
    """
    if not has(m, aten.mul.Tensor) or not is_only(m) or rank(m) not in (4, 5):
        return None
    of_frames = (0, 2) if rank(m) == 5 else (0,)
    for x, factor in operands(m):
        sizes = (1,) * (rank(m) - rank(factor)) + shape(factor)
        is_small = all(size == 1 or axis in of_frames for axis, size in enumerate(sizes))
        # In PyTorch, the factor of a tensor on the GPU may be a single number on the CPU. Kernels cannot read
        # it there.
        is_here = factor.meta["device"] == m.meta["device"]
        if is_small and is_here and dtype(factor).is_floating_point:
            return x, factor
    return None


def _of_frames(r: Rewriter, x: Node, factor: Node) -> Node:
    """Returns ``factor`` as a 1-D tensor: a number for each image of x, or for each frame of videos x."""
    size = (shape(x)[0], 1, shape(x)[2] if rank(x) == 5 else 1, 1, 1)[: rank(x)]
    if shape(factor) != size:
        factor = r.new(steps.expand, (factor, size), size, dtype(factor))
    return r.reshape(factor, (math.prod(size),))


def _added_to(x: Node, y: Any) -> Node | None:
    """Returns h if y is x + h, and only one node reads y. Else None."""
    sums = operands(y) if has(y, aten.add.Tensor) and is_only(y) else ()
    for other, h in sums:
        if other is x and h is not x and (shape(h), dtype(h)) == (shape(y), dtype(y)):
            return h
    return None


def _blend(r: Rewriter, n: Node, h: Any, residual: Node, kept: Node, scale: Node) -> Node:
    """Makes a node that computes kept * residual + scale * h in one kernel, ``steps.blend``.

    The frames of videos are passed as images. This needs no copy, because videos are channels-last in memory.
    """
    h, bias = h.args if has(h, bias_of) and is_only(h) else (h, None)
    if rank(n) == 4:
        return r.item(r.new(steps.blend, (h, residual, bias, kept, scale, False)), 0, n)
    h, residual = map(r.images, (h, residual))
    y = r.item(r.new(steps.blend, (h, residual, bias, kept, scale, False)), 0, h)
    return r.video(y, shape(n)[0])
