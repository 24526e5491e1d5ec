"""Rules for convolutions of images and videos, with the padding, upsampling or bias before or after them.

A rule is a function that replaces one node of a graph by a faster one. ``_RULES`` lists the rules that are
called for each convolution. ``frames.py`` has the rules about pads, caches and norms before a convolution of
a video.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.upsample.config import phases_pay
from sdfastgn.plans.rewrite.biases import bias_of
from sdfastgn.plans.rewrite.frames import (
    image_in_frames,
    in_frames,
    in_one,
    last_slice,
    padded_for_all,
    upsampled_in_frames,
)
from sdfastgn.plans.rewrite.nodes import TO_FRAMES, Rewriter, dtype, has, has_kernels, is_only, rank, shape
from sdfastgn.plans.rewrite.rules import Rule, apply
from sdfastgn.plans.run import steps

# cuDNN computes a convolution together with bias and ReLU only if the channels of a pixel take a multiple of
# 16 bytes. In fp16 and bf16 these are 8 channels.
_CUDNN_CHANNELS = 8
# For each function in ``steps`` that adds a bias: the indices of its arguments ``bias`` and ``emits``.
# ``emits`` says whether the function also computes statistics for a GroupNorm. The argument ``activation``
# comes directly after ``emits``.
_SUMS = {steps.add: (2, 4), steps.add_bias_: (1, 2)}

# In these dtypes a convolution with a 1x1 kernel may become a matrix product. In fp32 PyTorch lets
# convolutions use TF32 by default, but not matrix products, so results would differ.
HALVES = (torch.float16, torch.bfloat16)


def convolutions(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, in_one, steps.cat)
    for rule in _RULES:
        graph = apply(graph, _where_usual(rule), steps.conv)
    graph = apply(graph, upsampled_in_frames, steps.upsample)
    graph = apply(graph, padded_for_all, steps.frames)
    return apply(graph, pad_of_cat, steps.pad)


def relus(graph: fx.Graph) -> fx.Graph:
    """Replaces a convolution, and the bias, residual and ReLU after it, by one call of cuDNN.

    This pass runs after the pass ``statistics``, because a sum that also computes statistics for a GroupNorm
    must stay.
    """
    return apply(graph, with_relu, operator.getitem)


def _where_usual(rule: Rule) -> Rule:
    """Restricts ``rule`` to convolutions that are not transposed, in a dtype for which there are kernels."""

    def usual(r: Rewriter, n: Any) -> Node | None:
        _, _, _, stride, padding, dilation, transposed, *_ = n.args
        is_usual = not transposed and has_kernels(n)
        has_axes = all(len(numbers) == rank(n) - 2 for numbers in (stride, padding, dilation))
        return rule(r, n) if is_usual and has_axes else None

    return usual


def own_padding(r: Rewriter, n: Any) -> Node | None:
    """Replaces a pad with zeros before a convolution by the convolution's own argument ``padding``.

    This is possible for axes with equal pads on both sides. Other pads stay.
    """
    x, weight, bias, stride, padding, *others = n.args
    if not has(x, steps.pad) or x.args[2:] != ("constant", 0.0):
        return None
    source, pads, mode, value = x.args
    axes = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]  # pads of the last axis come first
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
    """Replaces a 16-bit convolution with a 1x1 kernel by a matrix product over the channels."""
    x, weight, bias, stride, padding, _, _, _, groups = n.args
    is_pixel = set(shape(weight)[2:]) == {1} and set(stride) == {1} and not any(padding) and groups == 1
    return r.like(steps.pointwise_conv, (x, weight, bias), n) if is_pixel and dtype(n) in HALVES else None


def frames_repeated_after(r: Rewriter, n: Any) -> Node | None:
    """Moves a 2-D convolution of repeated frames before the repetition. It then computes each frame once."""
    images = n.args[0]
    video: Any = images.args[0] if has(images, steps.reshape) and is_only(images) else None
    large: Any = video.args[0] if has(video, steps.permute) and is_only(video) else None
    if not has(large, steps.upsample) or not is_only(large) or large.args[1][0] == 1:
        return None
    small, times, first_once = large.args
    N, C, T, H, W = shape(large)
    if video.args[1] != TO_FRAMES or shape(images) != (N * T, C, H, W):
        return None
    x, each = r.images(small), tuple(times[1:])
    if each != (1, 1):
        x = r.new(steps.upsample, (x, each, False), (shape(x)[0], C, H, W), dtype(large))
    y = r.video(r.new(steps.conv, (x, *n.args[1:]), (shape(x)[0], *shape(n)[1:]), dtype(n)), N)
    many = (N, shape(n)[1], T, *shape(n)[2:])
    y = r.new(steps.upsample, (y, (times[0], 1, 1), first_once), many, dtype(n))
    return r.images(y)


def in_phases(r: Rewriter, n: Any) -> Node | None:
    """Replaces a 3x3 convolution of an image upsampled by two by ``upsample_conv``, where that is faster.

    Upsampling makes four pixels from one. ``upsample_conv`` computes the result at each of the four by a 2x2
    convolution of the small image.
    """
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
    """Separates the bias from a convolution, so that a later norm or sum can add it."""
    x, weight, bias, *others = n.args
    if bias is None:
        return None
    return r.like(bias_of, (r.like(steps.conv, (x, weight, None, *others), n), bias), n)


def pad_of_cat(r: Rewriter, n: Any) -> Node | None:
    """Replaces a constant pad of a cat by one node, ``steps.padded_cat``, if no other node reads the cat."""
    x, pads, mode, value = n.args
    if mode != "constant" or min(pads) < 0 or not has(x, steps.cat) or not is_only(x):
        return None
    return r.like(steps.padded_cat, (*x.args, pads, value), n)


def with_relu(r: Rewriter, n: Any) -> Node | None:
    """Replaces relu(convolution + bias), with or without a residual in the sum, by one cuDNN call."""
    total, i = n.args
    if i != 0 or not has(total, *_SUMS) or rank(n) != 4 or dtype(n) not in HALVES:
        return None
    bias, emits = (total.args[at] for at in _SUMS[total.target])
    terms = total.args[: _SUMS[total.target][0]]
    if emits or bias is None or total.args[-1] != "relu":
        return None
    if has(total, steps.add) and total.args[3] != 1.0:
        return None
    for h, residual in (terms, terms[::-1]) if len(terms) == 2 else ((terms[0], None),):
        if _takes_relu(h, residual is not None):
            x, weight, _, stride, padding, dilation, _, _, groups = h.args
            return r.like(steps.conv_relu, (x, weight, bias, residual, stride, padding, dilation, groups), n)
    return None


def _takes_relu(h: Any, has_residual: bool) -> bool:
    """True if cuDNN can compute the convolution ``h`` together with ReLU, and a residual if there is one.

    With a residual it can only if the convolution is 3x3 and keeps the size of the image.
    """
    if not has(h, steps.conv) or not is_only(h) or rank(h) != 4:
        return False
    _, weight, _, stride, padding, dilation, transposed, *_ = h.args
    numbers = shape(weight)[2:], tuple(stride), tuple(padding), tuple(dilation)
    keeps_size = numbers == ((3, 3), (1, 1), (1, 1), (1, 1))
    has_channels = all(C % _CUDNN_CHANNELS == 0 for C in shape(weight)[:2])
    return not transposed and has_channels and (keeps_size or not has_residual)


# The rules for convolutions. Each one runs over the whole graph, as the rules before it have left it.
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
