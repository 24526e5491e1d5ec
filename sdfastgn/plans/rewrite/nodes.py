"""Functions with which the passes read nodes of an fx graph, and the class with which they make new nodes.

A node stands for the elements of a tensor, wherever they lie in memory. Therefore a copy of a tensor is the
same value as the tensor, and several reshapes in a row are one reshape. ``node.meta`` has "shape", "dtype"
and "device" if the value is a tensor. ``node.meta`` is empty if the value is a tuple of tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.common.dispatch import KERNEL_DTYPES
from sdfastgn.plans.run import steps
from sdfastgn.plans.trace.refusals import DRAWN

aten = torch.ops.aten
# The permutation that exchanges channels and frames of a video.
TO_FRAMES = (0, 2, 1, 3, 4)


def shape(n: Node) -> tuple[int, ...]:
    return n.meta["shape"]


def dtype(n: Node) -> torch.dtype:
    return n.meta["dtype"]


def rank(n: Node) -> int:
    return len(n.meta["shape"])


def index_of_pad(n: Node, dim: int) -> int:
    """The index of the pad before axis ``dim`` in the list of pads that ``steps.pad`` takes for ``n``."""
    return 2 * (rank(n) - 1 - dim)


def has(n: Any, *targets: Any) -> bool:
    """True if ``n`` is a node that calls one of ``targets``."""
    return isinstance(n, Node) and n.op == "call_function" and n.target in targets


def is_only(n: Node) -> bool:
    """True if exactly one node reads ``n``, and reads it once."""
    return len(n.users) == 1 and sum(a is n for a in _flat(user(n))) == 1


def user(n: Node) -> Node:
    """The first node that reads ``n``."""
    return next(iter(n.users))


def has_kernels(n: Node) -> bool:
    """True if the kernels of this package take tensors in the dtype of ``n``."""
    return dtype(n) in KERNEL_DTYPES


def is_exact(cast: Any) -> bool:
    """True if ``cast``, a call of ``steps.cast``, converts between floats and rounds no number."""
    before, after = dtype(cast.args[0]), dtype(cast)
    are_floats = before.is_floating_point and after.is_floating_point
    return are_floats and torch.promote_types(before, after) == after


def number(n: Node) -> int | float | None:
    """The second operand of ``n`` if it is a number, and ``n`` has no keyword arguments. Else None."""
    is_number = len(n.args) > 1 and isinstance(n.args[1], (int, float)) and not n.kwargs
    return n.args[1] if is_number else None


def operands(n: Node) -> Iterator[tuple[Node, Node]]:
    """Yields (a, b) and (b, a), the first two operands of the node ``n``, if both are tensors.

    Yields nothing if one is no tensor, or if ``n`` has keyword arguments, such as alpha.
    """
    a, b = n.args[:2] if len(n.args) > 1 else (None, None)
    if isinstance(a, Node) and isinstance(b, Node) and not n.kwargs:
        yield a, b
        yield b, a


def cleaned(graph: fx.Graph) -> fx.Graph:
    """Removes nodes that no other node reads. Nodes that write into arguments or draw random numbers stay."""
    for n in reversed(graph.nodes):
        if is_unread(n):
            graph.erase_node(n)
    return graph


def is_unread(n: Node) -> bool:
    """True if ``n`` can be removed: no node reads it, and it neither writes nor draws random numbers."""
    is_kept = n.users or n.target is aten.copy_.default or n.target in DRAWN
    return n.op in ("call_function", "get_attr") and not is_kept


def ordered(graph: fx.Graph) -> fx.Graph:
    """Moves nodes so that each one stands after those that it reads. Other nodes keep their order.

    Raises RuntimeError if a node reads itself, directly or through others.
    """
    done: set[Node] = set()
    last: Node | None = None
    for n in list(graph.nodes):
        if last is n.prev and done.issuperset(n.all_input_nodes):  # the node already stands where it must
            done.add(n)
            last = n
            continue
        stack = [n]
        waiting: list[Node] = []  # each of these nodes waits for the next one, which it reads
        while stack:
            top = stack[-1]
            waits = [a for a in top.all_input_nodes if a not in done]
            if top not in done and waits:
                if top in waiting:
                    cycle = waiting[waiting.index(top) :]
                    raise RuntimeError(f"these nodes read each other: {', '.join(map(str, cycle))}")
                waiting.append(top)
                stack += waits
                continue
            stack.pop()
            if waiting and waiting[-1] is top:
                waiting.pop()
            if top not in done:
                done.add(top)
                if last is not None and last.next is not top:
                    last.append(top)
                last = top
    return graph


class Rewriter:
    """Makes nodes in ``graph``, in front of the node ``at``.

    ``share``: True returns an earlier node instead of making an equal one. This is only right in a pass that
    goes from the first node to the last: then the earlier node stands in front of all its readers.

    Attributes:
        has_changed: True if nodes were made or replaced.
    """

    def __init__(self, graph: fx.Graph, *, share: bool = False) -> None:
        self.graph = graph
        self.at: Node = next(iter(graph.nodes))
        self.seen: dict[Any, Node] | None = {} if share else None
        self.has_changed = False

    def new(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """Makes a node that calls ``target``. Without a ``shape``, its value is a tuple of tensors."""
        key = None
        if self.seen is not None:
            key = (
                target,
                key_of(args),
                key_of(list((kwargs or {}).items())),
                shape and tuple(shape),
                dtype,
            )
            if key in self.seen:
                return self.seen[key]
        self.has_changed = True
        with self.graph.inserting_before(self.at):
            n = self.graph.create_node("call_function", target, tuple(args), kwargs)
        if shape is not None:
            device = next((a.meta["device"] for a in n.all_input_nodes if "device" in a.meta), None)
            n.meta = {"shape": tuple(shape), "dtype": dtype, "device": device or self.at.meta.get("device")}
        if key is not None:
            self.seen[key] = n  # type: ignore[index]
        return n

    def like(self, target: Callable[..., Any], args: Sequence[Any], n: Node, **kwargs: Any) -> Node:
        """Makes a node that calls ``target``. Its value has the shape, dtype and device of the node ``n``."""
        made = self.new(target, args, n.meta.get("shape"), n.meta.get("dtype"), kwargs or None)
        if n.meta:
            made.meta["device"] = n.meta["device"]
        return made

    def item(self, n: Node, i: int, like: Node) -> Node:
        """Makes a node for item ``i`` of the tuple ``n``: a tensor of the shape and dtype of ``like``."""
        return self.like(operator.getitem, (n, i), like)

    def replace(self, old: Node, new: Node) -> None:
        self.has_changed = True
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    # ---- views: several of one kind in a row become one, and those that change nothing are left out

    def reshape(self, x: Node, to: Sequence[int]) -> Node:
        to = tuple(to)
        while has(x, steps.reshape):
            x = x.args[0]
        return x if shape(x) == to else self.new(steps.reshape, (x, to), to, dtype(x))

    def permute(self, x: Node, dims: Sequence[int]) -> Node:
        dims = tuple(d % rank(x) for d in dims)
        if has(x, steps.permute):
            dims, x = tuple(x.args[1][d] for d in dims), x.args[0]
        to = tuple(shape(x)[d] for d in dims)
        moved = [d for d in dims if shape(x)[d] != 1]
        if moved == sorted(moved):  # a permutation that only moves axes of one element is a reshape
            return self.reshape(x, to)
        return self.new(steps.permute, (x, dims), to, dtype(x))

    def images(self, video: Node) -> Node:
        """Makes a view of a video (N, C, T, H, W) as images (N * T, C, H, W): its frames in order."""
        N, C, T, *image = shape(video)
        return self.reshape(self.permute(video, TO_FRAMES), (N * T, C, *image))

    def video(self, images: Node, N: int) -> Node:
        """Makes a view of ``images`` as ``N`` videos (N, C, T, H, W). The images are the frames in order."""
        count, *image = shape(images)
        return self.permute(self.reshape(images, (N, count // N, *image)), TO_FRAMES)

    def cut(self, x: Node, dim: int, start: int, length: int) -> Node:
        """Makes a view of ``length`` elements of axis ``dim`` of x, beginning at ``start``."""
        if length == shape(x)[dim]:
            return x
        if has(x, steps.cut) and x.args[1] == dim:
            x, start = x.args[0], start + x.args[2]
        to = (*shape(x)[:dim], length, *shape(x)[dim + 1 :])
        return self.new(steps.cut, (x, dim, start, length), to, dtype(x))

    def cast(self, x: Node, to: torch.dtype) -> Node:
        if has(x, steps.cast) and is_exact(x):
            x = x.args[0]
        return x if dtype(x) == to else self.new(steps.cast, (x, to), shape(x), to)


def key_of(a: Any) -> Any:
    """Returns a hashable value that is equal for equal arguments of nodes.

    The values for 1, 1.0 and True differ, and so do those for 0.0 and -0.0.
    """
    if isinstance(a, (list, tuple)):
        return tuple(map(key_of, a))
    return a if isinstance(a, Node) else (type(a), repr(a) if isinstance(a, float) else a)


def _flat(n: Node) -> list[Node]:
    """All nodes that ``n`` reads, as often as it reads them."""
    found: list[Node] = []
    fx.node.map_arg((n.args, n.kwargs), found.append)
    return found
