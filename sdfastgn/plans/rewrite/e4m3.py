"""Linear layers of many rows become products in E4M3, an 8-bit float dtype, with a scale for each row.

A step before the product writes the product's input in E4M3. Several products of one input share this step.
An adaptive norm writes E4M3 itself. Otherwise the step also computes an activation, and it reads both parts
of a concatenation, or both factors of a gated activation. So no other step writes these to memory.

Only large layers in the model's blocks are computed in E4M3 (``in_blocks`` of ``patches/fp8/rows.py``). Small
ones would hardly be faster. The sensitive ones are outside of blocks: embeddings of patches, prompt and
timestep, and the last layer. Modulations in blocks have few rows. In the other layers the error is that of
rounding to E4M3, because each call computes the scale of each row. So no value is cut off, and an outlier
costs no precision in other rows.
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

# Fewest rows of an input, and fewest columns of input and output. A product of 512 rows is limited by the
# weight, which is half as large in E4M3. With fewer rows or columns the step that writes the input takes as
# long as the product saves.
FEWEST_ROWS = FEWEST_COLUMNS = 512
# Products in E4M3 need sizes that are multiples of this number.
_SIZES = 16
# The dtype of the models. PyTorch's products with a scale for each row have results in it.
DTYPE = torch.bfloat16


def e4m3(graph: fx.Graph, weights: Collection[Node]) -> fx.Graph:
    """linear(x, weight, bias) of many rows -> ``linear_e4m3`` of quantized rows and weights.

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
    """True if ``n`` is the product of many rows with a large weight in ``weights``, all in ``DTYPE``."""
    if not has(n, steps.linear):
        return False
    x, weight, bias = n.args
    are_alike = all(dtype(t) == DTYPE for t in (n, x, weight, bias) if t is not None)
    if not are_alike or weight not in weights or rank(weight) != 2:
        return False
    are_large = math.prod(shape(x)[:-1]) >= FEWEST_ROWS and min(shape(weight)) >= FEWEST_COLUMNS
    return are_large and not any(size % _SIZES for size in shape(weight)) and fits_registers(shape(x)[-1])


def _rows(x: Node, products: list[Node]) -> tuple[Any, ...]:
    """The arguments of ``quantize_rows`` for x. If possible they make it compute x too, from other values."""
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
    """x in E4M3 and its scales, if x is the norm of an ``ada_norm`` and only ``products`` read it."""
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
    """(input of the activation, its name) if nobody else reads its result x; else (x, "identity")."""
    name = activation(x) if has_no_other_reader else None
    return (x, "identity") if name is None else (x.args[0], name)


def _written(r: Rewriter, step: Any, args: Any, written: dict[Any, list[Node]], to: Any) -> list[Node]:
    """The results of ``step(*args)``: a tensor of the shape ``to`` in E4M3, and the scales of its rows."""
    key = step, args
    if key not in written:
        written[key] = _items(r, r.new(step, args), 0, to)
    return written[key]


def _items(r: Rewriter, results: Node, first: int, to: Any) -> list[Node]:
    rows = r.new(operator.getitem, (results, first), to, E4M3)
    return [rows, r.new(operator.getitem, (results, first + 1), to[:-1], torch.float32)]
