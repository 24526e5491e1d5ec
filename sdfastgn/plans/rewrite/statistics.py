"""Lets the kernel that writes the input of a GroupNorm also compute statistics for the norm.

Statistics are sums from which the norm gets mean and variance. With them the norm need not read its input an
extra time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.plans.rewrite.nodes import TO_FRAMES, Rewriter, has, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.rewrite.views import merged_views
from sdfastgn.plans.run import steps

# For each function in ``steps`` that can compute statistics of its result for a GroupNorm: the index of its
# argument ``emits``, which turns this on.
_EMITS = {steps.add: 4, steps.add_bias_: 2, steps.blend: 5, steps.cat_two: 2, steps.upsample_conv: 3}


def statistics(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, channels_of_two, steps.cat)
    graph = merged_views(apply(graph, in_images, steps.add, steps.add_bias_))
    return apply(graph, known_statistics, steps.group_norm, steps.frames)


def wants_statistics(x: Node) -> bool:
    """True if a GroupNorm reads x, and is faster if the kernel that writes x computes statistics.

    Statistics are sums from which a norm gets mean and variance.
    """
    return any(True for _ in _norms_of(x))


def _norms_of(x: Node) -> Iterator[Node]:
    """Yields the GroupNorms of x, and of its views, that are faster if statistics of x are known.

    Statistics are sums from which a norm gets mean and variance.
    """
    for u in x.users:
        if _takes_statistics(u, x):
            yield u
        elif _is_alike(u):
            yield from _norms_of(u)
        elif has(u, steps.permute, steps.reshape):
            for v in u.users:
                if _images_of(v) is x or _video_of(v) is x:
                    yield from _norms_of(v)


def _is_alike(view: Any) -> bool:
    """True if ``view`` is a reshape that keeps samples and channels, such as from an image to a video."""
    return has(view, steps.reshape) and rank(view) > 2 and shape(view)[:2] == shape(view.args[0])[:2]


def _images_of(n: Any) -> Node | None:
    """Returns the video whose frames, in order, are the images ``n``. None if ``n`` is something else."""
    frames: Any = n.args[0] if has(n, steps.reshape) and rank(n) == 4 else None
    if not has(frames, steps.permute) or frames.args[1] != TO_FRAMES:
        return None
    N, T, *image = shape(frames)
    return frames.args[0] if shape(n) == (N * T, *image) else None


def _video_of(n: Any) -> Node | None:
    """Returns the images that are, in order, the frames of the video ``n``. None if there are none."""
    frames: Any = n.args[0] if has(n, steps.permute) and n.args[1] == TO_FRAMES else None
    if not has(frames, steps.reshape) or rank(frames.args[0]) != 4:
        return None
    N, T, *image = shape(frames)
    return frames.args[0] if shape(frames.args[0]) == (N * T, *image) else None


def _takes_statistics(n: Any, x: Node) -> bool:
    if not has(n, steps.group_norm, steps.frames) or n.args[0] is not x:
        return False
    norm = n.args[8] if has(n, steps.frames) else None
    if has(n, steps.frames) and not isinstance(norm, steps.Group):
        return False
    known = n.args[7] if norm is None else norm.statistics
    positions = math.prod(shape(x)[3 if _is_of_frames(n) and rank(x) == 5 else 2 :])
    return known is None and statistics_pay(shape(x)[1], positions)


def _is_of_frames(n: Any) -> bool:
    """True if the GroupNorm ``n`` needs separate statistics for each frame of a video, or reads images."""
    if has(n, steps.frames):
        return n.args[8].framewise or n.args[8].pads_first
    return n.args[8] or rank(n.args[0]) == 4


def in_images(r: Rewriter, n: Any) -> None:
    """Lets a sum of videos read their frames as images, if a GroupNorm needs statistics of each frame.

    Statistics are sums from which the norm gets mean and variance. The kernel of the sum computes statistics
    of each sample, and each image is a sample.
    """
    y = next((u for u in n.users if u.args[1] == 0), None)
    if y is None or rank(y) != 5 or shape(y)[2] == 1 or not any(map(_is_of_frames, _norms_of(y))):
        return
    summands = 2 if has(n, steps.add) else 1
    images = [r.images(v) for v in n.args[:summands]]
    total = r.new(n.target, (*images, *n.args[summands:]))
    r.replace(y, r.video(r.item(total, 0, images[0]), shape(y)[0]))


def channels_of_two(r: Rewriter, n: Any) -> Node | None:
    """Replaces a cat of the channels of two tensors before a GroupNorm by one kernel, ``steps.cat_two``.

    The kernel can also compute sums from which the norm gets mean and variance.
    """
    parts, dim = n.args
    if dim != 1 or len(parts) != 2 or not wants_statistics(n):
        return None
    return r.item(r.new(steps.cat_two, (*parts, False)), 0, n)


def known_statistics(r: Rewriter, n: Any) -> Node | None:
    """Lets the kernel that writes the input of a GroupNorm also compute statistics for the norm.

    Statistics are sums from which a norm gets mean and variance.
    """
    x = n.args[0]
    if not _takes_statistics(n, x):
        return None
    while (source := x.args[0] if _is_alike(x) else _video_of(x)) is not None:
        x = source
    if not has(x, operator.getitem) or x.args[1] != 0 or not has(x.args[0], *_EMITS):
        return None
    if _is_of_frames(n) and rank(x) == 5 and shape(x)[2] > 1:
        return None  # the kernel would compute statistics of the whole video, and the norm needs each frame's
    writer = x.args[0]
    writer.update_arg(_EMITS[writer.target], True)
    known = next((u for u in writer.users if u.args[1] == 1), None) or r.new(operator.getitem, (writer, 1))
    if has(n, steps.group_norm):
        return r.like(n.target, (*n.args[:7], known, *n.args[8:]), n)
    norm = n.args[8]._replace(statistics=known)
    return r.like(n.target, (*n.args[:8], norm, *n.args[9:]), n)
