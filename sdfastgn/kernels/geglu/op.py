"""GEGLU, a linear layer's output and its bias, gated by GELU: ``sdfastgn::geglu`` and its backward.

Formula, with x of shape (..., 2D), value = x[..., :D] + bias[:D], gate = x[..., D:] + bias[D:], and
P the normal distribution:

    y = value * gelu(gate)        gelu(z) = z * P(z) = 0.5 * z * (1 + erf(z / sqrt(2)))

    dvalue = dy * gelu(gate)
    dgate = dy * value * (P(gate) + gate * P'(gate))
    dbias = sum_rows (dvalue, dgate)

On a GPU the kernels of ``geglu/kernels.py`` run; everywhere else, and for a second derivative,
``reference_geglu`` and ``reference_geglu_grads``. Layout and numerics contract: there.

Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
Linear Units", 2016; the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common.checks import check_input, check_operand
from sdfastgn.kernels.common.grad_op import GradOp
from sdfastgn.kernels.common.op import PlannedOp
from sdfastgn.kernels.geglu.plans import GegluCall, GegluGradCall, GegluGrads, GegluPlan, launch_geglu_grads

__all__ = ["GEGLU_BACKWARD", "geglu", "reference_geglu", "reference_geglu_grads"]


def reference_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): the fallback."""
    value, gate = _halves(x, bias)
    return (value * F.gelu(gate)).to(x.dtype).contiguous()


def reference_geglu_grads(call: GegluGradCall) -> GegluGrads:
    """Gradients in plain PyTorch, computed in fp32 (fp64 for fp64 input).

    Every step is a differentiable op, so that a second derivative is right too.
    """
    value, gate = _halves(call.x, call.bias)
    dy = call.dy.to(value.dtype)
    du = torch.cat((dy * F.gelu(gate), torch.ops.aten.gelu_backward(dy * value, gate)), -1)
    return GegluGrads(
        None if call.dx is None else du.to(call.dx).contiguous(),
        None if call.dbias is None else du.reshape(-1, call.x.shape[-1]).sum(0).to(call.dbias),
    )


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(value, gate)"""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    u = u if bias is None else u + bias.to(u.dtype)
    D = x.shape[-1] // 2
    return u[..., :D], u[..., D:]


# --- ops --------------------------------------------------------------------------------------------


def _fake(call: GegluCall) -> Tensor:
    return call.x.new_empty((*call.x.shape[:-1], call.x.shape[-1] // 2))


def _save(ctx: Any, call: GegluCall, results: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call)


def _backward(ctx: Any, needs: Any, dy: Tensor | None) -> dict[str, Tensor | None]:
    if dy is None:
        return {}
    x, bias = ctx.saved_tensors
    dtypes = (x.dtype if needs.x else None, bias.dtype if needs.bias else None)
    grads = GEGLU_BACKWARD(GegluGradCall(dy, x, bias, *dtypes))
    return dict(zip(GegluGrads._fields, grads, strict=True))


def _check(name: str, call: GegluCall) -> None:
    x = call.x
    check_input(name, "x", x)
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x must be (..., 2D), got shape {tuple(x.shape)}")
    check_operand(name, "bias", call.bias, x, (x.shape[-1],))


_GEGLU = PlannedOp(
    "geglu(Tensor x, Tensor? bias) -> Tensor",
    GegluCall,
    plan=GegluPlan,
    reference=lambda call: reference_geglu(*call),
    fake=_fake,
    save=_save,
    backward=_backward,
    check=_check,
)


def _empty_grads(call: GegluGradCall) -> tuple[Tensor, Tensor]:
    x = call.x
    return x.new_empty(x.shape, dtype=call.dx), x.new_empty(x.shape[-1:], dtype=call.dbias)


GEGLU_BACKWARD = GradOp(
    # The last two: dtypes of the gradients that are wanted.
    "geglu_backward(Tensor dy, Tensor x, Tensor? bias, ScalarType? dx, ScalarType? dbias) -> Tensor[]",
    GegluGradCall,
    GegluGrads,
    launch=launch_geglu_grads,
    reference=reference_geglu_grads,
    empty=_empty_grads,
)


# --- public function ------------------------------------------------------------------------------

_NAME = f"{__name__}.geglu"


def geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``value * gelu(gate)`` of the two halves of x + bias, with the exact (erf) GELU, in one pass.

    Args:
        x: (..., 2D), at least rank 1: values, then gates. Usually the output of a linear layer
            without its bias.
        bias: (2D,) or None: that layer's bias.

    Shapes: the output is (..., D).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); bias any of these. The output has the
        dtype of x.
    Layout: rows are read where they lie if they are without gaps and equally far apart, else from a
    copy. The output is contiguous.
    Grad: with respect to both. Between forward and backward x and bias are kept, nothing else. A
        second derivative, the transforms of torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: an argument is not a dense tensor of one of these dtypes.
        ValueError: a shape or a device does not fit.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the order of the halves is that of
    diffusers' GEGLU.
    """
    return _GEGLU(GegluCall(x, bias), _NAME)
