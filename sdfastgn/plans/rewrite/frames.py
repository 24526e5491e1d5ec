"""Rules for what comes before a convolution of a video: pads, upsampling and a norm become one kernel.

The kernel is called by ``steps.frames``. Video decoders of diffusers compute a video in chunks. They keep the
last frames of each chunk, and concatenate them with the next chunk. In this file the frames that are kept for
the next chunk are the *kept frames*, and the frames from the last chunk are the *cache*. ``steps.frames``
reads the cache, and returns the kept frames as its second result.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.fx import Node

from sdfastgn.kernels.convolution.windows import windows_pay
from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, has_kernels, is_only, rank, shape, user
from sdfastgn.plans.run import steps

# For (mode of the pad along time, mode along height and width): the name of the mode in which
# ``steps.frames`` pads.
_MODES = {
    ("constant", "constant"): "zeros",
    ("replicate", "replicate"): "replicate",
    ("replicate", "reflect"): "reflect",
}
_ONCE = (1, 1, 1)


class Kept(NamedTuple):
    """Frames that the model keeps for the next chunk of a video: the last ``length`` frames of a value.

    Attributes:
        reader: the node that cuts the frames out of the value. If all frames are kept: a node that reads the
            value.
        length: the number of frames.
        whole: the value, if all its frames are kept. Else None.
    """

    reader: Node
    length: int
    whole: Node | None = None


class Source(NamedTuple):
    """The input of a convolution as arguments of ``steps.frames``: frames, and what is done with them.

    Attributes:
        x: the frames before pads, upsampling and concatenation with the cache.
        reader: the node that reads x on the way to the convolution.
        cache: frames that the model has kept from the last chunk of the video, or None.
        front: number of frames that a pad or the cache puts before x.
        back: number of frames that a pad puts after x.
        border: number of rows that a pad adds above and below, and of columns left and right.
        of_time: the mode of the pad along time; None if there is no such pad.
        of_image: the mode of the pad along height and width; None if there is no such pad.
        times: how often each element is repeated along time, height and width.
        kept: the frames that other nodes keep for the next chunk of the video.
        norm: the node of a norm between the pads and the convolution, or None. If it is None and x is the
            result of a norm, ``steps.frames`` can compute that norm too, before the pads.
    """

    x: Any
    reader: Node
    cache: Node | None = None
    front: int = 0
    back: int = 0
    border: tuple[int, int] = (0, 0)
    of_time: str | None = None
    of_image: str | None = None
    times: tuple[int, int, int] = _ONCE
    kept: tuple[Kept, ...] = ()
    norm: Any = None

    @property
    def mode(self) -> str | None:
        """The mode of ``steps.frames`` for the pad modes ``of_time`` and ``of_image``; None: it has none."""
        for (time, image), name in _MODES.items():
            if self.of_time in (None, time) and self.of_image in (None, image):
                return name
        return None

    @property
    def is_changed(self) -> bool:
        return bool(self.front or self.back or any(self.border) or self.times != _ONCE)

    @property
    def upsampled(self) -> tuple[int, ...]:
        """The shape of x after upsampling."""
        N, C, T, H, W = shape(self.x)
        t, h, w = self.times
        return N, C, (T - 1) * t + 1, H * h, W * w


# ---- rules


def in_one(r: Rewriter, n: Any) -> Node | None:
    """Replaces a cat of convolutions of successive parts of a video by one convolution of these parts."""
    parts, axis = n.args
    if rank(n) != 5 or axis != 2 or not all(has(p, steps.conv) and is_only(p) for p in parts):
        return None
    cuts, others = [p.args[0] for p in parts], parts[0].args[1:]
    _, _, stride, padding, _, transposed, *_ = others
    video, start = cuts[0].args[0], cuts[0].args[2:3]
    if transposed or padding[0] or not all(has(c, steps.cut) and c.args[:2] == (video, 2) for c in cuts):
        return None
    first = last = start[0]
    for part, c in zip(parts, cuts, strict=True):
        if c.args[2] != last or part.args[1:] != others:
            return None
        last += stride[0] * shape(part)[2]
    end = cuts[-1].args[2] + cuts[-1].args[3]
    return r.like(steps.conv, (r.cut(video, 2, first, end - first), *others), n)


def last_slice(r: Rewriter, n: Any) -> Node | None:
    """Replaces a causal 3-D convolution of a single frame by a 2-D convolution: ``steps.conv_last_slice``.

    All frames before this one are zeros from a pad. So only the last slice of the weight along time counts.
    """
    x, weight, bias, stride, padding, dilation, _, _, groups = n.args
    if rank(n) != 5 or bias is not None or padding[0]:
        return None
    if has(weight, steps.cut) and shape(x)[2] == 1:  # the model itself cuts out the weight's last slice
        whole, axis, start, length = weight.args
        if axis != 2 or length != 1 or start != shape(whole)[2] - 1:
            return None
        return r.like(steps.conv_last_slice, (x, whole, stride, padding, dilation, groups), n)
    if not has(x, steps.pad):
        return None
    frame, pads, mode, value = x.args
    reach = dilation[0] * (shape(weight)[2] - 1)
    is_causal = tuple(pads) == (0, 0, 0, 0, reach, 0) and (mode, value) == ("constant", 0)
    if not is_causal or shape(frame)[2] != 1:
        return None
    return r.like(steps.conv_last_slice, (frame, weight, stride, padding, dilation, groups), n)


def in_frames(r: Rewriter, n: Any) -> Node | None:
    """Replaces pads, a cache or upsampling before a convolution of a video by one kernel, ``steps.frames``.

    The cache has the last frames of the video's previous chunk. The kernel also computes a norm, before the
    pads or between them and the convolution. Where a 2-D convolution is faster, the kernel puts the frames of
    each window of the convolution side by side as channels. ``steps.conv_windows`` is this 2-D convolution.
    """
    _, weight, bias, stride, padding, dilation, _, _, groups = n.args
    source = source_of(n) if rank(n) == 5 and bias is None else None
    if source is None or not source.is_changed:
        return None
    pays = windows_pay(n.meta["device"], dtype(n), shape(weight), stride[0], dilation[0], groups)
    window = shape(weight)[2] if pays and not padding[0] else 1
    y = _frames(r, source, window)
    if window > 1:
        return r.like(steps.conv_windows, (y, weight, stride, padding, dilation), n)
    return r.like(steps.conv, (y, *n.args[1:]), n)


def upsampled_in_frames(r: Rewriter, n: Any) -> Node | None:
    """Replaces upsampling of a video, and a norm before it, by one kernel: ``steps.frames``."""
    if rank(n) != 5 or not has_kernels(n):
        return None
    source = _upsampling(Source(n, n))
    return None if source is None else _frames(r, source)


def padded_for_all(r: Rewriter, n: Any) -> Node | None:
    """If frames are read both with and without a pad along time, computes them once: with the pad.

    The node ``n`` calls ``steps.frames`` only to pad the result of another call of ``steps.frames``. One call
    replaces both. Nodes that read the frames without the pad get a view of the padded frames.
    """
    x, *how = n.args
    inner: Any = x.args[0] if has(x, operator.getitem) else None
    if not has(inner, steps.frames) or not _only_pads(how) or shape(x)[0] != 1:
        return None
    front, back, mode = how[1], how[2], how[4]
    before, cache, own_front, own_back, border, own_mode, keep, *others, window = inner.args
    is_padded = own_front or own_back
    if cache is not None or any(border) or keep or window != 1 or (is_padded and own_mode != mode):
        return None
    all_frames = front + own_front, back + own_back, border, mode, 0, *others, 1
    both = r.new(steps.frames, (before, None, *all_frames))
    part = r.cut(r.item(both, 0, user(n)), 2, front, shape(x)[2])
    x.replace_all_uses_with(part, delete_user_cb=lambda reader: reader is not n)
    return both


def _only_pads(how: list[Any]) -> bool:
    """True if ``how``, the arguments of ``steps.frames`` after x, asks for nothing but pads along time."""
    cache, _, _, border, _, keep, shift, norm, times, window = how
    is_plain = cache is shift is norm is None and not keep and window == 1
    return is_plain and not any(border) and tuple(times) == _ONCE


def _frames(r: Rewriter, source: Source, window: int = 1) -> Node:
    """Makes a node that computes ``source``, the input of a convolution, by the kernel ``steps.frames``.

    Returns a node for the frames. Nodes that keep frames for the next chunk of the video read the kernel's
    second result from now on.
    """
    before, shift, norm, kept = _norm_of(source) or (source.x, None, None, source.kept)
    keep = max((k.length for k in kept), default=0)
    where = source.front, source.back, source.border, source.mode, keep, shift, norm, source.times, window
    both = r.new(steps.frames, (before, source.cache, *where))
    N, C, T, H, W = source.upsampled
    if kept:
        _read_kept(r, kept, r.new(operator.getitem, (both, 1), (N, C, keep, H, W), dtype(source.x)))
    sides = (size + 2 * side for size, side in zip((H, W), source.border, strict=True))
    size = (N, window * C, source.front + T + source.back - window + 1, *sides)
    return r.new(operator.getitem, (both, 0), size, dtype(source.x))


def image_in_frames(r: Rewriter, n: Any) -> Node | None:
    """Replaces a pad of an image before a convolution, and a norm before the pad, by one kernel.

    The pad must replicate or reflect. The image is passed to ``steps.frames`` as a video of one frame.
    """
    x, bias = n.args[0], n.args[2]
    if rank(n) != 4 or bias is not None or not has(x, steps.pad) or not is_only(x) or x.args[2] == "constant":
        return None
    image, (left, right, top, bottom), mode, _ = x.args
    if left != right or top != bottom or min(top, left) < 0:
        return None
    N, C, H, W = shape(image)
    inner = image.args[0] if has(image, steps.reshape) and is_only(image) else image
    found = _norm_of(Source(inner, user(inner))) if is_only(inner) else None
    before, shift, norm, _ = found or (image, None, None, ())
    video = r.reshape(before, (N, C, 1, H, W))
    both = r.new(steps.frames, (video, None, 0, 0, (top, left), mode, 0, shift, norm, _ONCE, 1))
    y = r.new(operator.getitem, (both, 0), (N, C, 1, H + 2 * top, W + 2 * left), dtype(x))
    return r.like(steps.conv, (r.reshape(y, shape(x)), *n.args[1:]), n)


# ---- pads, caches and upsampling


def source_of(n: Any) -> Source:
    """Finds out how the input of the convolution ``n`` is padded, joined with a cache, or upsampled.

    The cache has the last frames of the video's previous chunk. The search ends at a pad, cat or upsampling
    whose result other nodes read, unless they only keep its last frames for the next chunk.
    """
    source = Source(n.args[0], n)
    while (inner := _without_pad(source)) is not None:
        source = inner
    source = _without_cache(source) or source
    return _without_upsampling(source) or _without_pad_of_norm(source) or source


def _without_pad(source: Source) -> Source | None:
    if not has(source.x, steps.pad):
        return None
    x, pads, mode, value = source.x.args
    left, right, top, bottom, front, back = pads
    if left != right or top != bottom or min(pads) < 0 or value != 0:
        return None
    kept = _kept_of(source)
    if front or back:
        if source.of_time is not None:
            return None
        source = source._replace(front=front, back=back, of_time=mode)
    if top or left:
        # ``steps.frames`` adds no rows and columns to frames that it returns for a video's next chunk. So the
        # pad stays if the model keeps padded frames.
        if source.of_image is not None or kept:
            return None
        source = source._replace(border=(top, left), of_image=mode)
    if kept is None or source.mode is None:
        return None
    return source._replace(x=x, reader=source.x, kept=kept)


def _without_pad_of_norm(source: Source) -> Source | None:
    """Adds a GroupNorm and the pad before it to ``source``, the description of a convolution's input.

    Returns the new description, or None if there is no such pad. The norm's mean and variance include the
    frames that the pad repeats. ``steps.frames`` includes them too.
    """
    norm = source.x
    x = norm.args[0] if has(norm, steps.group_norm) and norm.args[6:] == (None, None, False) else None
    if not has(x, steps.pad) or not is_only(x) or not is_only(norm) or source.is_changed:
        return None
    inner = _without_pad(Source(x, norm))
    if inner is None or (inner.of_time, inner.of_image) != ("replicate", None):
        return None
    return inner._replace(norm=norm)


def _without_upsampling(source: Source) -> Source | None:
    if not has(source.x, steps.upsample):
        return None
    kept = _kept_of(source)
    return None if kept is None else _upsampling(source._replace(kept=kept))


def _upsampling(source: Source) -> Source | None:
    """Adds an upsampling, whose result is ``source.x``, to the description of a convolution's input.

    Returns the new description, or None if one kernel cannot do the upsampling together with the rest.
    """
    x, times, first_once = source.x.args
    # In ``steps.frames``, upsampling along time never repeats the first frame. If the model repeats it too,
    # the repetitions become a replicating pad in front.
    if times[0] > 1 and not first_once:
        if source.cache is not None:
            return None
        source = source._replace(front=source.front + times[0] - 1, of_time=source.of_time or "replicate")
        if source.of_time != "replicate" or source.mode is None:
            return None
    return source._replace(x=x, reader=source.x, times=tuple(times))


def _without_cache(source: Source) -> Source | None:
    if not has(source.x, steps.cat) or source.x.args[1] != 2 or len(source.x.args[0]) != 2:
        return None
    cache, x = source.x.args[0]
    kept = _kept_of(source)
    if kept is None or cache is x:
        return None
    return source._replace(x=x, reader=source.x, cache=cache, front=source.front + shape(cache)[2], kept=kept)


# ---- frames that models keep for the next chunk of a video


def _kept_of(source: Source) -> tuple[Kept, ...] | None:
    """Lists the frames that nodes keep for a video's next chunk: ``source.kept``, and those of ``source.x``.

    None if another node than ``source.reader`` reads ``source.x`` for anything else, or if ``steps.frames``
    cannot return these frames.
    """
    found = [_kept_by(u, source) for u in source.x.users if u is not source.reader]
    kept = tuple(k for k in found if k is not None)
    if len(kept) < len(found) or (kept and (source.back or source.times != _ONCE)):
        return None
    # One kernel reads the cache (frames of the last chunk) and returns the frames for the next chunk. So the
    # cache must not be computed from frames for the next chunk.
    if source.cache is not None and not all(source.cache < k.reader for k in kept):
        return None
    return source.kept + kept


def _kept_by(u: Any, source: Source) -> Kept | None:
    """Returns which frames of ``source.x`` the node ``u`` keeps for the next chunk of a video.

    They are the last frames of ``source.x``, or of the cache (frames of the last chunk) and ``source.x``
    together. They are all frames of ``source.x`` if ``u`` concatenates it with another chunk after it, or is
    the output of the graph. Returns None if ``u`` uses ``source.x`` for anything else.
    """
    x, cache = source.x, source.cache
    if u.op == "output" and source.is_changed:
        return Kept(u, shape(x)[2], whole=x)
    if has(u, steps.cut) and u.args[1] == 2 and u.args[2] + u.args[3] == shape(x)[2]:
        return Kept(u, u.args[3])
    if not has(u, steps.cat) or u.args[1] != 2 or len(u.args[0]) != 2 or u.args[0][0] is u.args[0][1]:
        return None
    before = u.args[0][0]
    if before is x:
        return Kept(u, shape(x)[2], whole=x)
    before = before.args[0] if has(before, steps.copy) else before
    is_end = has(before, steps.cut) and before.args[:2] == (cache, 2)
    is_end = is_end and before.args[2] + before.args[3] == shape(before.args[0])[2]
    return Kept(u, shape(u)[2]) if cache is not None and (before is cache or is_end) else None


def _read_kept(r: Rewriter, kept: tuple[Kept, ...], frames: Node) -> None:
    """Lets nodes that keep frames for a video's next chunk read ``frames``, a result of ``steps.frames``."""
    most = shape(frames)[2]
    for reader, length, whole in kept:
        part = r.cut(frames, 2, most - length, length)
        if whole is not None:
            reader.replace_input_with(whole, part)
            continue
        # Models copy the frames that they keep for the next chunk, so that the other frames can be freed.
        # These copies are dropped: ``frames`` has no other frames.
        if length == most:
            for u in list(reader.users):
                if has(u, steps.copy):
                    u.replace_all_uses_with(part)
        reader.replace_all_uses_with(part)


