"""Takes biases out of convolutions, so that a kernel that runs after the convolution anyway can add them.

``bias_of`` is a node that adds a bias. It exists only while a graph is rewritten. The rules in
``convolutions.py`` make such nodes. The rules in ``sums.py`` move the biases into norms and residual sums.
The pass ``biases`` runs after these. It replaces the remaining ``bias_of`` nodes by sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import (
    TO_FRAMES,
    Rewriter,
    dtype,
    has,
    has_kernels,
    is_only,
    operands,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

aten = torch.ops.aten
# Functions in ``steps`` whose result lies in newly allocated memory, so that a later node may overwrite it.
_NEW = (steps.conv, steps.conv_windows, steps.conv_last_slice)


def bias_of(h: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias to h, which has the channels on axis 1. Finished graphs do not call it.

    Rules make nodes that call it, and later rules replace these nodes.
    """
    return h + bias.view(-1, *[1] * (h.dim() - 2))


def biases(graph: fx.Graph) -> fx.Graph:
    return apply(apply(graph, _of_frames, aten.add.Tensor), _added, bias_of)


def _of_frames(r: Rewriter, n: Any) -> Node | None:
    """Adds a number for each channel of each frame to a convolution of videos in place: ``steps.add_bias_``.

    This replaces the sum ``n``. The convolution's bias is added with the numbers.
    """
    for h, t in operands(n):
        if (
            rank(h) != 5
            or shape(h) != shape(n)
            or 0 in shape(n)
            or dtype(h) != dtype(t)
            or not has_kernels(n)
        ):
            continue
        N, C, T = shape(n)[:3]
        if shape(t) != (N, C, T, 1, 1) or not is_only(h):
            continue
        h, bias = h.args if has(h, bias_of) else (h, None)
        if not _is_its_own(h):
            continue
        rows = r.reshape(r.permute(t, TO_FRAMES), (N * T, C))
        rows = rows if bias is None else r.like(aten.add.Tensor, (rows, bias), rows)
        images = r.images(h)
        return r.video(r.item(r.new(steps.add_bias_, (images, rows, False)), 0, images), N)
    return None


def _added(r: Rewriter, n: Any) -> Node:
    """Replaces a ``bias_of`` node, whose bias no norm or residual sum has taken, by an in-place sum.

    If h, to which the bias is added, must not be overwritten, the sum gets new memory instead.
    """
    h, bias = n.args
    if _is_its_own(h) and 0 not in shape(n):
        return r.item(r.new(steps.add_bias_, (h, bias, False)), 0, n)
    column = r.reshape(bias, (shape(n)[1], *[1] * (rank(n) - 2)))
    return r.like(aten.add.Tensor, (h, column), n)


def _is_its_own(h: Any) -> bool:
    """True if h may be overwritten: its memory is newly allocated, and only one node reads this memory."""
    while has(h, steps.reshape, steps.permute) and is_only(h):
        h = h.args[0]
    return has(h, *_NEW) and is_only(h)
