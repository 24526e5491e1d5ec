"""Computes how many bytes the steps of a rewritten graph read and write.

A step is a node that calls a kernel or a PyTorch op. Shapes and dtypes come from ``node.meta`` alone. So the
numbers are also right for the graph of a model whose parameters are on the device meta.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import base, is_view, writes_over

aten = torch.ops.aten
# Steps that write into a part of their first argument, and read nothing of that argument.
_PARTIAL_WRITERS = (steps.write_slice_, steps.write_select_, aten.copy_.default)
# Ops that read only some elements of their first argument: as many as the result has.
_SELECTIONS = (
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
)
# Steps that call cuDNN, cuBLAS or PyTorch's attention.
_LIBRARY = (
    steps.conv,
    steps.conv_relu,
    steps.conv_windows,
    steps.conv_last_slice,
    steps.pointwise_conv,
    steps.linear,
    steps.linear_e4m3,
    steps.linear_gelu,
    steps.linears,
    steps.add_linear_,
    steps.attention,
    steps.attention_to_first,
)
# Steps that move elements and compute nothing.
_COPIES = (
    steps.cast,
    steps.cat,
    steps.copy,
    steps.pad,
    steps.padded_cat,
    steps.write_select_,
    steps.write_slice_,
)
# For each kind of a step, its name in the lines below a table of steps.
_KINDS = {
    "kernel": "our kernels",
    "library": "convolutions, products and attention",
    "copy": "copies",
    "upstream": "as upstream wrote it",
}


class Step(NamedTuple):
    """One step of a plan: a call of a kernel or of a PyTorch op.

    Attributes:
        name: the name of its node in the graph.
        target: the name of the function in ``plans/run/steps``, or of the op of aten.
        kind: "kernel" for this package's kernels, "library" for convolutions, matrix products and attention,
            "copy" for steps that only move elements, and "upstream" for ops that no rule has replaced.
        shape, dtype: shape and dtype of the result, or of the first tensor if the result is a tuple. None if
            no other node reads a tensor of the result.
        read, written: bytes. Memory that a step reads through several views counts once.
    """

    name: str
    target: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    read: int
    written: int


def steps_of(graph: fx.Graph) -> list[Step]:
    """Lists the kernel and op calls of ``graph``, in order. Views and all reshapes are left out."""
    return [_step(n) for n in graph.nodes if n.op == "call_function" and not is_view(n)]


def table(found: Sequence[Step]) -> str:
    """Makes a table: one line for each step, then the totals, then the ops that no rule has replaced."""
    lines = [
        f"{s.name:32} {s.target:28} {_tensor(s):32} {s.read / 1e6:12.3f} {s.written / 1e6:12.3f}"
        for s in found
    ]
    lines.insert(0, f"{'name':32} {'step':28} {'result':32} {'MB read':>12} {'MB written':>12}")
    total = sum(s.read + s.written for s in found)
    lines.append(f"{len(found)} steps, {total / 1e6:.3f} MB")
    for kind, name in _KINDS.items():
        own = [s for s in found if s.kind == kind]
        size = sum(s.read + s.written for s in own)
        if own:
            lines.append(f"{name}: {len(own)} steps, {size / 1e6:.3f} MB, {size / max(total, 1):.1%}")
    left = collections.Counter(s.target for s in found if s.kind == "upstream")
    lines += [f"  {count} x {target}" for target, count in left.most_common()]
    return "\n".join(lines)


def memory(n: Node) -> int:
    """Bytes in memory that a node touches when it reads all of ``n``.

    An element that a view repeats counts once.
    """
    size = _bytes(n)
    if is_view(n) and n.target is not operator.getitem:
        size = min(size, memory(n.args[0]))
    return size


def peak(graph: fx.Graph) -> int:
    """Computes how many bytes the values of ``graph`` take at most at one time, without its placeholders.

    A value takes memory until its last use. A reshape that must copy counts as a view, which takes none.
    """
    homes: dict[Node, Node] = {}
    last: dict[Node, Node] = {}  # node -> the last node that reads a value in its memory
    for n in graph.nodes:
        source: Any = n.args[0] if is_view(n) or writes_over(n) else n
        if n.target is operator.getitem and (n.args[1] or not writes_over(source)):
            source = n  # ``n`` is one of several results of a function, and has memory of its own
        homes[n] = n if source is n else homes[source]
        last.update((homes[a], n) for a in n.all_input_nodes)
    ends: dict[Node, list[Node]] = collections.defaultdict(list)
    for home, n in last.items():
        ends[n].append(home)
    sizes = {n: _bytes(n) for n, home in homes.items() if n is home and n.op == "call_function"}
    now = most = 0
    for n in graph.nodes:
        now += sizes.get(n, 0)
        most = max(most, now)
        now -= sum(sizes.get(home, 0) for home in ends[n])
    return most


def _step(n: Node) -> Step:
    items: dict[Any, Node] = (
        {u.args[1]: u for u in n.users if u.target is operator.getitem and u.meta} if not n.meta else {}
    )
    first = n if n.meta else items.get(min(items, default=0))
    shape, dtype = (None, None) if first is None else (first.meta["shape"], first.meta["dtype"])
    return Step(n.name, _name(n.target), _kind(n.target), shape, dtype, _read(n), _written(n, items.values()))


def _read(n: Node) -> int:
    touched: dict[Node, int] = collections.defaultdict(int)
    for a in n.all_input_nodes:
        size = memory(a)
        if a is n.args[0] and n.target in _SELECTIONS:
            size = min(size, _bytes(n))
        elif n.target is steps.conv_last_slice and a is n.args[1]:
            size //= a.meta["shape"][2]
        if not (a is n.args[0] and n.target in _PARTIAL_WRITERS):
            touched[base(a)] += size
    return sum(min(size, _bytes(b) or size) for b, size in touched.items())


def _written(n: Node, items: Iterable[Node]) -> int:
    if n.target in _PARTIAL_WRITERS:
        return _bytes(n.args[1])
    if n.meta:
        return _bytes(n)
    return sum(map(_bytes, items))


def _bytes(n: Node) -> int:
    return math.prod(n.meta["shape"]) * n.meta["dtype"].itemsize if n.meta else 0


def _is_step(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith(steps.__name__)


def _kind(target: Any) -> str:
    if not _is_step(target):
        return "upstream"
    return "library" if target in _LIBRARY else "copy" if target in _COPIES else "kernel"


def _name(target: Any) -> str:
    return target.__name__ if _is_step(target) else str(target)


def _tensor(s: Step) -> str:
    dtype = "" if s.dtype is None else str(s.dtype).removeprefix("torch.")
    return "" if s.shape is None else f"{dtype}[{', '.join(map(str, s.shape))}]"
