"""Rules for spatial norms: GroupNorms with a factor and an offset for each position, as in MoVQ's decoder.

Factor and offset are upsampled from small tensors. ``steps.modulated_norm`` reads the small tensors and
upsamples them in the kernel of the norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.pad_frames.op import modulation_times
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, is_only, operands, rank, shape
from sdfastgn.plans.rewrite.norms import ACTIVATIONS, activation
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

aten = torch.ops.aten


class Upsampled(NamedTuple):
    """A value that is made by upsampling: the small tensor, and how its elements are repeated.

    Attributes:
        small: the tensor that is upsampled.
        times: for each spatial axis, how often an element is repeated.
        first_once: True if frame 0 of a video is not repeated along time.
    """

    small: Node
    times: tuple[int, ...]
    first_once: bool


def modulations(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, spatial_norm, aten.add.Tensor)
    return apply(graph, activated_norm, *ACTIVATIONS)


def spatial_norm(r: Rewriter, n: Any) -> Node | None:
    """Replaces group_norm(x) * factor + offset by ``steps.modulated_norm``.

    Factor and offset must be upsampled from small tensors. The kernel upsamples them itself.
    """
    for product, offset in operands(n):
        for norm, factor in operands(product) if has(product, aten.mul.Tensor) and is_only(product) else ():
            is_plain = has(norm, steps.group_norm) and norm.args[5:] == ("identity", None, None, False)
            if is_plain and is_only(norm) and rank(n) in (4, 5) and shape(norm) == shape(n):
                y = _modulated(r, n, norm, upsampled(r, factor), upsampled(r, offset))
                if y is not None:
                    return y
    return None


def activated_norm(r: Rewriter, n: Any) -> Node | None:
    """Lets ``steps.modulated_norm`` (a GroupNorm, factor and offset) also compute an activation after it."""
    x = n.args[0]
    norm = x.args[0] if has(x, steps.reshape) and is_only(x) else x
    if not has(norm, steps.modulated_norm) or not is_only(norm) or norm.args[5] != "identity":
        return None
    args = (*norm.args[:5], activation(n), norm.args[6])
    return r.reshape(r.like(steps.modulated_norm, args, norm), shape(n))


def _modulated(
    r: Rewriter, n: Node, norm: Any, factor: Upsampled | None, offset: Upsampled | None
) -> Node | None:
    if factor is None or offset is None or factor[1:] != offset[1:]:
        return None
    a, b = factor.small, offset.small
    is_alike = shape(a) == shape(b) and dtype(a) == dtype(b) == dtype(n) == dtype(norm)
    if not is_alike or shape(a)[:2] != shape(n)[:2]:
        return None
    N, C, *small = shape(a)
    frames, small_frames = ((1,), (1,)) if rank(n) == 4 else ((), ())
    video, modulation = (N, C, *frames, *shape(n)[2:]), (N, 2 * C, *small_frames, *small)
    # ``steps.modulated_norm`` derives from the shapes how often it repeats elements, and whether it repeats
    # the first frame. If the model's code repeats them otherwise, nothing is replaced.
    found = modulation_times(video, modulation)
    times = (*frames, *factor.times)
    if found is None or found[0] != times or (times[0] > 1 and found[1] != factor.first_once):
        return None
    both = r.reshape(r.new(steps.cat, ((a, b), 1), (N, 2 * C, *small), dtype(n)), modulation)
    x, *settings = norm.args[:6]
    y = r.new(steps.modulated_norm, (r.reshape(x, video), *settings, both), video, dtype(n))
    return r.reshape(y, shape(n))


def upsampled(r: Rewriter, n: Any) -> Upsampled | None:
    """Finds the small tensor from which the node ``n`` is upsampled. None if ``n`` is not upsampled.

    A 1x1 convolution after the upsampling is moved before it.
    """
    if has(n, steps.upsample):
        return Upsampled(n.args[0], tuple(n.args[1]), n.args[2])
    if has(n, steps.conv):
        return _convolved(r, n)
    return _in_parts(r, n) if has(n, steps.cat) and n.args[1] == 2 and len(n.args[0]) == 2 else None


def _convolved(r: Rewriter, n: Any) -> Upsampled | None:
    """Moves a 1x1 convolution that follows upsampling before the upsampling."""
    x, weight, _, stride, padding, _, transposed, *_ = n.args
    if set(shape(weight)[2:]) != {1} or set(stride) != {1} or any(padding) or transposed:
        return None
    found = upsampled(r, x)
    if found is None:
        return None
    small = r.new(steps.conv, (found.small, *n.args[1:]), (*shape(n)[:2], *shape(found.small)[2:]), dtype(n))
    return found._replace(small=small)


def _in_parts(r: Rewriter, n: Any) -> Upsampled | None:
    """Joins separate upsampling of a video's first frame and of its other frames to one upsampling.

    In the result ``first_once`` is True: the first frame is not repeated along time.
    """
    first, rest = (upsampled(r, part) for part in n.args[0])
    if first is None or rest is None or (rest.first_once and rest.times[0] > 1):
        return None
    a: Any = first.small
    b = rest.small
    if shape(n.args[0][0])[2] != 1 or shape(a)[2] != 1 or first.times[1:] != rest.times[1:]:
        return None
    frames = shape(b)[2]
    if has(a, steps.cut) and has(b, steps.cut) and b.args == (a.args[0], 2, a.args[2] + 1, frames):
        return Upsampled(r.cut(a.args[0], 2, a.args[2], 1 + frames), rest.times, True)
    both = (*shape(a)[:2], 1 + frames, *shape(a)[3:])
    return Upsampled(r.new(steps.cat, ((a, b), 2), both, dtype(a)), rest.times, True)
