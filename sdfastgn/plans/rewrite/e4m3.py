"""Replaces linear layers of many rows by matrix products in E4M3, an 8-bit float dtype.

Each row of the input, and each row of the weight, has its own scale. A kernel before the product quantizes
the input. Several products of the same input share this kernel. If the input comes from an adaptive norm, the
norm's kernel quantizes it. Otherwise the quantizing kernel also computes an activation, a concatenation of
two tensors or a gated activation before the product. Its result is then not written to memory in 16 bits.

Only large layers in the model's transformer blocks are computed in E4M3 (``in_blocks`` of
``patches/fp8/rows.py``). Small layers would hardly be faster. The layers that are sensitive to rounding are
outside of blocks: embeddings of patches, prompt and timestep, and the last layer. Layers that compute
modulations in blocks have few rows. In layers that are computed in E4M3, the error is that of rounding,
because the scale of each row is computed in each call. No value is clipped, and an outlier costs no precision
in other rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.kernels.layer_norm.config import fits_registers
from sdfastgn.plans.rewrite.nodes import (
    Rewriter,
    cleaned,
    dtype,
    has,
    is_only,
    operands,
    ordered,
    rank,
    shape,
)
from sdfastgn.plans.rewrite.norms import activation
from sdfastgn.plans.run import steps

aten = torch.ops.aten

# A linear layer is computed in E4M3 only if its input has at least this number of rows, and input and output
# have at least this number of columns. With 512 rows, reading the weight takes most of the time, and in E4M3
# it is half as large. With fewer rows or columns, quantizing the input takes as long as the product saves.
FEWEST_ROWS = FEWEST_COLUMNS = 512
# In matrix products in E4M3, the numbers of rows and columns of the weight must be multiples of this number.
_SIZES = 16
# Only linear layers in this dtype are computed in E4M3, because PyTorch's E4M3 products with a scale for each
# row return this dtype.
DTYPE = torch.bfloat16


def e4m3(graph: fx.Graph, weights: Collection[Node]) -> fx.Graph:
    """Replaces large linear layers by ``steps.linear_e4m3``, and quantizes their inputs and weights.

    ``weights``: the parameters that may be quantized.
    """
    r, allowed = Rewriter(graph), set(weights)
    found = [n for n in graph.nodes if _fits(n, allowed)]
    written: dict[Any, list[Node]] = {}
    for n in found:
        r.at = n
        x, weight, bias = n.args
        x_in_e4m3 = _of_norm(r, x, found, written) or _written(
            r, steps.quantize_rows, _rows(x, found), written, shape(x)
        )
        weight_in_e4m3 = _written(r, steps.quantize_weight, (weight,), written, shape(weight))
        r.replace(n, r.like(steps.linear_e4m3, (*x_in_e4m3, *weight_in_e4m3, bias, dtype(n)), n))
    return ordered(cleaned(graph)) if r.has_changed else graph


def _fits(n: Node, weights: set[Node]) -> bool:
    """True if ``n`` is a linear layer in bf16 of many rows, with a large weight that is in ``weights``."""
    if not has(n, steps.linear):
        return False
    x, weight, bias = n.args
    are_alike = all(dtype(t) == DTYPE for t in (n, x, weight, bias) if t is not None)
    if not are_alike or weight not in weights or rank(weight) != 2:
        return False
    are_large = math.prod(shape(x)[:-1]) >= FEWEST_ROWS and min(shape(weight)) >= FEWEST_COLUMNS
    return are_large and not any(size % _SIZES for size in shape(weight)) and fits_registers(shape(x)[-1])


def _rows(x: Node, products: list[Node]) -> tuple[Any, ...]:
    """Returns arguments with which ``quantize_rows`` computes x in E4M3.

    If x is an activation, a cat of two tensors or a gated activation, and only the nodes ``products`` read x,
    ``quantize_rows`` also does this operation: the arguments are the operation's inputs. Else they are (x,).
    """
    if not all(reader in products for reader in x.users):
        return (x,)
    if has(x, steps.cat) and x.args[1] == rank(x) - 1 and len(x.args[0]) == 2:
        first, second = (_before_activation(part, is_only(part)) for part in x.args[0])
        return *first, *second
    for gate, value in operands(x) if has(x, aten.mul.Tensor) else ():
        before = _before_activation(gate, is_only(gate))
        if before[0] is not gate and shape(gate) == shape(value) and dtype(gate) == dtype(value):
            return *before, value, "identity", True
    before = _before_activation(x, True)
    return before if before[0] is not x else (x,)


def _of_norm(r: Rewriter, x: Node, products: list[Node], written: dict[Any, list[Node]]) -> list[Node] | None:
    """Lets the kernel of the adaptive norm x quantize x. Returns nodes for x in E4M3 and for its scales.

    None if x is no adaptive norm, or if other nodes than ``products`` read x.
    """
    if x in written:
        return written[x]
    norm: Any = x.args[0] if has(x, operator.getitem) and x.args[1] == 1 else None
    if not has(norm, steps.ada_norm) or not all(reader in products for reader in x.users):
        return None
    at, r.at = r.at, norm
    all_three = r.new(steps.ada_norm_in_e4m3, norm.args)
    for total in [u for u in norm.users if u.args[1] == 0]:
        r.replace(total, r.item(all_three, 0, total))
    r.at = at
    written[x] = _items(r, all_three, 1, shape(x))
    return written[x]


def _before_activation(x: Any, has_no_other_reader: bool) -> tuple[Node, str]:
    """Returns (input, name) of the activation whose result is x. (x, "identity") if there is none.

    ``has_no_other_reader``: False if other nodes read x, so that the activation must stay.
    """
    name = activation(x) if has_no_other_reader else None
    return (x, "identity") if name is None else (x.args[0], name)


def _written(r: Rewriter, step: Any, args: Any, written: dict[Any, list[Node]], to: Any) -> list[Node]:
    """Makes a call ``step(*args)``, or finds an equal one in ``written``. Returns nodes for its two results.

    They are a tensor of the shape ``to`` in E4M3, and the scales of its rows.
    """
    key = step, args
    if key not in written:
        written[key] = _items(r, r.new(step, args), 0, to)
    return written[key]


def _items(r: Rewriter, results: Node, first: int, to: Any) -> list[Node]:
    rows = r.new(operator.getitem, (results, first), to, E4M3)
    return [rows, r.new(operator.getitem, (results, first + 1), to[:-1], torch.float32)]
