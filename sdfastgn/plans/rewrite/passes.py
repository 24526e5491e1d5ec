"""``rewrite`` runs all passes over the graph of a traced call, one after another.

A pass takes a graph and returns one. It replaces PyTorch's ops by *steps*: functions in ``plans/run/steps``,
most of which call a kernel.
"""

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
# All passes, in the order in which they run. Each takes a graph and returns one, and relies on those before
# it. The comment beside a pass says what it replaces, or why it stands where it does.
PASSES: tuple[Callable[[fx.Graph], fx.Graph], ...] = (
    canonicalize,  # models write the same op in several forms. From here on there is one form
    repeated_rows,  # if rows of a linear layer's input are repeated, the layer computes each of them once
    rotations,  # rotary embeddings become one kernel
    heads,  # norms, rotary embeddings and concatenations of attention heads become one kernel
    ada_norms,  # a norm of tokens, a factor and offset after it and a gated sum before it become one kernel
    norms,  # norms over channels, which models write in several ways, become one kernel
    after_norms,  # scales, shifts and activations go into norms before ``sink_views`` puts views behind norms
    sink_views,  # reshapes and permutations before norms and activations move behind them
    after_norms,  # ``after_norms`` again, because ``sink_views`` has moved activations next to norms
    modulations,  # a GroupNorm, and a factor and offset upsampled from small tensors, become one kernel
    cells,  # convolutions whose windows do not overlap become matrix products
    repeats,  # repeated elements before convolutions become upsampling
    convolutions,  # pads, upsampling and norm before a convolution become one kernel, its bias becomes a node
    sums,  # residual sums also add the biases of convolutions
    shifts,  # norms also add the biases and embeddings that are added before them
    moves,  # sums and means read pixel shuffles, and images cut into patches, without copies of them
    biases,  # biases of convolutions that no other pass has moved into a kernel become sums
    activated_sums,  # sums also compute the activations after them
    statistics,  # sums also compute mean and variance for the GroupNorm after them
    relus,  # a convolution, its bias, a residual and ReLU become one call of cuDNN
    tokens,  # linear layers, gated activations, and sums before layer norms become fewer kernels
    packs,  # linear layers with the same input become one product, if no other pass has replaced them
    finish,  # writes become in-place where possible. Must be last: later passes might read overwritten values
)


def rewrite(graph: fx.Graph, in_e4m3: Collection[fx.Node] = ()) -> fx.Graph:
    """Replaces PyTorch's ops in the graph of a traced call by steps, most of which call a kernel.

    ``in_e4m3``: parameters whose large matrix products are computed in E4M3, an 8-bit float dtype. Raises
    Untraceable if the graph contains an op that later calls could not repeat, such as dropout.
    """
    for n in graph.nodes:
        _check(n)
    drawn = _random_numbers(graph)
    for each in PASSES:
        # The pass ``e4m3`` runs before ``tokens``, which would also join activations with linear layers, but
        # in 16 bits.
        if each is tokens and in_e4m3:
            graph = e4m3(graph, in_e4m3)
        graph = each(graph)
    if _random_numbers(graph) != drawn:
        raise Untraceable("the plan would draw the call's random numbers in another order")
    return graph


def _random_numbers(graph: fx.Graph) -> list[fx.Node]:
    """Lists the nodes that draw random numbers, in the order of the graph."""
    return [n for n in graph.nodes if n.target in DRAWN]


def _check(n: fx.Node) -> None:
    """Raises Untraceable if later calls could not repeat the op that the node ``n`` calls.

    Such ops draw random numbers (except ``DRAWN``, such as randn), depend on strides, or write into something
    else than an argument of the call.
    """
    if n.op != "call_function" or (not n.users and not writes(n.target)):
        return
    if is_random(n.target) and n.target not in DRAWN and not _is_attention_without_dropout(n):
        raise Untraceable(f"the call draws random numbers ({n.target})")
    if n.target in _STRIDED:
        raise Untraceable(f"the call depends on strides ({n.target})")
    is_write = n.target is aten.copy_.default and n.args[0].op == "placeholder"
    if writes(n.target) and not is_write:
        raise Untraceable(f"the call writes with {n.target}")


# The results of these ops depend on where elements lie in memory. Nodes of the graph do not say where.
_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def _is_attention_without_dropout(n: fx.Node) -> bool:
    """True for attention with dropout 0. PyTorch tags the op as random even then."""
    return n.target is aten.scaled_dot_product_attention.default and not arguments(n)[4]
