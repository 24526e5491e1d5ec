"""Masks of attention that are computed from arguments of the call alone, such as the mask of a padded text.

A trace does not know which keys a mask hides. ``keys_seen`` finds it out for real arguments. Then
``unmasked`` makes a graph whose attention needs no mask: it reads all keys, or the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.fx import Node

from sdfastgn.plans.rewrite.nodes import Rewriter, has, is_unread, rank, shape
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.traffic import memory
from sdfastgn.plans.trace.refusals import is_random

# Which keys queries see: all of them, or the first ones.
ALL, FIRST = "all", "first"
# A key is hidden if its bias is lower than that of a seen key by this much. Its weight is then exp(-9000)
# times as large, which is 0 in any dtype. Models write -10000, which is -9984 in bf16.
_HIDES = 9000.0
# The same bias for all keys changes no weight. A larger one would round the scores to which it is added.
_MOST_BIAS = 16.0
# Bytes (1 GB). What a larger mask hides is not asked.
_MOST_MEMORY = 1 << 30


def masks_of(
    graph: fx.Graph, inputs: Collection[Node], constants: Collection[Node]
) -> dict[Node, list[Node]]:
    """Each mask that attention reads -> the nodes that it is computed from, and itself, in order.

    ``inputs``, ``constants``: placeholders of ``graph``. Masks that depend on other ones, or on no input, are
    left out.
    """
    readers: dict[Node, list[Node]] = {}
    for n in graph.nodes:
        if has(n, steps.attention) and isinstance(n.args[3], Node) and not n.args[4]:
            readers.setdefault(n.args[3], []).append(n)
    found: dict[Node, list[Node]] = {}
    for mask, each in readers.items():
        if 0 in shape(mask) or not all(map(_has_samples_of_mask, each)):
            continue
        sources = _sources(mask)
        leaves = {s for s in sources if s.op == "placeholder"}
        is_known = leaves <= {*inputs, *constants} and not leaves.isdisjoint(inputs)
        if is_known and all(not is_random(s.target) and memory(s) <= _MOST_MEMORY for s in sources):
            found[mask] = [s for s in graph.nodes if s in sources]
    return found


def samples_of(mask: Node) -> int:
    """The number of samples for which ``mask`` has masks; 1 if they share one."""
    return shape(mask)[0] if rank(mask) == 4 else 1


def _has_samples_of_mask(n: Node) -> bool:
    """True if the attention ``n`` has one mask for all samples, or one mask for each sample."""
    q, k, v, mask, *_ = n.args
    samples = samples_of(mask)
    return samples == 1 or all(rank(t) == 4 and shape(t)[0] == samples for t in (q, k, v))


def _sources(n: Node) -> set[Node]:
    found, todo = {n}, [n]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found


def computed(
    masks: Mapping[Node, Sequence[Node]], placeholders: Sequence[Node]
) -> Callable[..., list[Tensor]]:
    """A function that computes the values of ``masks`` from the values of ``placeholders``."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in placeholders}
    read = {s for sources in masks.values() for s in sources}
    for n in placeholders[0].graph.nodes:
        if n in read and n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output([copies[mask] for mask in masks])
    return fx.GraphModule({}, graph).forward


def keys_seen(mask: Tensor) -> Tensor:
    """For each sample the number of keys that its queries see, if each sees just the first ones. Else -1.

    ``mask`` (N, H, S, K), or of fewer axes for all samples: bool, True for a key that is seen; or a bias that
    is added to the scores. The number is -1 if a query sees no key, because then the result depends on the
    attention kernel.
    """
    rows = mask.reshape(len(mask) if mask.dim() == 4 else 1, -1, mask.shape[-1])
    first = rows[..., :1]
    if mask.dtype is torch.bool:
        is_seen, is_hidden, starts = rows, ~rows, first
    else:
        is_seen, is_hidden = rows == first, rows <= first - _HIDES
        starts = first.abs() <= _MOST_BIAS
    count = is_seen[:, 0].sum(-1)
    is_first = torch.arange(rows.shape[-1], device=mask.device) < count[:, None, None]
    is_prefix = ((is_seen == is_first) & (is_seen | is_hidden) & starts).flatten(1).all(1)
    return torch.where(is_prefix, count, -1)


def unmasked(graph: fx.Graph, masks: Mapping[Node, Sequence[Node]], seen: Sequence[str | None]) -> fx.Graph:
    """A copy of ``graph`` whose attention reads fewer masks.

    Args:
        graph: of a plan.
        masks: some of its masks, as ``masks_of`` gives them.
        seen: for each mask ALL, FIRST, or None to keep it. For each FIRST the copy has one more placeholder,
            after the others: the number of keys of each sample, on the CPU.
    """
    copied = fx.Graph()
    copies: dict[Node, Node] = {}
    for n in graph.nodes:
        copies[n] = copied.node_copy(n, copies.__getitem__)
    r = Rewriter(copied)
    r.at = next(n for n in r.graph.nodes if n.op != "placeholder")
    kinds = {copies[mask]: kind for mask, kind in zip(masks, seen, strict=True) if kind is not None}
    cut = [mask for mask, kind in kinds.items() if kind == FIRST]
    numbers = {mask: _number(r, f"keys_{i}", samples_of(mask)) for i, mask in enumerate(cut)}
    unread = {copies[s] for mask, sources in masks.items() if copies[mask] in kinds for s in sources}
    for n in list(r.graph.nodes):
        mask = n.args[3] if has(n, steps.attention) and not n.args[4] else None
        if mask in kinds:
            r.at = n
            q, k, v, _, is_causal, *more = n.args
            if mask in numbers:
                new = r.like(steps.attention_to_first, (q, k, v, numbers[mask], *more), n)
            else:
                new = r.like(steps.attention, (q, k, v, None, is_causal, *more), n)
            r.replace(n, new)
    for n in reversed(list(r.graph.nodes)):
        if n in unread and is_unread(n):
            r.graph.erase_node(n)
    return r.graph


def _number(r: Rewriter, name: str, samples: int) -> Node:
    with r.graph.inserting_before(r.at):
        n = r.graph.placeholder(name)
    n.meta = {"shape": (samples,), "dtype": torch.int64, "device": torch.device("cpu")}
    return n
