"""GEGLU, a linear layer's output gated by GELU, with that layer's bias: the ops ``sdfastgn::geglu`` and ``sdfastgn::geglu_backward``.

Formula, with x of shape (..., 2D), value = x[..., :D] + bias[:D], gate = x[..., D:] + bias[D:], and P the normal distribution:

    y = value * gelu(gate)        gelu(z) = z * P(z) = 0.5 * z * (1 + erf(z / sqrt(2)))

    dvalue = dy * gelu(gate)        dgate = dy * value * (P(gate) + gate * P'(gate))        dbias = sum_rows (dvalue, dgate)

On a GPU the kernels of ``geglu/kernels.py`` run; everywhere else, and for a second derivative, ``reference_geglu`` and
``reference_geglu_grads``. Layout and numerics contract: there.

Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; the chain rule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.checks import check_input, check_operand
from sdfastgn.kernels.common.double_backward import second_derivative
from sdfastgn.kernels.geglu.kernels import find_plan, launch_geglu, launch_geglu_grads, make_plan, plan_key

__all__ = ["geglu", "geglu_grads", "reference_geglu", "reference_geglu_grads"]

Dtypes = tuple[torch.dtype | None, torch.dtype | None]


def reference_geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same function in plain PyTorch, in fp32 (fp64 for fp64 input): fallback without a GPU and truth of the tests (in fp64)."""
    value, gate = _halves(x, bias)
    return (value * F.gelu(gate)).to(x.dtype).contiguous()


