"""The first pass replaces ops that mean the same by one form, so that later passes look for one form only.

``canonicalize`` goes once over the nodes, from the first to the last. To add a form, write a function below
that is decorated with ``spells(op, ...)``. It gets a ``Rewriter``, which makes nodes, the node of the op, and
all arguments of the op in the order of its schema. The arguments already have their final form. The function
returns the node that replaces this node, or None if it does not apply. If several functions are for the same
op, they are tried in the order of this file, until one applies.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.rewrite import cats
from sdfastgn.plans.rewrite.nodes import Rewriter, cleaned, dtype, has, key_of, operands, rank, shape
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.schemas import arguments, writes
from sdfastgn.plans.trace.refusals import is_random

aten = torch.ops.aten
_Spelling = Callable[..., "Node | None"]
_SPELLINGS: dict[Any, list[_Spelling]] = {}
# Ops that allocate a tensor without filling it. Two equal nodes that call one of them must not become one
# node, because the model's code writes other values into each tensor.
UNFILLED = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
# An attention mask that hides later frames of a video looks like stairs: all queries of a frame see the same
# number of keys, and the queries of the next frame see more. Attention can then run once for each frame,
# without a mask. It does so if a frame has at least this number of queries on average.
_LEAST_ROWS = 16


def canonicalize(graph: fx.Graph) -> fx.Graph:
    """Replaces ops that mean the same by one form, and nodes that compute the same value by one node."""
    r = Rewriter(cleaned(graph), share=True)
    for n in graph.nodes:
        if n.op != "call_function" or not n.meta:
            continue
        r.at = n
        new = _spelled(r, n) or _shared(r, n)
        if new is not n:
            r.replace(n, new)
    return cleaned(graph)


def spells(*ops: Any) -> Callable[[_Spelling], _Spelling]:
    """A decorator: ``canonicalize`` calls the function for each node that calls one of ``ops``."""

    def entered(function: _Spelling) -> _Spelling:
        for op in ops:
            _SPELLINGS.setdefault(op, []).append(function)
        return function

    return entered


def _spelled(r: Rewriter, n: Node) -> Node | None:
    for function in _SPELLINGS.get(n.target, ()):
        found = function(r, n, *arguments(n))
        if found is not None:
            return found
    return None


def _shared(r: Rewriter, n: Node) -> Node:
    """Returns the first node of the graph that computes the same value as ``n``. This may be ``n``."""
    is_op = isinstance(n.target, torch._ops.OpOverload)
    if not is_op or writes(n.target) or is_random(n.target) or n.target in UNFILLED:
        return n
    key = n.target, key_of(n.args), key_of(list(n.kwargs.items())), shape(n), dtype(n)
    return r.seen.setdefault(key, n)  # type: ignore[union-attr]


# ---- views and copies


@spells(
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _reshape(r: Rewriter, n: Node, x: Node, *_: Any) -> Node:
    """Replaces each view that keeps the order of elements, such as unsqueeze, by a reshape."""
    return r.reshape(x, shape(n))


@spells(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def _alias(r: Rewriter, n: Node, x: Node, *_: Any) -> Node:
    """Removes ops that return their argument unchanged."""
    return x


@spells(aten.clone.default)
def _clone(r: Rewriter, n: Node, x: Node, *_: Any) -> Node:
    """Removes a copy, because a node stands for a value wherever it lies in memory.

    A copy of a part of a tensor stays. Models make it so that the whole tensor can be freed.
    """
    if not has(x, steps.cut):
        return x
    return cats.padded_part(r, n, x) or r.like(steps.copy, (x,), n)


@spells(aten.permute.default)
def _permute(r: Rewriter, n: Node, x: Node, dims: Sequence[int]) -> Node:
    return r.permute(x, dims)


@spells(aten.transpose.int)
def _transpose(r: Rewriter, n: Node, x: Node, a: int, b: int) -> Node:
    dims = list(range(rank(x)))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return r.permute(x, dims)


@spells(aten.t.default)
def _t(r: Rewriter, n: Node, x: Node) -> Node:
    return r.permute(x, range(rank(x))[::-1])


@spells(aten.expand.default)
def _expand(r: Rewriter, n: Node, x: Node, *_: Any) -> Node:
    return x if shape(x) == shape(n) else r.like(steps.expand, (x, shape(n)), n)


@spells(aten.repeat.default)
def _repeat(r: Rewriter, n: Node, x: Node, times: Sequence[int]) -> Node:
    """Replaces ``repeat`` by ``expand`` and a reshape.

    An axis with more than one element gets a new axis before it, along which it is expanded.
    """
    before = (1,) * (rank(n) - rank(x)) + shape(x)
    axes = [(t, s) if t != 1 != s else (t * s,) for t, s in zip(times, before, strict=True)]
    single = [(1, s) if len(pair) == 2 else (s,) for pair, s in zip(axes, before, strict=True)]
    view, sizes = r.reshape(x, [*itertools.chain(*single)]), tuple(itertools.chain(*axes))
    if shape(view) != sizes:
        view = r.new(steps.expand, (view, sizes), sizes, dtype(x))
    return r.reshape(view, shape(n))


@spells(aten.slice.Tensor)
def _slice(r: Rewriter, n: Node, x: Node, dim: int, start: int | None, _: Any, step: int) -> Node | None:
    dim, start = dim % rank(x), start or 0
    size = shape(x)[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    return r.cut(x, dim, start, shape(n)[dim]) if step == 1 else None


@spells(aten.select.int)
def _select(r: Rewriter, n: Node, x: Node, dim: int, index: int) -> Node:
    dim %= rank(x)
    return r.reshape(r.cut(x, dim, index % shape(x)[dim], 1), shape(n))


@spells(aten._to_copy.default)
def _cast(
    r: Rewriter, n: Node, x: Node, _dtype: Any, layout: Any, _device: Any, pinned: Any, *_: Any
) -> Node | None:
    """Replaces a conversion to another dtype by ``steps.cast``. Conversions to other devices stay."""
    stays = n.meta["device"] == x.meta["device"] and layout in (None, torch.strided) and not pinned
    return r.cast(x, dtype(n)) if stays and dtype(x).is_complex == dtype(n).is_complex else None


@spells(aten.view_as_complex.default, aten.view.dtype)
def _other_elements(r: Rewriter, n: Node, x: Node, *more: Any) -> Node:
    """Makes the argument of a view in another dtype contiguous.

    Such views need neighboring elements in memory, and the kernels of a plan may write channels-last.
    """
    dense = r.like(aten.contiguous.default, (x,), x)
    return r.like(n.target, (dense, *more), n)


@spells(aten.pixel_shuffle.default)
def _pixel_shuffle(r: Rewriter, n: Node, x: Node, k: int) -> Node:
    """Replaces a pixel shuffle by views. It makes k * k channels of a pixel a square of k x k pixels."""
    *samples, C, H, W = shape(x)
    d = len(samples)
    y = r.reshape(x, (*samples, C // (k * k), k, k, H, W))
    y = r.permute(y, (*range(d), d, d + 3, d + 1, d + 4, d + 2))
    return r.reshape(y, shape(n))


@spells(aten.pixel_unshuffle.default)
def _pixel_unshuffle(r: Rewriter, n: Node, x: Node, k: int) -> Node:
    """Replaces ``pixel_unshuffle``, which makes k * k channels from k x k pixels, by views."""
    *samples, C, H, W = shape(x)
    d = len(samples)
    y = r.reshape(x, (*samples, C, H // k, k, W // k, k))
    y = r.permute(y, (*range(d), d, d + 2, d + 4, d + 1, d + 3))
    return r.reshape(y, shape(n))


# ---- joining and enlarging tensors

spells(aten.cat.default)(cats.cat)


@spells(aten.stack.default)
def _stack(r: Rewriter, n: Node, parts: Sequence[Node], dim: int) -> Node | None:
    """Replaces a stack by a cat of parts with one more axis."""
    dim %= rank(n)
    to = (*shape(n)[:dim], 1, *shape(n)[dim + 1 :])
    return cats.cat(r, n, [r.reshape(p, to) for p in parts], dim)


@spells(aten.slice_scatter.default)
def _overwritten(r: Rewriter, n: Node, x: Node, part: Node, *_: Any) -> Node | None:
    """Replaces a write over all elements of a tensor by the value that is written."""
    return part if shape(part) == shape(n) else None


@spells(aten.constant_pad_nd.default)
def _constant_pad(r: Rewriter, n: Node, x: Node, pads: Sequence[int], value: float) -> Node | None:
    return _pad(r, n, x, pads, "constant", float(value)) if dtype(x).is_floating_point else None


@spells(aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replicating_pad(r: Rewriter, n: Node, x: Node, pads: Sequence[int]) -> Node | None:
    return _pad(r, n, x, pads, "replicate", 0.0)


@spells(aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflecting_pad(r: Rewriter, n: Node, x: Node, pads: Sequence[int]) -> Node | None:
    return _pad(r, n, x, pads, "reflect", 0.0)


def _pad(r: Rewriter, n: Node, x: Node, pads: Sequence[int], mode: str, value: float) -> Node | None:
    if not any(pads):
        return x
    spatial = 2 * (rank(x) - 2)
    if rank(x) not in (4, 5) or min(pads) < 0 or len(pads) > spatial:
        return None
    return cats.padded(r, n, x, [*pads, *[0] * (spatial - len(pads))], mode, value)


@spells(
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)
def _upsample(r: Rewriter, n: Node, x: Node, size: Sequence[int], *scales: float | None) -> Node | None:
    """Replaces nearest upsampling by powers of two by ``steps.upsample``.

    For other factors the op stays, because the source of an element then depends on how PyTorch rounds. A
    cast before the upsampling is moved behind it.
    """
    sizes = list(zip(shape(n)[2:], shape(x)[2:], strict=True))
    times = tuple(large // small for large, small in sizes)
    if any(t & (t - 1) or t * s[1] != s[0] for t, s in zip(times, sizes, strict=True)):
        return None
    given = tuple(s for s in scales if s is not None)
    if (given and given != times) or not dtype(x).is_floating_point:
        return None
    source: Any = x.args[0] if has(x, steps.cast) else None
    if source is not None and dtype(source).is_floating_point and dtype(source).itemsize <= dtype(x).itemsize:
        small = r.new(steps.upsample, (source, times, False), shape(n), dtype(source))
        return r.cast(small, dtype(n))
    return r.like(steps.upsample, (x, times, False), n)


@spells(aten.avg_pool1d.default, aten.avg_pool2d.default)
def _average(r: Rewriter, n: Node, x: Node, size: Any, stride: Any, padding: Any, *more: Any) -> Node | None:
    """Replaces average pooling along one axis by ``steps.mean_windows``.

    The windows must neither overlap nor leave gaps. Elements after the last whole window are cut off first.
    """
    is_plain = dtype(x).is_floating_point and (len(more) < 3 or more[2] is None)  # divisor_override is None
    d = 1 if n.target is aten.avg_pool1d.default else 2
    axes = [rank(x) - d + i for i, length in enumerate(size) if length > 1] if len(size) == d else []
    if len(axes) != 1 or not is_plain or any(padding) or list(stride or size) != list(size):
        return None
    (axis,), length = axes, max(size)
    used = shape(n)[axis] * length
    if used > shape(x)[axis]:
        return None  # the last window has fewer elements than the others
    return r.like(steps.mean_windows, (r.cut(x, axis, 0, used), axis, length), n)


@spells(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _mean_of_cells(
    r: Rewriter, n: Node, x: Node, kernel: Sequence[int], stride: Any, padding: Any, *more: Any
) -> Node | None:
    """Replaces average pooling whose windows neither overlap nor leave gaps by a mean over axes of a view."""
    d = 3 if n.target is aten.avg_pool3d.default else 2
    cell, step = ([*size] * (d // len(size)) for size in (kernel, stride or kernel))
    rounds_up, _, divisor = more
    is_usual = rank(x) == d + 2 and dtype(x).is_floating_point and not (any(padding) or rounds_up or divisor)
    if not is_usual or cell != step:
        return None
    sizes = [m * k for m, k in zip(shape(n)[2:], cell, strict=True)]
    x = cats.unpadded(x, sizes)
    for axis, size in enumerate(sizes, 2):
        x = r.cut(x, axis, 0, size)
    split = [size for pair in zip(shape(n)[2:], cell, strict=True) for size in pair]
    cells = r.reshape(x, (*shape(n)[:2], *split))
    return r.like(aten.mean.dim, (cells, list(range(3, 3 + 2 * d, 2))), n)


# ---- products


@spells(aten.convolution.default)
def _convolution(r: Rewriter, n: Node, x: Node, *more: Any) -> Node | None:
    """Replaces a convolution of images or videos by ``steps.conv``."""
    return r.like(steps.conv, (x, *more), n) if rank(n) in (4, 5) else None


@spells(aten.linear.default)
def _linear(r: Rewriter, n: Node, x: Node, w: Node, bias: Node | None) -> Node | None:
    if rank(w) != 2 or (bias is not None and rank(bias) != 1):
        return None
    return _product(r, n, x, w, bias)


@spells(aten.mm.default)
def _mm(r: Rewriter, n: Node, x: Node, w: Node) -> Node | None:
    """Replaces a product with a transposed matrix by a linear layer."""
    return _product(r, n, x, w.args[0]) if has(w, steps.permute) else None


@spells(aten.addmm.default)
def _addmm(r: Rewriter, n: Node, bias: Node, x: Node, w: Node, beta: float, alpha: float) -> Node | None:
    """Replaces a product with a transposed matrix, plus a row, by a linear layer with a bias."""
    if not has(w, steps.permute) or shape(bias) != shape(n)[1:] or not beta == alpha == 1:
        return None
    return _product(r, n, x, w.args[0], bias)


@spells(aten.bmm.default)
def _bmm(r: Rewriter, n: Node, x: Node, w: Node) -> Node | None:
    """Replaces a batched product in which all samples have the same transposed matrix by a linear layer."""
    matrix: Any = w.args[0] if has(w, steps.expand) else None
    matrix = matrix.args[0] if has(matrix, steps.reshape) else matrix
    is_one = has(matrix, steps.permute) and shape(matrix) == shape(w)[1:]
    return _product(r, n, x, matrix.args[0]) if is_one else None


def _product(r: Rewriter, n: Node, x: Node, w: Node, bias: Node | None = None) -> Node:
    """Makes a call of ``steps.linear``. A reshape of x that keeps its rows is moved behind the call."""
    x = _rows_of(x)
    y = r.new(steps.linear, (x, w, bias), (*shape(x)[:-1], shape(w)[0]), dtype(n))
    return r.reshape(y, shape(n))


def _rows_of(x: Node) -> Node:
    """Returns the value from which x was reshaped, if both have the same rows along the last axis. Else x."""
    source: Any = x.args[0] if has(x, steps.reshape) else x
    return source if rank(source) > 1 and shape(source)[-1] == shape(x)[-1] else x


@spells(aten.add.Tensor)
def _bias(r: Rewriter, n: Node, *_: Any) -> Node | None:
    """Replaces a linear layer without bias, plus a row, by a linear layer with a bias."""
    for y, row in operands(n):
        product: Any = _rows_of(y) if rank(y) else y
        if not has(product, steps.linear) or product.args[2] is not None or shape(y) != shape(n):
            continue
        if shape(row) == shape(n)[-1:] and dtype(row) == dtype(y) and _readers(product) == 1 == _readers(y):
            return _product(r, n, product.args[0], product.args[1], row)
    return None


def _readers(n: Any) -> int:
    """The number of nodes that read ``n``. Nodes whose own value is never read do not count."""
    return sum(bool(u.users) or u.op == "output" or writes(u.target) for u in n.users)


@spells(aten.scaled_dot_product_attention.default)
def _attention(
    r: Rewriter, n: Node, q: Node, k: Node, v: Node, mask: Any, dropout: float, *more: Any
) -> Node | None:
    """Replaces ``scaled_dot_product_attention`` by ``steps.attention``, if possible without a mask.

    Attention without an axis of heads gets one head, which fast kernels need. A triangular mask becomes
    causal attention. If there is only one key, its value is the result. If a mask hides the later frames of a
    video from each frame, attention runs once for each frame, with the keys that the frame sees.
    """
    if dropout:
        return None
    stairs = None if mask is None or more[0] else _stairs(mask)
    if stairs is not None and rank(q) == rank(k) == rank(v) == 4 and shape(k)[2] == shape(mask)[-1]:
        return _attention_of_stairs(r, n, (q, k, v), stairs, more)
    if mask is not None and shape(q)[-2] == shape(k)[-2] == shape(mask)[-2] and _is_triangle(mask):
        mask, more = None, (True, *more[1:])
    is_alike = not more[-1] and shape(q)[:-2] == shape(k)[:-2] == shape(v)[:-2]
    if mask is None and is_alike and shape(k)[-2] == 1:
        return v if shape(v) == shape(n) else r.like(steps.expand, (v, shape(n)), n)
    is_one_head = mask is None and not more[-1] and rank(q) == 3
    if not is_one_head or not shape(q)[0] == shape(k)[0] == shape(v)[0]:
        return r.like(steps.attention, (q, k, v, mask, *more), n)
    q, k, v = (r.reshape(t, (shape(t)[0], 1, *shape(t)[1:])) for t in (q, k, v))
    y = r.new(steps.attention, (q, k, v, mask, *more), (*shape(q)[:3], shape(v)[3]), dtype(n))
    return r.reshape(y, shape(n))


def _attention_of_stairs(
    r: Rewriter, n: Node, heads: Sequence[Node], stairs: Sequence[tuple[int, int]], more: Sequence[Any]
) -> Node:
    q, *others = heads
    parts, start = [], 0
    for rows, keys in stairs:
        part = r.cut(q, 2, start, rows)
        seen = [r.cut(t, 2, 0, keys) for t in others]
        to = (*shape(n)[:2], rows, shape(n)[3])
        parts.append(r.new(steps.attention, (part, *seen, None, *more), to, dtype(n)))
        start += rows
    return parts[0] if len(parts) == 1 else r.like(steps.cat, (tuple(parts), 2), n)


def _stairs(mask: Node) -> list[tuple[int, int]] | None:
    """Splits the queries of a mask into runs of neighbors that see the same number of keys.

    Returns (number of queries, number of keys that they see) for each run. Returns None if ``mask`` is not a
    constant, if a query sees other keys than the first ones, or if the runs are so short that attention
    should not run once for each.
    """
    last, n = shape(mask)[-2:], mask
    while has(n, steps.cast, steps.reshape, steps.expand, aten._to_copy.default) and shape(n)[-2:] == last:
        if dtype(n).is_floating_point != dtype(n.args[0]).is_floating_point:
            return None  # -inf hides a key, but a cast of -inf to bool gives True, which shows the key
        n = n.args[0]
    if not has(n, aten.index_select.default) or n.args[1] != 0 or 0 in last:
        return None
    # If the model's code fills a mask row by row, ``trace/fills.py`` makes it from two constants: the
    # different rows, and the index of the row for each query.
    values, which = (_constant(a) for a in (n.args[0], n.args[2]))
    if values is None or which is None:
        return None
    is_seen = values if values.dtype is torch.bool else values == 0
    counts = is_seen.sum(-1)
    if not (is_seen | (values == -math.inf) if values.is_floating_point() else is_seen == values).all():
        return None
    is_first = torch.arange(last[1], device=values.device) < counts[:, None]
    keys, rows = torch.unique_consecutive(counts[which], return_counts=True)
    if not torch.equal(is_seen, is_first) or keys.min() == 0 or len(rows) * _LEAST_ROWS > last[0]:
        return None
    return list(zip(rows.tolist(), keys.tolist(), strict=True))


def _constant(n: Node) -> Any:
    """Returns the value of ``n``, a tensor on the CPU, if ``n`` is a constant or a copy of one. Else None."""
    if has(n, aten._to_copy.default) and dtype(n) == dtype(n.args[0]):
        n = n.args[0]
    owner: Any = n.graph.owning_module
    return getattr(owner, str(n.target)) if n.op == "get_attr" else None


def _is_triangle(mask: Any) -> bool:
    """True if ``mask`` hides from each query exactly the keys that come after it."""
    if dtype(mask) != torch.bool or shape(mask)[-1] != shape(mask)[-2]:
        return False
    ones = shape(mask)[-2:]
    while has(mask, steps.cast, steps.reshape, steps.expand) and shape(mask)[-2:] == ones:
        mask = mask.args[0]
    filled: Any = mask.args[0] if has(mask, aten.tril.default) and arguments(mask)[1] == 0 else None
    return has(filled, aten.full.default) and filled.args[1] != 0 and shape(mask)[-2:] == ones


# ---- norms


@spells(aten.group_norm.default)
def _group_norm(
    r: Rewriter, n: Node, x: Node, groups: int, w: Any, b: Any, eps: float, *_: Any
) -> Node | None:
    args = (x, groups, w, b, eps, "identity", None, None, False)
    return r.like(steps.group_norm, args, n) if rank(x) > 2 else None


@spells(operator.getitem)
def _first_of_native_group_norm(r: Rewriter, n: Node, norm: Node, i: int) -> Node | None:
    """Replaces the first result of ``native_group_norm`` by a GroupNorm.

    The other results stay. They are the mean, and one divided by the standard deviation.
    """
    if i or not has(norm, aten.native_group_norm.default):
        return None
    x, w, b, _, _, _, groups, eps = arguments(norm)
    return _group_norm(r, n, x, groups, w, b, eps)


@spells(aten.layer_norm.default)
def _layer_norm(
    r: Rewriter, n: Node, x: Node, axes: Sequence[int], w: Any, b: Any, eps: float, *_: Any
) -> Node | None:
    return r.like(steps.layer_norm, (x, w, b, eps), n) if len(axes) == 1 else None


# ---- numbers


@spells(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _plus_nothing(r: Rewriter, n: Node, x: Node, number: Any, *_: Any) -> Node | None:
    return _unchanged(n, x) if not isinstance(number, Node) and number == 0 else None


@spells(aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
def _times_one(r: Rewriter, n: Node, x: Node, number: Any) -> Node | None:
    return _unchanged(n, x) if not isinstance(number, Node) and number == 1 else None


def _unchanged(n: Node, x: Node) -> Node | None:
    return x if dtype(x) == dtype(n) else None


@spells(aten.mul.Tensor)
def _silu(r: Rewriter, n: Node, *_: Any) -> Node | None:
    """Replaces x * sigmoid(x) by silu."""
    for x, gate in operands(n):
        if has(gate, aten.sigmoid.default) and gate.args[0] is x and dtype(x).is_floating_point:
            return r.like(aten.silu.default, (x,), n)
    return None


@spells(aten.pow.Tensor_Scalar)
def _square(r: Rewriter, n: Node, x: Node, exponent: float) -> Node | None:
    """Replaces a square by the product of x with itself."""
    return r.like(aten.mul.Tensor, (x, x), n) if exponent == 2 and dtype(x) == dtype(n) else None


@spells(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def _zeros(r: Rewriter, n: Node, *_: Any) -> Node:
    return _filled(r, n, 0)


@spells(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(r: Rewriter, n: Node, *_: Any) -> Node:
    return _filled(r, n, 1)


@spells(aten.full.default, aten.full_like.default, aten.fill.Scalar)
def _full(r: Rewriter, n: Node, _: Any, value: Any, *more: Any) -> Node:
    return _filled(r, n, value)


@spells(aten.new_full.default)
def _new_full(r: Rewriter, n: Node, _: Any, size: Any, value: Any, *more: Any) -> Node:
    return _filled(r, n, value)


@spells(aten.fill.Tensor)
def _fill(r: Rewriter, n: Node, x: Node, value: Node) -> Node:
    """Replaces a fill of x with ``value``, a tensor of one number, by an expanded ``value``.

    The values of x do not matter.
    """
    if value.meta["device"] == n.meta["device"]:
        return r.cast(r.new(steps.expand, (value, shape(n)), shape(n), dtype(value)), dtype(n))
    return r.like(aten.fill.Tensor, (_filled(r, n, 0), value), n)


def _filled(r: Rewriter, n: Node, value: Any) -> Node:
    """Makes a tensor with the shape, dtype and device of the node ``n``, filled with the number ``value``."""
    return r.like(aten.full.default, (shape(n), value), n, dtype=dtype(n), device=n.meta["device"])
