"""Statistics for GroupNorms from the step that writes their input."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx
from torch.fx import Node

from sdfastgn.kernels.statistics.config import statistics_pay
from sdfastgn.plans.rewrite.nodes import Rewriter, has, rank, shape
from sdfastgn.plans.rewrite.rules import apply
from sdfastgn.plans.run import steps

__all__ = ["statistics", "wants_statistics"]

# Step that can compute statistics of its result -> index of its argument ``emits``.
_EMITS = {
    steps.add: 4,
    steps.add_bias_: 2,
    steps.blend: 5,
    steps.cat_two: 2,
    steps.upsample_conv: 3,
}


def statistics(graph: fx.Graph) -> fx.Graph:
    graph = apply(graph, channels_of_two, steps.cat)
    return apply(graph, known_statistics, steps.group_norm, steps.frames)


def wants_statistics(x: Node) -> bool:
    """True if a GroupNorm of x is faster if it gets the statistics of x."""
    of_videos = [v for u in x.users for v in u.users if _video_of(v) is x]
    same = [*filter(_is_alike, x.users), *of_videos]
    return any(_takes_statistics(u, x) for u in x.users) or any(map(wants_statistics, same))


def _is_alike(view: Any) -> bool:
    """True if ``view`` has the same channels and positions as what it reads, such as an image as a video."""
    return has(view, steps.reshape) and rank(view) > 2 and shape(view)[:2] == shape(view.args[0])[:2]


def _video_of(video: Any) -> Any:
    """The images that are the frames of ``video``, in order. None if it is something else."""
    if not has(video, steps.permute) or video.args[1] != (0, 2, 1, 3, 4):
        return None
    frames: Any = video.args[0]
    images: Any = frames.args[0] if has(frames, steps.reshape) else None
    return images if rank(images or video) == 4 and shape(images)[1:] == shape(frames)[2:] else None


def _takes_statistics(n: Any, x: Node) -> bool:
    if not has(n, steps.group_norm, steps.frames) or n.args[0] is not x:
        return False
    of_frames = False  # each frame is normalized by itself, and statistics of its image serve it
    if has(n, steps.group_norm):
        known, framewise = n.args[7:9]
        of_frames = framewise and _video_of(x) is not None
    elif isinstance(n.args[8], steps.Group):
        known, framewise = n.args[8].statistics, n.args[8].framewise
    else:
        return False
    positions = math.prod(shape(x)[3 if of_frames else 2 :])
    return known is None and framewise == of_frames and statistics_pay(shape(x)[1], positions)


def channels_of_two(r: Rewriter, n: Any) -> Node | None:
    """The channels of two tensors side by side, for a GroupNorm: ``cat_two``, which computes statistics."""
    parts, dim = n.args
    if dim != 1 or len(parts) != 2 or not wants_statistics(n):
        return None
    return r.item(r.new(steps.cat_two, (*parts, False)), 0, n)


def known_statistics(r: Rewriter, n: Any) -> Node | None:
    """A GroupNorm of what a step has just written: this step also computes the statistics."""
    x = n.args[0]
    if not _takes_statistics(n, x):
        return None
    while (source := x.args[0] if _is_alike(x) else _video_of(x)) is not None:
        x = source
    if not has(x, operator.getitem) or x.args[1] != 0 or not has(x.args[0], *_EMITS):
        return None
    writer = x.args[0]
    writer.update_arg(_EMITS[writer.target], True)
    known = next((u for u in writer.users if u.args[1] == 1), None) or r.new(operator.getitem, (writer, 1))
    if has(n, steps.group_norm):
        return r.like(n.target, (*n.args[:7], known, *n.args[8:]), n)
    norm = n.args[8]._replace(statistics=known)
    return r.like(n.target, (*n.args[:8], norm, *n.args[9:]), n)