def reference_geglu_grads(
    dy: Tensor, x: Tensor, bias: Tensor | None, dtypes: Dtypes
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (..., 2D) and bias (2D,) in plain PyTorch, in ``dtypes``; None where those are None. dy: (..., D).

    Every step is a differentiable op, so that a second derivative is right too. Computed in fp32 (fp64 for fp64 input).
    """
    value, gate = _halves(x, bias)
    dy = dy.to(value.dtype)
    du = torch.cat((dy * F.gelu(gate), torch.ops.aten.gelu_backward(dy * value, gate)), -1)
    return (
        None if dtypes[0] is None else du.to(dtypes[0]),
        None if dtypes[1] is None else du.reshape(-1, x.shape[-1]).sum(0).to(dtypes[1]),
    )


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(value, gate)"""
    u = x.to(torch.promote_types(x.dtype, torch.float32))
    u = u if bias is None else u + bias.to(u.dtype)
    D = x.shape[-1] // 2
    return u[..., :D], u[..., D:]


# --- ops ----------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("sdfastgn", "FRAGMENT")
_LIBRARY.define("geglu(Tensor x, Tensor? bias) -> Tensor")
# The result has one tensor for each of dx and dbias whose dtype is given, in this order.
_LIBRARY.define(
    "geglu_backward(Tensor dy, Tensor x, Tensor? bias, ScalarType? dx, ScalarType? dbias) -> Tensor[]"
)


def _impl(x: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0:
        return _fake(x, bias)
    if not dispatch.runs_in_triton(x):
        return reference_geglu(x, bias)
    key = plan_key(x, bias)
    return launch_geglu(find_plan(key) or make_plan(key, x, bias), x, bias)


def _fake(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _backward_impl(dy: Tensor, x: Tensor, bias: Tensor | None, *dtypes: torch.dtype | None) -> list[Tensor]:
    if x.numel() == 0:
        return [t.zero_() for t in _backward_fake(dy, x, bias, *dtypes)]
    grads = launch_geglu_grads if dispatch.runs_in_triton(x) else reference_geglu_grads
    return [t.contiguous() for t in grads(dy, x, bias, (dtypes[0], dtypes[1])) if t is not None]


def _backward_fake(dy: Tensor, x: Tensor, bias: Tensor | None, *dtypes: torch.dtype | None) -> list[Tensor]:
    shapes = (x.shape, x.shape[-1:])
    return [x.new_empty(s, dtype=dtype) for s, dtype in zip(shapes, dtypes, strict=True) if dtype is not None]


def geglu_grads(dy: Tensor, x: Tensor, bias: Tensor | None, dtypes: Dtypes) -> tuple[Tensor | None, ...]:
    """Gradients of x (..., 2D) and bias (2D,) in ``dtypes``; None where those are None. dy: (..., D)."""
    if x.numel() and dispatch.is_plain_inference(x, (dy, bias)):
        return launch_geglu_grads(dy, x, bias, dtypes)
    found = iter(torch.ops.sdfastgn.geglu_backward(dy, x, bias, *dtypes))
    return tuple(None if dtype is None else next(found) for dtype in dtypes)


def _keep(ctx: Any, x: Tensor, bias: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep(ctx, *inputs)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    needs_x, needs_bias = ctx.needs_input_grad[:2]
    dtypes = (x.dtype if needs_x else None, bias.dtype if needs_bias else None)
    return (None, None) if dy is None else geglu_grads(dy, x, bias, dtypes)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    dy, x, bias, *dtypes = inputs
    ctx.dtypes = tuple(dtypes)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, bias)


def _double_backward(ctx: Any, dgrads: list[Tensor | None]) -> tuple[Any, ...]:
    def gradients(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return reference_geglu_grads(dy, x, bias, ctx.dtypes)

    return *second_derivative(gradients, ctx.saved_tensors, dgrads, ctx.needs_input_grad[:3]), None, None


class _Geglu(torch.autograd.Function):
    """The op's autograd at a fifth of the CPU time: for calls of which the dispatcher has nothing else to know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, plan: Any) -> Tensor:
        _keep(ctx, x, bias)
        return launch_geglu(plan, x, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dy), None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("geglu", _impl, _key)
    _LIBRARY.impl("geglu_backward", _backward_impl, _key)
torch.library.register_fake("sdfastgn::geglu", _fake, lib=_LIBRARY)
torch.library.register_fake("sdfastgn::geglu_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd("sdfastgn::geglu", _backward, setup_context=_setup, lib=_LIBRARY)
torch.library.register_autograd(
    "sdfastgn::geglu_backward", _double_backward, setup_context=_backward_setup, lib=_LIBRARY
)


# --- public function ------------------------------------------------------------------------------------------------------------


def geglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``value * gelu(gate)`` of the two halves of x + bias, with the exact (erf) GELU, in one pass over memory.

    Args:
        x: (..., 2D), at least rank 1: values, then gates. Usually the output of a linear layer without its bias.
        bias: (2D,) or None: that layer's bias.

    Shapes: the output is (..., D).
    Dtypes: x fp16, bf16 or fp32 (fp64 runs in plain PyTorch); bias any of these. The output has the
        dtype of x.
    Layout: rows are read where they lie if they are without gaps and equally far apart, else from a copy. The output is contiguous.
    Grad: with respect to both. Between forward and backward x and bias are kept, nothing else. A second derivative, the transforms of
        torch.func and forward-mode AD run in plain PyTorch.
    Raises:
        TypeError: an argument is not a dense tensor of one of these dtypes.
        ValueError: a shape or a device does not fit.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the order of the halves is that of diffusers' GEGLU.
    """
    # A key that can be looked up first; whatever is wrong misses there and is then checked.
    if dispatch.is_plain(x, (bias,)):
        try:
            key = plan_key(x, bias)
            plan = find_plan(key)
            if plan is None:
                _check(x, bias)
                plan = make_plan(key, x, bias)
            if not dispatch.wants_gradient(x, (bias,)):
                return launch_geglu(plan, x, bias)
            if plan.programs:
                return _Geglu.apply(x, bias, plan)
        except RuntimeError:  # a tensor that has no strides or no memory
            _check(x, bias)
            raise
    _check(x, bias)
    if not dispatch.needs_op(x):
        return reference_geglu(x, bias)
    return torch.ops.sdfastgn.geglu(x, bias)


def _check(x: Any, bias: Any) -> None:
    name = "sdfastgn.geglu"
    check_input(name, "x", x)
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x must be (..., 2D), got shape {tuple(x.shape)}")
    check_operand(name, "bias", bias, x, (x.shape[-1],))