# ---- norms


def _norm_of(source: Source) -> tuple[Node, Any, steps.Group | steps.Channel, tuple[Kept, ...]] | None:
    """Returns (input of the norm, shift, norm, kept frames) if the frames of ``source`` come from a norm.

    Else None. The shift is a tensor that is added to the norm's input. The kept frames are those that nodes
    keep for the next chunk of the video.
    """
    if source.norm is not None:
        _, groups, weight, bias, eps, activation, shift, *_ = source.norm.args
        group = steps.Group(groups, weight, bias, eps, activation, pads_first=True)
        return source.x, shift, group, ()
    x, kept = source.x, _kept_of(source)
    if kept is None:
        return None
    if has(x, steps.channel_norm):
        return x.args[0], x.args[7] if len(x.args) > 7 else None, steps.Channel(*x.args[1:7]), kept
    if has(x, steps.group_norm) and (x.args[6] is None or rank(x.args[6]) == 1):
        _, groups, weight, bias, eps, activation, shift, statistics, framewise, *ada = x.args
        norm = steps.Group(groups, weight, bias, eps, activation, statistics, None, framewise)
        return None if ada or (framewise and source.times != _ONCE) else (x.args[0], shift, norm, kept)
    if has(x, steps.modulated_norm) and source.times == _ONCE:
        x, groups, weight, bias, eps, activation, modulation = x.args
        return x, None, steps.Group(groups, weight, bias, eps, activation, None, modulation), kept
    return None
