"""Gated activations: one tensor times the activation of another, as in SwiGLU and GEGLU.

Formula:

    y = value * activation(gate)

value and gate may be the two halves of one tensor, or two tensors. On a GPU a kernel of ``geglu/kernels.py``
runs. Everywhere else, and if gradients are wanted, ``reference_gated`` runs. ``geglu/op.py`` has the special
case of GELU with a bias, which also has kernels for the backward.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.checks import check_activation
from sdfastgn.kernels.common.declaration import Operand, Value, checks_of, even_rows
from sdfastgn.kernels.common.plan_cache import Plans, named


class GatedCall(NamedTuple):
    """The arguments of the function ``gated``."""

    value: Annotated[Tensor, Operand("(..., D)", whole=even_rows)]
    gate: Annotated[Tensor, Operand("(..., D)", whole=even_rows, same_dtype=True)]
    activation: Annotated[str, Value(check_activation)]


def reference_gated(value: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Computes ``gated`` in plain PyTorch, in fp32 or fp64, for calls that the kernel cannot run."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * ACTIVATIONS[activation](gate.to(wide))).to(value.dtype).contiguous()


# --- launch -----------------------------------------------------------------------------------------


_plans = Plans("gated", GatedCall, named(f"{__package__}.plans:GatedPlan"))
_check = checks_of(GatedCall, lambda name, call: None)
_NAME = f"{__name__}.gated"


# --- public function ------------------------------------------------------------------------------


def gated(value: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Computes ``value * activation(gate)`` in one pass.

    Args:
        value, gate: (..., D), of one shape and dtype, at least rank 1.
        activation: a key of ``sdfastgn.kernels.common.activations.ACTIVATIONS``.

    Shapes: the output has the shape of value.
    Dtypes: value and gate are fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. The output has their
        dtype. The result of the activation is not rounded before it is multiplied.
    Layout: any. An operand is copied first if its rows have gaps, overlap or are far apart, or if distances
        between rows differ. The output is contiguous.
    Grad: calls that want gradients, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: an argument is not a strided tensor, or has another dtype.
        ValueError: a shape, a device or the activation's name does not fit.
    """
    call = GatedCall(value, gate, activation)
    found = _plans.run(_NAME, call, _check, lambda call: call.value.numel() > 0)
    return reference_gated(value, gate, activation) if found is None else found
