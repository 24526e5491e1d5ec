"""All passes, in order: ``rewrite``."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

from sdfastgn.plans.rewrite.ada_norms import ada_norms
from sdfastgn.plans.rewrite.biases import biases
from sdfastgn.plans.rewrite.cells import cells
from sdfastgn.plans.rewrite.convolutions import convolutions, relus
from sdfastgn.plans.rewrite.e4m3 import e4m3
from sdfastgn.plans.rewrite.finish import finish
from sdfastgn.plans.rewrite.heads import heads
from sdfastgn.plans.rewrite.modulations import modulations
from sdfastgn.plans.rewrite.moves import moves
from sdfastgn.plans.rewrite.norms import after_norms, norms
from sdfastgn.plans.rewrite.packs import packs
from sdfastgn.plans.rewrite.repeated_rows import repeated_rows
from sdfastgn.plans.rewrite.repeats import repeats
from sdfastgn.plans.rewrite.rotations import rotations
from sdfastgn.plans.rewrite.spelling import canonicalize
from sdfastgn.plans.rewrite.statistics import statistics
from sdfastgn.plans.rewrite.sums import activated_sums, shifts, sums
from sdfastgn.plans.rewrite.tokens import tokens
from sdfastgn.plans.rewrite.views import sink_views
from sdfastgn.plans.run.schemas import arguments, writes
from sdfastgn.plans.trace.refusals import DRAWN, is_random
from sdfastgn.plans.trace.traced import Untraceable

aten = torch.ops.aten
# Each pass takes and returns a graph. A pass relies on those before it:
PASSES: tuple[Callable[[fx.Graph], fx.Graph], ...] = (
    canonicalize,  # one spelling for each op
    repeated_rows,  # before products
    rotations,  # of pairs of elements, in attention
    heads,  # norms before rotations, and heads that are joined along the tokens
    ada_norms,  # norms of tokens with a modulation, and gated sums
    norms,  # norms of channels
    after_norms,  # scales, shifts and activations into norms. The next pass puts views after norms
    sink_views,  # views behind norms and pointwise ops, where the kernels take these
    after_norms,  # activations, which are now next to the norms
    modulations,  # of norms, by small images or videos
    cells,  # convolutions whose windows do not overlap, as products
    repeats,  # of elements, for convolutions
    convolutions,  # and what they read. Their biases become separate steps
    sums,  # which take biases
    shifts,  # biases and embeddings, into the norms after them
    moves,  # of elements between channels and positions, into sums and means
    biases,  # that no other step took
    activated_sums,  # sums and biases that an activation follows
    statistics,  # of sums, before the norms that want them
    relus,  # into the convolutions before them, with bias and residual
    tokens,
    packs,  # of the products that are still products
    finish,  # what writes where. After it, a value's readers must stay
)


def rewrite(graph: fx.Graph, in_e4m3: Collection[fx.Node] = ()) -> fx.Graph:
    """Replaces the ops of a traced graph by steps.

    ``in_e4m3``: parameters. Their large products are computed in E4M3. Raises Untraceable if a plan cannot
    repeat an op.
    """
    for n in graph.nodes:
        _check(n)
    drawn = _random_numbers(graph)
    for each in PASSES:
        if each is tokens and in_e4m3:  # before the other steps that compute activations of products
            graph = e4m3(graph, in_e4m3)
        graph = each(graph)
    if _random_numbers(graph) != drawn:
        raise Untraceable("the plan would draw the call's random numbers in another order")
    return graph


def _random_numbers(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that draw random numbers, in order."""
    return [n for n in graph.nodes if n.target in DRAWN]


def _check(n: fx.Node) -> None:
    """Raises Untraceable if a plan cannot repeat ``n``: random numbers, strides, other writes."""
    if n.op != "call_function" or (not n.users and not writes(n.target)):
        return
    if is_random(n.target) and n.target not in DRAWN and not _is_attention_without_dropout(n):
        raise Untraceable(f"the call draws random numbers ({n.target})")
    if n.target in _STRIDED:
        raise Untraceable(f"the call depends on strides ({n.target})")
    is_write = n.target is aten.copy_.default and n.args[0].op == "placeholder"
    if writes(n.target) and not is_write:
        raise Untraceable(f"the call writes with {n.target}")


# Their results depend on where elements lie in memory, and values have no places.
_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def _is_attention_without_dropout(n: fx.Node) -> bool:
    """PyTorch calls attention random even if its dropout is 0."""
    return n.target is aten.scaled_dot_product_attention.default and not arguments(n)[4]
