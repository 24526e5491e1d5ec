"""What a 3-D convolution reads: frames with pads, a cache, upsampling and a norm, in one ``steps.frames``."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import Node

from sdfastgn.kernels.convolution.windows import windows_pay
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, is_only, rank, shape
from sdfastgn.plans.run import steps

__all__ = ["in_frames", "last_slice"]

# (mode of the pad along time, mode along height and width) -> mode of ``steps.frames``.
_MODES = {
    ("constant", "constant"): "zeros",
    ("replicate", "replicate"): "replicate",
    ("replicate", "reflect"): "reflect",
}
_ONCE = (1, 1, 1)


class Source(NamedTuple):
    """The input of a convolution in the terms of ``steps.frames``.

    ``x``: the frames themselves. ``head``: the node that reads x, which ``steps.frames`` replaces.
    """

    x: Node
    head: Node
    cache: Node | None = None
    front: int = 0
    back: int = 0
    border: tuple[int, int] = (0, 0)
    mode: str = "zeros"
    times: tuple[int, int, int] = _ONCE

    @property
    def is_changed(self) -> bool:
        return bool(self.front or self.back or any(self.border) or self.times != _ONCE)

    @property
    def upsampled(self) -> tuple[int, ...]:
        """The shape of x after upsampling."""
        N, C, T, H, W = shape(self.x)
        t, h, w = self.times
        return N, C, (T - 1) * t + 1, H * h, W * w


class Kept(NamedTuple):
    """``reader`` is the last ``count`` frames of the padded x. Or it reads them, and they are x itself."""

    reader: Node
    count: int
    reads_all: bool = False


def last_slice(r: Rewriter, n: Node) -> Node | None:
    """A convolution of one frame after zeros: it meets only the last slice of the weight along time."""
    x, weight, bias, stride, padding, dilation, _, _, groups = n.args
    if rank(n) != 5 or bias is not None or not has(x, steps.pad) or padding[0]:
        return None
    frame, pads, mode, value = x.args
    reach = dilation[0] * (shape(weight)[2] - 1)
    is_causal = (shape(frame)[2], mode, value) == (1, "constant", 0) and tuple(pads) == (0, 0, 0, 0, reach, 0)
    return (
        r.like(steps.conv_last_slice, (frame, weight, stride, padding, dilation, groups), n)
        if is_causal
        else None
    )


def in_frames(r: Rewriter, n: Node) -> Node | None:
    """A norm, upsampling, a cat with a cache and pads before a convolution: one ``steps.frames``."""
    x, weight, bias, stride, padding, dilation, _, _, groups = n.args
    source = source_of(x) if rank(n) == 5 and bias is None else None
    if source is None or not source.is_changed:
        return None
    kept = _kept(source)
    found = _norm_of(source) if kept is not None else None
    before, shift, norm = found or (source.x, None, None)
    keep = max((k.count for k in kept or ()), default=0) if found else 0
    k, slides = shape(weight)[2], not padding[0]
    pays = windows_pay(n.meta["device"], dtype(n), shape(weight), stride[0], dilation[0], groups)
    window = k if slides and pays else 1
    where = source.front, source.back, source.border, source.mode, keep, shift, norm, source.times, window
    both = r.new(steps.frames, (before, source.cache, *where))
    N, C, T, H, W = source.upsampled
    height, width = (size + 2 * side for size, side in zip((H, W), source.border, strict=True))
    count = source.front + T + source.back - window + 1
    y = r.new(operator.getitem, (both, 0), (N, window * C, count, height, width), dtype(x))
    if found and kept:
        _read_kept(r, source.x, kept, r.new(operator.getitem, (both, 1), (N, C, keep, H, W), dtype(x)))
    if window > 1:
        return r.like(steps.conv_windows, (y, weight, stride, padding, dilation), n)
    return r.like(steps.conv, (y, *n.args[1:]), n)


def source_of(x: Node) -> Source:
    """Takes from x the pads, and the cat or the upsampling below them, as far as only x needs them."""
    of_time = of_image = None
    source = Source(x, x)
    while has(x, steps.pad) and is_only(x):
        inner, (left, right, top, bottom, front, back), mode, value = x.args
        pads_time, pads_image = bool(front or back), bool(top or left)
        is_second = (pads_time and of_time is not None) or (pads_image and of_image is not None)
        if left != right or top != bottom or min(top, left, front, back) < 0 or value != 0 or is_second:
            break
        new_time, new_image = mode if pads_time else of_time, mode if pads_image else of_image
        name = _mode(new_time, new_image)
        if name is None:
            break
        of_time, of_image = new_time, new_image
        source = source._replace(x=inner, head=x, mode=name)
        source = source._replace(front=front, back=back) if pads_time else source
        source = source._replace(border=(top, left)) if pads_image else source
        x = inner
    if has(x, steps.upsample) and is_only(x) and (x.args[2] or x.args[1][0] == 1):
        return source._replace(x=x.args[0], head=x, times=tuple(x.args[1]))
    if has(x, steps.cat) and x.args[1] == 2 and len(x.args[0]) == 2 and is_only(x):
        cache, frames = x.args[0]
        return source._replace(x=frames, head=x, cache=cache, front=source.front + shape(cache)[2])
    return source


def _mode(of_time: str | None, of_image: str | None) -> str | None:
    """The mode of ``steps.frames`` that pads like this. None stands for an axis without pads."""
    for (time, image), name in _MODES.items():
        if of_time in (None, time) and of_image in (None, image):
            return name
    return None


def _norm_of(source: Source) -> tuple[Node, Any, steps.Group | steps.Channel] | None:
    """(x of the norm, its shift, the norm), if the frames are the result of a norm."""
    x = source.x
    if has(x, steps.channel_norm):
        return x.args[0], x.args[7] if len(x.args) > 7 else None, steps.Channel(*x.args[1:7])
    if has(x, steps.group_norm):
        _, groups, weight, bias, eps, activation, shift, statistics, framewise = x.args
        norm = steps.Group(groups, weight, bias, eps, activation, statistics, None, framewise)
        return None if framewise and source.times != _ONCE else (x.args[0], shift, norm)
    if has(x, steps.modulated_norm) and source.times == _ONCE:
        return x.args[0], None, steps.Group(*x.args[1:6], None, x.args[6])
    return None


def _kept(source: Source) -> list[Kept] | None:
    """Those who read x beside the convolution, if all of them read last frames of the padded x. Else None."""
    x, head, cache = source.x, source.head, source.cache
    found = [_kept_by(u, source) for u in x.users if u is not head]
    kept = [k for k in found if k is not None]
    if len(kept) < len(found) or cache is x or (kept and (source.back or source.times != _ONCE)):
        return None
    # The step reads the cache and makes the kept frames. So no kept frames may lead to the cache.
    return kept if cache is None or all(cache < k.reader for k in kept) else None


def _kept_by(u: Node, source: Source) -> Kept | None:
    """``u`` as a reader of last frames: of x, or of the cache and x if x is short."""
    x, cache = source.x, source.cache
    if has(u, steps.cut) and u.args[1] == 2 and u.args[2] + u.args[3] == shape(x)[2]:
        return Kept(u, u.args[3])
    if not has(u, steps.cat) or u.args[1] != 2 or len(u.args[0]) != 2 or u.args[0][0] is u.args[0][1]:
        return None
    before = u.args[0][0]
    if before is x:  # all frames of x are the cache of the next convolution
        return Kept(u, shape(x)[2], reads_all=True)
    before = before.args[0] if has(before, steps.copy) else before
    is_end = has(before, steps.cut) and before.args[:2] == (cache, 2)
    is_end = is_end and before.args[2] + before.args[3] == shape(before.args[0])[2]
    return Kept(u, shape(u)[2]) if cache is not None and (before is cache or is_end) else None


def _read_kept(r: Rewriter, x: Node, kept: list[Kept], frames: Node) -> None:
    """Lets the readers of x read ``frames``, the second result of the step."""
    most = shape(frames)[2]
    for reader, count, reads_all in kept:
        part = r.cut(frames, 2, most - count, count)
        if reads_all:
            reader.replace_input_with(x, part)
            continue
        if count == most:  # already a copy without the other frames
            for u in list(reader.users):
                if has(u, steps.copy):
                    u.replace_all_uses_with(part)
        reader.replace_all_uses_with(part)
