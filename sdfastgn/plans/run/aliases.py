"""Tells where the values of a rewritten graph lie in memory.

It says which nodes are views, which nodes write over an argument, and which strides a value will have.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from sdfastgn.kernels.attention.over_frames import tokens_within
from sdfastgn.plans.run import schemas, steps

# Steps that compute nothing. Their results are views of the argument wherever its strides allow that.
VIEWS = (steps.reshape, steps.permute, steps.expand, steps.cut)

# Steps whose results are contiguous. They compute tokens, which are rows along the last axis, and not images.
_OF_ROWS = (
    steps.linear,
    steps.linear_e4m3,
    steps.quantize_rows,
    steps.quantize_weight,
    steps.linear_gelu,
    steps.linears,
    steps.add_linear_,
    steps.act_linear,
    steps.layer_norm,
    steps.add_layer_norm,
    steps.grouped_layer_norm,
    steps.ada_norm,
    steps.ada_norm_in_e4m3,
    steps.rotate,
    steps.join_heads,
)


def is_view(n: Node) -> bool:
    """True if ``n`` is a view of its argument, or an item of a tuple. All reshapes count as views."""
    if n.op != "call_function":
        return False
    return n.target is operator.getitem or n.target in VIEWS or schemas.is_view(n.target)


def writes_over(n: Node) -> bool:
    """True if ``n`` writes over its first argument: it calls an in-place op or a function such as "add_"."""
    if n.op != "call_function":
        return False
    target: Any = n.target
    return schemas.writes(target) if isinstance(target, OpOverload) else target.__name__.endswith("_")


def base(n: Node) -> Node:
    """Returns ``n``, or the node whose memory ``n`` is a view of. All reshapes count as views."""
    while is_view(n):
        source: Any = n.args[0]
        if n.target is operator.getitem and not is_view(source):
            break  # ``n`` is one of several results of a function, in memory of its own
        n = source
    return n


def copies(n: Any) -> bool:
    """True if ``n`` is a reshape that must copy, because no view of its argument has the new shape.

    ``in_memory`` gives the strides of the argument.
    """
    if n.op != "call_function" or n.target is not steps.reshape:
        return False
    try:
        in_memory(n.args[0]).view(n.meta["shape"])
    except RuntimeError:
        return True
    return False


def adds_bias_apart(n: Any) -> bool:
    """True if ``n`` is a linear layer whose bias PyTorch would add in a second pass over the result.

    PyTorch does so if the input has more than two axes and is not contiguous.
    """
    if n.op != "call_function" or n.target is not steps.linear or n.args[2] is None:
        return False
    x = in_memory(n.args[0])
    return x.dim() > 2 and not x.is_contiguous()


def in_memory(n: Any) -> Tensor:
    """Returns an empty tensor on the device meta with the shape of the value that the node ``n`` computes.

    It has the strides that the value will probably have in a run. Images and videos, which are values with 4
    or 5 axes, are assumed to be channels-last, because steps write them so.
    """
    if n.op == "call_function" and n.target in VIEWS:
        return n.target(in_memory(n.args[0]), *n.args[1:])
    shape = n.meta["shape"]
    if n.target is steps.attention and tokens_within(*map(in_memory, n.args[:3])) is False:
        return torch.empty((shape[2], *shape[:2], shape[3]), device="meta").permute(1, 2, 0, 3)
    if n.target in (
        steps.attention,
        steps.attention_to_first,
    ):  # attention kernels write the heads of a token side by side
        return torch.empty((*shape[:-3], shape[-2], shape[-3], shape[-1]), device="meta").transpose(-2, -3)
    if n.target is steps.group_norm and len(shape) == 3:  # GroupNorms keep the strides of x (N, C, L)
        return torch.empty_like(in_memory(n.args[0]))
    writer: Any = n.args[0] if n.target is operator.getitem else n
    if len(shape) not in (4, 5) or writer.target in _OF_ROWS:
        return torch.empty(shape, device="meta")
    return torch.empty((shape[0], *shape[2:], shape[1]), device="meta").movedim(-1, 1)
