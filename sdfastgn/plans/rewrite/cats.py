"""Rules for concatenations (``cat``) and pads. Each replaces one of them by views or by a cheaper operation.

A pad here is the operation that adds elements around a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, dtype, has, index_of_pad, is_only, rank, shape
from sdfastgn.plans.rewrite.strips import convolution_of_strips, norm_of_channels
from sdfastgn.plans.run import steps

aten = torch.ops.aten


def cat(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces ``aten.cat`` by a cheaper operation that a function of ``_RULES`` finds, or by ``steps.cat``.

    Empty parts are dropped. A cat of several dtypes stays.
    """
    parts = [p for p in parts if math.prod(shape(p))]
    if not parts or any(dtype(p) != dtype(n) for p in parts):
        return None
    dim %= rank(n)
    if len(parts) == 1:
        return parts[0]
    for rule in _RULES:
        found = rule(r, n, parts, dim)
        if found is not None:
            return found
    return r.like(steps.cat, (tuple(parts), dim), n)


def _all_of_one(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a cat by the tensor x, if the cat joins all parts into which x was cut, in their order."""
    return _joined([_uncopied(p) for p in parts], dim)


def _moved_parts(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a cat of all parts of a tensor, which was cut along another axis, by views of the tensor."""
    cuts: list[Any] = [_unshaped(p) for p in parts]
    whole, count = _joined(cuts, cuts[0].args[1]) if has(cuts[0], steps.cut) else None, len(cuts)
    if whole is None or any(shape(p) != shape(parts[0]) for p in parts):
        return None
    axis, length = cuts[0].args[1], cuts[0].args[3]
    before = math.prod(shape(n)[:dim])
    # If the cuts (the parts before they were reshaped) are stacked along a new axis before their axis ``at``,
    # the stack has the elements of the cat in the same order. ``at`` is None if there is no such axis.
    at = next((i for i in range(rank(whole) + 1) if math.prod(shape(cuts[0])[:i]) == before), None)
    if at is None:
        return None
    x = r.reshape(whole, (*shape(whole)[:axis], count, length, *shape(whole)[axis + 1 :]))
    others = [i for i in range(rank(x)) if i != axis]
    return r.reshape(r.permute(x, (*others[:at], axis, *others[at:])), shape(n))


def _repeated_frames(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a cat of copies of a video's first frame, the video, and copies of its last frame by a pad.

    The pad has the mode "replicate".
    """
    if rank(n) != 5 or dim != 2:
        return None
    for i, x in enumerate(parts):
        before, after = parts[:i], parts[i + 1 :]
        last = shape(x)[2] - 1
        if all(_frame_of(p, x) == 0 for p in before) and all(_frame_of(p, x) == last for p in after):
            front, back = (sum(shape(p)[2] for p in some) for some in (before, after))
            return padded(r, n, x, [0, 0, 0, 0, front, back], "replicate", 0.0)
    return None


def _zeros_around(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a cat of frames of zeros before or after other frames by a pad with zeros."""
    if rank(n) != 5 or dim != 2 or not dtype(n).is_floating_point:
        return None
    inner = [i for i, p in enumerate(parts) if not _is_zero(p)]
    if not inner or len(inner) == len(parts):
        return None
    first, last = inner[0], inner[-1] + 1
    front, back = (sum(shape(p)[2] for p in some) for some in (parts[:first], parts[last:]))
    if not front and not back:
        return None
    to = (*shape(n)[:2], shape(n)[2] - front - back, *shape(n)[3:])
    x = parts[first] if last - first == 1 else r.new(steps.cat, (tuple(parts[first:last]), 2), to, dtype(n))
    return padded(r, n, x, [0, 0, 0, 0, front, back], "constant", 0.0)


def _padded_parts(r: Rewriter, n: Node, parts: Sequence[Any], dim: int) -> Node | None:
    """Replaces a cat of tensors that were padded alike by a cat of the tensors without pads, padded once.

    The pads must be equal along all axes but ``dim``, the axis of the cat. Along ``dim``, only the first part
    may have a pad before it, and only the last part a pad after it.
    """
    if not all(has(p, steps.pad) and is_only(p) and p.args[2:] == parts[0].args[2:] for p in parts):
        return None
    at = index_of_pad(n, dim)
    if at < 0 or at >= len(parts[0].args[1]) or parts[0].args[2] == "reflect":
        return None
    others = {(*p.args[1][:at], *p.args[1][at + 2 :]) for p in parts}
    along = [b for p in parts for b in p.args[1][at : at + 2]]
    if len(others) > 1 or any(along[1:-1]):
        return None
    pads = list(parts[0].args[1])
    pads[at : at + 2] = along[0], along[-1]
    sources = tuple(p.args[0] for p in parts)
    size = sum(shape(x)[dim] for x in sources)
    to = (*shape(sources[0])[:dim], size, *shape(sources[0])[dim + 1 :])
    return padded(r, n, r.new(steps.cat, (sources, dim), to, dtype(n)), pads, *parts[0].args[2:])


def _first_frame_once(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces separate upsampling of a video's first frame and of its other frames by one upsampling.

    Models repeat the first frame only along height and width, and the other frames also along time.
    ``steps.upsample`` does both if its argument ``first_once`` is True.
    """
    if rank(n) != 5 or dim != 2 or len(parts) != 2:
        return None
    first: Any = _unshaped(parts[0])
    others: Any = parts[1]
    if not (has(first, steps.upsample) and has(others, steps.upsample)):
        return None
    if shape(parts[0])[2] != 1 or first.args[2] or others.args[2]:
        return None
    x = _joined([_uncopied(_unshaped(first.args[0])), _uncopied(others.args[0])], 2)
    if x is None or shape(first.args[0])[-2:] != shape(x)[-2:]:
        return None
    return r.like(steps.upsample, (x, others.args[1], True), n)


def _norms_of_samples(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a cat of GroupNorms of all parts of a batch by one GroupNorm of the batch.

    All these GroupNorms must have the same parameters.
    """
    if dim or not all(has(p, steps.group_norm) and p.args[1:] == parts[0].args[1:] for p in parts):
        return None
    x = _joined([p.args[0] for p in parts], 0)
    return None if x is None else r.like(steps.group_norm, (x, *parts[0].args[1:]), n)


_RULES: tuple[Callable[[Rewriter, Node, Sequence[Node], int], Node | None], ...] = (
    _all_of_one,
    _moved_parts,
    _repeated_frames,
    _zeros_around,
    _padded_parts,
    _first_frame_once,
    _norms_of_samples,
    convolution_of_strips,
    norm_of_channels,
)


def padded(r: Rewriter, n: Node, x: Any, pads: Sequence[int], mode: str, value: float) -> Node:
    """Makes a node that pads x. Its shape and dtype are those of the node ``n``.

    If x is itself a pad with the same mode and value, one pad replaces both. In the mode "reflect" both stay.
    """
    while has(x, steps.pad) and mode == x.args[2] != "reflect" and value == x.args[3]:
        x, pads = x.args[0], [a + b for a, b in zip(pads, x.args[1], strict=True)]
    return r.like(steps.pad, (x, tuple(pads), mode, value), n)


def padded_part(r: Rewriter, n: Node, cut: Any) -> Node | None:
    """Replaces ``cut``, a part of a padded tensor, by a part of the unpadded tensor, which is then padded.

    Returns None if that is not possible, or if the tensor is padded only along the axis of the cut.
    """
    source, dim, start, length = cut.args
    if not has(source, steps.pad) or dim < 2:
        return None
    x, pads, mode, value = source.args
    at = index_of_pad(n, dim)
    if not any((*pads[:at], *pads[at + 2 :])):
        return None
    first, last = start - pads[at], start - pads[at] + length  # the cut's range in the unpadded x
    begin, end = max(first, 0), min(last, shape(x)[dim])
    before, after = begin - first, last - end
    if begin >= end or (mode == "reflect" and (before or after)):
        return None
    pads = [*pads[:at], before, after, *pads[at + 2 :]]
    return padded(r, n, r.cut(x, dim, begin, end - begin), pads, mode, value)


def unpadded(x: Any, sizes: Sequence[int]) -> Any:
    """Returns the input of x, if x is a pad that only adds elements after the first ``sizes`` elements.

    Otherwise returns x. ``sizes``: a number of elements for each spatial axis.
    """
    if not has(x, steps.pad) or any(x.args[1][::2]) or min(x.args[1]) < 0:
        return x
    source = x.args[0]
    return source if all(s >= m for s, m in zip(shape(source)[2:], sizes, strict=True)) else x


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """Returns the tensor that was cut along ``dim`` into ``parts``.

    None if ``parts`` are not cut from one tensor, or are not all of it in order.
    """
    end = 0
    for p in parts:
        if not has(p, steps.cut) or p.args[0] is not parts[0].args[0] or p.args[1:3] != (dim, end):
            return None
        end += p.args[3]
    whole = parts[0].args[0]
    return whole if end == shape(whole)[dim] else None


def _is_zero(n: Any) -> bool:
    return has(n, aten.full.default) and n.args[1] == 0


def _uncopied(n: Any) -> Any:
    return n.args[0] if has(n, steps.copy) else n


def _unshaped(n: Any) -> Any:
    return n.args[0] if has(n, steps.reshape) else n


def _frame_of(part: Any, x: Any) -> int | None:
    """Returns the index of a frame of the video x, if ``part`` has only copies of this frame. Else None."""
    while has(part, steps.expand, steps.copy):
        part = part.args[0]
    if part is x and shape(x)[2] == 1:
        return 0
    whole, start = (x.args[0], x.args[2]) if has(x, steps.cut) and x.args[1] == 2 else (x, 0)
    is_frame = has(part, steps.cut) and part.args[0] is whole and part.args[1] == 2 and part.args[3] == 1
    return part.args[2] - start if is_frame else None
