"""Convolutions of images and videos: padding, matrix products, upsampling, biases.

``_RULES`` has the rules (``rules.py``) about one convolution. Rules about what a convolution of frames reads
are in ``frames.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.upsample.config import phases_pay
from sdfastgn.plans.rewrite.biases import bias_of
from sdfastgn.plans.rewrite.frames import image_in_frames, in_frames, in_one, last_slice
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, has_kernels, is_only, rank, shape
from sdfastgn.plans.rewrite.rules import Rule, apply
from sdfastgn.plans.run import steps

__all__ = ["convolutions"]

# Dtypes in which a convolution of single pixels is as exact as a product. In fp32 PyTorch lets convolutions
# use TF32, but not products.
HALVES = (torch.float16, torch.bfloat16)


def convolutions(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, in_one, steps.cat)
    for rule in _RULES:
        graph = apply(graph, _where_usual(rule), steps.conv)
    return graph


def _where_usual(rule: Rule) -> Rule:
    """``rule`` for convolutions in a dtype of our kernels. Transposed ones stay as upstream wrote them."""

    def usual(r: Rewriter, n: Any) -> Node | None:
        _, _, _, stride, padding, dilation, transposed, *_ = n.args
        is_usual = not transposed and has_kernels(n)
        has_axes = all(len(numbers) == rank(n) - 2 for numbers in (stride, padding, dilation))
        return rule(r, n) if is_usual and has_axes else None

    return usual


def own_padding(r: Rewriter, n: Any) -> Node | None:
    """Zeros around the input, as many on both sides of an axis: the convolution adds them itself."""
    x, weight, bias, stride, padding, *others = n.args
    if not has(x, steps.pad) or x.args[2:] != ("constant", 0.0):
        return None
    source, pads, mode, value = x.args
    axes = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]  # the last axis first, as for F.pad
    own = [a if a == b else 0 for a, b in axes]
    rest = [0 if a == b else p for a, b in axes for p in (a, b)]
    if not any(own) or min(own) < 0 or (any(rest) and not is_only(x)):
        return None
    if any(rest):
        source = r.like(steps.pad, (source, tuple(rest), mode, value), x)
        sizes = [s - 2 * p for s, p in zip(shape(x)[2:], reversed(own), strict=True)]
        source.meta["shape"] = (*shape(x)[:2], *sizes)
    total = [p + q for p, q in zip(padding, reversed(own), strict=True)]
    return r.like(steps.conv, (source, weight, bias, stride, total, *others), n)


def as_product(r: Rewriter, n: Any) -> Node | None:
    """A convolution whose kernel is one pixel, in 16 bits: a matrix product of the channels."""
    x, weight, bias, stride, padding, _, _, _, groups = n.args
    is_pixel = set(shape(weight)[2:]) == {1} and set(stride) == {1} and not any(padding) and groups == 1
    return r.like(steps.pointwise_conv, (x, weight, bias), n) if is_pixel and dtype(n) in HALVES else None


def frames_repeated_after(r: Rewriter, n: Any) -> Node | None:
    """A convolution of single frames that were repeated along time: the frames are repeated after it."""
    images = n.args[0]
    video: Any = images.args[0] if has(images, steps.reshape) and is_only(images) else None
    large: Any = video.args[0] if has(video, steps.permute) and is_only(video) else None
    if not has(large, steps.upsample) or not is_only(large) or large.args[1][0] == 1:
        return None
    small, times, first_once = large.args
    N, C, T, H, W = shape(large)
    if video.args[1] != (0, 2, 1, 3, 4) or shape(images) != (N * T, C, H, W):
        return None
    few, each = shape(small)[2], tuple(times[1:])
    x = r.reshape(r.permute(small, (0, 2, 1, 3, 4)), (N * few, C, *shape(small)[3:]))
    if each != (1, 1):
        x = r.new(steps.upsample, (x, each, False), (N * few, C, H, W), dtype(large))
    y = r.new(steps.conv, (x, *n.args[1:]), (N * few, *shape(n)[1:]), dtype(n))
    y = r.permute(r.reshape(y, (N, few, *shape(n)[1:])), (0, 2, 1, 3, 4))
    many = (N, shape(n)[1], T, *shape(n)[2:])
    y = r.new(steps.upsample, (y, (times[0], 1, 1), first_once), many, dtype(n))
    return r.reshape(r.permute(y, (0, 2, 1, 3, 4)), shape(n))


def in_phases(r: Rewriter, n: Any) -> Node | None:
    """A 3x3 convolution of an image upsampled by two: ``upsample_conv``, where convolving in phases pays."""
    x, weight, bias, stride, padding, dilation, _, _, groups = n.args
    if not has(x, steps.upsample) or not is_only(x) or tuple(x.args[1]) != (2, 2):
        return None
    numbers = (tuple(stride), tuple(padding), tuple(dilation), groups)
    if shape(weight)[2:] != (3, 3) or numbers != ((1, 1), (1, 1), (1, 1), 1):
        return None
    small = x.args[0]
    N, C, H, W = shape(small)
    if not phases_pay(N, C, shape(weight)[0], H, W, dtype(small).itemsize):
        return None
    return r.item(r.new(steps.upsample_conv, (small, weight, bias, False)), 0, n)


def bias_apart(r: Rewriter, n: Any) -> Node | None:
    """A convolution with a bias: a convolution, then the bias, which the next step may take over."""
    x, weight, bias, *others = n.args
    if bias is None:
        return None
    return r.like(bias_of, (r.like(steps.conv, (x, weight, None, *others), n), bias), n)


# In this order: a rule sees what those before it have left.
_RULES: tuple[Rule, ...] = (
    frames_repeated_after,
    own_padding,
    as_product,
    in_phases,
    bias_apart,
    last_slice,
    in_frames,
    image_in_frames,
)
