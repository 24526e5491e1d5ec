"""GEGLU, which gates one half of a linear layer's output with the GELU of the other half.

The ops are ``sdfastgn::geglu`` and ``sdfastgn::geglu_backward``. Formula, with x (..., 2D),
value = x[..., :D] + bias[:D], gate = x[..., D:] + bias[D:], and P the cumulative normal distribution:

    y = value * gelu(gate)        gelu(z) = z * P(z) = 0.5 * z * (1 + erf(z / sqrt(2)))

    dvalue = dy * gelu(gate)
    dgate = dy * value * (P(gate) + gate * P'(gate))
    dbias = sum over rows of (dvalue, dgate), concatenated

On a GPU the kernels of ``geglu/kernels.py`` run; that file explains layouts and numerics. Everywhere else,
and for second derivatives, ``reference_geglu`` and ``reference_geglu_grads`` run.

Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
Linear Units", 2016; the chain rule.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.declaration import (
    Gradients,
    Operand,
    WantedDtype,
    backward_of,
    empty_row_gradients,
    even_rows,
)
from sdfastgn.kernels.common.e4m3 import quantized
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.common.plan_cache import named


class GegluCall(NamedTuple):
    """The arguments of the op ``sdfastgn::geglu``, and ``quantizer``.

    ``quantizer``, which has the scale for an output in E4M3, is not an argument of the op. Calls with a
    quantizer run without the op.
    """

    x: Annotated[Tensor, Operand("(..., 2D)", whole=even_rows)]
    bias: Annotated[Tensor | None, Operand("(2D,)")]
    quantizer: Annotated[Tensor | None, Operand("(8,)")] = None


def reference_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``geglu`` in plain PyTorch, in fp32, or in fp64 for fp64 x.

    This function runs where no kernel can run.
    """
    value, gate = _halves(x, bias)
    return (value * torch.ops.aten.gelu.default(gate)).to(x.dtype).contiguous()


def reference_geglu_grads(call: Any) -> Gradients:
    """Computes the gradients in plain PyTorch, in fp32, or in fp64 for fp64 input.

    Args:
        call: its fields are dy (..., D), x and bias as in ``GegluCall``, and ``dx`` and ``dbias``: the dtypes
            of the gradients, or None for a gradient that is not wanted.

    Every step can be differentiated, so second derivatives are right.
    """
    value, gate = _halves(call.x, call.bias)
    dy = call.dy.to(value.dtype)
    du = torch.cat(
        (dy * torch.ops.aten.gelu.default(gate), torch.ops.aten.gelu_backward(dy * value, gate)), -1
    )
    return {
        "x": None if call.dx is None else du.to(call.dx).contiguous(),
        "bias": None if call.dbias is None else du.reshape(-1, call.x.shape[-1]).sum(0).to(call.dbias),
    }


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes x + bias in fp32, or fp64 for fp64 x, and returns its halves: (value, gate), each (..., D)."""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    u = u if bias is None else u + bias.to(u.dtype)
    D = x.shape[-1] // 2
    return u[..., :D], u[..., D:]


# --- ops --------------------------------------------------------------------------------------------


def _fake(call: GegluCall) -> Tensor:
    return call.x.new_empty((*call.x.shape[:-1], call.x.shape[-1] // 2))


def _check(name: str, call: GegluCall) -> None:
    """Raise ValueError if the last dimension of x has an odd size."""
    if call.x.shape[-1] % 2:
        raise ValueError(f"{name}: x must be (..., 2D), got shape {tuple(call.x.shape)}")


GEGLU_BACKWARD = GradOp(
    "geglu_backward",
    backward_of(GegluCall, (), dy=Operand(), wanted=WantedDtype),
    plan=named(f"{__package__}.plans:GegluGradPlan"),
    reference=reference_geglu_grads,
    empty=empty_row_gradients,
)
_GEGLU = PlannedOp(
    "geglu",
    GegluCall,
    ("y",),
    plan=named(f"{__package__}.plans:GegluPlan"),
    reference=lambda call: reference_geglu(call.x, call.bias),
    fake=_fake,
    check=_check,
    backward=GEGLU_BACKWARD,
)


# --- public function ------------------------------------------------------------------------------

_NAME = f"{__name__}.geglu"


def geglu(x: Tensor, bias: Tensor | None = None, *, quantizer: Tensor | None = None) -> Tensor:
    """Computes ``value * gelu(gate)`` in one pass, where value and gate are the two halves of x + bias.

    GELU is the exact (erf) form.

    Args:
        x: (..., 2D), at least rank 1. The values come first, then the gates. Usually x is the output of a
            linear layer that was called without its bias.
        bias: (2D,) or None. Usually the bias of that linear layer.
        quantizer: None, or an fp32 tensor (8,) with the scale by which the output is divided before it is
            rounded to E4M3, a float dtype of 8 bits (``common/e4m3.py``). The output then has no gradients.

    Shapes: the output is (..., D).
    Dtypes: x is fp16, bf16, fp32 or fp64. fp64 runs in plain PyTorch. bias may have any of the four dtypes.
        The output has the dtype of x, or is in E4M3 with a quantizer.
    Layout: any. x is copied first if its rows have gaps, overlap or are far apart, or if distances between
        rows differ. The output is contiguous.
    Grad: x and bias have gradients, and both are kept for the backward. Second derivatives, the transforms
        of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: an argument is not a strided tensor, or has another dtype.
        ValueError: a shape or a device does not fit.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020. Values come before gates as in diffusers'
    GEGLU.
    """
    if quantizer is None:
        return _GEGLU(GegluCall(x, bias), _NAME)
    call = GegluCall(x, bias, quantizer)
    if dispatch.is_plain_inference(x, call) and x.numel():
        return _GEGLU(call, _NAME, is_plain=True)
    _GEGLU.check(_NAME, call)
    return quantized(reference_geglu(x.to(torch.promote_types(x.dtype, torch.float32)), bias), quantizer)
