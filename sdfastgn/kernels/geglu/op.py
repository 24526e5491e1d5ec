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

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import check_input, check_operand
from sdfastgn.kernels.common.double_backward import derivative_of, save_all
from sdfastgn.kernels.common.op import Op, PlannedOp
from sdfastgn.kernels.geglu.plans import GegluCall, GegluGradCall, GegluGrads, GegluPlan, launch_geglu_grads

__all__ = ["geglu", "geglu_grads", "reference_geglu", "reference_geglu_grads"]


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
        None if call.dx is None else du.to(call.dx),
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
    return geglu_grads(GegluGradCall(dy, x, bias, *dtypes))._asdict()


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


@dispatch.retried
def _run_backward(call: GegluGradCall) -> list[Tensor]:
    if call.x.numel() == 0:
        return [grad.zero_() for grad in _fake_backward(call)]
    grads = launch_geglu_grads if dispatch.runs_in_triton(call.x) else reference_geglu_grads
    return [grad.contiguous() for grad in grads(call) if grad is not None]


def _fake_backward(call: GegluGradCall) -> list[Tensor]:
    wanted = ((call.x.shape, call.dx), (call.x.shape[-1:], call.dbias))
    return [call.x.new_empty(shape, dtype=dtype) for shape, dtype in wanted if dtype is not None]


_GEGLU_BACKWARD = Op(
    # One tensor for each of dx and dbias whose dtype is given, in this order.
    "geglu_backward(Tensor dy, Tensor x, Tensor? bias, ScalarType? dx, ScalarType? dbias) -> Tensor[]",
    GegluGradCall,
    _run_backward,
    _fake_backward,
    save=save_all,
    backward=derivative_of(reference_geglu_grads),
)


@dispatch.retried
def geglu_grads(call: GegluGradCall) -> GegluGrads:
    """The gradients whose dtypes are given, by the kernels where they run."""
    if dispatch.is_batched(call.dy):
        return reference_geglu_grads(call)
    if call.x.numel() and dispatch.is_plain_inference(call.x, call):
        return launch_geglu_grads(call)
    found = iter(_GEGLU_BACKWARD.through_dispatcher(call))
    dx, dbias = (None if dtype is None else next(found) for dtype in (call.dx, call.dbias))
    return GegluGrads(dx, dbias)


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
