"""Finds attention masks that are computed from the call's arguments alone, such as the mask of a padded text.

Tensors in a trace have no values, so the trace does not know which keys a mask hides. ``computed`` computes
the masks for real arguments, and ``keys_seen`` counts the keys that each mask shows. If a mask hides no key,
or all keys after the first ones, ``unmasked`` makes a copy of the graph whose attention reads no mask. This
attention reads all keys, or only the first ones.
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

# Two values that say which keys a mask shows: all of them, or only the first ones.
ALL, FIRST = "all", "first"
# A mask may be a bias that is added to the attention scores. A key counts as hidden if its bias is lower than
# that of a visible key by at least this number. Its attention weight is then smaller by the factor
# exp(-9000), which is 0 in any dtype. Models use a bias of -10000, which is -9984 in bf16.
_HIDES = 9000.0
# The largest bias of visible keys for which a mask is left out. An equal bias for all visible keys changes no
# attention weight. But adding a larger bias would round the scores, so the result would differ.
_MOST_BIAS = 16.0
# Bytes (1 GB). If a mask, or a value from which it is computed, is larger, the mask stays.
_MOST_MEMORY = 1 << 30


def masks_of(
    graph: fx.Graph, inputs: Collection[Node], constants: Collection[Node]
) -> dict[Node, list[Node]]:
    """Finds the attention masks that depend on ``inputs``, and besides these only on ``constants``.

    Returns a dict. For each such mask it has the nodes from which the mask is computed, and the mask itself,
    in the order of the graph. ``inputs`` and ``constants`` are placeholders of ``graph``.
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
    """The number of samples in ``mask``; 1 if all samples share one mask."""
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
    """Returns a function that computes the values of ``masks`` from the values of ``placeholders``."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in placeholders}
    read = {s for sources in masks.values() for s in sources}
    for n in placeholders[0].graph.nodes:
        if n in read and n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output([copies[mask] for mask in masks])
    return fx.GraphModule({}, graph).forward


def keys_seen(mask: Tensor) -> Tensor:
    """Counts the keys that the queries of each sample see. Returns an integer tensor (N,).

    The number is -1 if the mask is needed: if queries see different keys, if a hidden key comes before a
    visible one, or if a query sees no key, because then the result depends on the attention kernel.

    ``mask``: (N, H, S, K), or fewer axes if all samples share it. It is either bool, with True for a key that
    is seen, or a bias that is added to the scores.
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
    """Makes a copy of ``graph`` whose attention reads fewer masks.

    Args:
        graph: the rewritten graph of a call.
        masks: the result of ``masks_of`` for this graph.
        seen: for each mask, the keys that attention reads instead of the mask: ALL, or only the FIRST ones.
            None keeps the mask. For each FIRST the copy has one more placeholder, after the others: an int64
            tensor on the CPU with the number of keys of each sample.
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
